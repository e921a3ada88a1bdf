// How a row's sums end: with its sink, and as its output's factor and log-sum-exp.
#pragma once

#include <hip/hip_runtime.h>

#include "../problem.h"

namespace hf::decode_attention {

/// The sink of a query head as an exponent of 2; -inf without sinks.
__device__ inline float sink_of(const float* sinks, uint32_t head) {
  return sinks ? sinks[head] * kLog2E : -__builtin_inff();
}

/// A row whose weights 2^(score - maximum) add up to `total`, and whose sink is one weight more, without a value.
struct RowEnd {
  float inverse;  // what the sum of weighted values is multiplied with; 0 where no key is seen
  float lse;      // base 2

  __device__ RowEnd(float maximum, float total, float sink) {
    const bool seen = total > 0.f || total != total;
    const float top = fmaxf(maximum, sink);
    const float base = top == -__builtin_inff() ? 0.f : top;
    const float keep = __builtin_amdgcn_exp2f(maximum - base);
    const float all = total * keep + __builtin_amdgcn_exp2f(sink - base);
    inverse = seen ? keep / all : 0.f;
    lse = all > 0.f || all != all ? base + __builtin_amdgcn_logf(all) : -__builtin_inff();
  }
};

/// The scores c tanh(s / c), as exponents of 2 in and out: c - 2 c / (2^(2 s / c log2 e) + 1), off by at most 2^-21 c.
template <int kTiles>
__device__ inline void cap_scores(const Problem& p, dev::f32x4 (&scores)[kTiles]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float power = __builtin_amdgcn_exp2f(scores[t][r] * p.cap_exponent);
      scores[t][r] = p.cap - 2.f * p.cap * __builtin_amdgcn_rcpf(power + 1.f);
    }
}

}  // namespace hf::decode_attention
