// What a simulation executes: instructions prepared once, templates cut to a number of loop iterations, and the
// work-groups of each XCD with the addresses and the sources of their data.
#pragma once

#include <memory>
#include <vector>

#include "capture.h"
#include "simulator.h"

namespace hftime {

struct Static {
  uint8_t unit = 0, lane_bytes = 0;
  Stall stall = issue;
  bool shared = false;           // uses what other SIMDs use too
  bool port = false;             // uses a pipe of its SIMD
  bool vm = false, lgkm = false;
  bool moves_all_lanes = false;  // stores send their data whether or not it is in range
  uint16_t matrix_cycles = 0;
  uint32_t vmcnt = 0, lgkmcnt = 0, code_line = 0;
  double nop_cycles = 0;
  const uint16_t* reads = nullptr;
  const uint16_t* reads_end = nullptr;
  const uint16_t* writes_end = nullptr;
};

struct Segment {
  uint32_t begin = 0, end = 0;   // of the instructions
  uint32_t access = 0;           // first access word
};

struct WaveProgram {
  const WaveStream* source = nullptr;
  const uint32_t* instructions = nullptr;
  std::vector<Segment> segments;
};

struct Program {
  std::vector<WaveProgram> waves;
};

// Where an extent's lines are for one work-group, and where they come from.
struct Shift {
  uint64_t sector = 0;           // added to the template's
  Origin origin;
  uint64_t line(uint32_t sector_in_template) const { return (sector + sector_in_template) / 2; }
};

struct Placement {
  uint64_t group = 0;
  const Program* program = nullptr;
  std::vector<Shift> shifts;     // by extent, then one for none
  const std::vector<Moved>* moved = nullptr;  // of the recorded work-group
  // Of the access to `extent` whose first sector is word `at` of the wave's accesses.
  Shift shift_of(uint32_t extent, uint32_t wave, uint32_t at) const {
    Shift s = shifts[extent < shifts.size() ? extent : shifts.size() - 1];
    for (const Moved& m : *moved)
      if (m.at == at && m.wave == wave) s.sector += static_cast<uint64_t>(m.by);
    return s;
  }
};

struct Plan {
  Plan(const Launch& launch, const Machine& machine, const Setup& setup);
  std::vector<Static> statics;
  std::vector<std::unique_ptr<Program>> programs;  // by template
  std::vector<std::vector<Placement>> order;       // by XCD
  uint64_t rounds = 0, total_rounds = 0, iterations = 0, total_iterations = 0;
};

// Where the iterations of a stream's longest regular loop begin; empty if there is none.
std::vector<uint32_t> loop_starts(const WaveStream& stream);

}  // namespace hftime
