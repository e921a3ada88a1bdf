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
// With a short K one wave does all of it, without LDS or a barrier. Its time is mostly that of the loads before its first
// product, so the tile's expert, the number of entries in use and the slots are loaded together. Starting a work-group takes 17
// ns on an XCD (modelled), in which its compute units receive 14 KB; hence several tiles of columns.
//
// At most 8 slots of a tile, on gfx950: line_wave.h multiplies them, in loads of whole lines of W.
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
#include "hipforge/amd/wave_parts.h"
#include "../../mxfp8_gemm/amd/line_wave.h"
#include "../../mxfp8_gemm/amd/long_runs.h"

namespace hf::moe {

using wave_split::Elements;
using wave_split::kTile;
using wave_split::Scales;

constexpr int kMaxWaves = 8;  // registers decide

/// Slots that are multiplied at once; kLines: by line_wave.h, on gfx950.
#if defined(__gfx942__)
constexpr uint32_t slots_at_once(int row_tiles, bool) { return row_tiles * kTile; }
#else
constexpr uint32_t slots_at_once(int row_tiles, bool lines) { return lines ? wave_split::kLineRows : row_tiles * kTile; }
#endif

#if defined(__gfx950__) || defined(__gfx942__)

// Up to 64 slots of one tile: lane i holds slot i.
struct Slots {
  uint32_t each, count;

  // Slot `first + lane % 16`, or lane % of; no slot from `count` on.
  __device__ uint32_t of_lane(uint32_t first, uint32_t lane, uint32_t of = kTile) const {
    return dev::from_lane(each, first + lane % of);
  }
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

/// The arguments that a pass over slots of a tile reads.
struct Pass {
  const uint8_t *w, *w_scales, *a, *a_scales;
  uint32_t n, k, a_rows, a_div, options;

  __device__ Pass(const uint8_t* weight, const uint8_t* weight_scales, uint32_t columns, uint32_t depth, const Late& rest)
      : w(weight), w_scales(weight_scales), a(rest.a), a_scales(rest.a_scales), n(columns), k(depth), a_rows(rest.a_rows),
        a_div(rest.a_div), options(rest.options) {}
  __device__ explicit Pass(const Late& p) : Pass(p.w, p.w_scales, p.n, p.k, p) {}

  __device__ uint32_t row_of(uint32_t slot) const { return a_div == 1 ? slot : slot / a_div; }

  /// The scales of `rows` rows of an expert's W from column0 on, at most a tile of them.
  template <Scales kScales>
  __device__ dev::Buffer scales_of_w(uint32_t expert, uint32_t column0, uint32_t rows) const {
    constexpr uint32_t kShared = wave_split::shared_rows(kScales);
    const uint32_t stride = wave_split::scale_row_bytes(kScales, k), groups = (n + kShared - 1) / kShared;
    const uint64_t first = uint64_t{expert} * groups + column0 / kShared;
    // A tile lies within rows that share scales.
    return dev::make_buffer(w_scales + first * stride, (kShared == 1 ? rows : rows != 0) * stride);
  }
};

/// The factors of the sums of four columns of a slot, for Scales::kOnce.
template <Scales kScales>
struct SlotScales {
  dev::f32x4 w;
  float a;

  SlotScales() = default;
  __device__ __forceinline__ SlotScales(const Pass& pass, uint32_t expert, uint32_t slot, bool exists, uint32_t column) {
    if constexpr (kScales == Scales::kOnce) {
      const bool one_a = pass.options & kOneAScale, one_w = pass.options & kOneWScale;
      const uint32_t of_expert = one_w ? 1 : pass.n;
      const dev::Buffer of_a = dev::make_buffer(pass.a_scales, (one_a ? 1 : pass.a_rows) * sizeof(float));
      const dev::Buffer of_w =
          dev::make_buffer(pass.w_scales + uint64_t{expert} * of_expert * sizeof(float), of_expert * sizeof(float));
      const uint32_t a_at = one_a ? 0 : pass.row_of(slot) * sizeof(float);
      a = __builtin_bit_cast(float, dev::load_b32(of_a, exists ? a_at : dev::kOutOfRange, 0));
      if (one_w)
        w = dev::f32x4(__builtin_bit_cast(float, dev::load_b32(of_w, 0, 0)));
      else
        w = __builtin_bit_cast(dev::f32x4, dev::load_b128(of_w, column * sizeof(float), 0));
    }
  }

