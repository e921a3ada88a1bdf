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
// A work-group may have several such tiles of columns side by side. The multiplication is wave_split_kernel.h's; lane l has
// slot l % 16 of a row tile and four neighbouring columns of it.
// Grid: ceil(n / tile_columns) x min(tiles, num_valid); row y walks tiles y, y + gridDim.y, ... up to
// num_tokens_post_padded. Slots may lie anywhere in a tile: an entry outside 0 .. num_valid - 1, negative ones included, is
// padding.
//
// A short K has one wave do all of it, so that there is neither LDS nor a barrier, and what a wave reads before its first
// multiplication decides: the tile's expert, the entries in use and the slots are read side by side. Starting a work-group
// takes time too: 17 ns on an XCD as modelled, in which its compute units receive 14 KB. Hence several tiles of columns.
//
// Bytes: per tile an expert's weight byte is loaded once for every 16 kRowTiles slots, A from cache. On gfx950 a CU
// receives the 2 KiB of a step each 158 cycles (8 TB/s, 256 CUs, 2.4 GHz) and its SIMDs multiply them in 8 kRowTiles; on
// gfx942 the 512 bytes of a block each 62 (5.3 TB/s, 304 CUs, 2.1 GHz), with 17 kRowTiles cycles of ldexp and sums: memory
// is the bound.
//
// Addresses: W has a resource over 16 rows of one expert on a 64-bit base, so N K of an expert is limited by the guards
// alone; A's offsets are those of a resource over all of it, below 2^31.
#pragma once

#include "grouped_problem.h"
#include "hipforge/amd/hip.h"
#include "long_runs.h"

namespace hf::moe {

using wave_split::kTile;

constexpr int kMaxWaves = 8;  // registers decide

#if defined(__gfx950__) || defined(__gfx942__)

// Up to 64 slots of one tile: lane i holds slot i.
struct Slots {
  uint32_t each, count;

  // Slot `first + lane % 16`; no slot from `count` on.
  __device__ uint32_t of_lane(uint32_t first, uint32_t lane) const { return dev::from_lane(each, first + lane % kTile); }
};

// Four columns of a slot's row, with bias and weight.
__device__ inline void store(uint32_t expert, dev::f32x4 values, uint32_t slot, uint32_t column) {
  const Late& p = arguments_here();
  const uint32_t n = p.n;
  if (p.biases != nullptr) {
    column = dev::lane_value_here(column);
    const float* bias = p.biases + uint64_t{expert} * n + column;
#pragma unroll
    for (int i = 0; i < dev::kColumnsPerLane; ++i)
      if (column + i < n) values[i] += bias[i];
  }
  if (p.slot_weights != nullptr) values *= p.slot_weights[slot];
  dev::store_columns(p.out, values, slot, dev::lane_value_here(column), n, p.aligned_output);
}

/// Calls group(slots, expert) for every 64 entries of the work-group's tiles that have slots of an expert that is here, and
/// ends the waves.
template <class Group>
[[noreturn]] __device__ __forceinline__ void for_each_group(const Problem& p, uint32_t lane, Group group) {
  uint32_t tile = blockIdx.y, first = 0;
  for (;;) {
    uint32_t entry = p.num_valid;
    if (first + lane < p.block_m) entry = static_cast<uint32_t>(p.sorted_ids[tile * p.block_m + first + lane]);
    const int32_t* in_use = p.padded;
    asm volatile("" : "+s"(in_use));  // no load before the loop
    int32_t in_tiles = dev::load_constant(in_use), owner = dev::load_constant(p.expert_ids + tile);
    asm volatile("" : "+s"(in_tiles), "+s"(owner));  // one wait for both, and for neither before the entry is asked for
    const auto padded = static_cast<uint32_t>(max(in_tiles, 0)), expert = static_cast<uint32_t>(owner);
    const uint32_t used = min(padded, p.tiles * p.block_m);
    if (tile * p.block_m >= used) __builtin_amdgcn_endpgm();
    if (expert < p.experts) {
      Slots slots;
      slots.each = dev::kept_to_front(entry, entry < p.num_valid, lane, slots.count);
      if (slots.count > 0) group(slots, expert);
    }
    first += dev::kWaveSize;
    if (first < p.block_m) continue;
    first = 0;
    tile += gridDim.y;
    if (tile * p.block_m >= used) __builtin_amdgcn_endpgm();  // below 2^32: the grid has no more rows than tiles
  }
}

#endif

/// Work-groups of up to kMaxWaves waves: p.tile_columns / 16 times 2^p.log2_parts, neighbouring waves a tile's parts of K.
/// kAlone: one part, so that no wave waits for another; else wave_split::kTileBytes of LDS for each wave and row tile.
/// Every grid row has a tile. a_rows k and n k below 2^31; k a multiple of 32, at most wave_split::kMaxK; every slot / a_div
/// below a_rows; a and w aligned to 16 bytes.
template <int kRowTiles, bool kAlone>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp8_grouped_split(Problem p) {
#if defined(__gfx950__) || defined(__gfx942__)
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  auto* all_sums = reinterpret_cast<dev::f32x4*>(lds);
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t log2_parts = kAlone ? 0 : p.log2_parts, parts = 1u << log2_parts;
  const uint32_t part = kAlone ? 0 : wave & (parts - 1), tile = wave >> log2_parts;
  const uint32_t column0 = blockIdx.x * p.tile_columns + tile * kTile;
  dev::f32x4* sums = all_sums + tile * parts * kRowTiles * dev::kWaveSize;
  for_each_group(p, lane, [&](const Slots& slots, uint32_t expert) {
    uint32_t first = 0;
    do {
      const Late& late = arguments_here();
      const uint32_t k = late.k, n = late.n;
      uint32_t slot[kRowTiles], row[kRowTiles];
      bool exists[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        slot[t] = slots.of_lane(first + t * kTile, lane);
        row[t] = late.a_div == 1 ? slot[t] : slot[t] / late.a_div;
        exists[t] = first + t * kTile + lane % kTile < slots.count;
      }
      // Of all experts' rows of W; a tile past the last column has none.
      const uint64_t w_row = uint64_t{expert} * n + column0;
      const uint32_t w_rows = column0 < n ? min<uint32_t>(kTile, n - column0) : 0;
      using Rows = wave_split::GatheredRows<kRowTiles>;
      wave_split::Wave<kRowTiles, Rows> mine(Rows(late.a, late.a_scales, row, exists, late.a_rows, k, lane),
                                             dev::make_buffer(late.w + w_row * k, w_rows * k),
                                             dev::make_buffer(late.w_scales + w_row * (k / kMxBlock), w_rows * (k / kMxBlock)),
                                             k, wave_split::lane_offset(k, lane), lane);
      wave_split::run_long<kAlone>(mine, wave_split::first_step(k, part, log2_parts),
                              wave_split::first_step(k, part + 1, log2_parts), late.aligned_scales);
      const uint32_t column = column0 + lane / kTile * dev::kColumnsPerLane;
      if constexpr (kAlone) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
          if (exists[t]) store(expert, mine.acc[t], slot[t], column);
      } else {
        dev::add_parts(sums, mine.acc, part, parts, lane, [&](uint32_t t, dev::f32x4 total) {
          const uint32_t at = slots.of_lane(first + t * kTile, lane);
          if (first + t * kTile + lane % kTile < slots.count) store(expert, total, at, column);
        });
        __syncthreads();  // the next sums take the same LDS
      }
    } while ((first += kTile * kRowTiles) < slots.count);
  });
#endif
}

}  // namespace hf::moe
