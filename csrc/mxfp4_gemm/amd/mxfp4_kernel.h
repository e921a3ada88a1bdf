// MXFP4 GEMM on the scaled MFMA: out = X W^T from e2m1 operands with e8m0 scales per 32 elements of K.
//
//            W rows n0 .. n0+15   n0+16 .. n0+31         one wave: 16 kMSub rows of X x 16 kNSub rows of W, K from step
//          +--------------------+--------------------+   `begin` to step `end` of its part
//   X rows |  acc[0][0]         |  acc[0][1]  ...    |
//   m0..15 +--------------------+--------------------+   lane l holds row l % 16 of each tile, k = 32 g .. 32 g + 31 of a
//  m16..31 |  acc[1][0]         |  acc[1][1]  ...    |   128-k step, g = l / 16: 16 bytes, exactly one scale block
//          +--------------------+--------------------+
//
// Work-group: k_splits waves with a part of K each, whose sums are added through LDS in their order: one launch, no workspace.
// Grid: ceil(N / (16 kNSub)) x ceil(M / (16 kMSub)). W is the instruction's A operand, so that a lane ends with four
// neighbouring columns of one output row.
//
// Weights come plain (row-major [N, K/2]) or shuffled in 16 x 16-byte tiles, where the 16 bytes of 16 rows are neighbours and a
// load of a wave is 1 KiB without a gap. Scales come plain ([rows, K/32]) or, with shuffled weights, in the shuffled order.
//
// Bytes: a weight byte is loaded once per 16 kMSub rows of X, an X byte once per 16 kNSub rows of W. At kMSub = 1 a wave
// issues one MFMA per KiB of weight; at 8 TB/s and 2.4 GHz a CU of 256 receives a KiB each 79 cycles and the MFMA takes 16:
// memory is the bound until M passes 64.
//
// Tails: rows that do not exist and lanes whose 32 k lie past K read zeros, which is the value 0 with the scale 2^-127.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/device/mx.h"
#include "hipforge/device/mx_shuffled.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/amd/wave.h"
#include "hipforge/amd/wave_parts.h"

namespace hf::mxfp4 {

constexpr int kMaxWaves = 8;
constexpr int kMaxLds = 64 << 10;
constexpr int kTile = dev::kMfmaTile;
constexpr int kStep = dev::kMfmaK;
constexpr int kLaneBytes = kMxBlock / 2;          // a lane's operand: one block of a row
constexpr int kStepBytes = kStep / 2;
constexpr int kTileBytes = kTile * kLaneBytes;    // a shuffled tile of one 16-byte column
constexpr int kSumBytes = kTile * kTile * sizeof(float);  // of a wave and tile

static_assert(kLaneBytes == 16 && kStepBytes == dev::kMfmaGroups * kLaneBytes);
static_assert(kTile == kShuffledRows);

/// A launch's choices in one word, so that all arguments fit the 14 dwords that are in SGPRs when a wave starts. shuffled: the
/// weights and their scales.
constexpr uint32_t pack_options(uint32_t log2_splits, bool shuffled, bool aligned_output) {
  return log2_splits | uint32_t{shuffled} << 8 | uint32_t{aligned_output} << 9;
}

struct Plan {
  uint32_t log2_splits;
  bool shuffled, aligned_output;
  uint32_t scale_columns;    // of the shuffled scales: K/32 rounded up to 8
  uint32_t scale_rows;       // of the shuffled scales: N rounded up to 256

  __device__ Plan(uint32_t options, uint32_t n, uint32_t k)
      : log2_splits(options & 0xFF),
        shuffled(options >> 8 & 1),
        aligned_output(options >> 9 & 1),
        scale_columns((k / kMxBlock + kShuffledScaleColumns - 1) / kShuffledScaleColumns * kShuffledScaleColumns),
        scale_rows((n + kShuffledPaddedRows - 1) / kShuffledPaddedRows * kShuffledPaddedRows) {}
};

#if defined(__gfx950__)

// kTiles x 16 rows of one operand as a lane sees them. Rows that do not exist have offsets out of range.
template <int kTiles>
struct Panel {
  dev::Buffer payload, scales;
  uint32_t payload_bytes, scale_bytes;
  uint32_t payload_stride;    // from step to step
  bool shuffled;
  uint32_t group;             // lane / 16
  uint32_t data_at[kTiles];   // offset of the lane's 16 bytes of step 0
  uint32_t scale_at[kTiles];  // offset of the lane's scale of step 0

  __device__ Panel(const uint8_t* data, const uint8_t* scale_data, uint32_t first_row, uint32_t rows, uint32_t k,
                   uint32_t lane, bool is_shuffled, const Plan& plan)
      : payload_bytes(rows * (k / 2)),
        scale_bytes(is_shuffled ? plan.scale_rows * plan.scale_columns : rows * (k / kMxBlock)),
        payload_stride(is_shuffled ? kTile * kStepBytes : kStepBytes),
        shuffled(is_shuffled),
        group(lane / kTile) {
    payload = dev::make_buffer(data, payload_bytes);
    scales = dev::make_buffer(scale_data, scale_bytes);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t row = first_row + t * kTile + lane % kTile;
      // Of block `group` of the row (mx_shuffled.h has the shuffled order).
      const uint32_t data_offset = shuffled ? row / kTile * kTile * (k / 2) + group * kTileBytes + row % kTile * kLaneBytes
                                            : row * (k / 2) + group * kLaneBytes;
      const uint32_t scale_offset =
          shuffled ? row / kShuffledScaleRows * kShuffledScaleRows * plan.scale_columns + group * 64 + row % 16 * 4 +
                         row % kShuffledScaleRows / 16
                   : row * (k / kMxBlock) + group;
      data_at[t] = row < rows ? data_offset : dev::kOutOfRange;
      scale_at[t] = row < rows ? scale_offset : dev::kOutOfRange;
    }
  }