  __device__ __forceinline__ dev::f32x4 applied(dev::f32x4 sums) const {
    if constexpr (kScales != Scales::kOnce) return sums;
    return sums * (w * a);
  }
};

/// All steps from `begin` to `end`; kWholeK: that is all of K.
template <bool kWholeK, Scales kScales, class Wave>
__device__ __forceinline__ void multiply_steps(Wave& mine, uint32_t begin, uint32_t end, const Pass& pass) {
#if defined(__gfx950__)
  constexpr bool kHasLongRuns = kScales == Scales::kMx;
#else
  constexpr bool kHasLongRuns = false;
#endif
  const bool aligned = pass.options & kAlignedScales, between = pass.options & kScalesBetweenWords;
  if constexpr (kHasLongRuns)
    wave_split::run_long<kWholeK>(mine, begin, end, aligned, between);
  else
    mine.run(begin, end, aligned, between);
}

/// The sums of 16 rows of W and the slots' rows of A, over `part` of K.
template <int kRowTiles, bool kLines, bool kWholeK, Scales kScales, Elements kW>
__device__ __forceinline__ void multiply_part(dev::f32x4 (&acc)[kRowTiles], const Pass& pass, const uint32_t (&row)[kRowTiles],
                                              const bool (&exists)[kRowTiles], dev::Buffer w, dev::Buffer w_scales, uint32_t part,
                                              uint32_t log2_parts, bool has_results, uint32_t lane, [[maybe_unused]] void* line_scales) {
  const uint32_t k = pass.k;
#if defined(__gfx950__)
  if constexpr (kLines) {
    static_assert(kRowTiles == 1 && kScales == Scales::kMx && kW == Elements::e4m3);
    wave_split::LineWave mine(dev::make_buffer(pass.a, pass.a_rows * k), dev::make_buffer(pass.a_scales, pass.a_rows * (k / kMxBlock)),
                              row[0], exists[0], w, w_scales, k, lane);
    mine.run(*static_cast<wave_split::LineWave::RunScales*>(line_scales), wave_split::first_pair(k, part, log2_parts),
             wave_split::first_pair(k, part + 1, log2_parts));
    acc[0] = mine.total();
    return;
  }
#endif
  using Rows = wave_split::GatheredRows<kRowTiles, kScales>;
  wave_split::Wave<kRowTiles, Rows, kTile, 1, kScales, kW> mine(Rows(pass.a, pass.a_scales, row, exists, pass.a_rows, k, lane), w,
                                                               w_scales, k, wave_split::w_lane_offset<kW>(k, lane), lane);
  const uint32_t begin = wave_split::first_step(k, part, log2_parts), end = wave_split::first_step(k, part + 1, log2_parts);
  multiply_steps<kWholeK, kScales>(mine, begin, has_results ? end : begin, pass);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) acc[t] = mine.acc[t];
}

__device__ inline const int32_t* expert_of(const First& p, uint32_t tile) {
  const uint32_t bytes = tile * static_cast<uint32_t>(sizeof(int32_t));  // below 2^32: a tile has 4 of 2^31 entries or more
  return reinterpret_cast<const int32_t*>(reinterpret_cast<const uint8_t*>(p.expert_ids) + bytes);
}

/// Calls group(slots, expert, pass) for every 64 entries of the work-group's tiles that hold a slot of one of the experts here,
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
                                pass.options);
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
/// kAlone: one part, so that no wave waits for another; else wave_split::kTileBytes of LDS for each wave and row tile. kLines: 8
/// slots at a time on gfx950, behind those kLineScaleBytes for each wave, and what takes_lines says.
/// Every grid row has a tile. a_rows k and n k below 2^31; k a multiple of 32 or, of scales that are not MX's, 16, at most
/// wave_split::kMaxK; every slot / a_div below a_rows; a and w aligned to 16 bytes.
template <int kRowTiles, bool kAlone, Scales kScales, Elements kW = Elements::e4m3, bool kLines = false>
__device__ __forceinline__ void multiply_groups(const First& leading) {
#if defined(__gfx950__) || defined(__gfx942__)
  constexpr uint32_t kPassSlots = slots_at_once(kRowTiles, kLines), kSlotsOfTile = kPassSlots / kRowTiles;
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
  for_each_group(leading, lane, also, [&](const Slots& slots, uint32_t expert, Pass pass) {
    const uint32_t parts = 1u << log2_parts, part = wave & (parts - 1), tile = wave >> log2_parts;
    const uint32_t column0 = blockIdx.x * tile_columns + tile * kTile;
    dev::f32x4* sums = all_sums + tile * parts * kRowTiles * dev::kWaveSize;
    const uint32_t sum_bytes = kAlone ? 0 : (tile_columns / kTile << log2_parts) * kRowTiles * wave_split::kTileBytes;
    uint8_t* const line_scales = lds + sum_bytes;
    for (uint32_t first = 0;;) {
      const uint32_t k = pass.k, n = pass.n;
      uint32_t slot[kRowTiles], row[kRowTiles];
      bool exists[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        slot[t] = slots.of_lane(first + t * kTile, lane, kSlotsOfTile);
        row[t] = pass.row_of(slot[t]);
        exists[t] = first + t * kTile + lane % kSlotsOfTile < slots.count;
      }
      // Of all experts' rows of W; a tile past the last column has none.
      const uint64_t w_row = uint64_t{expert} * n + column0;
      const uint32_t w_rows = column0 < n ? min<uint32_t>(kTile, n - column0) : 0;
      const uint32_t w_bytes = wave_split::row_bytes(kW, k);
      const uint32_t column = column0 + lane / kTile * dev::kColumnsPerLane;
      // The scales of the tiles that the wave stores arrive while it multiplies.
      SlotScales<kScales> scales[kAlone ? kRowTiles : 1];
      if constexpr (kAlone) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) scales[t] = SlotScales<kScales>(pass, expert, slot[t], exists[t], column);
      } else {
        const uint32_t at = first + part * kTile;
        scales[0] = SlotScales<kScales>(pass, expert, slots.of_lane(at, lane), at + lane % kTile < slots.count, column);
      }
      dev::f32x4 acc[kRowTiles];
      multiply_part<kRowTiles, kLines, kAlone, kScales, kW>(
          acc, pass, row, exists, dev::make_buffer(pass.w + w_row * w_bytes, w_rows * w_bytes),
          pass.scales_of_w<kScales>(expert, column0, w_rows), part, log2_parts, true, lane,
          line_scales + wave * wave_split::kLineScaleBytes);
      const bool stores = kSlotsOfTile == kTile || lane % kTile < kSlotsOfTile;
      if constexpr (kAlone) {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
          if (exists[t] && stores) store(expert, scales[t].applied(acc[t]), slot[t], column);
      } else {
        static_assert(kRowTiles <= 2, "a wave stores one tile at most, as there are two parts or more");
        dev::add_parts(sums, acc, part, parts, lane, [&](uint32_t t, dev::f32x4 total) {
          const uint32_t at = slots.of_lane(first + t * kTile, lane);
          if (first + t * kTile + lane % kTile < slots.count && stores) store(expert, scales[0].applied(total), at, column);
        });
        __syncthreads();  // the next sums take the same LDS
      }
      if ((first += kPassSlots) >= slots.count) return;
      pass = Pass(arguments_here());
    }
  });
