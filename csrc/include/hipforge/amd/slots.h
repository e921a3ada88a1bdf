// What sorts the slots of a decode step: bits in LDS, sums over earlier lanes, runs of equal words.
#pragma once

#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"

namespace hf::dev {

/// Sets bits of a word in LDS.
__device__ inline void set_bits(uint32_t* word, uint32_t bits) {
  __hip_atomic_fetch_or(word, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

/// Four words `value` to an address of whole words.
__device__ inline void store_words(int32_t* to, int32_t value) {
  typedef i32x4 i32x4_at4 __attribute__((aligned(4)));
  *reinterpret_cast<i32x4_at4*>(to) = i32x4(value);
}

namespace detail {

// value + that of the lane kLanes before, within each row of 16.
template <int kLanes>
__device__ inline uint32_t plus_earlier(uint32_t value) {
  constexpr int kRowShr = 0x110 + kLanes;
  return value + static_cast<uint32_t>(__builtin_amdgcn_update_dpp(0, static_cast<int32_t>(value), kRowShr, 0xF, 0xF, true));
}

}  // namespace detail

/// The sum over the lanes of the wave before this one; `total`: over all. Every lane must be active.
__device__ inline uint32_t wave_sum_before(uint32_t value, uint32_t lane, uint32_t& total) {
  const uint32_t upto = detail::plus_earlier<8>(  // in the row
      detail::plus_earlier<4>(detail::plus_earlier<2>(detail::plus_earlier<1>(value))));
  uint32_t rows = 0;  // before this one's
  total = 0;
#pragma unroll
  for (int last = kWaveRow - 1; last < kWaveSize; last += kWaveRow) {
    if (lane > static_cast<uint32_t>(last)) rows = total + of_lane(upto, last);
    total += of_lane(upto, last);
  }
  return rows + upto - value;
}

}  // namespace hf::dev
