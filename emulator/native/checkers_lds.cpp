// LDS bytes: written? waited for? ordered? The rules are in lds_shadow.h.
#include "checkers.h"

namespace hfemu {
namespace {

// One instruction's access.
struct LdsAccess {
  Wave& w;
  const ExecInst& in;
  LdsShadow& shadow;
  WaveShadow& me;
  const Options& options;
  uint32_t wave, index, seq;
  bool reads, writes, atomic, dma, polls;
  bool data = false;                     // a volatile load that is no poll
  uint32_t sync = ClockPool::kNone;      // what a write leaves in the word
  uint32_t acquired = ClockPool::kNone;  // taken last; lanes often share one
};

struct Other {
  uint32_t wave, lane, pc, seq;
  bool writes, dma;
};

void race(const Wave& w, const ExecInst& in, const Clock& known, uint32_t address, int lane,
                       const char* what, const Other& other) {
  const uint32_t issued = other.dma ? known.vm_issued[other.wave] : known.lgkm_issued[other.wave];
  std::string text =
      format("LDS race at 0x%x: this %s and a %s by wave %u, lane %u at %s have no barrier or flag between them", address,
             what, other.writes ? "write" : "read", other.wave, other.lane, place(w, other.pc).c_str());
  if (issued >= other.seq)
    text = format("LDS race at 0x%x: between this %s and a %s by wave %u, lane %u at %s, wave %u did signal or reach a "
                  "barrier, but without waiting for that %s before (s_waitcnt %s)",
                  address, what, other.writes ? "write" : "read", other.wave, other.lane, place(w, other.pc).c_str(),
                  other.wave, other.writes ? "write" : "read", other.dma ? "vmcnt" : "lgkmcnt");
  report(w, in, FaultKind::lds_race, text, lane);
}

Other writer(const LdsRecord& rec) {
  return {rec.write_wave, rec.write_lane, rec.write_pc, rec.write_seq, true, rec.dma};
}

// Whether the record's last write happens before what the wave does now.
bool ordered_write(const LdsAccess& c, const LdsRecord& rec) {
  const Clock& known = c.me.clock;
  return rec.write_wave == c.wave ||
         (rec.dma ? known.vm[rec.write_wave] : known.lgkm[rec.write_wave]) >= rec.write_seq;
}

// Whether an unordered last write of another wave is no race with this access.
bool tolerated(const LdsAccess& c, const LdsRecord& rec) {
  if (c.polls || (rec.seen >> c.wave & 1)) return true;
  if (!rec.atomic) return false;
  return c.atomic || (c.writes ? rec.polled : rec.write_epoch == c.shadow.epoch);
}

void check_wait(const LdsAccess& c, const LdsRecord& rec, uint32_t address, int lane) {
  const WaveShadow& s = *c.shadow.waves[rec.write_wave];
  if (rec.dma ? s.vm_done >= rec.write_seq : rec.write_wave == c.wave || s.lgkm_done >= rec.write_seq) return;
  if (rec.write_wave != c.wave && tolerated(c, rec)) return;
  report(c.w, c.in, FaultKind::missing_wait,
         format("reads LDS 0x%x before wave %u has waited (s_waitcnt %s) for its write at %s", address, rec.write_wave,
               rec.dma ? "vmcnt" : "lgkmcnt", place(c.w, rec.write_pc).c_str()),
        lane);
}

// A plain write against atomics that are not the last write.
void check_atomics(const LdsAccess& c, const LdsRecord& rec, uint32_t address, int lane) {
  const WaveSet& set = c.shadow.sets[rec.writers];
  for (uint32_t v = 0; v < c.shadow.wave_count; ++v)
    if (v != c.wave && c.me.clock.lgkm[v] < set.seq[v])
      race(c.w, c.in, c.me.clock, address, lane, "write", {v, set.lane[v], set.pc[v], set.seq[v], true, false});
}

// A plain write against the reads since the last write.
void check_readers(const LdsAccess& c, const LdsRecord& rec, uint32_t address, int lane) {
  const Clock& known = c.me.clock;
  const auto check = [&](uint32_t wave, uint32_t seq, uint32_t pc, uint32_t from_lane) {
    if (wave == c.wave || known.lgkm[wave] >= seq) return;
    // Reads before a barrier reach the LDS unit before the writes behind it.
    const bool in_order = rec.read_epoch < c.shadow.epoch && known.lgkm_issued[wave] >= seq;
    if (c.options.check_strict || !in_order)
      race(c.w, c.in, known, address, lane, "write", {wave, from_lane, pc, seq, false, false});
  };
  if (!rec.several) return check(rec.read_wave, rec.read_seq, rec.read_pc, rec.read_lane);
  const WaveSet& set = c.shadow.sets[rec.readers];
  for (uint32_t v = 0; v < c.shadow.wave_count; ++v) check(v, set.seq[v], set.pc[v], set.lane[v]);
}

void put(WaveSet& set, uint32_t wave, uint32_t seq, uint32_t pc, uint8_t lane) {
  set.seq[wave] = seq;
  set.pc[wave] = pc;
  set.lane[wave] = lane;
}
// An empty set at `index`.
void claim(LdsShadow& shadow, uint32_t& index, bool& owned) {
  if (!owned) {
    index = static_cast<uint32_t>(shadow.sets.size());
    owned = true;
    shadow.sets.emplace_back();
  }
  shadow.sets[index] = WaveSet{};
}

void remember_read(const LdsAccess& c, LdsRecord& rec, int lane) {
  const uint32_t* known = c.me.clock.lgkm;
  const auto lane8 = static_cast<uint8_t>(lane);
  if (rec.several && rec.read_epoch != c.shadow.epoch) {
    // After the next barrier one record may suffice again.
    const WaveSet& set = c.shadow.sets[rec.readers];
    rec.several = false;
    for (uint32_t v = 0; v < c.shadow.wave_count; ++v) rec.several |= v != c.wave && known[v] < set.seq[v];
    if (!rec.several) rec.has_read = false;
  }
  if (!rec.several && rec.has_read && rec.read_wave != c.wave && known[rec.read_wave] < rec.read_seq) {
    claim(c.shadow, rec.readers, rec.own_readers);
    put(c.shadow.sets[rec.readers], rec.read_wave, rec.read_seq, rec.read_pc, rec.read_lane);
    rec.several = true;
  }
  rec.has_read = true;
  rec.read_epoch = c.shadow.epoch;
  if (rec.several) {
    put(c.shadow.sets[rec.readers], c.wave, c.seq, c.index, lane8);
  } else {
    rec.read_wave = static_cast<uint8_t>(c.wave);
    rec.read_seq = c.seq;
    rec.read_pc = c.index;
    rec.read_lane = lane8;
  }
}

void acquire(LdsAccess& c, uint32_t id) {
  if (id == c.acquired || c.shadow.clocks.find(id) == nullptr) return;
  c.acquired = id;
  c.me.acquires.push_back({c.seq, id});
}

// `bytes` bytes at `address`, which the record stands for.
void touch(LdsAccess& c, LdsRecord& rec, uint32_t address, uint32_t bytes, int lane) {
  const bool ordered = !rec.has_write || ordered_write(c, rec);
  // What another wave has released is complete; a wave's own DMA need not be.
  if (c.reads && c.options.check_waits && (!ordered || (rec.dma && rec.write_wave == c.wave)))
    check_wait(c, rec, address, lane);
  if (c.shadow.orders) {
    const bool open = !ordered && !tolerated(c, rec);
    if (open && c.reads && c.options.check_races)
      race(c.w, c.in, c.me.clock, address, lane, c.atomic ? "atomic" : c.writes ? "write" : c.data ? "volatile read" : "read", writer(rec));
    if (open && !c.reads && c.options.check_races) {
      StoreConflict& conflict = c.shadow.conflicts.emplace_back(StoreConflict{rec, address, bytes, lane, {}});
      std::memcpy(conflict.old, c.w.wg->lds + address, bytes);
    }
    if (c.writes && !c.atomic && c.options.check_races) {
      if (rec.has_read) check_readers(c, rec, address, lane);
      if (rec.several_atomics && !rec.polled && !(rec.seen >> c.wave & 1)) check_atomics(c, rec, address, lane);
    }
    if (c.reads && (c.atomic ? c.in.inst->dst.kind != OperandKind::none : c.polls || rec.atomic)) {
      acquire(c, rec.sync);
      rec.seen = static_cast<uint16_t>(rec.seen | 1u << c.wave);
    }
    if (!c.writes && !c.polls && ordered) remember_read(c, rec, lane);
  }
  if (!c.writes) return;
  rec.sync = c.atomic ? c.shadow.clocks.join(rec.sync, c.sync) : c.sync;
  if (!c.atomic) {
    rec.several_atomics = false;
  } else if (rec.several_atomics || (rec.atomic && rec.write_wave != c.wave)) {
    if (!rec.several_atomics) {
      claim(c.shadow, rec.writers, rec.own_writers);
      put(c.shadow.sets[rec.writers], rec.write_wave, rec.write_seq, rec.write_pc, rec.write_lane);
    }
    rec.several_atomics = true;
    put(c.shadow.sets[rec.writers], c.wave, c.seq, c.index, static_cast<uint8_t>(lane));
  }
  rec.has_write = true;
  rec.has_read = rec.several = false;
  rec.seen = 0;
  rec.write_wave = static_cast<uint8_t>(c.wave);
  rec.write_lane = static_cast<uint8_t>(lane);
  rec.write_seq = c.seq;
  rec.write_pc = c.index;
  rec.write_epoch = c.shadow.epoch;
  rec.atomic = c.atomic;
  rec.polled = c.polls;
  rec.dma = c.dma;
}

void copy_set(LdsShadow& shadow, uint32_t& index, bool& owned, bool used) {
  if (!used) return;
  const WaveSet set = shadow.sets[index];
  claim(shadow, index, owned);
  shadow.sets[index] = set;
}

// A record covers a dword until an access takes part of it; then each byte has its own record until all are written
// again.
void touch_dword(LdsAccess& c, uint32_t address, uint32_t bytes, int lane) {
  LdsRecord& rec = c.shadow.dwords[address / 4];
  if (rec.group != c.shadow.group) {
    rec = LdsRecord{};
    rec.group = c.shadow.group;
  }
  const auto mask = static_cast<uint8_t>(((1u << bytes) - 1) << (address & 3));
  if (c.reads && c.options.check_uninit && (rec.defined & mask) != mask) c.me.lds_undefined |= uint64_t{1} << lane;
  if (c.writes) rec.defined |= mask;
  if (bytes == 4 && !rec.split) return touch(c, rec, address, 4, lane);
  if (!rec.split) {
    if (!rec.own_parts) {
      rec.parts = static_cast<uint32_t>(c.shadow.parts.size());
      rec.own_parts = true;
      c.shadow.parts.emplace_back();
    }
    for (LdsRecord& part : c.shadow.parts[rec.parts]) {
      part = rec;
      part.own_readers = part.own_writers = false;  // four records cannot share one set
      copy_set(c.shadow, part.readers, part.own_readers, rec.several);
      copy_set(c.shadow, part.writers, part.own_writers, rec.several_atomics);
    }
    rec.split = true;
  }
  const uint32_t part = rec.parts;
  for (uint32_t b = 0; b < bytes; ++b) touch(c, c.shadow.parts[part][(address & 3) + b], address + b, 1, lane);
  if (bytes < 4 || !c.writes || c.atomic) return;
  LdsRecord whole = c.shadow.parts[part][0];
  whole.parts = part;
  whole.own_parts = true;
  whole.split = false;
  whole.defined = 15;
  whole.readers = rec.readers;
  whole.own_readers = rec.own_readers;
  whole.writers = rec.writers;
  whole.own_writers = rec.own_writers;
  rec = whole;
}

uint32_t release(LdsShadow& lds, WaveShadow& s, uint32_t wave) {
  const uint32_t from[5] = {s.lgkm_done, s.vm_done, s.lgkm_issued, s.vm_issued, s.learned};
  if (lds.clocks.find(s.released) == nullptr || std::memcmp(from, s.released_from, sizeof from) != 0) {
    s.released = lds.clocks.add(released_clock(s, wave));
    std::memcpy(s.released_from, from, sizeof from);
  }
  return s.released;
}

}  // namespace

void LdsShadow::begin_group() {
  ++group;
  ++epoch;
  parts.clear();
  sets.clear();
  conflicts.clear();
  clocks.forget();
}

void LdsShadow::barrier() {
  ++epoch;
  clocks.forget();
  Clock all;
  for (uint32_t v = 0; v < wave_count; ++v) all.join(released_clock(*waves[v], v));
  for (uint32_t v = 0; v < wave_count; ++v) {
    waves[v]->clock = all;
    waves[v]->acquires.clear();  // every wave has acquired it already
    ++waves[v]->learned;
  }
}

Clock released_clock(const WaveShadow& s, uint32_t index) {
  Clock c = s.clock;
  c.lgkm[index] = s.lgkm_done;
  c.vm[index] = s.vm_done;
  c.lgkm_issued[index] = s.lgkm_issued;
  c.vm_issued[index] = s.vm_issued;
  return c;
}

void apply_acquires(LdsShadow& lds, WaveShadow& s) {
  std::erase_if(s.acquires, [&](const WaveShadow::Acquire& a) {
    if (a.seq > s.lgkm_done) return false;
    s.clock.join(*lds.clocks.find(a.from));
    ++s.learned;
    return true;
  });
}

void resolve_conflicts(Wave& w, const ExecInst& in) {
  std::vector<StoreConflict>& conflicts = w.wg->shadow->conflicts;
  for (const StoreConflict& c : conflicts)
    if (std::memcmp(c.old, w.wg->lds + c.address, c.bytes) != 0)
      race(w, in, w.shadow->clock, c.address, c.lane, "write", writer(c.before));
  conflicts.clear();
}

void check_lds_access(Wave& w, const ExecInst& in, const uint32_t* a, uint64_t exec, uint32_t bytes, Access access) {
  LdsShadow& shadow = *w.wg->shadow;
  WaveShadow& me = *w.shadow;
  const auto index = static_cast<uint32_t>(in.inst - w.launch->program->insts.data());
  const bool dma = in.op_class == OpClass::vmem_load && access == Access::store;
  const bool atomic = access == Access::atomic;
  LdsAccess c{w, in, shadow, me, w.launch->options, w.index, index, dma ? me.vm_issued : me.lgkm_issued,
              access != Access::store, access != Access::load, atomic, dma, false, shadow.usage->uses[index].volatile_data};
  if (shadow.orders) {
    c.polls = shadow.plain_flags && !dma && shadow.usage->uses[index].polls;
    if (atomic || (shadow.plain_flags && c.writes && !dma && bytes <= 8)) c.sync = release(shadow, me, w.index);
  }
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    for (uint32_t at = a[l], end = a[l] + bytes; at < end;) {
      const uint32_t n = std::min(4 - (at & 3), end - at);
      touch_dword(c, at, n, l);
      at += n;
    }
  }
}

}  // namespace hfemu
