// MX-FP8 GEMM for at most 8 rows of X: parts of K fill the rows and columns of the matrix instruction that few rows leave
// empty.
//
//   W, kColumns = 8:   k ->                              the instruction's 16 rows      X likewise: its 16 columns
//               | part 0          | part 1          |    0..7   columns n0.. of part 0   0..7   rows of part 0
//   column n0   |=================|=================|    8..15  the same,    of part 1   8..15  the same, of part 1
//   ...                                                  of the 16 x 16 products the 8 x 8 on the diagonal are used:
//   column n0+7 |=================|=================|    part 0 with part 0, part 1 with part 1
//               each part split over the waves of a group; a work-group has several groups, with 8 columns each
//
// kColumns = 4: four parts, for at most 4 rows. A work-group's sums, of waves and parts, are added through LDS in the order of
// parts and then of waves. Grid: ceil(n / (groups kColumns)).
//
// Bytes: W once, X once per group. A compute unit has at most 32 KiB in flight, so the launch takes as long as the compute unit
// with the most columns: tiles of 16 columns give 128 of 256 compute units two tiles where n = 6144, and leave 160 without one
// where n = 1536. Groups of 4 or 8 columns share those n evenly. Memory is the bound.
// Instructions of one wave: about 80, 9 for each step of 128 k of its part, and 2 for each wave and part that are added.
//
// K is a multiple of 128 for each part, and scales are aligned to 4 bytes: there are no tails in K.
#pragma once

#include "hipforge/amd/hip.h"
#include "wave_split_kernel.h"

namespace hf::k_packed {

using wave_split::kTile;
using wave_split::Problem;

constexpr int kMaxWaves = 16;
constexpr int kTileFloats = kTile * kTile;

/// wave_split's options, whose alignments always hold here, and the groups of a work-group.
constexpr uint32_t pack_options(uint32_t log2_waves, uint32_t groups) {
  return wave_split::pack_options(log2_waves, true, false, groups);
}

/// Parts of K in one instruction.
constexpr int parts(int columns) { return kTile / columns; }

/// Where product (row, column) of `part` is among the floats of a wave, lane after lane.
template <int kColumns>
__device__ inline uint32_t product_index(uint32_t row, uint32_t column, uint32_t part) {
  const uint32_t tile_row = part * kColumns + row, tile_column = part * kColumns + column;
  return (tile_column / dev::kColumnsPerLane * kTile + tile_row) * dev::kColumnsPerLane + tile_column % dev::kColumnsPerLane;
}

/// Work-groups of groups 2^log2_waves waves, at most kMaxWaves; LDS: kTileFloats floats for each. m <= kColumns; k a multiple
/// of 128 parts; aligned scales.
template <int kColumns>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp8_k_packed(
    const uint8_t* wq, const uint8_t* ws, const uint8_t* xq, const uint8_t* xs, uint32_t m, uint32_t n, uint32_t k,
    uint32_t options, dev::bf16* out, const dev::bf16* bias) {
  const Problem p{wq, ws, xq, xs, m, n, k, options, out, bias};
  static_assert(kColumns == 4 || kColumns == 8);
  static_assert(kColumns * kColumns <= dev::kWaveSize, "a lane adds up one output");
  constexpr int kParts = parts(kColumns);
  extern __shared__ float sums[];
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t log2_waves = p.log2_waves(), groups = options >> 16;
  const uint32_t group = wave >> log2_waves, part = wave - (group << log2_waves);
  const uint32_t column0 = (blockIdx.x * groups + group) * kColumns;
  using Rows = wave_split::NeighbouringRows<1, kColumns>;
  const uint32_t in_lane = wave_split::lane_offset<kColumns>(p.k, lane);
  const bool any = column0 < p.n;  // the last work-group's last groups may have no column
  if (any) {
    wave_split::Wave<1, Rows, kColumns> mine(Rows(p.xq, p.xs, 0, p.m, p.k, in_lane, lane),
                                             wave_split::rows_of(p.wq, column0, kColumns, p.n, p.k),
                                             wave_split::rows_of(p.ws, column0, kColumns, p.n, p.k / kMxBlock), p.k, in_lane,
                                             lane);
    mine.run(wave_split::first_step(p.k / kParts, part, log2_waves),
             wave_split::first_step(p.k / kParts, part + 1, log2_waves), true);
    reinterpret_cast<dev::f32x4*>(sums)[wave * dev::kWaveSize + lane] = mine.acc[0];
  }
  __syncthreads();
  const uint32_t row = lane / kColumns, column = column0 + lane % kColumns;
  if (part != 0 || row >= p.m || column >= p.n) return;
  const float* mine = sums + wave * kTileFloats;
  float total = 0.0f;
#pragma unroll
  for (int in = 0; in < kParts; ++in) {
    const uint32_t at = product_index<kColumns>(row, lane % kColumns, in);
    float sum = mine[at];
    for (uint32_t i = 1; i < 1u << log2_waves; ++i) sum += mine[i * kTileFloats + at];
    total = in == 0 ? sum : total + sum;
  }
  if (p.has_bias()) total += static_cast<float>(wave_split::bias_here()[column]);
  p.out[uint64_t{row} * p.n + column] = static_cast<dev::bf16>(total);
}

}  // namespace hf::k_packed
