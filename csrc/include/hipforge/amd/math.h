// fp32 functions for which the instruction alone is not accurate enough.
#pragma once

#include "hipforge/amd/hip.h"

namespace hf::dev {

/// 1 / sqrt(x) by the instruction, which treats subnormals as 0.
__device__ inline float reciprocal_root(float x) {
  const bool tiny = x < 0x1p-100f;
  return __builtin_amdgcn_rsqf(tiny ? x * 0x1p48f : x) * (tiny ? 0x1p24f : 1.f);
}

/// 2^x by the instruction, which gives 0 for a subnormal result.
__device__ inline float power_of_2(float x) { return __builtin_amdgcn_exp2f(x); }

/// a / (1 + e), correctly rounded from the sum on.
__device__ inline float over_one_and(float a, float e) { return a / (1.f + e); }

/// `value` limited to [low, high]; undefined for a NaN.
__device__ inline float limited(float value, float low, float high) { return __builtin_amdgcn_fmed3f(value, low, high); }

/// `value` limited to [-limit, limit]; a NaN stays NaN. The result of an overflowing conversion depends on a mode bit.
__device__ inline float saturated(float value, float limit) {
  const float clamped = limited(value, -limit, limit);
  return value == value ? clamped : value;
}

/// The index of the lowest set bit of a mask that has one.
__device__ inline uint32_t lowest_bit(uint64_t mask) { return static_cast<uint32_t>(__builtin_ctzll(mask)); }

/// The larger of *to and `value` to memory of the device; one more in LDS.
__device__ inline void atomic_largest(uint32_t* to, uint32_t value) {
  __hip_atomic_fetch_max(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ inline void atomic_count(uint32_t* counter) {
  __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

/// A product of fp32 numbers that is rounded to half next. LLVM before August 2026 folds product and conversion into
/// v_fma_mixlo_f16 with an addend of +0, which turns a product of -0 into +0; an assembler statement on the product prevents
/// that.
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
