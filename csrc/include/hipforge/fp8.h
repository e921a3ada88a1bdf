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

}  // namespace hf::dev
