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

#include "problem.h"
#include "hipforge/amd/hip.h"
#include "../../mxfp8_gemm/amd/long_runs.h"

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

/// What a pass over slots of a tile reads of the arguments.
struct Pass {
  const uint8_t *w, *w_scales, *a, *a_scales;
  uint32_t n, k, a_rows, a_div, aligned_scales;

  __device__ Pass(const uint8_t* weight, const uint8_t* weight_scales, uint32_t columns, uint32_t depth, const Late& rest)
      : w(weight), w_scales(weight_scales), a(rest.a), a_scales(rest.a_scales), n(columns), k(depth), a_rows(rest.a_rows),
        a_div(rest.a_div), aligned_scales(rest.aligned_scales) {}
  __device__ explicit Pass(const Late& p) : Pass(p.w, p.w_scales, p.n, p.k, p) {}
};

__device__ inline const int32_t* expert_of(const First& p, uint32_t tile) {
  const uint32_t bytes = tile * static_cast<uint32_t>(sizeof(int32_t));  // below 2^32: a tile has 4 of 2^31 entries or more
  return reinterpret_cast<const int32_t*>(reinterpret_cast<const uint8_t*>(p.expert_ids) + bytes);
}

/// Calls group(slots, expert, pass) for every 64 entries of the work-group's tiles that have slots of an expert that is here,
/// and ends the waves. `p`: in scalar registers from the start. also(arguments): loads scalars that `group` needs; called where
/// waves wait for memory anyway.
template <class Also, class Group>
[[noreturn]] __device__ __forceinline__ void for_each_group(First p, uint32_t lane, Also also, Group group) {
  uint32_t tile = blockIdx.y, first = 0;
  for (;;) {
    const uint32_t entries = min(p.block_m - first, uint32_t{dev::kWaveSize});
    const auto entry = dev::load_b32(
        dev::make_buffer(p.sorted_ids + (tile * p.block_m + first), entries * sizeof(int32_t)),
        lane * sizeof(int32_t), 0);
    const int32_t in_tiles = dev::load_constant(p.padded), owner = dev::load_constant(expert_of(p, tile));
    const Late& late = arguments_here();
    const uint32_t tiles = late.tiles, experts = late.experts, grid_rows = late.grid_rows;
    const Pass pass(p.w, p.w_scales, p.n, p.k, late);
    also(late);
    dev::wave_values_loaded_here(in_tiles, owner, tiles, experts, grid_rows, pass.a, pass.a_scales, pass.a_rows, pass.a_div,
                                pass.aligned_scales);
    const auto padded = static_cast<uint32_t>(max(in_tiles, 0)), expert = static_cast<uint32_t>(owner);
    const uint32_t used = min(padded, tiles * p.block_m);
    if (tile * p.block_m >= used) __builtin_amdgcn_endpgm();
    if (expert < experts) {
      Slots slots;
      slots.each = dev::kept_to_front(entry, lane < entries && entry < p.num_valid, lane, slots.count);
      if (slots.count > 0) group(slots, expert, pass);
    }
    first += dev::kWaveSize;
    if (first >= p.block_m) {
      first = 0;
      tile += grid_rows;
      if (tile * p.block_m >= used) __builtin_amdgcn_endpgm();  // below 2^32: the grid has no more rows than tiles
    }
    p = first_here();  // again from memory: the arguments do not occupy registers till here
  }
}

#endif

/// Work-groups of up to kMaxWaves waves: p.tile_columns / 16 times 2^p.log2_parts, neighbouring waves a tile's parts of K.
/// kAlone: one part, so that no wave waits for another; else wave_split::kTileBytes of LDS for each wave and row tile.
/// Every grid row has a tile. a_rows k and n k below 2^31; k a multiple of 32, at most wave_split::kMaxK; every slot / a_div
/// below a_rows; a and w aligned to 16 bytes.
template <int kRowTiles, bool kAlone>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp8_grouped_split(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns, uint32_t depth, Rest) {
#if defined(__gfx950__) || defined(__gfx942__)
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  auto* all_sums = reinterpret_cast<dev::f32x4*>(lds);
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  uint32_t log2_parts = 0, tile_columns;
  const auto also = [&](const Late& late) {
    tile_columns = late.tile_columns;
    dev::wave_value_loaded_here(tile_columns);
    if constexpr (!kAlone) {
      log2_parts = late.log2_parts;
      dev::wave_value_loaded_here(log2_parts);
    }
  };
  const First leading{sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns, depth};
  for_each_group(leading, lane, also, [&](const Slots& slots, uint32_t expert, Pass pass) {
    const uint32_t parts = 1u << log2_parts, part = wave & (parts - 1), tile = wave >> log2_parts;
    const uint32_t column0 = blockIdx.x * tile_columns + tile * kTile;
    dev::f32x4* sums = all_sums + tile * parts * kRowTiles * dev::kWaveSize;
    for (uint32_t first = 0;;) {
      const uint32_t k = pass.k, n = pass.n;
      uint32_t slot[kRowTiles], row[kRowTiles];
      bool exists[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        slot[t] = slots.of_lane(first + t * kTile, lane);
        row[t] = pass.a_div == 1 ? slot[t] : slot[t] / pass.a_div;
        exists[t] = first + t * kTile + lane % kTile < slots.count;
      }
      // Of all experts' rows of W; a tile past the last column has none.
      const uint64_t w_row = uint64_t{expert} * n + column0;
      const uint32_t w_rows = column0 < n ? min<uint32_t>(kTile, n - column0) : 0;
      using Rows = wave_split::GatheredRows<kRowTiles>;
      wave_split::Wave<kRowTiles, Rows> mine(Rows(pass.a, pass.a_scales, row, exists, pass.a_rows, k, lane),
                                             dev::make_buffer(pass.w + w_row * k, w_rows * k),
                                             dev::make_buffer(pass.w_scales + w_row * (k / kMxBlock), w_rows * (k / kMxBlock)),
                                             k, wave_split::lane_offset(k, lane), lane);
      wave_split::run_long<kAlone>(mine, wave_split::first_step(k, part, log2_parts),
                                   wave_split::first_step(k, part + 1, log2_parts), pass.aligned_scales);
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
      if ((first += kTile * kRowTiles) >= slots.count) return;
      pass = Pass(arguments_here());
    }
  });
#endif
}

}  // namespace hf::moe
