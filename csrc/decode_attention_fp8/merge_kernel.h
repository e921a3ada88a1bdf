// The end of a call with several splits: their outputs added up by log-sum-exp.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/wave.h"
#include "problem.h"
#include "query.h"

namespace hf::decode_attention {

/// out = sum of 2^(lse_s - L) partial_s / sum of 2^(lse_s - L), L the largest lse_s; the splits are added in their order.
/// Grid: (M, B * Hkv); a wave owns one row.
template <class Half, int kD>
__global__ __launch_bounds__(dev::kWaveSize) void decode_merge(const Problem problem) {
  constexpr int kPerLane = kD / dev::kWaveSize;
  using Values = Vector<float, kPerLane>;
  const uint32_t rows = gridDim.x, lane = threadIdx.x;
  const uint64_t folded = uint64_t{blockIdx.y} * rows + blockIdx.x;
  const uint64_t stride = uint64_t{gridDim.y} * rows;
  float largest = -__builtin_inff();
  for (uint32_t s = 0; s < problem.splits; ++s) largest = fmaxf(largest, problem.partial_lse[s * stride + folded]);
  const float base = largest == -__builtin_inff() ? 0.f : largest;
  Values sum = {};
  float weights = 0.f;
  for (uint32_t s = 0; s < problem.splits; ++s) {
    const float weight = __builtin_amdgcn_exp2f(problem.partial_lse[s * stride + folded] - base);
    weights += weight;
    sum += weight * *reinterpret_cast<const Values*>(problem.partial + (s * stride + folded) * kD + lane * kPerLane);
  }
  const bool seen = weights > 0.f || weights != weights;
  const uint32_t batch = blockIdx.y / problem.kv_heads, head = blockIdx.y % problem.kv_heads;
  const uint32_t token = blockIdx.x % problem.mq;
  const uint64_t offset = ((uint64_t{batch} * problem.mq + token) * problem.kv_heads * problem.group +
                           head * problem.group + blockIdx.x / problem.mq) * kD;
  Half* out = static_cast<Half*>(problem.out) + offset + lane * kPerLane;
  const float inverse = seen ? 1.f / weights : 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) out[i] = static_cast<Half>(Values(sum * inverse)[i]);
  if (lane == 0) problem.lse[folded] = seen ? (base + __builtin_amdgcn_logf(weights)) * kLn2 : -__builtin_inff();
}

}  // namespace hf::decode_attention
