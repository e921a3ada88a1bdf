// fp8 codes of floats, four to a word, by the packed conversion: OCP e4m3fn and e5m2 on gfx950, e4m3fnuz and e5m2fnuz on
// gfx942.
#pragma once

#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"

namespace hf::dev {

#if defined(__gfx942__)
constexpr bool kFnuz = true;
#else
constexpr bool kFnuz = false;
#endif

/// The codes of four floats within the format's range (a NaN stays one), in memory order.
__device__ inline uint32_t e4m3_codes(float a, float b, float c, float d) {
  const int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false);
  return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true));
}

/// That of one float, in the low byte.
__device__ inline uint32_t e4m3_code(float value) {
  return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_fp8_f32(value, 0.f, 0, false));
}

__device__ inline uint32_t e5m2_codes(float a, float b, float c, float d) {
  const int low = __builtin_amdgcn_cvt_pk_bf8_f32(a, b, 0, false);
  return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_bf8_f32(c, d, low, true));
}

}  // namespace hf::dev
