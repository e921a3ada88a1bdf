// fp32 functions for which the instruction alone is not accurate enough.
#pragma once


#include "hipforge/amd/hip.h"

namespace hf::dev {

/// 1 / sqrt(x) by the instruction, which treats subnormals as 0.
__device__ inline float reciprocal_root(float x) {
  const bool tiny = x < 0x1p-100f;
  return __builtin_amdgcn_rsqf(tiny ? x * 0x1p48f : x) * (tiny ? 0x1p24f : 1.f);
}

/// A product of fp32 numbers that is rounded to half next. LLVM before August 2026 folds the two into v_fma_mixlo_f16 with an
/// addend of +0, which makes +0 of a product of -0; what an assembler statement has touched is not folded.
template <class T>
__device__ inline T before_rounding_to_half(T product) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(float)); ++i) {
    float x = product[i];
    asm("" : "+v"(x));
    product[i] = x;
  }
  return product;
}

}  // namespace hf::dev
