// An event-driven simulation of a recorded launch on one XCD, or on all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "capture.h"
#include "machine.h"
#include "memory.h"

namespace hftime {

// Why waves waited, in the order of Outcome::stalls. `issue` is the time of issuing itself; `idle` is a wave's slot
// without a wave between the kernel's start and end.
enum Stall : uint8_t { issue, valu, matrix, lds, vector_memory, vmcnt, lgkmcnt, barrier, fetch, tail, stall_count };

struct Setup {
  Level start = Level::hbm;
  bool all_xcds = false;         // simulate every XCD, with one shared memory; else XCD 0
  uint64_t max_rounds = 0;       // of work-groups over the XCD's slots; 0: all
  uint64_t max_iterations = 0;   // of the waves' longest loop; 0: all
};

struct Span {  // a wave on compute unit 0 of XCD 0
  uint32_t simd, group, wave;
  double begin, end;
};

struct Phase : Span {  // of such a wave: it waits, for this reason
  Stall reason;
};

struct Outcome {
  double cycles = 0;             // from the first dispatch to the last write-back
  double last_wave = 0;          // the last wave's end
  double stalls[stall_count] = {};
  uint64_t instructions = 0, rounds = 0, total_rounds = 0, iterations = 0, total_iterations = 0;
  double pipe_cycles = 0;        // of the vector and matrix pipes of all SIMDs, whichever were busy
  Traffic traffic;
  std::vector<double> stall_of;  // cycles by instruction, summed over waves
  std::vector<uint64_t> count_of;
  std::vector<Span> spans;
  std::vector<Phase> phases;
};

// Throws std::runtime_error when a work-group that is needed was not recorded.
Outcome simulate(const Launch& launch, const Machine& machine, const Setup& setup);

}  // namespace hftime
