// MX-FP8 grouped GEMM of a mixture of experts with K split over the waves of a work-group, on gfx950 and gfx942:
// out[slot] = A[slot / a_div] W[expert]^T (+ bias[expert]) (* weight[slot]).
//
//   sorted_token_ids   | tile 0: block_m entries of one expert | tile 1 | ...        expert_ids: one per tile
//                        s0 s1 pad s2 pad ...   ->   s0 s1 s2    (64 entries at a time, slots moved to the front)
//
//                       k ->
//                     | wave 0 | wave 1 | ... | last wave |
//   A rows of s0 s1.. |========|========|     |===========|   16 kRowTiles slots, gathered by their row numbers
//   W[expert] n0 ..   |========|========|     |===========|   16 columns
//                          \        \     LDS      /
//                           +--- sums in the order of the waves ---> out[s0], out[s1], ..., columns n0 .. n0 + 15
//
// The multiplication is wave_split_kernel.h's; lane l has slot l % 16 of a row tile and four neighbouring columns of it.
// Grid: ceil(n / 16) x min(tiles, num_valid); row y walks tiles y, y + gridDim.y, ... up to num_tokens_post_padded. Slots
// may lie anywhere in a tile: an entry outside 0 .. num_valid - 1, negative ones included, is padding.
//
// A short K has one wave do all of it, so that there is neither LDS nor a barrier, and what a work-group reads before its
// first multiplication decides: the tile's expert, the entries in use and the slots are read side by side.
//
// Bytes: per tile an expert's weight byte is loaded once for every 16 kRowTiles slots, A from cache. On gfx950 a CU
// receives the 2 KiB of a step each 158 cycles (8 TB/s, 256 CUs, 2.4 GHz) and its SIMDs multiply them in 8 kRowTiles; on
// gfx942 the 512 bytes of a block each 62 (5.3 TB/s, 304 CUs, 2.1 GHz), with 17 kRowTiles cycles of ldexp and sums: memory
// is the bound.
//
// Addresses: W has a resource over 16 rows of one expert on a 64-bit base, so N K of an expert is limited by the guards
// alone; A's offsets are those of a resource over all of it, below 2^31.
#pragma once

#include <hip/hip_runtime.h>

#include "grouped_problem.h"
#include "wave_split_kernel.h"

namespace hf::moe {

using wave_split::kTile;

constexpr int kMaxWaves = 8;  // registers decide

#if defined(__gfx950__) || defined(__gfx942__)

// Up to 64 slots of one tile: lane i holds slot i.
struct Slots {
  uint32_t each, count;

  // Row numbers of A for 16 slots from `first` on, per lane % 16; a_rows where there is no such slot.
  __device__ uint32_t row(const Late& p, uint32_t first, uint32_t lane) const {
    const uint32_t index = first + lane % kTile, slot = dev::from_lane(each, index);
    const uint32_t row = p.a_div == 1 ? slot : slot / p.a_div;
    return index < count ? row : p.a_rows;
  }
};

// Four columns of a slot's row, with bias and weight.
__device__ inline void store(uint32_t expert, dev::f32x4 values, uint32_t slot, uint32_t column) {
  const Late& p = arguments_here();
  const uint32_t n = p.n;
  if (p.biases != nullptr) {
    const float* bias = p.biases + uint64_t{expert} * n + column;
#pragma unroll
    for (int i = 0; i < dev::kColumnsPerLane; ++i)
      if (column + i < n) values[i] += bias[i];
  }
  if (p.slot_weights != nullptr) values *= p.slot_weights[slot];
  dev::store_columns(p.out, values, slot, column, n, p.aligned_output);
}

/// Calls group(slots, expert) for every 64 entries of the work-group's tiles that have slots of an expert that is here.
template <class Group>
__device__ __forceinline__ void for_each_group(const Problem& p, uint32_t lane, Group group) {
  for (uint32_t tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
    const auto entry_at = [&](uint32_t first) {
      const uint32_t entry = first + lane;
      return entry < p.block_m ? static_cast<uint32_t>(p.sorted_ids[tile * p.block_m + entry]) : p.num_valid;
    };
    const uint32_t expert = static_cast<uint32_t>(dev::load_constant(p.expert_ids + tile));
    const int64_t used = dev::load_constant(p.padded);
    uint32_t entry = entry_at(0);
    if (int64_t{tile} * p.block_m >= used) return;
    if (expert >= p.experts) continue;
    for (uint32_t first = 0; first < p.block_m; first += dev::kWaveSize) {
      if (first > 0) entry = entry_at(first);
      Slots slots;
      slots.each = dev::kept_to_front(entry, entry < p.num_valid, lane, slots.count);
      if (slots.count > 0) group(slots, expert);
    }
  }
}

#endif

/// Work-groups of 1 to kMaxWaves waves, a power of two; LDS: wave_split::kTileBytes for each wave and row tile,
/// none for one wave. a_rows k and n k below 2^31; k a multiple of 32, at most wave_split::kMaxK; every slot / a_div below
/// a_rows; a and w aligned to 16 bytes.
template <int kRowTiles>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp8_grouped_split(Problem p) {
#if defined(__gfx950__) || defined(__gfx942__)
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  auto* sums = reinterpret_cast<dev::f32x4*>(lds);
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t waves = blockDim.x / dev::kWaveSize, log2_waves = __builtin_ctz(waves);
  const uint32_t column0 = blockIdx.x * kTile;
  for_each_group(p, lane, [&](const Slots& slots, uint32_t expert) {
    for (uint32_t first = 0; first < slots.count; first += kTile * kRowTiles) {
      const Late& late = arguments_here();
      const uint32_t k = late.k, n = late.n;
      const uint64_t expert_bytes = uint64_t{n} * k;
      uint32_t row[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) row[t] = slots.row(late, first + t * kTile, lane);
      using Rows = wave_split::GatheredRows<kRowTiles>;
      wave_split::Wave<kRowTiles, Rows> mine(
          Rows(late.a, late.a_scales, row, late.a_rows, k, lane),
          wave_split::rows_of(late.w + expert * expert_bytes, column0, kTile, n, k),
          wave_split::rows_of(late.w_scales + expert * (expert_bytes / kMxBlock), column0, kTile, n, k / kMxBlock), k, lane);
      mine.run(wave_split::first_step(k, wave, log2_waves), wave_split::first_step(k, wave + 1, log2_waves),
               late.aligned_scales);
      wave_split::add_parts(sums, mine.acc, wave, waves, lane, [&](uint32_t t, dev::f32x4 total) {
        const uint32_t index = first + t * kTile + lane % kTile, slot = dev::from_lane(slots.each, index);
        if (index < slots.count) store(expert, total, slot, column0 + lane / kTile * dev::kColumnsPerLane);
      });
      if (waves > 1) __syncthreads();  // the next sums take the same LDS
    }
  });
#endif
}

}  // namespace hf::moe
