// Scale and shift of the rows of a block: one load for the wave, then through LDS to the lanes that hold these keys.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "work.h"
#include "query.h"

namespace hf::decode_attention {

/// The word of key lane % 16 of tile lane / 16. A lane without a key takes another's, so that no address is outside the cache.
template <int kTiles>
__device__ inline uint32_t load_row_word(const uint8_t* from, int64_t page_stride, uint32_t slot_stride,
                                         const Tile (&tiles)[kTiles]) {
  const uint32_t lane = dev::lane_index();
  Tile own = tiles[0];
#pragma unroll
  for (int t = 1; t < kTiles; ++t) {
    const bool mine = lane >= kTileN * t;
    own.page = mine ? tiles[t].page : own.page;
    own.slot = mine ? tiles[t].slot : own.slot;
    own.keys = mine ? tiles[t].keys : own.keys;
  }
  const uint32_t slot = own.slot + (lane % kTileN < own.keys ? lane % kTileN : 0);
  return *reinterpret_cast<const uint32_t*>(from + own.page * page_stride + uint64_t{slot} * slot_stride);
}

/// Hands the words on through `slot` in LDS, which the wave alone uses; returns where row_words finds the lane's.
template <int kTiles>
__device__ inline const uint8_t* share_row_words(uint8_t* slot, uint32_t word) {
  const uint32_t lane = dev::lane_index();
  if (kTiles == 4 || lane < kTileN * kTiles) reinterpret_cast<uint32_t*>(slot)[lane] = word;
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  return slot + lane / kTileN * 16;
}

struct RowWords {
  dev::f32x4 scale, shift;
};

/// Those of the tile's keys 4 (lane / 16) + r.
__device__ inline RowWords row_words(const uint8_t* words, int tile) {
  const auto four = *reinterpret_cast<const Vector<_Float16, 8>*>(words + 4 * kTileN * tile);
  return {__builtin_convertvector(four.even, dev::f32x4), __builtin_convertvector(four.odd, dev::f32x4)};
}

}  // namespace hf::decode_attention
