// MX-FP8 GEMM on the scaled MFMA for up to 64 rows of X: out = X W^T, one matrix instruction per 16 x 16 x 128 piece.
//
//            W rows n0 .. n0+15   n0+16 .. n0+31        one wave: 16 rows of X (M) x 16 n_sub rows of W (N),
//          +--------------------+--------------------+  K from step `begin` to step `end` of its split
//   X rows |  accumulator 0     |  accumulator 1 ... |
//   m0..15 +--------------------+--------------------+  operands: lane l has row l % 16, k = 16 (l / 16) and 64 past it
//
// Work-group: one wave. Grid: ceil(N / (16 n_sub)) x k_splits x ceil(M / 16). W is the instruction's A operand, so that
// a lane ends with four neighbouring columns of one output row and stores them at once.
//
// Each 128-k step is exactly one MFMA per tile: lane group g hands in the scale byte of block g, so nothing is masked
// or repeated. Two to four steps of operands are in flight (a ring of registers); their scales arrive as one dword per
// step, four steps per 16-byte load, and one shift selects the lane's byte.
//
// Bytes: a weight byte is loaded once per 16 rows of X, 64 consecutive bytes of 16 rows per instruction; X is loaded
// once per wave, from cache. Per 2 KiB of weight a wave issues 1 MFMA, 2 (1 + 1 / n_sub) payload loads and
// 1 + 1 / n_sub shifts; in all 20 instructions (counted) at n_sub = 1 and 9 at 4. At 8 TB/s, 256 CUs and
// 2.4 GHz a CU receives 2 KiB each 158 cycles: memory is the bound, whatever M.
//
// Split K: step ranges differ by at most one step. Each split writes its partial sums to partials[split, M, N] and a
// second kernel adds them in the order of the splits, so results do not depend on timing.
//
// Tails: rows past M or N and steps past the range read 0 through the exact size of each resource; in a last step
// shorter than 128 so do the lanes past K, scales included, and 0 times 2^-127 adds 0. No byte of a neighbouring row or
// block takes part.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/device/mx.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/amd/wave.h"

namespace hf::mfma {

constexpr int kThreads = dev::kWaveSize;
constexpr int kTile = dev::kMfmaTile;
constexpr int kStep = dev::kMfmaK;
constexpr int kStepBlocks = kStep / kMxBlock;  // scale bytes of a row and step: one dword
constexpr int kScaleSteps = 4;                 // steps whose scales one 16-byte load brings
constexpr int kMaxRows = 64;

static_assert(kStepBlocks == dev::kMfmaGroups, "lane group g supplies the scale of block g");
static_assert(kScaleSteps * kStepBlocks == 16, "one 16-byte load holds the scales of kScaleSteps steps");

/// Steps of operands in flight: about 16 loads per wave, and at most 256 registers.
constexpr int ring_steps(int sub_tiles) { return sub_tiles <= 2 ? 4 : 2; }

#if defined(__gfx950__)

// A lane's operand as it is loaded. The halves become the eight registers of an instruction only at their use: with one vector
// in the ring, clang 21 copied the ring ahead of the loop (160 VGPRs instead of 104 for 16 columns).
struct Halves {
  dev::u32x4 first, second;
  __device__ dev::i32x8 operand() const { return dev::mfma_operand(first, second); }
};

// kTiles x 16 rows of one operand as a lane sees them: row lane % 16 of each tile, the chunk at 16 (lane / 16) and the
// one 64 past it.
template <int kTiles>
struct Panel {
  dev::Buffer payload, scales;
  uint32_t payload_bytes, scale_bytes;
  uint32_t group;                         // lane / 16
  uint32_t first[kTiles], second[kTiles];  // offsets of the lane's two chunks of step 0
  uint32_t scale_row[kTiles];              // offset of the lane's row of scales

