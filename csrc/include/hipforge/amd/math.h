// fp32 functions for which the instruction alone is not accurate enough.
#pragma once

#include <hip/hip_runtime.h>

namespace hf::dev {

/// 1 / sqrt(x) by the instruction, which treats subnormals as 0.
__device__ inline float reciprocal_root(float x) {
  const bool tiny = x < 0x1p-100f;
  return __builtin_amdgcn_rsqf(tiny ? x * 0x1p48f : x) * (tiny ? 0x1p24f : 1.f);
}

}  // namespace hf::dev
