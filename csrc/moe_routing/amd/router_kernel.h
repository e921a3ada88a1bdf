// logits[t, e] = sum over h of x[t, h] w[e, h] (+ bias[e]), products and sums in fp32.
//
//              4 experts                 one work-group: 4 experts, kTokens tokens, all of H in 16 waves
//            +-----------+
//   kTokens  |           |    wave w:    steps w, w + 16, w + 32, ... of 128 h
//            +-----------+    lane l:    l % 4 is its expert (of A) and its token (of B), l / 4 its 8 h of the step
//
// v_mfma_f32_4x4x1_16b multiplies 16 pairs of 4-vectors at once: block l / 4 of it takes one h of each lane, so that a
// lane's own 16-byte pieces of w and of x feed it without a shuffle, 8 instructions for 128 h, 4 experts and 4 tokens.
// Its 16 blocks are added over the lanes, the 16 waves in LDS in their order: no second launch, no atomics.
// Bytes: w once per kTokens tokens (from memory once, then from L2), x once per 4 experts, from L2. Up to 8 tokens w from
// memory is the bound; for many tokens it is the matrix cores: 256 fp32 products in 8 cycles.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"

namespace {

using F32x8 = float __attribute__((ext_vector_type(8)));

constexpr int kWaves = 16;
constexpr int kThreads = kWaves * hf::dev::kWaveSize;
constexpr int kTile = 4;        // experts of a work-group, and tokens of an instruction
constexpr int kPiece = 8;       // h of a lane in a step
constexpr int kStep = kPiece * hf::dev::kWaveSize / kTile;
constexpr int kLeastTokens = 4, kFewTokens = 8, kMoreTokens = 16, kManyTokens = 32;
constexpr int64_t kEnoughGroups = 256;  // a work-group for each compute unit of an MI355X
static_assert(kStep == 128);

template <class T>
__device__ inline F32x8 load_piece(hf::dev::Buffer buffer, uint32_t offset) {
  if constexpr (sizeof(T) == 2) {
    using T8 = T __attribute__((ext_vector_type(8)));
    return __builtin_convertvector(__builtin_bit_cast(T8, hf::dev::load_b128(buffer, offset, 0)), F32x8);
  } else {
    const auto low = __builtin_bit_cast(hf::dev::f32x4, hf::dev::load_b128(buffer, offset, 0));
    const auto high = __builtin_bit_cast(hf::dev::f32x4, hf::dev::load_b128(buffer, offset, 16));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
}

// The sum over the 16 lanes that share lane % 4, in all of them.
__device__ inline float sum_of_blocks(float value) {
  value = hf::dev::detail::add_row_rotated<4>(value);
  value = hf::dev::detail::add_row_rotated<8>(value);
  return hf::dev::column_combined(value, [](float a, float b) { return a + b; });
}

template <int kTokens, int kUnroll>
__global__ __launch_bounds__(kThreads) void router_gemm_kernel(
    const void* x_rows, const void* weights, const float* bias, float* out, uint32_t tokens, uint32_t experts, uint32_t hidden,
    uint32_t x_row_bytes) {
  const Arguments a{x_rows, weights, bias, out, tokens, experts, hidden, x_row_bytes};
  constexpr int kTiles = kTokens / kTile;
  __shared__ float partial[kWaves][kTokens][kTile];
  const uint32_t lane = threadIdx.x % hf::dev::kWaveSize;
  const uint32_t wave = hf::dev::uniform(threadIdx.x / hf::dev::kWaveSize);
  const uint32_t first_expert = blockIdx.x * kTile, first_token = blockIdx.y * kTokens;
  const auto w = hf::dev::make_buffer(a.w, a.experts * a.hidden * static_cast<uint32_t>(sizeof(Weight)));
  const auto x = hf::dev::make_buffer(
      static_cast<const char*>(a.x) + uint64_t{first_token} * a.x_row_bytes,
      (min(a.tokens - first_token, static_cast<uint32_t>(kTokens)) - 1) * a.x_row_bytes +
          a.hidden * static_cast<uint32_t>(sizeof(Input)));
  const uint32_t expert = first_expert + lane % kTile, own = lane / kTile * kPiece;
  const uint32_t w_row = expert < a.experts ? expert * a.hidden * static_cast<uint32_t>(sizeof(Weight)) : hf::dev::kOutOfRange;
  uint32_t x_row[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const uint32_t token = t * kTile + lane % kTile;
    x_row[t] = first_token + token < a.tokens ? token * a.x_row_bytes : hf::dev::kOutOfRange;
  }
  const uint32_t steps = (a.hidden + kStep - 1) / kStep;
  hf::dev::f32x4 sums[kTiles] = {};
  for (uint32_t base = wave; base < steps; base += kWaves * kUnroll) {
    F32x8 of_w[kUnroll], of_x[kUnroll][kTiles];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWaves >= steps) break;
      const uint32_t h = (base + u * kWaves) * kStep + own;
      const bool inside = h < a.hidden;  // hidden is a multiple of kPiece
      of_w[u] = load_piece<Weight>(w, inside ? w_row + h * static_cast<uint32_t>(sizeof(Weight)) : hf::dev::kOutOfRange);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        of_x[u][t] = load_piece<Input>(x, inside ? x_row[t] + h * static_cast<uint32_t>(sizeof(Input)) : hf::dev::kOutOfRange);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWaves >= steps) break;
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
          sums[t] = __builtin_amdgcn_mfma_f32_4x4x1f32(of_w[u][i], of_x[u][t][i], sums[t], 0, 0, 0);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    hf::dev::f32x4 total;
#pragma unroll
    for (int r = 0; r < kTile; ++r) total[r] = sum_of_blocks(sums[t][r]);
    if (lane < kTile) *reinterpret_cast<hf::dev::f32x4*>(partial[wave][t * kTile + lane]) = total;
  }
  __syncthreads();
  if (threadIdx.x >= kTokens * kTile) return;
  const uint32_t token = threadIdx.x / kTile, column = threadIdx.x % kTile;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWaves; ++i) sum += partial[i][token][column];
  if (first_token + token >= a.tokens || first_expert + column >= a.experts) return;
  if (a.bias) sum += a.bias[first_expert + column];
  a.out[uint64_t{first_token + token} * a.experts + first_expert + column] = sum;
}

}  // namespace
