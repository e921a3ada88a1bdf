// SwiGLU with the parameters of clamped variants: g = min(gate, limit), u = clamp(up, -limit, limit) + beta (both keep a
// NaN), y = g / (1 + 2^(-g alpha log2 e)) u, in fp32 without rounding in between.
#pragma once

#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/math.h"
#include "hipforge/host/error.h"

namespace hf {

/// A model's parameters as kernels take them.
struct Activation {
  float power;  // -alpha log2 e
  float beta;   // -0 where there is none: adding it changes nothing, the sign of a zero included
  float limit;  // infinity where there is none
  bool modified;
  bool interleaved;  // gate in even, up in odd columns
};

/// `limit` is infinite where there is none.
inline Activation checked_activation(double alpha, double beta, double limit, bool interleaved) {
  constexpr double kLog2E = 1.44269504089;
  HF_CHECK(__builtin_isfinite(alpha), "alpha must be finite; got ", alpha);
  HF_CHECK(__builtin_isfinite(beta), "beta must be finite; got ", beta);
  HF_CHECK(limit > 0, "limit must be positive; got ", limit);
  return {static_cast<float>(-alpha * kLog2E), beta == 0 ? -0.f : static_cast<float>(beta), static_cast<float>(limit),
          beta != 0 || limit < __builtin_inf(), interleaved};
}

namespace dev {

// min(value, limit) that keeps a NaN, which the instruction for it drops.
__device__ inline float limited_above(float value, float limit) { return value > limit ? limit : value; }

// The exponential may give 0 for a subnormal result; 1 + it is 1 either way.
__device__ inline float swiglu(float gate, float up, const Activation& parameters) {
  if (parameters.modified) {
    gate = limited_above(gate, parameters.limit);
    up = saturated(up, parameters.limit) + parameters.beta;
  }
  return over_one_and(gate, power_of_2(gate * parameters.power)) * up;
}

}  // namespace dev

}  // namespace hf
