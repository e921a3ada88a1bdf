// Warps: exchange between lanes and reductions over them.
#pragma once

#include "hipforge/nvidia/hip.h"
#include "hipforge/nvidia/vector.h"

namespace hf::dev {

constexpr int kWaveSize = 32;
using LaneMask = uint32_t;
constexpr LaneMask kAllLanes = 0xFFFFFFFFu;

/// A value known to be the same in all lanes.
__device__ inline uint32_t uniform(uint32_t value) { return value; }

/// Where a kernel's arguments should be read: this compiler has them in constant memory and places the reads itself.
template <class... T>
__device__ inline void wave_values_loaded_here(T...) {}

__device__ inline uint32_t lane_index() { return threadIdx.x % kWaveSize; }

/// The value that lane `lane` (per lane, modulo the wave) holds; every lane must be active.
__device__ inline uint32_t from_lane(uint32_t value, uint32_t lane) { return __shfl_sync(kAllLanes, value, lane); }

/// The 32-bit value that lane `lane`, the same for all, holds; every lane must be active.
template <class T>
__device__ inline T of_lane(T value, uint32_t lane) {
  static_assert(sizeof(T) == 4);
  return __shfl_sync(kAllLanes, value, lane);
}

/// The value of the other lane of each pair of neighbours; every lane must be active.
__device__ inline uint32_t from_pair_partner(uint32_t value) { return __shfl_xor_sync(kAllLanes, value, 1); }

/// The lanes for which `condition` holds; every lane must be active.
__device__ inline LaneMask lanes_with(bool condition) { return __ballot_sync(kAllLanes, condition); }

/// How many lanes of `mask` come before this one, and how many it has.
__device__ inline uint32_t lanes_before(LaneMask mask) { return __popc(mask & ((1u << lane_index()) - 1)); }
__device__ inline uint32_t lane_count(LaneMask mask) { return __popc(mask); }

/// Shared memory that a lane of the wave wrote before is seen by the others after; every lane must be active.
__device__ inline void wave_fence() { __syncwarp(); }

/// combine(x, y) over each kLanes neighbouring lanes (a power of two), in all of them; `combine` is associative and
/// commutative, the order of its uses fixed. The lanes of a group are active or not as one. T has 32 bits.
template <int kLanes, class T, class Combine>
__device__ inline T lanes_combined(T value, Combine combine) {
  static_assert(kLanes >= 1 && kLanes <= kWaveSize && (kLanes & (kLanes - 1)) == 0 && sizeof(T) == 4);
  const LaneMask group = kLanes == kWaveSize ? kAllLanes : ((1u << kLanes % 32) - 1) << (lane_index() & ~(kLanes - 1u));
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) value = combine(value, __shfl_xor_sync(group, value, distance));
  return value;
}

/// The largest value of the wave, in all its lanes; every lane must be active.
__device__ inline uint32_t largest_of_wave(uint32_t value) { return __reduce_max_sync(kAllLanes, value); }

/// The sum over the wave, in all its lanes; the order is fixed.
__device__ inline float wave_sum(float value) {
  return lanes_combined<kWaveSize>(value, [](float x, float y) { return x + y; });
}

}  // namespace hf::dev
