// MX-FP8 GEMV, Y = X W^T for 1 to 16 rows of X:
// out[m, n] = sum_b 2^(xs[m, b] + ws[n, b] - 254) sum_{k in b} x[m, k] w[n, k]
//
//        k ->   one step: 1024 bytes of a row, 16 per lane, one coalesced 1-KiB load
//        | lane 0 | lane 1 | lane 2 | ...                             | lane 63 |
//        |<-- scale block -->|<-- scale block -->| ...   (32 k share one e8m0 byte: lanes 2j and 2j+1)
//   n0   |=== W row n0     ======================================================|  \  a wave's sub-tile: kCols columns
//   n0+1 |=== W row n0+1   ======================================================|  /  at a time, all K, then the next
//
// Work-group: 4 waves, kBlockN columns, all rows of X. A wave owns kBlockN / 4 columns and walks them in sub-tiles of
// kCols, small enough that accumulators, operands and prefetch stay in registers for every (kRows, kBlockN).
// Lane: 16 consecutive k of every step, for all kRows x kCols outputs of the sub-tile. Waves share nothing; no LDS.
//
// Bytes: each weight byte is loaded once, by one wave; a work-group reads X once per sub-tile of each wave, which stays
// in cache (M K bytes). Per KiB of weight and row of X a wave issues 8 packed FMAs and 4 scale instructions, and 8
// conversions per KiB that the rows share; in all 29 instructions (counted) at M = 1, 49 at 2, 81 at 4, 145 at 8 and 327 at 16.
// At 8 TB/s, 256 CUs and 2.4 GHz one CU receives a KiB each 79 cycles and issues one vector instruction per cycle, so memory is
// the bound up to M = 4 and vector issue beyond; there the MFMA kernel takes over.
//
// Scales are in registers: even lanes load the byte of an even step, odd lanes the byte of the odd step after it, and DPP hands
// each to its neighbour inside the addition xs + ws, so that a row costs half a scale load per step.
//
// Tails: the resource of each operand has its exact size. A row that does not exist (m >= M, n >= N) starts at that
// size, and a lane whose 16 k are past K gets kOutOfRange: both read 0 without touching memory, and 0 contributes 0
// whatever scale byte goes with it. No lane sees a byte of a neighbouring row.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"
#include "hipforge/device/mx.h"
#include "hipforge/amd/wave.h"

namespace hf::gemv {

constexpr int kWaves = 4;
constexpr int kThreads = kWaves * 64;
constexpr int kLaneBytes = 16;
constexpr int kStep = 64 * kLaneBytes;  // k per wave and step
constexpr int kPair = 2 * kStep;        // two steps share one scale load
constexpr int kMaxRows = 16;

// Masks of sched_barrier: nothing may cross, or anything but memory accesses.
constexpr int kNothingCrosses = 0;
constexpr int kOnlyMemoryInOrder = 1;

static_assert(kMxBlock == 2 * kLaneBytes, "two neighbouring lanes share a scale block");

/// Waves per SIMD that registers must allow: enough to keep memory busy at small M, two where issue is the bound.
constexpr int least_waves(int rows) { return rows == 1 ? 4 : rows == 2 ? 3 : 2; }

/// The most columns that a wave accumulates at once: more of them share the unpacked X, until registers run out.
constexpr int most_columns(int rows) { return rows <= 8 ? 4 : 2; }

#if defined(__gfx950__)

// The operand of one side: kCount rows of `stride` payload bytes and stride / 32 scale bytes.
template <int kCount>
struct Rows {
  dev::Buffer payload;
  dev::Buffer scales;
  uint32_t payload_row[kCount];
  uint32_t scale_row[kCount];

  // Rows first, first + 1, ... of the tensor's `rows`.
  __device__ Rows(dev::Buffer payload_buffer, dev::Buffer scale_buffer, uint32_t first, uint32_t rows, uint32_t k)
      : payload(payload_buffer), scales(scale_buffer) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) place(i, first + i, rows, k);
  }

  // Any rows, the same in all lanes; one that is not below `rows` reads 0.
  __device__ Rows(dev::Buffer payload_buffer, dev::Buffer scale_buffer, const uint32_t (&row)[kCount], uint32_t rows,
                  uint32_t k)
      : payload(payload_buffer), scales(scale_buffer) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) place(i, row[i], rows, k);
  }

  // No row starts past the end: the hardware compares the lane's offset with num_records less the row's, unsigned.
  __device__ void place(int i, uint32_t row, uint32_t rows, uint32_t k) {
    row = min(row, rows);
    payload_row[i] = row * k;
    scale_row[i] = row * (k / kMxBlock);
  }

  __device__ dev::u32x4 load(int row, uint32_t lane_offset) const {
    return dev::load_b128(payload, lane_offset, payload_row[row]);
  }

  __device__ void load(dev::u32x4 (&data)[kCount], uint32_t lane_offset) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) data[i] = load(i, lane_offset);
  }

  __device__ void load_scales(uint32_t (&bytes)[kCount], uint32_t lane_offset) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) bytes[i] = dev::load_u8(scales, lane_offset, scale_row[i]);
  }
};

