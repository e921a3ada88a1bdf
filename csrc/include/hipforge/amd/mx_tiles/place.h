// Which tile of an MX GEMM, and which part of K, a work-group has.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"

namespace hf::tiles {

constexpr int kXcds = 8;
constexpr int kGroupRows = 8;  // row tiles that neighbouring work-groups walk before the next column tile

template <class C>
struct Place {
  uint32_t tile, split, row_tile, column_tile;

  // Work-group i runs on XCD i % kXcds: each XCD gets neighbouring tiles, and walks kGroupRows of them down a column.
  template <class P>
  __device__ __forceinline__ Place(const P& p, uint32_t block) {
    const uint32_t tiles = p.row_tiles * p.column_tiles, all = tiles << p.log2_splits;
    const uint32_t xcd = block % kXcds, before = xcd * (all / kXcds) + min(xcd, all % kXcds);
    uint32_t place = block / kXcds;
    if (p.log2_splits != 0) {
      const uint32_t here = all / kXcds + (xcd < all % kXcds);
      place += xcd * here / kXcds;
      if (place >= here) place -= here;
    }
    // Divisions leave their results in vector registers.
    split = dev::uniform((before + place) / tiles);
    tile = before + place - split * tiles;
    const uint32_t in_group = kGroupRows * p.column_tiles, group = dev::uniform(tile / in_group);
    const uint32_t group_rows = min<uint32_t>(kGroupRows, p.row_tiles - group * kGroupRows), inside = tile - group * in_group;
    column_tile = dev::uniform(inside / group_rows);
    row_tile = group * kGroupRows + inside - column_tile * group_rows;
  }

  __device__ uint32_t row0() const { return row_tile * C::kBlockM; }
  __device__ uint32_t column0() const { return column_tile * C::kBlockN; }
};

}  // namespace hf::tiles
