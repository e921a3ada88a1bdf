// The RMS norm of a head.
#pragma once

#include "chunk.h"
#include "hipforge/device/math.h"

namespace hf::rope_and_cache {

__device__ inline Half8 weight_of(const Half* weight, uint32_t chunk) {
  Half8 own = {};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) own[i] = weight[chunk * kChunk + i];
  return own;
}

template <int kLanes>
__device__ inline Half8 normalised(Half8 x, Half8 own_weight, const Arguments& a) {
  const F32x8 values = to_f32(x);
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) squares = __builtin_fmaf(values[i], values[i], squares);
  const float mean = sum_of_head<kLanes>(squares) / static_cast<float>(a.chunks * kChunk);
  const float factor = dev::reciprocal_root(mean + a.epsilon);
  const F32x8 w = to_f32(own_weight);
  if (a.weight_offset != 0.f) return product_to_half(values * factor * (w + a.weight_offset));
  return product_to_half(to_f32(product_to_half(values * factor)) * w);
}

}  // namespace hf::rope_and_cache
