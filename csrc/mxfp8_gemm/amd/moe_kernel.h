// MX-FP8 grouped GEMM of a mixture of experts, for few rows per expert: out[slot] = A[slot / a_div] W[expert]^T.
//
//   sorted_token_ids   | tile 0: block_m slots of one expert | tile 1 | ...          expert_ids: one per tile
//                        s0 pad s1 pad pad s2 ...      ->  s0 s1 s2  (64 entries at a time, moved to the front)
//
//                 columns column0 .. column0 + kBlockN - 1 of that expert's W          one work-group: 4 waves
//               +-------------------------------------------------------------+
//     slot s0   |  up to 2 slots: wave w owns kBlockN / 4 columns and all of K |      the sub-tile of gemv_kernel.h
//     slot s1   |  more slots: wave w owns the columns and a quarter of K,     |      the tile of mfma_kernel.h,
//     slot s2   |  16 to 64 slots at once; quarters are added in LDS           |      one matrix instruction per step
//               +-------------------------------------------------------------+
//
// Which path a tile takes depends on how many slots it really holds, which only the device knows. Slots may lie
// anywhere in a tile: an entry that is not in 0 .. num_valid - 1, negative ones included, is padding. Nothing is
// assumed of tiles that hold padding only.
//
// Grid: ceil(N / kBlockN) x min(tiles, num_valid). Row y of the grid walks tiles y, y + gridDim.y, ... up to
// num_tokens_post_padded: an index that pads every expert has at most num_valid tiles in use, however long its buffers
// are, so no work-group is wasted, and any other index is still computed completely.
//
// Bytes: per tile an expert's weight byte is loaded once for up to 32 slots; for up to 64 two waves of a work-group
// load it side by side, one of them from cache. A comes from cache. Counted with everything else, at kBlockN = 16 and K
// = 6144 a KiB of weight costs the vector path 41 instructions at one slot, 28 of them vector ones, and the matrix path
// 24 for 1 to 16 slots and 32 for 32; the vector path makes a third fewer memory requests, each of 1 KiB in a row.
// Memory leaves 316 issue slots per KiB, so it is the bound in both, and one or two slots take the path whose requests
// are best. Below K = 1024 a vector step is not filled and the matrix path has fewer instructions for about as many
// requests.
//
// Addresses: each expert's W has a resource of its own on a 64-bit base, so only N K is limited to 2^31 - 1, not E N K.
//
// The four quarters are added in the order of the waves, so results do not depend on timing.
#pragma once

#include "gemv_kernel.h"
#include "grouped_problem.h"
#include "hipforge/amd/hip.h"
#include "mfma_kernel.h"

namespace hf::moe {

constexpr int kWaves = gemv::kWaves;
constexpr int kThreads = gemv::kThreads;
constexpr int kTile = mfma::kTile;
constexpr int kVectorSlots = 2;                  // slots up to which the vector path is taken,
constexpr int kLeastVectorK = gemv::kStep;       // where a step of it is filled
constexpr int kChunk = dev::kWaveSize;           // entries of a tile that are looked at together
constexpr int kMaxRowTiles = 2;                  // of a wave; two waves share a part of K where a tile holds more slots
constexpr int kTileOutputs = kTile * kTile;

static_assert(kTileOutputs == kThreads, "a thread adds one output of each row tile");

#if defined(__gfx950__)

using Partials = float[kWaves][kMaxRowTiles][kTileOutputs];

// Up to 64 slots of one tile, and the weights that they meet.
struct Group {
  const Problem& p;
  const uint8_t *w, *w_scales;  // of the tile's expert
  uint32_t expert;
  uint32_t slots;  // lane i holds slot i
  uint32_t count;
  uint32_t column0, lane_index, wave;

  __device__ void store(uint32_t slot, uint32_t column, float value) const {
    const Late& late = arguments_here();
    if (late.biases) value += late.biases[uint64_t{expert} * late.n + column];
    if (late.slot_weights) value *= late.slot_weights[slot];
    late.out[uint64_t{slot} * late.n + column] = static_cast<dev::bf16>(value);
  }

