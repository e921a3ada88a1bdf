// 16 rows of MX-FP8 W times at most 8 rows of X, in loads of whole lines, on gfx950.
//
// Otherwise a load takes 64 bytes, half of a line, of each of 16 rows, and a later load the other half. With many waves the line has
// left L1 by then, so that a third of W is read from L2 twice, out of the bytes that a compute unit can have in flight.
// Here the instruction's 16 rows are the two halves of the lines of 8 rows:
//
//   W, a load:  row 0     | 64 bytes of rows 0 .. 7 of the instruction | those of rows 8 .. 15 |   a line
//               ...
//               row 7     |============================================|=======================|
//   X, a load:  the same of 8 rows: columns 0 .. 7 and 8 .. 15 of the instruction
//
// Two lines of a row, 256 k, are an instruction's k. Of its 16 x 16 products the 8 x 8 of the first halves and the 8 x 8 of the second
// are used, and added at the end. 8 rows of W and 256 k take one instruction, as 16 rows and 128 k do; X takes half as many loads.
//
// Scales of a run are loaded in lines too, before its steps, and go through LDS to the lanes that need them.
#pragma once

#include "hipforge/amd/hip.h"
#include "wave_split_kernel.h"

namespace hf::wave_split {

constexpr uint32_t kLineRows = kTile / 2, kLinePair = 2 * kStep;
constexpr uint32_t kLineScaleBytes = 6 << 10;  // of LDS for a wave: of 16 rows of W and 8 of X, for 64 steps

/// The pairs of steps of `part` of `parts`, a power of two; k a multiple of kLinePair.
__device__ inline uint32_t first_pair(uint32_t k, uint32_t part, uint32_t log2_parts) {
  return k / kLinePair * part >> log2_parts;
}

#if defined(__gfx950__)

constexpr int kLineHalves = kTile / kLineRows;  // of a line; and of 16 rows of W

/// Which half of its row's lines a lane has, and where its 16 bytes are in a line.
__device__ inline uint32_t half_of_line(uint32_t lane) { return lane / kLineRows % kLineHalves; }
__device__ inline uint32_t in_line(uint32_t lane) { return half_of_line(lane) * kPieceStride + lane / kTile * kPieceBytes; }

/// Which of the 8 bytes of a row's scales for two steps the lane group's block of the instruction has.
__device__ inline uint32_t scale_byte(uint32_t lane) {
  const uint32_t group = lane / kTile;
  return group / 2 * sizeof(uint32_t) + half_of_line(lane) * 2 + group % 2;
}

/// The sums of 16 rows of W as Wave has them, from those of each 8: in the lanes l with l % 16 < 8; others have none.
__device__ inline dev::f32x4 line_total(const dev::f32x4 (&sums)[kLineHalves]) {
  dev::f32x4 found;
#pragma unroll
  for (int i = 0; i < dev::kColumnsPerLane; ++i) {
    // Copied out first: given an element of a vector, clang 22's bit_cast reads element 0.
    const float of_first = sums[0][i], of_second = sums[1][i];
    const auto swapped = __builtin_amdgcn_permlane32_swap(__builtin_bit_cast(uint32_t, of_first),
                                                          __builtin_bit_cast(uint32_t, of_second), false, false);
    const uint32_t first = swapped[0], second = swapped[1];
    constexpr int kRotatedByEight = 0x128;
    const int32_t other = __builtin_amdgcn_mov_dpp(static_cast<int32_t>(second), kRotatedByEight, 0xF, 0xF, true);
    found[i] = __builtin_bit_cast(float, first) + __builtin_bit_cast(float, other);
  }
  return found;
}

/// One wave's 16 rows of W and 8 of X, one to a lane % 8. k a multiple of kLinePair; rows of scales start at a multiple of 4 bytes.
struct LineWave {
  static constexpr int kHalves = kLineHalves;
  static constexpr int kAhead = 2, kLongRun = 24;  // pairs of steps
  static constexpr int kScalePairs = 16;                 // whose scales a load takes: 128 bytes of a row
  static constexpr int kScaleBlocks = (kLongRun + kScalePairs - 1) / kScalePairs;

  struct Pair {
    Piece x[2], w[kHalves][2];
  };
  // Scales of 8 rows: lane l has the 16 bytes of steps 4 c .. 4 c + 3, where c is l / 16 + 4 (l / 8 % 2), of row l % 8.
  using ScaleBlock = dev::u32x4[dev::kWaveSize];
  // In LDS: those of X, and of each 8 rows of W.
  struct RunScales {
    ScaleBlock x[kScaleBlocks], w[kHalves][kScaleBlocks];
  };
  // Of a pair of steps: each one's word.
  struct PairWords {
    dev::u32x2 x, w[kHalves];
  };

  const dev::Buffer x, xs, w, ws;
  const uint32_t k, row, which_byte;
  const uint32_t in_x, in_w, in_xs, in_ws;  // of a lane
  dev::f32x4 sums[kHalves] = {};