#endif
}

template <int kRowTiles, bool kAlone, bool kLines>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp8_grouped_split(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns, uint32_t depth, Rest) {
  multiply_groups<kRowTiles, kAlone, Scales::kMx, Elements::e4m3, kLines>(
      {sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns, depth});
}

/// The same with scales that are not MX's.
template <int kRowTiles, bool kAlone, Scales kScales>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void fp8_grouped_split(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns, uint32_t depth, Rest) {
  multiply_groups<kRowTiles, kAlone, kScales>(
      {sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns, depth});
}

/// mxfp8_grouped_split with W in e2m1.
template <int kRowTiles, bool kAlone>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize) void mxfp4_grouped_split(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns, uint32_t depth, Rest) {
  multiply_groups<kRowTiles, kAlone, Scales::kMx, Elements::e2m1>(
      {sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns, depth});
}

/// Whether line_wave.h takes the problem; 16 slots at a time do else, whatever `rows` says.
inline bool takes_lines(const Problem& problem) {
  return problem.k % wave_split::kLinePair == 0 && (problem.options & kAlignedScales);
}

/// Checks the sizes of work-groups of kRowTiles tiles of slots, and launches `alone` or `shared`, where waves share a K.
template <int kRowTiles, class Kernel>
void launch_split(Kernel alone, Kernel shared, Problem problem, int64_t rows, int64_t waves, int64_t columns,
                  hipStream_t stream, int most_rows = kRowTiles * kTile, bool lines = false) {
  const int64_t n = problem.n;
  HF_CHECK(problem.k <= wave_split::kMaxK, "K must be at most ", wave_split::kMaxK, "; got ", problem.k);
  HF_CHECK(rows == most_rows, "this variant of the module has rows = ", most_rows, "; got ", rows);
  wave_split::check_waves(waves, kMaxWaves, most_rows);
  const int64_t most = kMaxWaves / waves * kTile;
  HF_CHECK(columns >= kTile && columns <= most && kMaxWaves * kTile % columns == 0,
           "columns must be 16, 32, 64 or 128, at most ", most, " with ", waves, " waves for each 16; got ", columns);
  if (problem.grid_rows == 0) return;
  problem.log2_parts = static_cast<uint32_t>(__builtin_ctzll(static_cast<uint64_t>(waves)));
  problem.tile_columns = static_cast<uint32_t>(columns);
  const dim3 grid(ceil_div(n, columns), problem.grid_rows);
  const auto threads = static_cast<uint32_t>(waves * (columns / kTile) * dev::kWaveSize);
  const uint32_t of_wave = (waves == 1 ? 0 : kRowTiles * wave_split::kTileBytes) + (lines ? wave_split::kLineScaleBytes : 0);
  const uint32_t lds = threads / dev::kWaveSize * of_wave;
  launch(waves == 1 ? alone : shared, problem, static_cast<const Rest&>(problem), grid, threads, lds, stream);
}