  // count <= kRows slots; the wave's columns and all of K.
  template <int kRows, int kBlockN>
  __device__ void by_rows() const {
    const uint32_t k = dev::wave_value_here(p.k), lane = dev::lane_value_here(lane_index);
    constexpr int kCols = kBlockN / kWaves, kOutputs = kRows * kCols;
    const uint32_t first_column = column0 + wave * kCols;
    if (first_column >= p.n) return;
    uint32_t a_row[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      a_row[i] = static_cast<uint32_t>(i) < count
                     ? dev::uniform(__builtin_amdgcn_readlane(static_cast<int32_t>(slots), i)) / p.a_div
                     : p.a_rows;
    const uint32_t blocks = k / kMxBlock;
    const gemv::Rows<kRows> a_side(dev::make_buffer(p.a, p.a_rows * k),
                                   dev::make_buffer(p.a_scales, p.a_rows * blocks), a_row, p.a_rows, k);
    const gemv::Rows<kCols> w_side(dev::make_buffer(w, p.n * k), dev::make_buffer(w_scales, p.n * blocks),
                                   first_column, p.n, k);
    gemv::SubTile<kRows, kCols> tile(a_side, w_side, k, lane);
    tile.run();
    const float total = dev::wave_sums(tile.acc, lane);
    const uint32_t output = dev::wave_sums_index<kOutputs>(lane);
    const uint32_t row = output / kCols, column = first_column + output % kCols;
    const uint32_t slot = dev::from_lane(slots, row);
    if (output < kOutputs && row < count && column < p.n) store(slot, column, total);
  }

  // All columns. Waves come in teams of `team`, each team taking 16 kRowTiles slots and each of its waves a part of K.
  template <int kRowTiles, int kBlockN>
  __device__ void by_tiles(Partials& partials, uint32_t team) const {
    const uint32_t k = dev::wave_value_here(p.k), lane = dev::lane_value_here(lane_index);
    constexpr uint32_t kTeamRows = kTile * kRowTiles;
    constexpr int kRing = kRowTiles == 1 ? 4 : 2;  // steps in flight: what leaves registers for three waves per SIMD
    const uint32_t part = wave % team, first = wave / team * kTeamRows;
    uint32_t a_row[kRowTiles];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const uint32_t index = first + t * kTile + lane % kTile;
      const uint32_t slot = dev::from_lane(slots, index);
      a_row[t] = index < count ? slot / p.a_div : p.a_rows;
    }
    const mfma::Panel<kRowTiles> a_side(p.a, p.a_scales, a_row, p.a_rows, k, lane);
    const mfma::Panel<1> w_side(w, w_scales, column0, min(p.n, column0 + kBlockN), k, lane);
    mfma::Tile<1, kRowTiles, kRing> tile(a_side, w_side, k, p.aligned_scales);
    const uint32_t steps = (k + mfma::kStep - 1) / mfma::kStep;
    tile.run(steps * part / team, steps * (part + 1) / team);

#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      float* at = &partials[wave][t][lane % kTile * kTile + lane / kTile * dev::kColumnsPerLane];
      *reinterpret_cast<dev::f32x4*>(at) = tile.acc[t];
    }
    __syncthreads();
    const uint32_t output = wave * dev::kWaveSize + lane, column = column0 + output % kTile;
    for (uint32_t row0 = 0; row0 < count; row0 += kTile) {
      const uint32_t owner = row0 / kTeamRows * team, t = row0 % kTeamRows / kTile;
      float sum = partials[owner][t][output];
      for (uint32_t other = 1; other < team; ++other) sum += partials[owner + other][t][output];
      const uint32_t row = row0 + output / kTile;
      const uint32_t slot = dev::from_lane(slots, row);
      if (row < count && output % kTile < kBlockN && column < p.n) store(slot, column, sum);
    }
    __syncthreads();  // the next group writes the same LDS
  }
};

#endif  // __gfx950__

/// Grid: ceil(n / kBlockN) x any number of rows; work-groups of kThreads. a_rows k and n k below 2^31; k a multiple of
/// 32; every slot / a_div below a_rows; a and w aligned to 16 bytes.
template <int kBlockN>
__global__ __launch_bounds__(kThreads, 3) void smallm_mxfp8_moe([[maybe_unused]] Problem p) {
#if defined(__gfx950__)
  __shared__ Partials partials;
  const uint32_t lane = threadIdx.x % dev::kWaveSize;
  const uint32_t wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const int64_t used = *p.padded;
  const uint64_t expert_bytes = uint64_t{p.n} * p.k;
  for (uint32_t tile = blockIdx.y; tile < p.tiles && int64_t{tile} * p.block_m < used; tile += gridDim.y) {
    const uint32_t expert = static_cast<uint32_t>(p.expert_ids[tile]);
    if (expert >= p.experts) continue;
    for (uint32_t first = 0; first < p.block_m; first += kChunk) {
      const uint32_t entry = first + lane;
      uint32_t slot = p.num_valid;
      if (entry < p.block_m) slot = static_cast<uint32_t>(p.sorted_ids[tile * p.block_m + entry]);
      uint32_t count;
      const uint32_t slots = dev::kept_to_front(slot, slot < p.num_valid, lane, count);
      const Group group{p,
                        p.w + expert * expert_bytes,
                        p.w_scales + expert * (expert_bytes / kMxBlock),
                        dev::lane_value_here(expert),
                        slots,
                        count,
                        blockIdx.x * kBlockN,
                        lane,
                        wave};
      if (count > kTile) {
        const uint32_t team = count > kMaxRowTiles * kTile ? kWaves / 2 : kWaves;
        group.by_tiles<kMaxRowTiles, kBlockN>(partials, team);
      } else if (count > kVectorSlots || (count > 0 && p.k < kLeastVectorK)) {
        group.by_tiles<1, kBlockN>(partials, kWaves);
      } else if (count == kVectorSlots) {
        group.by_rows<kVectorSlots, kBlockN>();
      } else if (count == 1) {
        group.by_rows<1, kBlockN>();
      }
    }
  }
#endif
}

}  // namespace hf::moe