  // Rows first_row, first_row + 1, ... of the tensor's `rows`.
  __device__ Panel(const uint8_t* data, const uint8_t* scale_data, uint32_t first_row, uint32_t rows, uint32_t k,
                   uint32_t lane)
      : Panel(data, scale_data, rows, k, lane) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) place(t, first_row + t * kTile + lane % kTile, rows, k);
  }

  // Any rows: the lane's own row of each tile; one that is not below `rows` reads 0.
  __device__ Panel(const uint8_t* data, const uint8_t* scale_data, const uint32_t (&row)[kTiles], uint32_t rows,
                   uint32_t k, uint32_t lane)
      : Panel(data, scale_data, rows, k, lane) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) place(t, row[t], rows, k);
  }

  __device__ void place(int t, uint32_t row, uint32_t rows, uint32_t k) {
    const bool exists = row < rows;
    first[t] = exists ? row * k + group * dev::kMfmaLaneBytes : dev::kOutOfRange;
    second[t] = exists ? first[t] + dev::kMfmaHalf : dev::kOutOfRange;
    scale_row[t] = exists ? row * (k / kMxBlock) : dev::kOutOfRange;
  }

  // A step past the wave's range starts at the end of the tensor, where every lane is out of range.
  __device__ void load(Halves (&data)[kTiles], uint32_t step, bool exists) const {
    const uint32_t at = exists ? step * kStep : payload_bytes;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      data[t] = {dev::load_b128(payload, first[t], at), dev::load_b128(payload, second[t], at)};
  }

  // The last step of a K that is not a multiple of 128.
  __device__ void load_partial(Halves (&data)[kTiles], uint32_t step, uint32_t k) const {
    const uint32_t at = step * kStep, lane_k = at + group * dev::kMfmaLaneBytes;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      data[t] = {dev::load_b128(payload, lane_k < k ? first[t] : dev::kOutOfRange, at),
                 dev::load_b128(payload, lane_k + dev::kMfmaHalf < k ? second[t] : dev::kOutOfRange, at)};
  }

  // Scale bytes of all four blocks of four steps, one dword per step.
  __device__ void load_scale_words(dev::u32x4 (&words)[kTiles], uint32_t step, bool exists) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      words[t] = dev::load_b128(scales, scale_row[t], exists ? step * kStepBlocks : scale_bytes);
  }

  // The scale byte of the lane's own block, 0 past K, as element `slot`.
  __device__ void load_scale_bytes(dev::u32x4 (&words)[kTiles], int slot, uint32_t step, uint32_t k,
                                   bool exists) const {
    const bool has_block = step * kStepBlocks + group < k / kMxBlock;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      words[t][slot] = dev::load_u8(scales, has_block ? scale_row[t] + group : dev::kOutOfRange,
                                    exists ? step * kStepBlocks : scale_bytes);
  }

 private:
  __device__ Panel(const uint8_t* data, const uint8_t* scale_data, uint32_t rows, uint32_t k, uint32_t lane)
      : payload_bytes(rows * k), scale_bytes(rows * (k / kMxBlock)), group(lane / kTile) {
    payload = dev::make_buffer(data, payload_bytes);
    scales = dev::make_buffer(scale_data, scale_bytes);
  }
};

// One wave's (16 kRowTiles) x (16 kSub) piece of the output; acc[r kSub + s] is the tile of row tile r and sub-tile s.
// kRing steps of operands are in flight.
template <int kSub, int kRowTiles = 1, int kRing = ring_steps(kSub)>
struct Tile {
  struct Step {
    Halves x[kRowTiles], w[kSub];
  };
  struct Scales {
    dev::u32x4 x[kRowTiles], w[kSub];
  };

  static_assert(kScaleSteps % kRing == 0);

  const Panel<kRowTiles>& x;
  const Panel<kSub>& w;
  const uint32_t k;
  const bool aligned_scales;
  Step ring[kRing];
  Scales scales;
  dev::f32x4 acc[kRowTiles * kSub] = {};

  __device__ Tile(const Panel<kRowTiles>& x_panel, const Panel<kSub>& w_panel, uint32_t depth, bool scales_aligned)
      : x(x_panel), w(w_panel), k(depth), aligned_scales(scales_aligned) {}

  __device__ void load(Step& step, uint32_t index, bool exists) const {
    w.load(step.w, index, exists);
    x.load(step.x, index, exists);
  }

  __device__ void load(Scales& target, uint32_t first_step, uint32_t end) const {
    if (aligned_scales) {
      w.load_scale_words(target.w, first_step, first_step < end);
      x.load_scale_words(target.x, first_step, first_step < end);
      return;
    }
#pragma unroll
    for (int j = 0; j < kScaleSteps; ++j) {
      w.load_scale_bytes(target.w, j, first_step + j, k, first_step + j < end);
      x.load_scale_bytes(target.x, j, first_step + j, k, first_step + j < end);
    }
  }

