// fp8 scales that are chosen from what they scale, a row or each 128 elements of one: scale = amax / fp8_max in fp32, 1 where that
// is 0; codes = x / scale by true division, saturated, rounded to nearest even. With a NaN or an infinity the scale is NaN, or
// the e8m0 byte 255, and codes are 0.
#pragma once

#include "hipforge/device/mx_encode.h"

namespace hf::dev {

constexpr int kFp8Block = 128;  // elements of a row that share a scale
constexpr float kE4m3Limit = static_cast<float>(kMxE4m3.largest);

/// The scale of elements whose largest magnitude has these bits.
__device__ inline float fp8_scale(uint32_t amax_bits) {
  constexpr uint32_t kInfinityBits = 0x7F800000;
  if (amax_bits >= kInfinityBits) return __builtin_nanf("");
  const float scale = __builtin_bit_cast(float, amax_bits) / kE4m3Limit;
  return scale == 0.f ? 1.f : scale;
}

/// The e8m0 byte of the least power of two that is not below `scale`, which becomes it.
__device__ inline uint8_t rounded_up(float& scale) {
  constexpr uint32_t kHalfSmallest = 0x00400000;  // 2^-127
  if (scale != scale) return kE8m0Nan;
  const uint32_t bits = __builtin_bit_cast(uint32_t, scale);
  const uint32_t byte = bits <= kHalfSmallest ? 0 : (bits + 0x7FFFFF) >> 23;
  scale = __builtin_bit_cast(float, byte == 0 ? kHalfSmallest : byte << 23);
  return static_cast<uint8_t>(byte);
}

/// Stores a scale as number `at` of `scales`, where `writes`, in fp32 or rounded up to e8m0, and returns it as stored.
__device__ inline float stored_scale(void* scales, uint64_t at, float scale, bool e8m0, bool writes) {
  if (e8m0) {
    const uint8_t byte = rounded_up(scale);
    if (writes) static_cast<uint8_t*>(scales)[at] = byte;
  } else if (writes) {
    static_cast<float*>(scales)[at] = scale;
  }
  return scale;
}

/// An element to encode under a scale.
__device__ inline float over_scale(float x, float scale) { return scale == scale ? x / scale : 0.f; }

/// Bits of the largest magnitude of some elements.
template <int kCount, class T>
__device__ inline uint32_t largest_magnitude(const T& values) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = larger(amax, magnitude_bits(static_cast<float>(values[i])));
  return amax;
}

/// The largest `value` among each kThreads neighbouring threads, or with 0 all of the work-group's `threads`, in all of them. All
/// threads call it; those that share a result are whole waves.
template <int kThreads, int kMostWaves>
__device__ inline uint32_t largest_of_threads(uint32_t value, uint32_t threads) {
  __shared__ uint32_t of_wave[kMostWaves];
  const uint32_t wave = threadIdx.x / kWaveSize, count = (kThreads == 0 ? threads : kThreads) / kWaveSize;
  value = lanes_combined<kWaveSize>(value, larger);
  __syncthreads();  // the last call's values have been read
  if (threadIdx.x % kWaveSize == 0) of_wave[wave] = value;
  __syncthreads();
  const uint32_t first = kThreads == 0 ? 0 : wave / count * count;
  for (uint32_t i = 0; i < count; ++i) value = larger(value, of_wave[first + i]);
  return value;
}

}  // namespace hf::dev
