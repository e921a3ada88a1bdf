// The LDS queue between producer and consumer waves of one work-group.
//
//   A block q of the work-group's run lives in slot q % qsize; its round is q / qsize. A slot has a part for each tile of
//   op_m rows of A and one for each 16 or 32 columns of B, and every part has a flag:
//   flag = 2 round      the part is free       (its producer may write)
//   flag = 2 round + 1  the part is filled     (its consumer may read)
//   flag = 2 round + 2  read, free for the next round
//
// Every part of a slot has one producer and one consumer at a time, and both visit slots in the order of q, so that the
// smallest block that is not finished can always advance: the queue cannot deadlock for any number of waves.
//
// LDS: flags of A [qsize, a_lanes], flags of B [qsize, b_lanes], parts of A in the same order, parts of B. A producer goes
// through its side as through one ring; a consumer polls and releases all parts of a block with one instruction, a lane for
// each flag.
#pragma once

#include <cstdint>

#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"

namespace hf::skinny {

/// A wave's place in a ring of `size`, and the value of its flags there when the part may be written.
struct Place {
  uint32_t index, free = 0;

  __device__ uint32_t filled() const { return free + 1; }

  /// Moves on; `by` is at most `size`.
  __device__ void advance(uint32_t by, uint32_t size) {
    index += by;
    if (index < size) [[likely]] return;
    index -= size;
    free += 2;
  }

  /// Moves on or, for a negative `by`, back; by at most `size`.
  __device__ void move(int32_t by, uint32_t size) {
    const int32_t moved = static_cast<int32_t>(index) + by, round = static_cast<int32_t>(size);
    const bool before = moved < 0, after = moved >= round;
    index = static_cast<uint32_t>(before ? moved + round : after ? moved - round : moved);
    free += before ? -2 : after ? 2 : 0;
  }
};

/// Waits until the flags that the lanes point to all have the value; what the other side did before its signals is
/// visible then.
__device__ inline void wait_for(const uint32_t* flag, uint32_t value) {
  while (__builtin_amdgcn_ballot_w64(__hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP) != value))
    __builtin_amdgcn_s_sleep(1);
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

/// Hands over the parts whose flags the first `lanes` lanes point to, once this wave's LDS accesses are complete. Loads
/// from global memory stay in flight.
__device__ inline void signal(uint32_t* flag, uint32_t lane, uint32_t lanes) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  if (lane < lanes) __hip_atomic_fetch_add(flag, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

}  // namespace hf::skinny