/// The entry for both formats of W. Writes out[slot] for every slot of a tile in use; other rows stay as they are. out bf16, at
/// least num_valid_tokens rows of N; a_q e4m3 in the architecture's format (or uint8) [M_act, K]; w like a_q [E, N, K], or two
/// e2m1 elements in a byte, the first in its low half: uint8 [E, N, K/2]; the scales e8m0 (or uint8) [M_act, K/32], [E, N, K/32];
/// the index tensors int32; mul_weight_by float32 [num_valid_tokens] or None; bias float32 [E, N] or None, added before the
/// weight; waves for each 16 columns 1, 2, 4 or 8; columns of a work-group 16 to 128.
template <int kRowTiles, Elements kW, bool kLines = false>
void grouped_split(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                   Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by, OptionalTensor bias,
                   int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m,
                   int64_t rows, int64_t waves, int64_t columns, hipStream_t stream) {
  static_assert(kRowTiles == 1 || kRowTiles == 2);
  constexpr bool kFp4 = kW == Elements::e2m1;
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, mxfp8::payload_of(w), kFp4};
  Problem problem = checked(given);
  take_output(problem, out, mul_weight_by, given);
  if constexpr (kFp4)
    launch_split<kRowTiles>(mxfp4_grouped_split<kRowTiles, true>, mxfp4_grouped_split<kRowTiles, false>, problem, rows, waves,
                            columns, stream);
  else if (kLines && takes_lines(problem))
    launch_split<kRowTiles>(mxfp8_grouped_split<kRowTiles, true, kLines>, mxfp8_grouped_split<kRowTiles, false, kLines>, problem,
                            rows, waves, columns, stream, wave_split::kLineRows, true);
  else
    launch_split<kRowTiles>(mxfp8_grouped_split<kRowTiles, true, false>, mxfp8_grouped_split<kRowTiles, false, false>, problem,
                            rows, waves, columns, stream, kLines ? wave_split::kLineRows : kRowTiles * kTile);
}

}  // namespace hf::moe
