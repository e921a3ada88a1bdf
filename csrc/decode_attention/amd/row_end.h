// The end of a row: adds its sink, and computes its output's factor and log-sum-exp.
#pragma once

#include "work.h"
#include "hipforge/amd/hip.h"

namespace hf::decode_attention {

/// Whether weights that add up to `total` are of a row that sees a key.
__device__ inline bool is_seen(float total) { return total > 0.f || total != total; }

/// A row whose weights 2^(score - maximum) add up to `total`; its sink, if it has one, is one weight more, without a value.
struct RowEnd {
  float inverse;  // what the sum of weighted values is multiplied with; 0 where no key is seen
  float lse;      // base 2

  /// `sinks`: of the query heads, natural logarithm; null for none.
  __device__ RowEnd(float maximum, float total, const float* sinks, uint32_t head) {
    const bool seen = is_seen(total);
    float base = maximum, keep = 1.f;
    if (sinks) {
      // Limited, because a large sink's product may overflow. The choice also keeps the compiler from fusing the product into
      // weight - base: where the sink is the maximum, the fused difference would be the product's rounding error, up to
      // 2^(exponent - 24), instead of 0. NaN stays NaN.
      const float product = sinks[head] * kLog2E, weight = product > __FLT_MAX__ ? __FLT_MAX__ : product;
      const float top = __builtin_fmaxf(maximum, weight);
      base = top == -__builtin_inff() ? 0.f : top;
      keep = __builtin_amdgcn_exp2f(maximum - base);
      total = total * keep + __builtin_amdgcn_exp2f(weight - base);
    }
    inverse = seen ? keep / total : 0.f;
    lse = is_seen(total) ? base + __builtin_amdgcn_logf(total) : -__builtin_inff();
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