// One sub-tile: kRows x kCols outputs over all of K. Two steps of W are in registers, so that two are in flight. X comes from
// cache and has one: each row is requested anew as soon as it has been unpacked.
template <int kRows, int kCols>
struct SubTile {
  static constexpr int kOutputs = kRows * kCols;

  const Rows<kRows>& x_rows;
  const Rows<kCols>& w_rows;
  const uint32_t k;
  const uint32_t lane_k;      // this lane's first k in a step
  const uint32_t lane_block;  // this lane's scale block in a pair of steps

  dev::u32x4 x[kRows];
  dev::u32x4 w_even[kCols], w_odd[kCols];
  uint32_t x_scales[kRows], w_scales[kCols];            // of a pair of steps
  uint32_t x_scales_next[kRows], w_scales_next[kCols];  // of the pair after it
  uint32_t highest_x[kRows] = {}, highest_w[kCols] = {};
  float acc[kOutputs] = {};

  __device__ SubTile(const Rows<kRows>& x_side, const Rows<kCols>& w_side, uint32_t depth, uint32_t lane)
      : x_rows(x_side),
        w_rows(w_side),
        k(depth),
        lane_k(lane * kLaneBytes),
        lane_block(lane % 2 * (kStep / kMxBlock) + lane / 2) {}

  __device__ uint32_t payload_offset(uint32_t first_k) const {
    const uint32_t at = first_k + lane_k;
    return at < k ? at : dev::kOutOfRange;
  }

  __device__ uint32_t scale_offset(uint32_t first_k) const {
    const uint32_t at = first_k / kMxBlock + lane_block;
    return at < k / kMxBlock ? at : dev::kOutOfRange;
  }

  __device__ void load_scales(uint32_t first_k) {
    const uint32_t offset = scale_offset(first_k);
    w_rows.load_scales(w_scales_next, offset);
    x_rows.load_scales(x_scales_next, offset);
  }

