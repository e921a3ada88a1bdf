// The eight neighbouring elements of a head that a lane owns: loads, stores, conversions, and sums over a head's lanes.
#pragma once

#include "problem.h"
#include "hipforge/device/math.h"
#include "hipforge/device/wave.h"

namespace hf::rope_and_cache {

__device__ inline F32x8 to_f32(Half8 x) { return dev::converted<F32x8>(x); }
__device__ inline Half8 product_to_half(F32x8 product) {
  if constexpr (__is_same(Half, dev::f16)) product = dev::before_rounding_to_half(product);
  return dev::converted<Half8>(product);
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
