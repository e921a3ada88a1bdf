// fp32 functions whose accuracy kernels rely on.
#pragma once

#include "hipforge/nvidia/hip.h"

namespace hf::dev {

/// 1 / sqrt(x), correctly rounded.
__device__ inline float reciprocal_root(float x) { return __frsqrt_rn(x); }

/// 2^x by the instruction, which gives 0 for a subnormal result.
__device__ inline float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// a / (1 + e) within two units in the last place, for e >= 0 or a NaN. By a quarter of both: the inverse of a divisor past 2^126
/// is subnormal, which the instruction gives as 0.
__device__ inline float over_one_and(float a, float e) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__builtin_fmaf(e, .25f, .25f)));
  return a * .25f * inverse;
}

/// `value` limited to [low, high]; what it gives for a NaN is not defined.
__device__ inline float limited(float value, float low, float high) { return fminf(fmaxf(value, low), high); }

/// `value` limited to [-limit, limit]; a NaN stays NaN.
__device__ inline float saturated(float value, float limit) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(limit));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(-limit));
  return value;
}

/// What is rounded to half next, as it is: no compiler folds the two here.
template <class T>
__device__ inline T before_rounding_to_half(T product) { return product; }

/// The index of the lowest set bit of a mask that has one.
__device__ inline uint32_t lowest_bit(uint64_t mask) { return static_cast<uint32_t>(__ffsll(static_cast<long long>(mask)) - 1); }

/// The larger of *to and `value` to memory of the device; one more in shared memory.
__device__ inline void atomic_largest(uint32_t* to, uint32_t value) { atomicMax(to, value); }
__device__ inline void atomic_count(uint32_t* counter) { atomicAdd(counter, 1u); }

}  // namespace hf::dev