  // Brings each lane's own byte to the bottom of its dword.
  __device__ void take(const Scales& loaded) {
    const uint32_t shift = aligned_scales ? 8 * x.group : 0;
#pragma unroll
    for (int s = 0; s < kSub; ++s) scales.w[s] = loaded.w[s] >> shift;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) scales.x[r] = loaded.x[r] >> shift;
  }

  __device__ void multiply(const Step& step, int slot) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int s = 0; s < kSub; ++s) {
        dev::f32x4& sum = acc[r * kSub + s];
        sum = dev::mfma_scaled_e4m3(step.w[s].operand(), scales.w[s][slot], step.x[r].operand(), scales.x[r][slot], sum);
      }
    }
  }

  __device__ void run(uint32_t begin, uint32_t end) {
    const uint32_t whole_end = min(end, k / kStep);
    Scales next;
    load(next, begin, whole_end);
#pragma unroll
    for (int j = 0; j < kRing; ++j) {
      load(ring[j], begin + j, begin + j < whole_end);
      // In the order of their use, here and below: loads return in order, so the first step waits for no other.
      __builtin_amdgcn_sched_barrier(0);
    }
    uint32_t step = begin;
    for (; step + kScaleSteps <= whole_end; step += kScaleSteps) {
      take(next);
      __builtin_amdgcn_sched_barrier(0);
      load(next, step + kScaleSteps, whole_end);
#pragma unroll
      for (int j = 0; j < kScaleSteps; ++j) {
        multiply(ring[j % kRing], j);
        load(ring[j % kRing], step + j + kRing, step + j + kRing < whole_end);
        __builtin_amdgcn_sched_barrier(0);
      }
    }
    take(next);
#pragma unroll
    for (int j = 0; j < kScaleSteps - 1; ++j) {
      if (step + j >= whole_end) break;
      multiply(ring[j % kRing], j);
      if (j + kRing < kScaleSteps - 1) load(ring[j % kRing], step + j + kRing, step + j + kRing < whole_end);
    }
    if (whole_end < end) multiply_partial(whole_end);
  }

  __device__ void multiply_partial(uint32_t step) {
    Step last;
    w.load_partial(last.w, step, k);
    x.load_partial(last.x, step, k);
    w.load_scale_bytes(scales.w, 0, step, k, true);
    x.load_scale_bytes(scales.x, 0, step, k, true);
    multiply(last, 0);
  }
};

#endif  // __gfx950__

/// What a launch computes, on device pointers; the kernel's only argument.
struct Problem {
  dev::bf16* out;
  float* partials;  // null where there is one split
  const uint8_t *xq, *xs, *wq, *ws;
  const dev::bf16* bias;  // [n], added to what is written to out; null: none
  uint32_t m, n, k;
  uint32_t log2_splits;
  uint32_t aligned_scales;  // rows of both scale tensors start at a multiple of 4 bytes
  uint32_t aligned_output;  // four neighbouring outputs can be stored at once
};

#if defined(__gfx950__)

// The sums of columns from `column` on, plus their bias where there is one.
__device__ inline dev::f32x4 with_bias(const Problem& p, dev::f32x4 sums, uint32_t column) {
  if (p.bias == nullptr) return sums;
#pragma unroll
  for (int i = 0; i < dev::kColumnsPerLane; ++i)
    if (column + i < p.n) sums[i] += static_cast<float>(p.bias[column + i]);
  return sums;
}

// One wave's tiles: 16 rows from row0, 16 kSub columns from column0, the steps of one split.
template <int kSub>
__device__ inline void compute(const Problem& p, uint32_t row0, uint32_t column0, uint32_t split, uint32_t lane) {
  const Panel<1> x(p.xq, p.xs, row0, p.m, p.k, lane);
  const Panel<kSub> w(p.wq, p.ws, column0, p.n, p.k, lane);
  Tile<kSub> tile(x, w, p.k, p.aligned_scales);
  const uint32_t steps = (p.k + kStep - 1) / kStep;
  tile.run(steps * split >> p.log2_splits, steps * (split + 1) >> p.log2_splits);

  const uint32_t row = row0 + lane % kTile;
  if (row >= p.m) return;
#pragma unroll
  for (int s = 0; s < kSub; ++s) {
    const uint32_t column = column0 + s * kTile + lane / kTile * dev::kColumnsPerLane;
    if (p.partials)
      dev::store_columns(p.partials + uint64_t{split} * p.m * p.n, tile.acc[s], row, column, p.n, p.aligned_output);
    else
      dev::store_columns(p.out, with_bias(p, tile.acc[s], column), row, column, p.n, p.aligned_output);
  }
}

#endif  // __gfx950__

/// Grid: ceil(n / (16 kSub)) x splits x ceil(m / 16) work-groups of one wave. With partials, split s writes
/// partials[s]; without, there is one split and it writes out. m k and n k below 2^31; k a multiple of 32.
template <int kSub>
__global__ __launch_bounds__(kThreads, 2) void smallm_mxfp8_mfma([[maybe_unused]] Problem problem) {
#if defined(__gfx950__)
  const uint32_t lane = threadIdx.x, row0 = blockIdx.z * kTile;
  const uint32_t column0 = blockIdx.x * (kTile * kSub);
  const uint32_t tiles = (problem.n - column0 + kTile - 1) / kTile;
  if (tiles >= kSub) return compute<kSub>(problem, row0, column0, blockIdx.y, lane);
  // The last columns fill fewer tiles; no tile is wasted.
  if constexpr (kSub == 4) {
    if (tiles >= 2) compute<2>(problem, row0, column0, blockIdx.y, lane);
    if (tiles == 2) return;
  }
  if constexpr (kSub > 1) compute<1>(problem, row0, column0 + (tiles - 1) * kTile, blockIdx.y, lane);
#endif
}

}  // namespace hf::mfma