  __device__ uint32_t scale_step(uint32_t step) const {
    return shuffled ? step / 2 * kShuffledScaleBytes + step % 2 * 2 : step * (kStep / kMxBlock);
  }

  // A step past the wave's part starts at the end of the tensor, where every lane is out of range.
  __device__ void load(dev::u32x4 (&data)[kTiles], uint32_t (&scale)[kTiles], uint32_t step, bool exists) const {
    const uint32_t at = exists ? step * payload_stride : payload_bytes;
    const uint32_t scale_from = exists ? scale_step(step) : scale_bytes;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      data[t] = dev::load_b128(payload, data_at[t], at);
      scale[t] = dev::load_u8(scales, scale_at[t], scale_from);
    }
  }

  // The last step of a K that is not a multiple of 128: lanes past K read nothing.
  __device__ void load_partial(dev::u32x4 (&data)[kTiles], uint32_t (&scale)[kTiles], uint32_t step, uint32_t k) const {
    const bool has_block = step * (kStep / kMxBlock) + group < k / kMxBlock;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      data[t] = dev::load_b128(payload, has_block ? data_at[t] : dev::kOutOfRange, step * payload_stride);
      scale[t] = dev::load_u8(scales, has_block ? scale_at[t] : dev::kOutOfRange, scale_step(step));
    }
  }
};

template <int kMSub, int kNSub>
struct Step {
  dev::u32x4 x[kMSub], w[kNSub];
  uint32_t x_scale[kMSub], w_scale[kNSub];
};

#endif  // __gfx950__

/// Steps of operands in flight: as many as leave registers for the accumulators.
constexpr int ring_steps(int m_sub, int n_sub) { return m_sub + n_sub <= 4 ? 4 : 2; }

template <int kMSub, int kNSub>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp4_mfma(
    [[maybe_unused]] const uint8_t* wq, [[maybe_unused]] const uint8_t* ws, [[maybe_unused]] const uint8_t* xq,
    [[maybe_unused]] const uint8_t* xs, [[maybe_unused]] uint32_t m, [[maybe_unused]] uint32_t n,
    [[maybe_unused]] uint32_t k, [[maybe_unused]] uint32_t options, [[maybe_unused]] dev::bf16* out) {
#if defined(__gfx950__)
  const Plan plan(options, n, k);
  constexpr int kRing = ring_steps(kMSub, kNSub);
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t row0 = blockIdx.y * (kTile * kMSub), column0 = blockIdx.x * (kTile * kNSub);
  const uint32_t steps = (k + kStep - 1) / kStep;
  const uint32_t begin = steps * wave >> plan.log2_splits, end = steps * (wave + 1) >> plan.log2_splits;

  const Panel<kMSub> x(xq, xs, row0, m, k, lane, false, plan);
  const Panel<kNSub> w(wq, ws, column0, n, k, lane, plan.shuffled, plan);
  const uint32_t whole_end = min(end, k / kStep);
  Step<kMSub, kNSub> ring[kRing];
  dev::f32x4 acc[kMSub * kNSub] = {};
  const auto load = [&](Step<kMSub, kNSub>& step, uint32_t index) {
    w.load(step.w, step.w_scale, index, index < whole_end);
    x.load(step.x, step.x_scale, index, index < whole_end);
  };
  const auto multiply = [&](const Step<kMSub, kNSub>& step) {
#pragma unroll
    for (int a = 0; a < kMSub; ++a)
#pragma unroll
      for (int b = 0; b < kNSub; ++b)
        acc[a * kNSub + b] =
            dev::mfma_scaled_e2m1(step.w[b], step.w_scale[b], step.x[a], step.x_scale[a], acc[a * kNSub + b]);
  };
#pragma unroll
  for (int j = 0; j < kRing; ++j) {
    load(ring[j], begin + j);
    // In the order of their use: loads return in order, so the first step waits only for its own.
    __builtin_amdgcn_sched_barrier(0);
  }
  uint32_t step = begin;
  for (; step + kRing <= whole_end; step += kRing) {
#pragma unroll
    for (int j = 0; j < kRing; ++j) {
      multiply(ring[j]);
      load(ring[j], step + kRing + j);
      __builtin_amdgcn_sched_barrier(0);
    }
  }
#pragma unroll
  for (int j = 0; j < kRing - 1; ++j) {
    if (step + j >= whole_end) break;
    multiply(ring[j]);
  }
  if (whole_end < end) {
    w.load_partial(ring[0].w, ring[0].w_scale, whole_end, k);
    x.load_partial(ring[0].x, ring[0].x_scale, whole_end, k);
    multiply(ring[0]);
  }

  const uint32_t row = row0 + lane % kTile, column = column0 + lane / kTile * dev::kColumnsPerLane;
  dev::add_parts(reinterpret_cast<dev::f32x4*>(lds), acc, wave, 1u << plan.log2_splits, lane,
                 [&](uint32_t t, dev::f32x4 sum) {
                   if (row + t / kNSub * kTile < m)
                     dev::store_columns(out, sum, row + t / kNSub * kTile, column + t % kNSub * kTile, n, plan.aligned_output);
                 });
#endif
}

}  // namespace hf::mxfp4
