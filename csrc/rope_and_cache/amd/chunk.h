// The eight neighbouring elements of a head that a lane owns: loads, stores, conversions, and sums over a head's lanes.
#pragma once

#include "../problem.h"
#include "hipforge/amd/math.h"
#include "hipforge/amd/wave.h"

namespace hf::rope_and_cache {

__device__ inline F32x8 to_f32(Half8 x) { return __builtin_convertvector(x, F32x8); }
__device__ inline Half8 product_to_half(F32x8 product) {
  if constexpr (__is_same(Half, _Float16)) product = dev::before_rounding_to_half(product);
  return __builtin_convertvector(product, Half8);
}

__device__ inline Half8 load_chunk(const Half* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Half8*>(from);
  Half8 x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = from[i];
  return x;
}

__device__ inline void store_chunk(Half* to, Half8 x, bool aligned) {
  if (aligned) {
    *reinterpret_cast<Half8*>(to) = x;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) to[i] = x[i];
}

template <int kLanes>
__device__ inline float sum_of_head(float value) {
  return dev::lanes_combined<kLanes>(value, [](float a, float b) { return a + b; });
}

}  // namespace hf::rope_and_cache
