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

}  // namespace

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
