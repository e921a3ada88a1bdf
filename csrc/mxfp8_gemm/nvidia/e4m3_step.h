// A step of the row stream with e4m3 and e8m0 scales in both operands: row_step.h has its products.
#pragma once

#include "row_stream_kernel.h"

namespace hf::row_stream {

/// ALIGNED: K is a multiple of a step. MOST: rows of X at most, if fewer than ROWS.
template <int ROWS, int TILES, bool ALIGNED, int MOST = ROWS>
class E4m3Step {
 public:
  static constexpr int kRows = ROWS, kTiles = TILES, kStepK = kStep, kLine = kStep;
  static constexpr bool kAligned = ALIGNED, kScalesX = true, kScalesW = true;
  static constexpr int kHalves = Part<ROWS>::kHalves, kGroups = Part<ROWS>::kGroups;
  static constexpr bool kPairs = ROWS == 8;            // of tiles, whose rows are those of an instruction
  static constexpr bool kKeeps = kPairs;  // registers are free for addresses that are computed once
  static constexpr int kScales = kPairs ? 1 : 2;  // rows of a tile in a lane
  static constexpr int kColumns = kPairs && MOST <= kFewRows ? 1 : 2;  // of a lane, whose rows of X it has
  using Sums = float[kPairs ? (TILES + 1) / 2 : TILES][kGroups][4];
  using Result = dev::bf16;

  static __device__ __forceinline__ int chunk_at(int row, int chunk) { return row_stream::chunk_at(row, chunk); }

  __device__ __forceinline__ E4m3Step(const Problem& p, int lane)
      : row_(kPairs ? lane / 4 : 2 * (lane % 4)), k_(p.k), lane_of_w_(lane / 4, lane % 4) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = min(kColumns == 1 ? lane / 8 : lane / 4 + 8 * h, p.m - 1);
      x_[h] = p.x + size_t(row) * p.x_pitch + 8 * (lane % 4), xs_[h] = p.xs + size_t(row) * (p.k / kBlock);
    }
    if (kPairs)
#pragma unroll
      for (int b = 0; b < 4; ++b) w_at_[b] = kept(lane_of_w_.at[b]);
    x_lane_ = kept(8 * (lane % 4));
  }

  /// Of a column's sum, what `to`, which holds `before`, is given: `factor` is a bias or null.
  static __device__ __forceinline__ Result result(const Problem& p, float sum, int column, const Result&) {
    const auto* const bias = static_cast<const dev::bf16*>(p.factor);
    return static_cast<Result>(bias ? sum + static_cast<float>(bias[column]) : sum);
  }

  /// Asks for X's part of the step whose first k is k0.
  __device__ __forceinline__ void load(int k0) { next_.template load<ALIGNED>(x_, xs_, k0, k0, k_); }

  /// Where the scale bytes of this lane's rows of W are, of a pass.
  struct ScalesAt {
    uint32_t at[TILES];
  };
  using Rows = std::conditional_t<kKeeps, ScalesAt, PassRows>;
  __device__ __forceinline__ Rows rows(const PassRows& of) const {
    if constexpr (!kKeeps) {
      return of;
    } else {
      Rows rows;
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        rows.at[i] = kept(shared_address(of.scales) + min(of.first + row_ + i * kTileRows, of.last) * of.pitch);
      return rows;
    }
  }

  /// Adds the products of the step at k0 once `arrived` says that W is here, and asks for X of the step at `next` unless it is -1.
  template <class Arrived>
  __device__ __forceinline__ void multiply(const uint8_t* here, const Rows& rows, int k0, int next,
                                           Sums& sums, Arrived arrived) {
    const std::conditional_t<kPairs, Columns, Factors<ROWS>> x(next_);
    uint32_t usual = x.usual;
    if (next >= 0) load(next);
    uint32_t sw[TILES][kScales];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < kScales; ++j) {
        if constexpr (kKeeps) {
          sw[i][j] = shared_scales<ALIGNED>(rows.at[i] + k0 / kBlock, k0, k_);
        } else {
          const int row = min(rows.first + row_ + i * kTileRows + j, rows.last);
          sw[i][j] = scale_word<ALIGNED>(rows.scales + row * rows.pitch + k0 / kBlock, k0, k_);
        }
        usual &= in_range(sw[i][j]);
      }
    const bool fast = __all_sync(~0u, usual == 0x80808080u);
    arrived();
    if constexpr (kPairs)
    {
      uint32_t at[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) at[b] = shared_address(here) + w_at_[b];
      multiply_pairs<TILES, kColumns>(at, x, x_lane_, sw, fast, sums);
    }
    else
      multiply_step<ROWS, TILES>(here, lane_of_w_, x, sw, fast, sums);
  }

  static __device__ __forceinline__ void put(const Sums& sums, int lane, float* to) {
    if constexpr (kPairs)
      Pairs<ROWS, TILES>::template put<kColumns>(sums, lane, to);
    else
      put_sums(sums, std::integral_constant<int, kHalves>{}, lane, to);
  }

 private:
  const uint8_t *x_[kHalves], *xs_[kHalves];
  Part<ROWS> next_;
  int row_, k_;  // of a tile's rows, the first whose sums this lane has
  LaneOfW lane_of_w_;
  uint32_t w_at_[4], x_lane_;
};

}  // namespace hf::row_stream
