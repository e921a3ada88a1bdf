// How the rows of decode attention end on sm_90: sinks, log-sum-exp, and four columns at a time written as the call asks.
#pragma once

#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"
#include "../problem.h"

namespace hf::decode_attention {

constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// What exponents are taken from: a maximum of -inf would make NaN of itself.
__device__ __forceinline__ float finite_base(float maximum) { return maximum == -kInfinity ? 0.f : maximum; }

/// The query tokens of a sequence, at most p.mq, and the place of its rows: row m is query head m / count, token m % count.
struct Tokens {
  uint32_t first, count;

  __device__ __forceinline__ Tokens(const Problem& p, uint32_t batch) : first(batch * p.mq), count(p.mq) {
    if (!p.q_starts) return;
    const int32_t begin = p.q_starts[batch], end = p.q_starts[batch + 1];
    first = static_cast<uint32_t>(begin);
    count = end > begin ? min(static_cast<uint32_t>(end - begin), p.mq) : 0;
  }

  /// Which query head of its KV head's a row is of.
  __device__ __forceinline__ uint32_t of_group(uint32_t row) const { return count == 1 ? row : row / count; }
};

/// A row of the result: query head `head` of all, and a token of its sequence.
struct ResultRow {
  uint64_t offset;  // elements before it in q and out
  uint64_t lse;     // its place there
  uint32_t head;

  __device__ ResultRow(const Problem& p, const Tokens& tokens, uint32_t head, uint32_t token, uint32_t head_dim) : head(head) {
    const uint32_t heads = p.kv_heads.value * p.group;
    offset = (uint64_t{tokens.first + token} * heads + head) * head_dim;
    lse = (p.q_starts ? tokens.first : uint64_t{tokens.first} * heads) + uint64_t{head} * p.lse_stride + token;
  }
};

/// Whether weights that add up to `total` are of a row that sees a key.
__device__ __forceinline__ bool is_seen(float total) { return total > 0.f || total != total; }

/// A row whose weights 2^(score - maximum) add up to `total`; its sink, if it has one, is one weight more, without a value.
struct RowEnd {
  float inverse;  // what the sum of weighted values is multiplied with; 0 where no key is seen
  float lse;      // base 2

  __device__ RowEnd(float maximum, float total, const float* sinks, uint32_t head) {
    const bool seen = is_seen(total);
    float base = maximum, keep = 1.f;
    if (sinks) {
      const float weight = fminf(__fmul_rn(sinks[head], kLog2E), 3.402823466e38f);
      base = finite_base(fmaxf(maximum, weight));
      keep = power2(maximum - base);
      total = total * keep + power2(weight - base);
    }
    inverse = seen ? keep / total : 0.f;
    lse = is_seen(total) ? base + log2_of(total) : -kInfinity;
  }
};

/// Stores elements offset .. offset + 3 of out; 8 neighbouring lanes have those of a block, and are active as one.
template <class Half>
__device__ __forceinline__ void store_four(const Problem& p, uint64_t offset, const float (&values)[4]) {
  if (p.output == Output::input) {
    dev::Vector<Half, 4> halves;
#pragma unroll
    for (int i = 0; i < 4; ++i) halves[i] = Half(values[i]);
    *reinterpret_cast<dev::Vector<Half, 4>*>(static_cast<Half*>(p.out) + offset) = halves;
    return;
  }
  if (p.output == Output::f32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + offset) = make_float4(values[0], values[1], values[2], values[3]);
    return;
  }
  constexpr float kLimit = static_cast<float>(dev::kMxE4m3.largest);
  float factor, scaled[4];
  uint32_t byte = 0;
  if (p.output == Output::mxfp8) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = dev::larger(amax, dev::magnitude_bits(values[i]));
    byte = dev::e4m3_block_scale(dev::lanes_combined<kMxBlock / 4>(amax, dev::larger));
    if (offset % kMxBlock == 0) p.block_scales[offset / kMxBlock] = static_cast<uint8_t>(byte);
    factor = dev::e8m0_inverse(byte);
  } else {
    factor = dev::inverse_scale(*p.out_scale);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scaled[i] = values[i] * factor;
  const uint32_t codes = dev::encode_fp8x4<dev::Fp8Format::e4m3>(scaled, kLimit);
  *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + offset) = byte == kE8m0Nan ? dev::kE4m3Nan * 0x01010101u : codes;
}

}  // namespace hf::decode_attention
