#include "global_races.h"

#include "checkers.h"

namespace hfemu {

// One instruction's access.
struct GlobalRaces::Visit {
  const Wave& w;
  const ExecInst& in;
  uint32_t group, index, seq, release;
  bool reads, writes, device, returns, data;
};

void GlobalRaces::begin_group(const Workgroup& group) {
  running_[group.flat + 1] = std::make_unique<Running>();
  enter_group(group);
}
void GlobalRaces::enter_group(const Workgroup& group) {
  group_ = group.flat + 1;
  now_ = running_.at(group_).get();
}
void GlobalRaces::end_group() {
  running_.erase(group_);
  now_ = nullptr;
}

GlobalRaces::Shadow& GlobalRaces::shadow_of(const Launch& launch, uint64_t address) {
  for (const auto& s : shadows_)
    if (address >= s->begin && address < s->end) return *s;
  const AddressMap::Piece* piece = launch.map.piece(address);
  auto s = std::make_unique<Shadow>();
  s->begin = (piece != nullptr ? piece->begin : address) & ~uint64_t{3};
  s->end = ((piece != nullptr ? piece->end : address + 1) + 3) & ~uint64_t{3};
  // Read-only ranges cannot race.
  if (piece == nullptr || piece->writable) s->dwords.resize((s->end - s->begin) / 4);
  shadows_.push_back(std::move(s));
  return *shadows_.back();
}

// --- what a wave knows -------------------------------------------------------------------------------------------------

uint32_t GlobalRaces::release(const Wave& w) {
  const WaveShadow& s = *w.shadow;
  const uint32_t v = w.index;
  if (now_->released[v] != 0 && now_->released_done[v] == s.vm_done && now_->released_learned[v] == s.learned) return now_->released[v];
  Release r;
  r.group = group_;
  std::copy_n(s.clock.vm_issued, kMaxWaves, r.loads);
  r.loads[v] = s.vm_done;
  std::copy_n(s.clock.written_back, kMaxWaves, r.stores);
  std::copy_n(s.clock.acquired, kMaxWaves, r.acquired);
  now_->released[v] = static_cast<uint32_t>(releases_.size());
  now_->released_done[v] = s.vm_done;
  now_->released_learned[v] = s.learned;
  releases_.push_back(r);
  return now_->released[v];
}

// Visits the signals that the waves of `group` had acquired and that are new.
void GlobalRaces::follow(Knowledge& k, uint32_t group, Fact& fact, const uint32_t* acquired) {
  const auto found = acquired_.find(group);
  if (found == acquired_.end()) return;
  for (uint32_t v = 0; v < kMaxWaves; ++v) {
    for (; fact.acquired[v] < acquired[v]; ++fact.acquired[v]) k.open.push_back(found->second[v][fact.acquired[v]]);
  }
}

bool GlobalRaces::ordered(const Wave& w, const Other& other, bool without_invalidation) {
  Knowledge& k = (without_invalidation ? now_->uninvalidated : now_->knowledge)[w.index];
  const Clock& clock = w.shadow->clock;
  const auto covered = [&](const Fact& f) {
    const bool waits = !other.writes || (without_invalidation && other.through);
    return (waits ? f.loads[other.wave] : f.stores[other.wave]) >= other.seq;
  };
  const auto known = k.facts.find(other.group);
  if (known != k.facts.end() && covered(known->second)) return true;
  follow(k, group_, k.facts[group_], without_invalidation ? clock.signals_read : clock.acquired);
  while (!k.open.empty()) {
    const uint32_t at = k.open.back();
    k.open.pop_back();
    if (at == 0 || !k.visited.insert(at).second) continue;
    k.open.push_back(signals_[at].previous);
    const Release& r = releases_[signals_[at].release];
    Fact& fact = k.facts[r.group];
    for (uint32_t v = 0; v < kMaxWaves; ++v) {
      fact.loads[v] = std::max(fact.loads[v], r.loads[v]);
      fact.stores[v] = std::max(fact.stores[v], r.stores[v]);
    }
    if (r.group != group_) follow(k, r.group, fact, r.acquired);
    if (r.group == other.group && covered(fact)) return true;
  }
  return false;
}

void GlobalRaces::before(const Wave& w, const ExecInst& in) {
  WaveShadow& s = *w.shadow;
  const uint32_t v = w.index;
  if (in.op_class == OpClass::waitcnt) {
    if (s.writing_back && vmcnt_of(static_cast<uint32_t>(in.inst->simm)) == 0) {
      for (uint32_t u = 0; u < kMaxWaves; ++u)
        s.clock.written_back[u] = std::max(s.clock.written_back[u], s.write_back[u]);
      s.writing_back = false;
      ++s.learned;
    }
    if (s.signals.empty()) return;
    std::erase_if(s.signals, [&](const WaveShadow::Acquire& a) {
      if (a.seq > s.vm_done) return false;
      std::vector<uint32_t>& list = acquired_[group_][v];
      list.push_back(a.from);
      s.clock.signals_read[v] = static_cast<uint32_t>(list.size());
      ++s.learned;
      return true;
    });
  } else if (in.inst->op == Op::buffer_wbl2 && in.inst->sc1) {
    std::copy_n(s.clock.vm_issued, kMaxWaves, s.write_back);
    s.write_back[v] = s.vm_issued;
    s.writing_back = true;
  } else if (in.inst->op == Op::buffer_inv && in.inst->sc1) {
    std::copy_n(s.clock.signals_read, kMaxWaves, s.clock.acquired);
    ++s.learned;
  }
}

// --- accesses ----------------------------------------------------------------------------------------------------------

void GlobalRaces::race(const Wave& w, const ExecInst& in, const char* what, const Other& other, uint64_t address,
                       int lane) {
  const char* kind = other.writes ? "write" : "read";
  std::string text = format("global race at 0x%llx (%s): this %s and a %s by work-group %u, wave %u, lane %u at %s are not "
                            "ordered", static_cast<unsigned long long>(address),
                            w.launch->map.describe(address, 1).c_str(), what, kind, other.group - 1, other.wave,
                            other.lane, place(w, other.pc).c_str());
  if (ordered(w, other, true)) {
    text += ": the signal that tells of it has been read, but no buffer_inv sc1 (acquire fence) has followed";
  } else if (const auto& facts = now_->uninvalidated[w.index].facts; facts.contains(other.group)) {
    text += format(": work-group %u did signal, but not after it had %s that %s (release fence)", other.group - 1,
                   other.writes ? "written back (buffer_wbl2 sc1) and waited for" : "waited for", kind);
  }
  report(w, in, FaultKind::global_race, text, lane);
}

void GlobalRaces::remember(uint32_t& list, const Past& now) {
  // A group's accesses are adjacent at the head.
  for (uint32_t at = list; at != 0 && past_[at].group == now.group; at = past_[at].next) {
    Past& p = past_[at];
    if (p.wave != now.wave || p.device != now.device || p.data != now.data) continue;
    const uint32_t next = p.next;
    p = now;
    p.next = next;
    return;
  }
  uint32_t at = free_past_;
  if (at != 0) {
    free_past_ = past_[at].next;
  } else {
    at = static_cast<uint32_t>(past_.size());
    past_.emplace_back();
  }
  past_[at] = now;
  past_[at].next = list;
  list = at;
}

void GlobalRaces::forget(uint32_t& list) {
  if (list == 0) return;
  uint32_t last = list;
  while (past_[last].next != 0) last = past_[last].next;
  past_[last].next = free_past_;
  free_past_ = list;
  list = 0;
}

void GlobalRaces::copy_list(uint32_t& list) {
  uint32_t head = 0, last = 0;
  for (uint32_t at = list; at != 0; at = past_[at].next) {
    past_.push_back(past_[at]);
    const auto made = static_cast<uint32_t>(past_.size()) - 1;
    past_[made].next = 0;
    if (last != 0) past_[last].next = made;
    else head = made;
    last = made;
  }
  list = head;
}

void GlobalRaces::touch(const Visit& v, Cell& cell, uint64_t address, uint32_t bytes, int lane) {
  const char* what = v.reads && v.writes ? "atomic" : v.writes ? "write" : v.data ? "volatile read" : "read";
  const auto meets_write = [&](const Other& other, bool device, bool modifies) {
    if (other.group == v.group || (v.device && device && (!v.data || modifies)) || ordered(v.w, other)) return;
    if (v.data && device && ordered(v.w, other, true)) return;
    if (v.reads || device) race(v.w, v.in, what, other, address, lane);
    Conflict& c = conflicts_.emplace_back(Conflict{other, address, bytes, lane, {}});
    std::memcpy(c.old, reinterpret_cast<const void*>(address), bytes);
  };
  const Past last{cell.writer, cell.write_seq, cell.write_pc, 0, cell.write_wave, cell.write_lane, cell.device,
                  cell.modifies, false};
  if (cell.writer != 0) meets_write(other_of(last, true), cell.device, cell.modifies);
  for (uint32_t at = cell.writers; at != 0; at = past_[at].next)
    meets_write(other_of(past_[at], true), true, past_[at].modifies);
  if (v.device && v.reads && v.returns && cell.signals != 0) {
    std::vector<WaveShadow::Acquire>& signals = v.w.shadow->signals;
    if (signals.empty() || signals.back().from != cell.signals) signals.push_back({v.seq, cell.signals});
  }
  if (!v.writes) {
    return remember(cell.readers, {v.group, v.seq, v.index, 0, static_cast<uint8_t>(v.w.index),
                                   static_cast<uint8_t>(lane), v.device, false, v.data});
  }
  for (uint32_t at = cell.readers; at != 0; at = past_[at].next) {
    const Other other = other_of(past_[at], false);
    const bool atomics = v.device && past_[at].device && (!past_[at].data || v.reads);
    if (other.group != v.group && !atomics && !ordered(v.w, other))
      race(v.w, v.in, what, other, address, lane);
  }
  forget(cell.readers);
  if (!v.device) forget(cell.writers);
  else if (cell.device && (cell.writer != v.group || cell.write_wave != v.w.index)) remember(cell.writers, last);
  const uint32_t before = v.reads ? cell.signals : 0;  // a store leaves nothing of earlier releases
  if (!v.device) {
    cell.signals = 0;
  } else if (before == 0 || signals_[before].release != v.release) {
    cell.signals = static_cast<uint32_t>(signals_.size());
    signals_.push_back({v.release, before});
  }
  cell.writer = v.group;
  cell.write_wave = static_cast<uint8_t>(v.w.index);
  cell.write_lane = static_cast<uint8_t>(lane);
  cell.write_seq = v.seq;
  cell.write_pc = v.index;
  cell.device = v.device;
  cell.modifies = v.reads;
}

void GlobalRaces::touch_dword(const Visit& v, Shadow& s, uint64_t address, uint32_t bytes, int lane) {
  Cell& cell = s.dwords[(address - s.begin) / 4];
  if (bytes == 4 && cell.parts == 0) return touch(v, cell, address, 4, lane);
  if (cell.parts == 0) {
    const uint32_t parts = static_cast<uint32_t>(parts_.size());
    parts_.emplace_back().fill(cell);
    for (uint32_t b = 1; b < 4; ++b) {  // each byte gets its own lists
      copy_list(parts_[parts][b].readers);
      copy_list(parts_[parts][b].writers);
    }
    cell.parts = parts;
  }
  for (uint32_t b = 0; b < bytes; ++b) touch(v, parts_[cell.parts][(address & 3) + b], address + b, 1, lane);
}

void GlobalRaces::access(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes,
                         Access access) {
  Visit v{w, in, group_, static_cast<uint32_t>(in.inst - w.launch->program->insts.data()), w.shadow->vm_issued, 0,
          access != Access::store, access != Access::load, access == Access::atomic || in.inst->sc1, true, false};
  // A scalar load with glc bypasses the scalar cache, as polls do; it counts in lgkmcnt.
  if (in.inst->format == Format::SMEM) {
    v.device |= in.inst->sc0;
    v.seq = w.shadow->vm_done;
  }
  if (access == Access::atomic) v.returns = in.inst->sc0;
  if (access == Access::load) {
    v.data = w.wg->shadow->usage->uses[v.index].volatile_data;
    if (!v.device && begins_exchange(w, in, in.inst->format == Format::SMEM)) {
      v.device = true;
      v.returns = false;
    }
  }
  if (v.device && v.writes) v.release = release(w);
  Shadow* s = nullptr;
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    for (uint64_t at = a.at[l], end = a.at[l] + bytes; at < end;) {
      const auto n = static_cast<uint32_t>(std::min<uint64_t>(4 - (at & 3), end - at));
      if (s == nullptr || at < s->begin || at >= s->end) s = &shadow_of(*w.launch, at);
      if (!s->dwords.empty()) touch_dword(v, *s, at, n, l);
      at += n;
    }
  }
}

void GlobalRaces::after(const Wave& w, const ExecInst& in) {
  for (const Conflict& c : conflicts_)
    if (std::memcmp(c.old, reinterpret_cast<const void*>(c.address), c.bytes) != 0)
      race(w, in, "write", c.other, c.address, c.lane);
  conflicts_.clear();
}

}  // namespace hfemu
