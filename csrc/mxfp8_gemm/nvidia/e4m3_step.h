// A step of the row stream with e4m3 and e8m0 scales in both operands: row_step.h has its products.
#pragma once

#include "row_stream_kernel.h"

namespace hf::row_stream {

/// ALIGNED: K is a multiple of a step.
template <int ROWS, int TILES, bool ALIGNED>
class E4m3Step {
 public:
  static constexpr int kRows = ROWS, kTiles = TILES, kStepK = kStep, kLine = kStep;
  static constexpr bool kAligned = ALIGNED, kScalesX = true, kScalesW = true;
  static constexpr int kHalves = Part<ROWS>::kHalves, kGroups = Part<ROWS>::kGroups;
  using Sums = float[TILES][kGroups][4];
  using Result = dev::bf16;

  static __device__ __forceinline__ int chunk_at(int row, int chunk) { return row_stream::chunk_at(row, chunk); }

  __device__ __forceinline__ E4m3Step(const Problem& p, int lane) : t_(lane % 4), k_(p.k), lane_of_w_(lane / 4, lane % 4) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = min(lane / 4 + 8 * h, p.m - 1);
      x_[h] = p.x + size_t(row) * p.x_pitch + 8 * t_, xs_[h] = p.xs + size_t(row) * (p.k / kBlock);
    }
  }

  /// Of a column's sum, what `to`, which holds `before`, is given: `factor` is a bias or null.
  static __device__ __forceinline__ Result result(const Problem& p, float sum, int column, const Result&) {
    const auto* const bias = static_cast<const dev::bf16*>(p.factor);
    return static_cast<Result>(bias ? sum + static_cast<float>(bias[column]) : sum);
  }

  /// Asks for X's part of the step whose first k is k0.
  __device__ __forceinline__ void load(int k0) { next_.template load<ALIGNED>(x_, xs_, k0, k0, k_); }

  /// Adds the products of the step at k0 once `arrived` says that W is here, and asks for X of the step at `next` unless it is -1.
  template <class Arrived>
  __device__ __forceinline__ void multiply(const uint8_t* here, const PassRows& rows, int k0, int next,
                                           Sums& sums, Arrived arrived) {
    const Factors<ROWS> x(next_);
    uint32_t usual = x.usual;
    if (next >= 0) load(next);
    uint32_t sw[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = min(rows.first + 2 * t_ + i * kTileRows + j, rows.last);
        sw[i][j] = scale_word<ALIGNED>(rows.scales + row * rows.pitch + k0 / kBlock, k0, k_);
        usual &= in_range(sw[i][j]);
      }
    const bool fast = __all_sync(~0u, usual == 0x80808080u);
    arrived();
    multiply_step<ROWS, TILES>(here, lane_of_w_, x, sw, fast, sums);
  }

  static __device__ __forceinline__ void put(const Sums& sums, int lane, float* to) {
    put_sums(sums, std::integral_constant<int, kHalves>{}, lane, to);
  }

 private:
  const uint8_t *x_[kHalves], *xs_[kHalves];
  Part<ROWS> next_;
  int t_, k_;
  LaneOfW lane_of_w_;
};

}  // namespace hf::row_stream
