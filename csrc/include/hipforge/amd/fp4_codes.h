// e2m1 codes by the hardware, which converts on gfx950 alone.
#pragma once

#include "hipforge/amd/hip.h"

namespace hf::dev {

#if defined(__gfx950__)
constexpr bool kConvertsToE2m1 = true;

/// Eight codes, the first in the lowest bits.
__device__ inline uint32_t e2m1_codes(const float (&values)[8]) {
  uint32_t word = 0;
  word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, values[0], values[1], 1.f, 0);
  word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, values[2], values[3], 1.f, 1);
  word = __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, values[4], values[5], 1.f, 2);
  return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(word, values[6], values[7], 1.f, 3);
}
#else
constexpr bool kConvertsToE2m1 = false;
__device__ inline uint32_t e2m1_codes(const float (&)[8]) { return 0; }
#endif

}  // namespace hf::dev
