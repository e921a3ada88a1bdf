// The end of a call with more splits than a cluster has blocks: their outputs added up by log-sum-exp.
//
//   out = sum of 2^(lse_s - L) partial_s / sum of 2^(lse_s - L), L the largest lse_s; a sink is one lse_s more
//
// A block owns a row: thread i has columns 4 (i % (D/4)) .. + 3 of splits i / (D/4), + kMergeThreads / (D/4), ...
// Bytes: 4 D read for each split of a row, at most 2^5 of them, from L2.
#pragma once

#include "hipforge/device/early_start.h"
#include "row_output.h"

namespace hf::decode_attention {

constexpr uint32_t kMergeThreads = 128;

/// Grid: (query heads, the most tokens of a sequence, B).
template <class Half, int kD>
__global__ void __launch_bounds__(kMergeThreads) decode_merge(const __grid_constant__ Problem p, uint32_t parts) {
  constexpr uint32_t kFours = kD / 4, kTeams = kMergeThreads / kFours;
  static_assert(kTeams >= 1 && kFours % 8 == 0);
  __shared__ float4 sums[kMergeThreads];
  dev::let_next_start();
  dev::wait_for_predecessor();
  const Tokens tokens(p, blockIdx.z);
  if (blockIdx.y >= tokens.count) return;
  const uint32_t heads = p.kv_heads.value * p.group, team = threadIdx.x / kFours, four = threadIdx.x % kFours;
  const uint64_t row = uint64_t{tokens.first} * heads + blockIdx.x * tokens.count + blockIdx.y;
  float maximum = -kInfinity, total = 0.f;
  for (uint32_t s = 0; s < parts; ++s) maximum = fmaxf(maximum, p.partial_lse[uint64_t{s} * p.rows + row]);
  const float base = finite_base(maximum);
  float sum[4] = {};
  for (uint32_t s = 0; s < parts; ++s) {
    const float weight = power2(p.partial_lse[uint64_t{s} * p.rows + row] - base);
    total += weight;
    if (s % kTeams != team) continue;
    const float4 part = *reinterpret_cast<const float4*>(p.partial + (uint64_t{s} * p.rows + row) * kD + 4 * four);
    sum[0] += weight * part.x, sum[1] += weight * part.y, sum[2] += weight * part.z, sum[3] += weight * part.w;
  }
  sums[threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  __syncthreads();
  if (threadIdx.x >= kFours) return;
#pragma unroll
  for (uint32_t other = 1; other < kTeams; ++other) {
    const float4 part = sums[other * kFours + four];
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
  const ResultRow to(p, tokens, blockIdx.x, blockIdx.y, kD);
  const RowEnd end(maximum, total, p.sinks, to.head);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] *= end.inverse;
  store_four<Half>(p, to.offset + 4 * four, sum);
  if (four == 0) p.lse[to.lse] = end.lse * kLn2;
}

}  // namespace hf::decode_attention
