// The router's logits on CUDA cores.
//
//              4 experts                 one block: 4 experts, kTokens tokens, all of H in 8 warps
//            +-----------+
//   kTokens  |           |    warp w:    steps w, w + 8, w + 16, ... of 256 h
//            +-----------+    lane l:    its 8 h of the step, for all 4 experts and kTokens tokens
//
// A lane's sums are added over the warp by shuffles, then over the warps in shared memory, in a fixed order. Bytes: w once
// per kTokens tokens, x once per 4 experts, from L2; for few tokens w from memory is the bound, and w is asked for a step
// ahead, that of the first step before the launch before has ended.
#pragma once

#include "hipforge/nvidia/buffer.h"
#include "hipforge/nvidia/wave.h"
#include "router_piece.h"

namespace {

using namespace hf::router;
using F32x8 = hf::dev::Vector<float, 8>;

constexpr int kWaves = 8;
constexpr int kThreads = kWaves * hf::dev::kWaveSize;
constexpr int kTile = 4;   // experts of a block
constexpr int kLeastTokens = 1, kFewTokens = 4, kMoreTokens = 8, kManyTokens = 16;
constexpr int64_t kEnoughGroups = 132;  // a block for each SM of an H100

template <int kTokens, int kUnroll>
__global__ __launch_bounds__(kThreads, 1) void router_gemm_kernel(
    const void* x_rows, const void* weights, const float* bias, float* out, uint32_t tokens, uint32_t experts, uint32_t hidden,
    uint32_t x_row_bytes) {
  const Arguments a{x_rows, weights, bias, out, tokens, experts, hidden, x_row_bytes};
  __shared__ float partial[kWaves][kTokens][kTile];
  hf::dev::let_next_start();
  const uint32_t lane = threadIdx.x % hf::dev::kWaveSize, warp = threadIdx.x / hf::dev::kWaveSize;
  const uint32_t first_expert = blockIdx.x * kTile, first_token = blockIdx.y * kTokens;
  // Rows past the last one are the last one again, and not stored.
  const char* w_row[kTile];
  const char* x_row[kTokens];
#pragma unroll
  for (int e = 0; e < kTile; ++e)
    w_row[e] = static_cast<const char*>(a.w) + uint64_t{min(first_expert + e, a.experts - 1)} * a.hidden * sizeof(Weight);
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
    x_row[t] = static_cast<const char*>(a.x) + uint64_t{min(first_token + t, a.tokens - 1)} * a.x_row_bytes;
  float sums[kTokens][kTile] = {};
  uint32_t h = warp * kStep + lane * kPiece;
  Piece<Weight> next[kTile];
  const auto load_next = [&](uint32_t at) {
    if (at >= a.hidden) return;  // hidden is a multiple of kPiece
#pragma unroll
    for (int e = 0; e < kTile; ++e) next[e] = load_piece<Weight>(w_row[e], at);
  };
  load_next(h);
  hf::dev::wait_for_predecessor();
  const float bias_here = a.bias ? a.bias[min(first_expert + threadIdx.x % kTile, a.experts - 1)] : 0.f;
  for (; h < a.hidden; h += kWaves * kStep) {
    F32x8 of_w[kTile];
#pragma unroll
    for (int e = 0; e < kTile; ++e)
#pragma unroll
      for (int i = 0; i < kPiece; ++i) of_w[e][i] = next[e][i];
    if constexpr (kTokens <= kFewTokens) load_next(h + kWaves * kStep);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Piece<Input> of_x = load_piece<Input>(x_row[t], h);
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
#pragma unroll
        for (int e = 0; e < kTile; ++e) sums[t][e] = __builtin_fmaf(of_w[e][i], of_x[i], sums[t][e]);
    }
    if constexpr (kTokens > kFewTokens) load_next(h + kWaves * kStep);  // there are registers for one step only
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t)
#pragma unroll
    for (int e = 0; e < kTile; ++e) {
      const float total = hf::dev::wave_sum(sums[t][e]);
      if (lane == 0) partial[warp][t][e] = total;
    }
  __syncthreads();
  if (threadIdx.x >= kTokens * kTile) return;
  const uint32_t token = threadIdx.x / kTile, column = threadIdx.x % kTile;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWaves; ++i) sum += partial[i][token][column];
  if (first_token + token >= a.tokens || first_expert + column >= a.experts) return;
  if (a.bias) sum += bias_here;
  a.out[uint64_t{first_token + token} * a.experts + first_expert + column] = sum;
}

}  // namespace
