// The rotation of a head by its token's angles.
#pragma once

#include "chunk.h"
#include "hipforge/device/vector.h"

namespace hf::rope_and_cache {

// cos and sin of the lane's elements; an element of the second neox half has the angles of its partner.
struct Angles {
  F32x8 cos, sin;
};

template <class T>
__device__ inline Angles load_angles(const Arguments& a, int64_t position, uint32_t chunk) {
  const uint32_t half = a.rotary_dim / 2;
  const T* cos = static_cast<const T*>(a.cos_sin) + position * a.rotary_dim;
  const T* sin = cos + half;
  Angles angles = {};
  if (a.whole_chunks && !a.interleaved) {
    using T8 = dev::Vector<T, 8>;
    const uint32_t first = chunk * kChunk < half ? chunk * kChunk : chunk * kChunk - half;
    angles.cos = dev::converted<F32x8>(*reinterpret_cast<const T8*>(cos + first));
    angles.sin = dev::converted<F32x8>(*reinterpret_cast<const T8*>(sin + first));
    return angles;
  }
  if (a.whole_chunks) {
    using T4 = dev::Vector<T, 4>;
    angles.cos = dev::each_twice(dev::converted<dev::f32x4>(*reinterpret_cast<const T4*>(cos + chunk * 4)));
    angles.sin = dev::each_twice(dev::converted<dev::f32x4>(*reinterpret_cast<const T4*>(sin + chunk * 4)));
    return angles;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t element = chunk * kChunk + i;
    if (element >= a.rotary_dim) continue;
    const uint32_t index = a.interleaved ? element / 2 : element < half ? element : element - half;
    angles.cos[i] = static_cast<float>(cos[index]);
    angles.sin[i] = static_cast<float>(sin[index]);
  }
  return angles;
}

// Puts a head's chunks where its lanes find each other's. All lanes of the wave call it: it waits for them, and those that rotate
// nothing may wait for the wave elsewhere next.
__device__ inline void share_chunk(Half8 x, Half8* head, uint32_t chunk, const Arguments& a) {
  if (a.interleaved) return;
  head[chunk] = x;
  dev::wave_fence();
}

// The elements that those of the lane's chunk rotate with. `head` is the wave's slot in LDS, where the head starts, shared before.
__device__ inline Half8 partners(Half8 x, const Half8* head, uint32_t chunk, const Arguments& a) {
  if (a.interleaved) return dev::pairs_swapped(x);
  const uint32_t half = a.rotary_dim / 2;
  if (a.whole_chunks) return head[chunk * kChunk < half ? chunk + half / kChunk : chunk - half / kChunk];
  const Half* elements = reinterpret_cast<const Half*>(head);
  Half8 other = x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t element = chunk * kChunk + i;
    if (element < a.rotary_dim) other[i] = elements[element < half ? element + half : element - half];
  }
  return other;
}

// NaN for a position that does not exist.
__device__ inline Angles angles_of(const Arguments& a, int64_t position, uint32_t chunk) {
  if (position < 0 || position >= a.max_positions) return {dev::splat<F32x8>(__builtin_nanf("")), dev::splat<F32x8>(__builtin_nanf(""))};
  return a.half_angles ? load_angles<Half>(a, position, chunk) : load_angles<float>(a, position, chunk);
}

__device__ inline Half8 rotated(Half8 x, const Angles& angles, const Half8* head, uint32_t chunk, const Arguments& a) {
  const Half8 other = partners(x, head, chunk, a);
  const F32x8 values = to_f32(x), others = to_f32(other);
  const uint32_t half = a.rotary_dim / 2;
  Half8 result = x;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t element = chunk * kChunk + i;
    const float turned = others[i] * angles.sin[i];
    const bool first = a.interleaved ? i % 2 == 0 : element < half;
    const float sum = values[i] * angles.cos[i] + (first ? -turned : turned);
    if (element < a.rotary_dim) result[i] = static_cast<Half>(sum);
  }
  return result;
}

}  // namespace hf::rope_and_cache
