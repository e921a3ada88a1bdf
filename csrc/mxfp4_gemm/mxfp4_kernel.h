// MXFP4 GEMM on the scaled MFMA: out = X W^T from e2m1 operands with e8m0 scales per 32 elements of K.
//
//            W rows n0 .. n0+15   n0+16 .. n0+31         one wave: 16 kMSub rows of X x 16 kNSub rows of W, K from step
//          +--------------------+--------------------+   `begin` to step `end` of its split
//   X rows |  acc[0][0]         |  acc[0][1]  ...    |
//   m0..15 +--------------------+--------------------+   lane l holds row l % 16 of each tile, k = 32 g .. 32 g + 31 of a
//  m16..31 |  acc[1][0]         |  acc[1][1]  ...    |   128-k step, g = l / 16: 16 bytes, exactly one scale block
//          +--------------------+--------------------+
//
// Work-group: one wave. Grid: ceil(N / (16 kNSub)) x k_splits x ceil(M / (16 kMSub)). W is the instruction's A operand, so
// that a lane ends with four neighbouring columns of one output row.
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

#include <hip/hip_runtime.h>

#include "hipforge/buffer.h"
#include "hipforge/mfma.h"
#include "hipforge/mx.h"
#include "hipforge/split_k.h"
#include "hipforge/wave.h"

namespace hf::mxfp4 {

constexpr int kThreads = dev::kWaveSize;
constexpr int kTile = dev::kMfmaTile;
constexpr int kStep = dev::kMfmaK;
constexpr int kLaneBytes = kMxBlock / 2;          // a lane's operand: one block of a row
constexpr int kStepBytes = kStep / 2;
constexpr int kTileBytes = kTile * kLaneBytes;    // a shuffled tile of one 16-byte column
constexpr int kScaleRows = 32, kScaleColumns = 8;  // a tile of shuffled scales

static_assert(kLaneBytes == 16 && kStepBytes == dev::kMfmaGroups * kLaneBytes);

struct Plan {
  uint32_t log2_splits;
  uint32_t shuffled;         // weights and their scales
  uint32_t scale_columns;    // of the shuffled scales: K/32 rounded up to 8
  uint32_t scale_rows;       // of the shuffled scales: N rounded up to 256
  uint32_t aligned_output;
};

#if defined(__gfx950__)

// kTiles x 16 rows of one operand as a lane sees them.
template <int kTiles>
struct Panel {
  dev::Buffer payload, scales;
  uint32_t blocks;                 // K / 32
  uint32_t group;                  // lane / 16
  bool shuffled;
  uint32_t data_at[kTiles];        // offset of the lane's 16 bytes of step 0
  uint32_t scale_at[kTiles];       // offset of the lane's scale of step 0
  bool exists[kTiles];

  __device__ Panel(const uint8_t* data, const uint8_t* scale_data, uint32_t first_row, uint32_t rows, uint32_t k,
                   uint32_t lane, bool is_shuffled, const Plan& plan)
      : blocks(k / kMxBlock), group(lane / kTile), shuffled(is_shuffled) {
    payload = dev::make_buffer(data, rows * (k / 2));
    scales = dev::make_buffer(scale_data, shuffled ? plan.scale_rows * plan.scale_columns : rows * blocks);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint32_t row = first_row + t * kTile + lane % kTile;
      exists[t] = row < rows;
      if (shuffled) {
        // Byte (n, kb) lives at ((n/16) (Kb/32) + kb/32) 512 + ((kb%32)/16) 256 + (n%16) 16 + kb%16: the 16-byte columns
        // of 16 rows follow each other.
        data_at[t] = row / kTile * kTile * (k / 2) + group * kTileBytes + row % kTile * kLaneBytes;
        // Scale (m, s) lives at (m/32) 32 S + (s/8) 256 + (s%4) 64 + (m%16) 4 + ((s%8)/4) 2 + (m%32)/16; here s = group.
        scale_at[t] = row / kScaleRows * kScaleRows * plan.scale_columns + group * 64 + row % 16 * 4 + row % 32 / 16;
      } else {
        data_at[t] = row * (k / 2) + group * kLaneBytes;
        scale_at[t] = row * blocks + group;
      }
    }
  }

