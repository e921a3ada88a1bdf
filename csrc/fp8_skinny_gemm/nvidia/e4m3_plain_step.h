// A step of the row stream with e4m3 in both operands and one scale for all: 128 k of TILES x 8 rows of W (columns of b), a line
// each, times ROWS rows of X (rows of a), in float16.
//
// Lanes have what they have in the step of MX-FP8 (row_step.h): 8 bytes of each 32, which become f16 without loss. With no scale
// of a block the instructions add over all of K in float32; the sum is multiplied by the scale once and rounded once.
#pragma once

#include "../../mxfp8_gemm/nvidia/row_stream_kernel.h"

namespace hf::row_stream {

/// ACCUMULATE: sums are added to the output. ALIGNED: K is a multiple of a step.
template <int ROWS, int TILES, bool ACCUMULATE, bool ALIGNED>
class E4m3PlainStep {
 public:
  static constexpr int kRows = ROWS, kTiles = TILES, kStepK = kStep, kLine = kStep;
  static constexpr bool kAligned = ALIGNED, kScalesX = false, kScalesW = false, kKeeps = false;
  static constexpr int kHalves = ROWS / 8, kPairs = Pairs<ROWS, TILES>::kPairs;
  using Sums = typename Pairs<ROWS, TILES>::Sums;
  using Result = dev::f16;

  static __device__ __forceinline__ int chunk_at(int row, int chunk) { return row_stream::chunk_at(row, chunk); }

  __device__ __forceinline__ Result result(const Problem&, float sum, int, const Result& before) const {
    sum *= scale_;
    return static_cast<Result>(ACCUMULATE ? static_cast<float>(before) + sum : sum);
  }

  /// `factor` is the scale, which is asked for before W has come.
  __device__ __forceinline__ E4m3PlainStep(const Problem& p, int lane)
      : k_(p.k), scale_(__ldg(static_cast<const float*>(p.factor))), lane_of_w_(lane / 4, lane % 4) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) x_[h] = p.x + size_t(min(lane / 4 + 8 * h, p.m - 1)) * p.x_pitch + 8 * (lane % 4);
  }

  /// Asks for X's part of the step whose first k is k0.
  __device__ __forceinline__ void load(int k0) {
#pragma unroll
    for (int b = 0; b < 4; ++b) load_block(k0, b);
  }

  static __device__ __forceinline__ PassRows rows(const PassRows& of) { return of; }

  /// Adds the products of the step at k0 once `arrived` says that W is here, and asks for X of the step at `next` unless it is -1.
  template <class Arrived>
  __device__ __forceinline__ void multiply(const uint8_t* here, const PassRows&, int k0, int next,
                                           Sums& sums, Arrived arrived) {
    if (next < 0) next = k0;
    arrived();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      uint32_t x[kHalves][4];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        halves_of(next_[h][b].x, x[h][0], x[h][1]);
        halves_of(next_[h][b].y, x[h][2], x[h][3]);
      }
      load_block(next, b);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        uint32_t w[2][4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s)
          if (2 * i + s < TILES) {
            const uint2 bytes = *reinterpret_cast<const uint2*>(here + (2 * i + s) * kTileRows * kLine + lane_of_w_.at[b]);
            halves_of(bytes.x, w[s][0], w[s][1]);
            halves_of(bytes.y, w[s][2], w[s][3]);
          }
        Pairs<ROWS, TILES>::add(w, x, sums[i], multiply_add);
      }
    }
  }

  static __device__ __forceinline__ void put(const Sums& sums, int lane, float* to) {
    Pairs<ROWS, TILES>::put(sums, lane, to);
  }

 private:
  __device__ __forceinline__ void load_block(int k0, int b) {
    const int k = k0 + b * kBlock;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      next_[h][b] = ALIGNED || k < k_ ? __ldg(reinterpret_cast<const uint2*>(x_[h] + k)) : make_uint2(0, 0);
  }

  const uint8_t* x_[kHalves];
  uint2 next_[kHalves][4];
  int k_;
  float scale_;
  LaneOfW lane_of_w_;
};

}  // namespace hf::row_stream