  // Processes the scales loaded last: notes the highest byte of each row (0xFF makes its outputs NaN) and removes the bias of
  // all.
  __device__ void take_scales() {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      highest_w[c] = max(highest_w[c], w_scales_next[c]);
      w_scales[c] = w_scales_next[c] - kE8m0Bias;
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      highest_x[m] = max(highest_x[m], x_scales_next[m]);
      x_scales[m] = x_scales_next[m] - kE8m0Bias;
    }
  }

  // Adds row m's dot products of 16 with kCount columns from first_column, each scaled exactly by ldexp: one
  // instruction for any exponent from -254 to 254.
  template <bool kOddStep, int kCount>
  __device__ void add_dots(int m, int first_column, const dev::f32x2 (&values)[8], const dev::f32x2 (&w)[kCount][8]) {
    dev::f32x2 dot[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) dot[c] = values[0] * w[c][0];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) dot[c] = __builtin_elementwise_fma(values[i], w[c][i], dot[c]);
    }
    const uint32_t x_exponent = dev::from_pair_lane<kOddStep>(x_scales[m]);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const int column = first_column + c;
      const uint32_t exponent = x_exponent + dev::from_pair_lane<kOddStep>(w_scales[column]);
      acc[m * kCols + column] += __builtin_ldexpf(dot[c].x + dot[c].y, static_cast<int>(exponent));
    }
  }

  // One step. With kReload, each row of X is requested for the step at next_k as soon as it is unpacked. Unpacking ahead of use
  // costs registers and gains nothing: one row is unpacked by pairs of columns, several rows one by one.
  template <bool kOddStep, bool kReload>
  __device__ void accumulate(const dev::u32x4 (&w_packed)[kCols], uint32_t next_k) {
    constexpr int kGroup = kRows == 1 && kCols > 2 ? 2 : kCols;
    const uint32_t next_offset = kReload ? payload_offset(next_k) : 0;
    dev::f32x2 values[8];
#pragma unroll
    for (int first = 0; first < kCols; first += kGroup) {
      dev::f32x2 w[kGroup][8];
#pragma unroll
      for (int c = 0; c < kGroup; ++c) dev::unpack_fp8x16(w_packed[first + c], w[c]);
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        if (first == 0) {
          dev::unpack_fp8x16(x[m], values);
          if constexpr (kReload) {
            if constexpr (kRows > 1) __builtin_amdgcn_sched_barrier(kNothingCrosses);
            x[m] = x_rows.load(m, next_offset);
            __builtin_amdgcn_sched_barrier(kOnlyMemoryInOrder);
          }
        }
        add_dots<kOddStep>(m, first, values, w);
        __builtin_amdgcn_sched_barrier(kNothingCrosses);
      }
    }
  }

  __device__ void run() {
    load_scales(0);
    w_rows.load(w_even, payload_offset(0));
    x_rows.load(x, payload_offset(0));
    w_rows.load(w_odd, payload_offset(kStep));
#pragma unroll
    for (int m = 0; m < kRows; ++m) asm("v_mov_b32 %0, 0" : "=v"(highest_x[m]));
#pragma unroll
    for (int c = 0; c < kCols; ++c) asm("v_mov_b32 %0, 0" : "=v"(highest_w[c]));
    uint32_t first_k = 0;
    for (; first_k + kPair < k; first_k += kPair) {
      take_scales();
      load_scales(first_k + kPair);
      accumulate<false, true>(w_even, first_k + kStep);
      w_rows.load(w_even, payload_offset(first_k + kPair));
      // Otherwise the compiler interleaves both steps and waits for all loads at once.
      __builtin_amdgcn_sched_barrier(kNothingCrosses);
      accumulate<true, true>(w_odd, first_k + kPair);
      w_rows.load(w_odd, payload_offset(first_k + kPair + kStep));
      __builtin_amdgcn_sched_barrier(kNothingCrosses);
    }
    // The last step, or the last two. Where there is only one, its reload of X is out of range and moves nothing.
    take_scales();
    accumulate<false, true>(w_even, first_k + kStep);
    if (first_k + kStep < k) accumulate<true, false>(w_odd, 0);
#pragma unroll
    for (int v = 0; v < kOutputs; ++v) {
      const bool nan = max(highest_x[v / kCols], highest_w[v % kCols]) == kE8m0Nan;
      acc[v] = nan ? __builtin_nanf("") : acc[v];
    }
  }
};

#endif  // __gfx950__

/// Grid: ceil(n / (kWaves * columns_per_wave)) work-groups of kThreads; columns_per_wave is a multiple of kCols.
/// m <= kRows; m k and n k below 2^31; k a multiple of 32; xq and wq aligned to 16 bytes; bias [n] or null.
template <int kRows, int kCols>
__global__ __launch_bounds__(kThreads, least_waves(kRows)) void smallm_mxfp8_gemv(
    [[maybe_unused]] dev::bf16* out, [[maybe_unused]] const uint8_t* xq, [[maybe_unused]] const uint8_t* xs,
    [[maybe_unused]] const uint8_t* wq, [[maybe_unused]] const uint8_t* ws, [[maybe_unused]] uint32_t m,
    [[maybe_unused]] uint32_t n, [[maybe_unused]] uint32_t k, [[maybe_unused]] uint32_t columns_per_wave,
    [[maybe_unused]] const dev::bf16* bias) {
#if defined(__gfx950__)
  constexpr int kOutputs = kRows * kCols;
  const uint32_t lane = threadIdx.x % dev::kWaveSize;
  const uint32_t wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t blocks = k / kMxBlock;
  const Rows<kRows> x_rows(dev::make_buffer(xq, m * k), dev::make_buffer(xs, m * blocks), 0, m, k);
  const dev::Buffer w_payload = dev::make_buffer(wq, n * k);
  const dev::Buffer w_scales = dev::make_buffer(ws, n * blocks);

  const uint32_t first_column = (blockIdx.x * kWaves + wave) * columns_per_wave;
  const uint32_t end_column = min(first_column + columns_per_wave, n);
  for (uint32_t column = first_column; column < end_column; column += kCols) {
    const Rows<kCols> w_rows(w_payload, w_scales, column, n, k);
    SubTile<kRows, kCols> tile(x_rows, w_rows, k, lane);
    tile.run();
    const float total = dev::wave_sums(tile.acc, lane);
    const uint32_t output = dev::wave_sums_index<kOutputs>(lane);
    const uint32_t row = output / kCols, at = column + output % kCols;
    if (output < kOutputs && row < m && at < n) {
      const float added = bias ? static_cast<float>(bias[at]) : 0.f;
      out[uint64_t{row} * n + at] = static_cast<dev::bf16>(total + added);
    }
  }
#endif
}

}  // namespace hf::gemv
