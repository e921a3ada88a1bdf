#include "program.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

namespace hftime {
namespace {

constexpr uint64_t kExtentSectors = uint64_t{1} << 36;  // extents never overlap
constexpr uint32_t kLastIterations = 2;                 // kept at the end of a shortened loop

Static prepare(const Launch& launch, const Instruction& i) {
  Static s;
  s.unit = i.unit;
  s.lane_bytes = i.lane_bytes;
  s.matrix_cycles = i.matrix_cycles;
  s.vm = i.counters & 1;
  s.lgkm = i.counters & 2;
  s.code_line = static_cast<uint32_t>(i.pc / 128);
  const auto imm = static_cast<uint32_t>(i.immediate);
  s.vmcnt = (imm & 15) | (imm >> 10 & 0x30);
  s.lgkmcnt = imm >> 8 & 15;
  s.nop_cycles = i.text.compare(0, 7, "s_sleep") == 0 ? 64.0 * (imm & 127) : 4.0 * ((imm & 15) + 1);
  switch (i.unit) {
    case HFEMU_LDS: s.shared = true, s.stall = lds; break;
    case HFEMU_SMEM: s.shared = true; break;
    case HFEMU_VMEM_LOAD: s.shared = true, s.stall = vector_memory; break;
    case HFEMU_VMEM_STORE: case HFEMU_ATOMIC: s.shared = s.moves_all_lanes = true, s.stall = vector_memory; break;
    case HFEMU_BARRIER: case HFEMU_END: s.shared = true; break;
    case HFEMU_VALU: case HFEMU_TRANSCENDENTAL: s.port = true, s.stall = valu; break;
    case HFEMU_MATRIX: s.port = true, s.stall = matrix; break;
    default: break;
  }
  s.reads = launch.registers.data() + i.first_register;
  s.reads_end = s.reads + i.reads;
  s.writes_end = s.reads_end + i.writes;
  return s;
}

bool is_memory(uint8_t unit) {
  return unit == HFEMU_SMEM || unit == HFEMU_LDS || unit == HFEMU_VMEM_LOAD || unit == HFEMU_VMEM_STORE ||
         unit == HFEMU_ATOMIC;
}

}  // namespace

std::vector<uint32_t> loop_starts(const WaveStream& stream) {
  const std::vector<uint32_t>& code = stream.instructions;
  std::map<uint32_t, std::vector<uint32_t>> arrivals;  // by loop head, through its backward branch
  for (uint32_t i = 1; i < code.size(); ++i)
    if (code[i] <= code[i - 1]) arrivals[code[i]].push_back(i);
  std::vector<uint32_t> best;
  uint64_t covered = 0;
  for (auto& [head, at] : arrivals) {
    if (at.size() < 4) continue;
    std::vector<uint32_t> gaps;
    for (size_t i = 1; i < at.size(); ++i) gaps.push_back(at[i] - at[i - 1]);
    std::sort(gaps.begin(), gaps.end());
    if (gaps.back() > 2 * gaps[gaps.size() / 2]) continue;  // irregular, or inside another loop
    const uint64_t span = at.back() - at.front() + gaps[gaps.size() / 2];
    if (span > covered) {
      covered = span;
      best = at;
    }
  }
  if (2 * covered < code.size()) best.clear();
  return best;
}

namespace {

// The template with `keep` iterations of its loop; whole if it has no more, or if its waves differ.
std::unique_ptr<Program> cut(const Launch& launch, const Template& t, uint64_t keep, uint64_t* iterations,
                             uint64_t* total) {
  auto program = std::make_unique<Program>();
  std::vector<std::vector<uint32_t>> starts;
  if (keep != 0)
    for (const WaveStream& s : t.waves) starts.push_back(loop_starts(s));
  bool regular = keep != 0;
  for (const auto& s : starts) regular = regular && !s.empty() && s.size() == starts[0].size();
  *total = regular ? starts[0].size() : 0;
  *iterations = std::min(*total, keep);
  for (size_t w = 0; w < t.waves.size(); ++w) {
    const WaveStream& s = t.waves[w];
    WaveProgram p;
    p.source = &s;
    p.instructions = s.instructions.data();
    const auto size = static_cast<uint32_t>(s.instructions.size());
    if (!regular || *total <= keep) {
      p.segments.push_back({0, size, 0});
    } else {
      const uint32_t from = starts[w][keep - kLastIterations], to = starts[w][*total - kLastIterations];
      const auto memory = static_cast<size_t>(std::count_if(
          s.instructions.begin(), s.instructions.begin() + to,
          [&](uint32_t i) { return is_memory(launch.instructions[i].unit); }));
      const uint32_t access = memory < s.access_at.size() ? s.access_at[memory] : static_cast<uint32_t>(s.accesses.size());
      p.segments.push_back({0, from, 0});
      p.segments.push_back({to, size, access});
    }
    program->waves.push_back(std::move(p));
  }
  return program;
}

// The first sector of each extent that a template touches: what makes shifts of different templates comparable.
std::map<uint16_t, int64_t> anchors(const Template& t) {
  std::map<uint16_t, int64_t> first;
  for (const WaveStream& s : t.waves)
    for (size_t at = 0; at < s.accesses.size();) {
      uint32_t n = s.accesses[at++];
      while (n--) {
        const uint32_t header = s.accesses[at++], count = header >> 2 & 0x3FFF;
        if ((header & 3) == 3) continue;
        if (count) first.emplace(static_cast<uint16_t>(header >> 16), s.accesses[at]);
        at += count;
      }
    }
  return first;
}

std::string why_not(const Launch& launch) {
  if (!launch.full) return "";
  return ": the recording is full with " + std::to_string(launch.templates.size()) +
         " different instruction streams; model a smaller problem, or give it more room: "
         "Capture(room_mib=...)";
}

struct Users {
  uint64_t first_round = 0;
  std::map<uint64_t, uint32_t> xcds_in_round;  // bit masks
};

}  // namespace

Plan::Plan(const Launch& launch, const Machine& machine, const Setup& setup) {
  for (const Instruction& i : launch.instructions) statics.push_back(prepare(launch, i));
  const auto xcds = static_cast<uint64_t>(machine.xcds);
  const uint64_t slots = static_cast<uint64_t>(machine.cus_per_xcd) * launch.groups_per_cu;
  const uint64_t on_first = (launch.groups + xcds - 1) / xcds;
  total_rounds = (on_first + slots - 1) / slots;
  rounds = setup.max_rounds ? std::min(total_rounds, setup.max_rounds) : total_rounds;
  const uint64_t kept = on_first - (total_rounds - rounds) * slots;

  std::vector<std::map<uint16_t, int64_t>> anchor;
  for (const Template& t : launch.templates) {
    uint64_t n = 0, of = 0;
    programs.push_back(cut(launch, t, setup.max_iterations, &n, &of));
    iterations = std::max(iterations, n);
    total_iterations = std::max(total_iterations, of);
    anchor.push_back(anchors(t));
  }
  // Extents lie in the order of those that the kernel touches: other live allocations must not move them.
  std::map<uint16_t, uint64_t> places;
  for (const Template& t : launch.templates)
    for (const uint16_t e : t.extents) places.emplace(e, 0);
  uint64_t next_place = 0;
  for (auto& [extent, place] : places) place = next_place++;
  // Which XCDs read the same part of an extent in the same round, and in which round a part is read first: the others
  // find it in the Infinity Cache, and share one transfer from HBM.
  std::map<std::pair<uint16_t, int64_t>, Users> users;
  for (const auto& [index, g] : launch.recorded) {
    if (g.of < 0) continue;
    const uint64_t round = index / xcds / slots;
    for (const auto& [extent, by] : g.shift) {
      const auto [at, fresh] = users.try_emplace({extent, anchor[g.of].at(extent) + by});
      if (fresh) at->second.first_round = round;
      at->second.xcds_in_round[round] |= 1u << index % xcds;
    }
  }
  order.resize(setup.all_xcds ? std::min(xcds, launch.groups) : 1);
  for (uint64_t x = 0; x < order.size(); ++x) {
    const uint64_t count = std::min(kept, (launch.groups - x + xcds - 1) / xcds);
    for (uint64_t i = 0; i < count; ++i) {
      const auto found = launch.recorded.find(i * xcds + x);
      if (found == launch.recorded.end() || found->second.of < 0)
        throw std::runtime_error("work-group " + std::to_string(i * xcds + x) + " was not recorded" + why_not(launch));
      const Group& g = found->second;
      Placement p;
      p.group = g.index;
      p.program = programs[g.of].get();
      p.moved = &g.moved;
      p.shifts.resize(launch.extents.size() + 1);
      for (size_t e = 0; e < p.shifts.size(); ++e) {
        Shift& s = p.shifts[e];
        const auto extent = static_cast<uint16_t>(e);
        const auto shift = g.shift.find(extent);
        const auto place = places.find(extent);
        s.sector = kExtentSectors * (1 + (place == places.end() ? places.size() : place->second));
        s.origin.level = setup.start;
        if (shift == g.shift.end()) {
          // Touched only after the recording's end: data that the work-group writes and no other one reads.
          s.sector += kExtentSectors / 2 + (g.index << 22);
          continue;
        }
        s.sector += static_cast<uint64_t>(shift->second);
        const Users& who = users.at({extent, anchor[g.of].at(extent) + shift->second});
        const uint64_t round = i / slots;
        if (setup.start == Level::hbm && !setup.all_xcds) {
          if (who.first_round < round) s.origin.level = Level::mall;
          s.origin.share = 1.0 / static_cast<double>(__builtin_popcount(who.xcds_in_round.at(round)));
        }
      }
      order[x].push_back(std::move(p));
    }
  }
}

}  // namespace hftime
