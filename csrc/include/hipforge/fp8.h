// fp8 payloads to fp32 with the packed conversion (two values per instruction).
//
// The instruction reads the architecture's own format: OCP e4m3fn on gfx950, e4m3fnuz on gfx942.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/vector.h"

namespace hf::dev {

/// Bytes 0 and 1 of `packed` as two floats.
__device__ inline f32x2 fp8_low_pair(uint32_t packed) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int32_t>(packed), false);
}

/// Bytes 2 and 3 of `packed` as two floats.
__device__ inline f32x2 fp8_high_pair(uint32_t packed) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int32_t>(packed), true);
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

/// Four payload bytes as four bf16 or f16, exactly, in two registers.
template <class Half>
__device__ inline void fp8x4_as(uint32_t packed, uint32_t& first, uint32_t& second) {
  const f32x2 low = fp8_low_pair(packed), high = fp8_high_pair(packed);
  if constexpr (__is_same(Half, bf16)) {
    first = exact_bf16_pair(low[0], low[1]);
    second = exact_bf16_pair(high[0], high[1]);
  } else {
    first = __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(low[0], low[1]));
    second = __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(high[0], high[1]));
  }
}

/// Eight payload bytes (the four of `first`, then those of `second`) as eight bf16 or f16, exactly.
template <class Half>
__device__ inline auto fp8x8_as(uint32_t first, uint32_t second) {
  using Result = Half __attribute__((ext_vector_type(8)));
  uint32_t words[4];
  fp8x4_as<Half>(first, words[0], words[1]);
  fp8x4_as<Half>(second, words[2], words[3]);
  const u32x4 packed = {words[0], words[1], words[2], words[3]};
  return __builtin_bit_cast(Result, packed);
}

}  // namespace hf::dev