  // row_of_x, exists: of lane % 8; w and ws over the wave's 16 rows.
  __device__ LineWave(dev::Buffer of_x, dev::Buffer of_xs, uint32_t row_of_x, bool exists, dev::Buffer of_w, dev::Buffer of_ws,
                      uint32_t depth, uint32_t lane)
      : x(of_x), xs(of_xs), w(of_w), ws(of_ws), k(depth), row(lane % kLineRows), which_byte(scale_byte(lane)),
        in_x(exists ? row_of_x * depth + in_line(lane) : dev::kOutOfRange), in_w(row * depth + in_line(lane)),
        in_xs(exists ? row_of_x * (depth / kMxBlock) + in_scales(lane) : dev::kOutOfRange),
        in_ws(row * (depth / kMxBlock) + in_scales(lane)) {}

  static __device__ uint32_t in_scales(uint32_t lane) {
    return (lane / kTile + kBlocks * half_of_line(lane)) * sizeof(dev::u32x4);
  }

  __device__ __forceinline__ void load(Pair& to, uint32_t pair) const {
    const uint32_t at = pair * kLinePair;
#pragma unroll
    for (int i = 0; i < 2; ++i) to.x[i] = dev::load_b128(x, in_x, at + i * kStep);
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) to.w[h][i] = dev::load_b128(w, in_w, at + i * kStep + h * kLineRows * k);
    __builtin_amdgcn_sched_barrier(0);  // in the order of their use: loads return in order
  }

  // The scales of kCount pairs of steps, to LDS.
  template <int kCount, class LoadFirst>
  __device__ __forceinline__ void bring_scales(RunScales& to, uint32_t first, LoadFirst load_first) const {
    constexpr int kBlocksOfRun = (kCount + kScalePairs - 1) / kScalePairs;
    const uint32_t lane = dev::lane_index();
    dev::u32x4 of_x[kBlocksOfRun], of_w[kHalves][kBlocksOfRun];
#pragma unroll
    for (int b = 0; b < kBlocksOfRun; ++b) {
      const uint32_t at = (first + b * kScalePairs) * 2 * kBlocks;
      of_x[b] = dev::load_b128(xs, in_xs, at);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) of_w[h][b] = dev::load_b128(ws, in_ws, at + h * kLineRows * (k / kMxBlock));
    }
    load_first();
#pragma unroll
    for (int b = 0; b < kBlocksOfRun; ++b) {
      to.x[b][lane] = of_x[b];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) to.w[h][b][lane] = of_w[h][b];
    }
    dev::wave_fence();
  }

  __device__ __forceinline__ dev::u32x2 words(const ScaleBlock* blocks, int pair) const {
    const int of_block = pair % kScalePairs;
    const auto* const from = reinterpret_cast<const dev::u32x2*>(blocks[pair / kScalePairs] + row);
    return from[2 * (of_block / 8 * kLineRows + of_block / 2 % 4 * kTile) + of_block % 2];
  }

  __device__ __forceinline__ PairWords words(const RunScales& scales, int pair) const {
    PairWords found;
    found.x = words(scales.x, pair);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) found.w[h] = words(scales.w[h], pair);
    return found;
  }

  __device__ __forceinline__ uint32_t scale(dev::u32x2 of_pair) const {
    return __builtin_amdgcn_perm(of_pair[1], of_pair[0], which_byte);
  }

  template <int kCount>
  __device__ __forceinline__ void run_pairs(RunScales& scales, uint32_t first) {
    Pair pairs[kCount];
    bring_scales<kCount>(scales, first, [&] {
#pragma unroll
      for (int i = 0; i < kAhead && i < kCount; ++i) load(pairs[i], first + i);
    });
    PairWords next = words(scales, 0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const PairWords now = next;
      if (i + 1 < kCount) next = words(scales, i + 1);
      const uint32_t x_scale = scale(now.x);
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        sums[h] = dev::mfma_scaled_e4m3(dev::mfma_operand(pairs[i].w[h][0], pairs[i].w[h][1]), scale(now.w[h]),
                                        dev::mfma_operand(pairs[i].x[0], pairs[i].x[1]), x_scale, sums[h]);
      if (i + kAhead < kCount) load(pairs[i + kAhead], first + i + kAhead);
      __builtin_amdgcn_sched_barrier(0);
    }
  }

  template <int kMost>
  __device__ __forceinline__ void run_rest(RunScales& scales, uint32_t first, uint32_t end) {
    if constexpr (kMost > 0) {
      if (end - first == kMost)
        run_pairs<kMost>(scales, first);
      else
        run_rest<kMost - 1>(scales, first, end);
    }
  }

  /// The pairs of steps from `begin` to `end`; `scales`: in LDS, the wave's own.
  __device__ __forceinline__ void run(RunScales& scales, uint32_t begin, uint32_t end) {
    for (; begin + kLongRun <= end; begin += kLongRun) run_pairs<kLongRun>(scales, begin);
    if (begin + kLongRun / 2 <= end) {
      run_pairs<kLongRun / 2>(scales, begin);
      begin += kLongRun / 2;
    }
    if (begin + kLongRun / 4 <= end) {
      run_pairs<kLongRun / 4>(scales, begin);
      begin += kLongRun / 4;
    }
    run_rest<kLongRun / 4 - 1>(scales, begin, end);
  }

  __device__ __forceinline__ dev::f32x4 total() const { return line_total(sums); }
};

static_assert(sizeof(LineWave::RunScales) == kLineScaleBytes);

#endif

}  // namespace hf::wave_split