  // Offset of step `step` past that of step 0, for payload and scales.
  __device__ uint32_t payload_step(uint32_t step) const { return shuffled ? step * (kTile * kStepBytes) : step * kStepBytes; }
  __device__ uint32_t scale_step(uint32_t step) const {
    return shuffled ? step / 2 * (kScaleRows * kScaleColumns) + step % 2 * 2 : step * (kStep / kMxBlock);
  }

  __device__ void load(dev::u32x4 (&data)[kTiles], uint32_t (&scale)[kTiles], uint32_t step, bool wanted) const {
    const bool has_block = wanted && step * (kStep / kMxBlock) + group < blocks;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const bool there = has_block && exists[t];
      data[t] = dev::load_b128(payload, there ? data_at[t] : dev::kOutOfRange, wanted ? payload_step(step) : 0);
      scale[t] = dev::load_u8(scales, there ? scale_at[t] : dev::kOutOfRange, wanted ? scale_step(step) : 0);
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
__global__ __launch_bounds__(kThreads, 2) void mxfp4_mfma(
    [[maybe_unused]] dev::bf16* out, [[maybe_unused]] float* partials, [[maybe_unused]] const uint8_t* xq,
    [[maybe_unused]] const uint8_t* xs, [[maybe_unused]] const uint8_t* wq, [[maybe_unused]] const uint8_t* ws,
    [[maybe_unused]] uint32_t m, [[maybe_unused]] uint32_t n, [[maybe_unused]] uint32_t k,
    [[maybe_unused]] Plan plan) {
#if defined(__gfx950__)
  constexpr int kRing = ring_steps(kMSub, kNSub);
  const uint32_t lane = threadIdx.x;
  const uint32_t row0 = blockIdx.z * (kTile * kMSub), column0 = blockIdx.x * (kTile * kNSub);
  const uint32_t steps = (k + kStep - 1) / kStep;
  const uint32_t begin = steps * blockIdx.y >> plan.log2_splits, end = steps * (blockIdx.y + 1) >> plan.log2_splits;

  const Panel<kMSub> x(xq, xs, row0, m, k, lane, false, plan);
  const Panel<kNSub> w(wq, ws, column0, n, k, lane, plan.shuffled, plan);
  Step<kMSub, kNSub> ring[kRing];
  dev::f32x4 acc[kMSub][kNSub] = {};
  const auto load = [&](Step<kMSub, kNSub>& step, uint32_t index) {
    w.load(step.w, step.w_scale, index, index < end);
    x.load(step.x, step.x_scale, index, index < end);
  };
#pragma unroll
  for (int j = 0; j < kRing; ++j) load(ring[j], begin + j);
  for (uint32_t step = begin; step < end; step += kRing) {
    // Steps past the end hold zeros and are not multiplied, so that an MFMA is counted only where it does work.
#pragma unroll
    for (int j = 0; j < kRing; ++j) {
      if (step + j < end) {
#pragma unroll
        for (int a = 0; a < kMSub; ++a)
#pragma unroll
          for (int b = 0; b < kNSub; ++b)
            acc[a][b] = dev::mfma_scaled_e2m1(ring[j].w[b], ring[j].w_scale[b], ring[j].x[a], ring[j].x_scale[a], acc[a][b]);
      }
      load(ring[j], step + kRing + j);
    }
  }

#pragma unroll
  for (int a = 0; a < kMSub; ++a) {
    const uint32_t row = row0 + a * kTile + lane % kTile;
    if (row >= m) continue;
#pragma unroll
    for (int b = 0; b < kNSub; ++b) {
      const uint32_t column = column0 + b * kTile + lane / kTile * dev::kColumnsPerLane;
      if (partials)
        dev::store_columns(partials + uint64_t{blockIdx.y} * m * n, acc[a][b], row, column, n, plan.aligned_output);
      else
        dev::store_columns(out, acc[a][b], row, column, n, plan.aligned_output);
    }
  }
#endif
}

}  // namespace hf::mxfp4
