// The memory side of the optional checks: LDS bytes (written? waited for? raced?) and global races.
#include "checkers.h"

namespace hfemu {
namespace {

std::string at_pc(const Wave& w, uint32_t index) {
  const Inst& i = w.launch->program->insts[index];
  return format("pc 0x%llx (%s)", static_cast<unsigned long long>(i.pc), instruction_text(i, nullptr).c_str());
}

uint32_t index_of(const Wave& w, const ExecInst& in) {
  return static_cast<uint32_t>(in.inst - w.launch->program->insts.data());
}

[[noreturn]] void lds_race(const Wave& w, const ExecInst& in, uint32_t address, int lane, const char* what,
                           uint32_t other_wave, bool other_writes, uint32_t other_pc) {
  fault(w, in, FaultKind::lds_race,
        format("LDS race at 0x%x: this %s and a %s by wave %u at %s have no barrier between them", address, what,
               other_writes ? "write" : "read", other_wave, at_pc(w, other_pc).c_str()),
        lane);
}

}  // namespace

void check_lds_access(Wave& w, const ExecInst& in, const uint32_t* a, uint64_t exec, uint32_t bytes, Access access) {
  LdsShadow& shadow = *w.wg->shadow;
  const Options& options = w.launch->options;
  const uint32_t index = index_of(w, in), epoch = shadow.epoch, wave = w.index;
  const bool dma = in.op_class == OpClass::vmem_load;
  const bool reads = access != Access::store, writes = access != Access::load, atomic = access == Access::atomic;
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    for (uint32_t at = a[l]; at < a[l] + bytes;) {
      const uint32_t first = at & 3, n = std::min(4 - first, a[l] + bytes - at);
      const auto mask = static_cast<uint8_t>(((1u << n) - 1) << first);
      LdsRecord& rec = shadow.dwords[at / 4];
      if (rec.touched < shadow.group_start) rec = LdsRecord{};
      rec.touched = epoch;
      const bool overlaps_write = (rec.write_bytes & mask) != 0;
      if (reads) {
        if (options.check_uninit && (rec.written & mask) != mask) w.shadow->lds_undefined |= uint64_t{1} << l;
        // An atomic seen with no barrier since is a flag that another wave polls: the reader takes the old or the new value.
        const bool flag = rec.write_atomic && rec.write_epoch == epoch;
        if (options.check_waits && overlaps_write && !flag) {
          const WaveShadow& writer = *shadow.waves[rec.write_wave];
          const bool landed = rec.write_by_dma ? writer.vm_done >= rec.write_seq
                                               : rec.write_wave == wave || writer.lgkm_done >= rec.write_seq;
          if (!landed)
            fault(w, in, FaultKind::missing_wait,
                  format("reads LDS 0x%x before wave %u has waited (s_waitcnt %s) for its write at %s", at,
                         rec.write_wave, rec.write_by_dma ? "vmcnt" : "lgkmcnt", at_pc(w, rec.write_pc).c_str()),
                  l);
        }
      }
      if (options.check_races) {
        const char* what = atomic ? "atomic" : writes ? "write" : "read";
        const bool fresh = rec.write_epoch == epoch && overlaps_write && rec.write_wave != wave;
        if (fresh && !(rec.write_atomic && (atomic || !writes)))
          lds_race(w, in, at, l, what, rec.write_wave, true, rec.write_pc);
        if (writes && rec.read_epoch == epoch && (rec.read_bytes & mask) && (rec.read_wave != wave || rec.read_several) &&
            !atomic)
          lds_race(w, in, at, l, what, rec.read_wave, false, rec.read_pc);
      }
      if (reads && !atomic) {
        const bool same = rec.read_epoch == epoch;
        rec.read_several = same && (rec.read_several || rec.read_wave != wave);
        rec.read_bytes = static_cast<uint8_t>(same ? rec.read_bytes | mask : mask);
        // Of several readers one other than a later writer must be known: keep the first.
        if (!same) {
          rec.read_wave = static_cast<uint8_t>(wave);
          rec.read_pc = index;
        }
        rec.read_epoch = epoch;
      }
      if (writes) {
        const bool extends = rec.write_epoch == epoch && rec.write_wave == wave && rec.write_by_dma == dma;
        rec.write_bytes = static_cast<uint8_t>(extends ? rec.write_bytes | mask : mask);
        rec.written |= mask;
        rec.write_epoch = epoch;
        rec.write_wave = static_cast<uint8_t>(wave);
        rec.write_pc = index;
        rec.write_atomic = atomic;
        rec.write_by_dma = dma;
        rec.write_seq = dma ? w.shadow->vm_issued : w.shadow->lgkm_issued;
      }
      at += n;
    }
  }
}

// --- global memory ----------------------------------------------------------------------------------------------------

namespace {
constexpr uint32_t kSeveral = 0x80000000, kAtomic = 0x80000000;
}

GlobalRaces::Shadow& GlobalRaces::shadow_of(const Launch& launch, uint64_t address) {
  for (const auto& s : shadows_)
    if (address >= s->begin && address < s->end) return *s;
  const AddressMap::Piece* piece = launch.map.piece(address);
  auto s = std::make_unique<Shadow>();
  s->begin = piece != nullptr ? piece->begin : address;
  s->end = piece != nullptr ? piece->end : address + 1;
  // Ranges nobody may write cannot race.
  if (piece == nullptr || piece->writable) s->bytes.resize(s->end - s->begin);
  shadows_.push_back(std::move(s));
  return *shadows_.back();
}

void GlobalRaces::access(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes,
                         Access access) {
  const uint32_t group = w.wg->flat + 1, index = index_of(w, in);
  const bool atomic = access == Access::atomic, writes = access != Access::load;
  Shadow* s = nullptr;
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    for (uint64_t at = a.at[l]; at < a.at[l] + bytes; ++at) {
      if (s == nullptr || at < s->begin || at >= s->end) s = &shadow_of(*w.launch, at);
      if (s->bytes.empty()) continue;
      Byte& b = s->bytes[at - s->begin];
      const uint32_t writer = b.writer & ~kAtomic, reader = b.reader & ~kSeveral;
      const bool both_atomic = atomic && (b.writer & kAtomic);
      const bool with_write = writer != 0 && writer != group && !both_atomic;
      const bool with_read = writes && reader != 0 && (reader != group || (b.reader & kSeveral)) && !atomic;
      if (with_write || with_read) {
        const uint32_t other = with_write ? writer : reader;
        fault(w, in, FaultKind::global_race,
              format("global race at 0x%llx (%s): this %s and a %s by work-group %u at %s are not ordered",
                     static_cast<unsigned long long>(at), w.launch->map.describe(at, 1).c_str(),
                     atomic ? "atomic" : writes ? "write" : "read", with_write ? "write" : "read", other - 1,
                     at_pc(w, with_write ? b.write_pc : b.read_pc).c_str()),
              l);
      }
      if (writes) {
        b.writer = group | (atomic ? kAtomic : 0);
        b.write_pc = index;
      } else {
        b.reader = reader == 0 || reader == group ? group | (b.reader & kSeveral) : reader | kSeveral;
        b.read_pc = index;
      }
    }
  }
}

}  // namespace hfemu
