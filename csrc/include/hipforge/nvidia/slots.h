// What sorts the slots of a decode step: bits in shared memory, sums over earlier lanes, runs of equal words.
#pragma once

#include "hipforge/nvidia/vector.h"
#include "hipforge/nvidia/wave.h"

namespace hf::dev {

/// Sets bits of a word in shared memory.
__device__ inline void set_bits(uint32_t* word, uint32_t bits) { atomicOr(word, bits); }

/// Four words `value` to an address of whole words.
__device__ inline void store_words(int32_t* to, int32_t value) {
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<Vector<int32_t, 4>*>(to) = {{value, value, value, value}};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = value;
}

/// The sum over the lanes of the wave before this one; `total`: over all. Every lane must be active.
__device__ inline uint32_t wave_sum_before(uint32_t value, uint32_t lane, uint32_t& total) {
  uint32_t upto = value;
#pragma unroll
  for (uint32_t distance = 1; distance < kWaveSize; distance *= 2) {
    const uint32_t earlier = __shfl_up_sync(kAllLanes, upto, distance);
    upto += lane >= distance ? earlier : 0;
  }
  total = of_lane(upto, kWaveSize - 1);
  return upto - value;
}

}  // namespace hf::dev
