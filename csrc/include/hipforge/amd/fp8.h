// fp8 payloads to fp32 with the packed conversion (two values per instruction).
//
// The instruction reads the architecture's own format: OCP e4m3fn on gfx950, e4m3fnuz on gfx942.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"

namespace hf::dev {

/// Bytes 0 and 1 of `packed` as two floats.
__device__ inline f32x2 fp8_low_pair(uint32_t packed) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int32_t>(packed), false);
}

/// Bytes 2 and 3 of `packed` as two floats.
__device__ inline f32x2 fp8_high_pair(uint32_t packed) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int32_t>(packed), true);
}

/// 0x80 in each byte of `packed` that is a NaN, 0 in the others.
__device__ inline uint32_t fp8_nan_bytes(uint32_t packed) {
  constexpr uint32_t kSigns = 0x80808080u;
#if defined(__gfx950__)
  return ((packed & ~kSigns) + 0x01010101u) & kSigns;  // 0x7F and 0xFF
#else
  const uint32_t others = packed ^ kSigns;  // 0x80 alone becomes 0
  return ~(((others & ~kSigns) + ~kSigns) | others) & kSigns;
#endif
}

/// Sixteen payload bytes as eight pairs of floats, in memory order.
__device__ inline void unpack_fp8x16(u32x4 packed, f32x2 (&values)[8]) {
#pragma unroll
  for (int dword = 0; dword < 4; ++dword) {
    values[2 * dword] = fp8_low_pair(packed[dword]);
    values[2 * dword + 1] = fp8_high_pair(packed[dword]);
  }
}

/// Two floats whose low 16 bits are 0 (every fp8 value is such) as two bf16, `low` first.
__device__ inline uint32_t exact_bf16_pair(float low, float high) {
  constexpr uint32_t kUpperHalves = 0x07060302;
  return __builtin_amdgcn_perm(__builtin_bit_cast(uint32_t, high), __builtin_bit_cast(uint32_t, low), kUpperHalves);
}

/// The nearest bf16 of four floats below 2^112 in magnitude, ties to even; NaN stays NaN.
__device__ inline bf16x4 nearest_bf16(f32x4 values) {
#if defined(__gfx950__)
  return __builtin_convertvector(values, bf16x4);
#else
  // gfx942 converts in software. A float's upper 8 significant bits are t - (t - x) with t = (2^16 + 1) x, if each
  // step rounds on its own.
#pragma clang fp contract(off)
  const f32x4 large = values * 65537.f;
  const f32x4 rounded = large - (large - values);
  const u32x2 pairs = {exact_bf16_pair(rounded[0], rounded[1]), exact_bf16_pair(rounded[2], rounded[3])};
  return __builtin_bit_cast(bf16x4, pairs);
#endif
}

/// Two words zipped: the pairs (a[i], b[i]) for the bytes i = 2 kPair and 2 kPair + 1 of both, each as two bf16, exactly.
template <int kPair>
__device__ inline u32x2 zip_fp8_as_bf16(uint32_t a, uint32_t b) {
#if defined(__gfx950__)
  constexpr uint32_t kZipped = kPair ? 0x07030602 : 0x05010400;
  const uint32_t bytes = __builtin_amdgcn_perm(b, a, kZipped);
  const bf16x2 first = __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(bytes, 1.f, false);
  const bf16x2 second = __builtin_amdgcn_cvt_scalef32_pk_bf16_fp8(bytes, 1.f, true);
  return u32x2{__builtin_bit_cast(uint32_t, first), __builtin_bit_cast(uint32_t, second)};
#else
  const f32x2 of_a = kPair ? fp8_high_pair(a) : fp8_low_pair(a);
  const f32x2 of_b = kPair ? fp8_high_pair(b) : fp8_low_pair(b);
  return u32x2{exact_bf16_pair(of_a[0], of_b[0]), exact_bf16_pair(of_a[1], of_b[1])};
#endif
}

}  // namespace hf::dev
