// The end of a call with several splits: their outputs added up by log-sum-exp.
//
//   out = sum of 2^(lse_s - L) partial_s / sum of 2^(lse_s - L), L the largest lse_s
//
// A sink is one more lse_s, without a partial output. So it counts once, however many splits there are.
//
// A work-group of 256 threads owns a row: D/4 threads have four columns each of a split, and 1024/D splits are loaded at
// a time. All log-sum-exps are loaded at once; of the partial outputs every thread has four loads in flight, so that 128
// splits of D = 128 take four trips to memory after the first. Sums are made in an order that the number of splits fixes, in
// float32; output.h quantises them where the call asks for it, so that nothing is launched for that.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "output.h"
#include "../problem.h"
#include "query.h"
#include "row_end.h"
#include "tile_rows.h"

namespace hf::decode_attention {

constexpr uint32_t kMergeThreads = 256;
constexpr uint32_t kMergeWaves = kMergeThreads / dev::kWaveSize;
constexpr uint32_t kMaxSplits = 512;

/// The larger or the sum over the wave, in all lanes.
__device__ inline float wave_max(float value) {
#pragma unroll
  for (int lanes = 1; lanes < dev::kWaveSize; lanes *= 2) value = fmaxf(value, __shfl_xor(value, lanes));
  return value;
}
__device__ inline float wave_total(float value) {
#pragma unroll
  for (int lanes = 1; lanes < dev::kWaveSize; lanes *= 2) value += __shfl_xor(value, lanes);
  return value;
}

/// Grid: (the most rows of a KV head, B * Hkv).
template <class Half, int kD>
__global__ __launch_bounds__(kMergeThreads) void decode_merge(const Problem problem) {
  constexpr uint32_t kColumnThreads = kD / 4;
  constexpr uint32_t kAtOnce = kMergeThreads / kColumnThreads;
  constexpr uint32_t kLoads = 4;  // in flight of each thread
  static_assert(kMaxSplits == 2 * kMergeThreads, "a thread has two of the log-sum-exps");
  __shared__ float weights[kMaxSplits];
  __shared__ dev::f32x4 sums[kMergeThreads];
  __shared__ float of_waves[2][kMergeWaves];

  const uint32_t thread = threadIdx.x, wave = thread / dev::kWaveSize;
  const uint32_t splits = problem.splits;
  const uint32_t batch = dev::uniform(blockIdx.y / problem.kv_heads), kv_head = blockIdx.y - batch * problem.kv_heads;
  const Tokens tokens(problem, batch);
  if (blockIdx.x >= problem.group * tokens.count) return;  // the grid is for the most tokens that a sequence has
  const uint64_t folded = first_row(problem, tokens, kv_head) + blockIdx.x;
  const uint64_t stride = problem.rows;
  float lse[2];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t split = thread + i * kMergeThreads;
    lse[i] = split < splits ? problem.partial_lse[split * stride + folded] : -__builtin_inff();
  }
  const float of_wave = wave_max(fmaxf(lse[0], lse[1]));
  if (thread % dev::kWaveSize == 0) of_waves[0][wave] = of_wave;
  __syncthreads();
  const uint32_t head_of_group = dev::uniform(blockIdx.x / tokens.count), token = blockIdx.x - head_of_group * tokens.count;
  const uint32_t head = kv_head * problem.group + head_of_group;
  const float sink = sink_of(problem.sinks, head);
  float largest = fmaxf(sink, of_waves[0][0]);
#pragma unroll
  for (uint32_t w = 1; w < kMergeWaves; ++w) largest = fmaxf(largest, of_waves[0][w]);
  const float base = largest == -__builtin_inff() ? 0.f : largest;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    lse[i] = __builtin_amdgcn_exp2f(lse[i] - base);
    weights[thread + i * kMergeThreads] = lse[i];
  }
  const float part = wave_total(lse[0] + lse[1]);
  if (thread % dev::kWaveSize == 0) of_waves[1][wave] = part;
  __syncthreads();
  float total = of_waves[1][0];
#pragma unroll
  for (uint32_t w = 1; w < kMergeWaves; ++w) total += of_waves[1][w];
  total += __builtin_amdgcn_exp2f(sink - base);

  const float* from = problem.partial + folded * kD + 4 * (thread % kColumnThreads);
  const uint32_t own = thread / kColumnThreads;
  dev::f32x4 sum = {};
  for (uint32_t first = 0; first < splits; first += kLoads * kAtOnce) {
    dev::f32x4 values[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t split = first + i * kAtOnce + own;
      values[i] = dev::f32x4{};
      if (split < splits) values[i] = *reinterpret_cast<const dev::f32x4*>(from + split * stride * kD);
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t split = first + i * kAtOnce + own;
      if (split < splits) sum += weights[split] * values[i];
    }
  }
  sums[thread] = sum;
  __syncthreads();
  if (thread >= kColumnThreads) return;
#pragma unroll
  for (uint32_t i = 1; i < kAtOnce; ++i) sum += sums[i * kColumnThreads + thread];

  const bool seen = total > 0.f || total != total;
  const uint64_t offset = (uint64_t{tokens.first + token} * (problem.kv_heads * problem.group) + head) * kD;
  const float inverse = seen ? 1.f / total : 0.f;
  store_four<Half>(problem, offset + 4 * thread, sum * inverse);
  const float lse_of_row = seen ? (base + __builtin_amdgcn_logf(total)) * kLn2 : -__builtin_inff();
  if (thread == 0) problem.lse[lse_place(problem, tokens, head, token)] = lse_of_row;
}

}  // namespace hf::decode_attention
