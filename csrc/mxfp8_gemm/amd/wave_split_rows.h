// Where a wave of wave_split_kernel.h reads rows of X and W and their scales.
#pragma once

#include "hipforge/amd/buffer.h"
#include "wave_split_problem.h"

namespace hf::wave_split {

#if defined(__gfx950__)
constexpr int kPieces = 2, kPieceBytes = 16, kPieceStride = 64, kScaleRows = 1;
using Piece = dev::u32x4;
constexpr int kFp4Pieces = 1, kFp4PieceBytes = 16, kFp4PieceStride = 64;
using Fp4Piece = dev::u32x4;
#else
constexpr int kPieces = 4, kPieceBytes = 8, kPieceStride = 32, kScaleRows = 4;
using Piece = dev::u32x2;
constexpr int kFp4Pieces = 4, kFp4PieceBytes = 4, kFp4PieceStride = 16;
using Fp4Piece = uint32_t;
#endif

/// Pieces of W that a lane has of a row and step: their number, bytes of each, and bytes from one to the next.
template <Elements kW>
struct WPieces {
  static constexpr int kCount = kPieces, kBytes = kPieceBytes, kStride = kPieceStride;
  using Piece = wave_split::Piece;
};
template <>
struct WPieces<Elements::e2m1> {
  static constexpr int kCount = kFp4Pieces, kBytes = kFp4PieceBytes, kStride = kFp4PieceStride;
  using Piece = Fp4Piece;
};

/// A resource over just `count` rows of `data` from `first` on, or as many as there are.
__device__ inline dev::Buffer rows_of(const uint8_t* data, uint32_t first, uint32_t count, uint32_t rows, uint32_t stride) {
  return dev::make_buffer(data + uint64_t{first} * stride, min(count, rows - first) * stride);
}

/// The same over the scales of `count` rows of W.
template <Scales kScales>
__device__ inline dev::Buffer scale_rows_of(const uint8_t* scales, uint32_t first, uint32_t count, uint32_t rows, uint32_t k) {
  constexpr uint32_t kShared = shared_rows(kScales);
  return rows_of(scales, first / kShared, (first % kShared + count + kShared - 1) / kShared, (rows + kShared - 1) / kShared,
                 scale_row_bytes(kScales, k));
}

/// Where row 0..15 of a tile begins in rows of `stride`. With kColumns < 16 a tile is kColumns rows, cut into 16 / kColumns
/// parts of their length: row r is part r / kColumns of row r % kColumns.
template <int kColumns = kTile>
__device__ inline uint32_t tile_row_offset(uint32_t row, uint32_t stride) {
  return row % kColumns * stride + (kColumns == kTile ? 0 : row / kColumns * (stride / (kTile / kColumns)));
}

/// The offset of a lane's row and first piece in 16 rows.
template <int kColumns = kTile>
__device__ inline uint32_t lane_offset(uint32_t k, uint32_t lane) {
  return tile_row_offset<kColumns>(lane % kTile, k) + lane / kTile * kPieceBytes;
}

/// The same of W.
template <Elements kW>
__device__ inline uint32_t w_lane_offset(uint32_t k, uint32_t lane) {
  return tile_row_offset(lane % kTile, row_bytes(kW, k)) + lane / kTile * WPieces<kW>::kBytes;
}

/// Rows of X that follow each other: all tiles share the lane's offset. kColumns as in tile_row_offset.
template <int kRowTiles, int kColumns = kTile, Scales kScales = Scales::kMx>
struct NeighbouringRows {
  static constexpr int kMostBetween = 8;  // steps of a run whose scales start between words

  const dev::Buffer payload, scales;
  const uint32_t offset, scale_offset, k, scale_bytes;

  // `in_lane` is lane_offset: the same value for W lets the compiler compute addresses once for both.
  __device__ NeighbouringRows(const uint8_t* x, const uint8_t* xs, uint32_t row0, uint32_t rows, uint32_t depth,
                              uint32_t in_lane, uint32_t lane)
      : payload(rows_of(x, row0, kTile * kRowTiles, rows, depth)),
        scales(rows_of(xs, row0, kTile * kRowTiles, rows, scale_row_bytes(kScales, depth))),
        offset(in_lane),
        scale_offset(tile_row_offset<kColumns>(lane % kTile, scale_row_bytes(kScales, depth))),
        k(depth),
        scale_bytes(scale_row_bytes(kScales, depth)) {}

  __device__ uint32_t in_lane(int) const { return offset; }
  __device__ uint32_t in_wave(int tile) const { return tile * kTile * k; }
  __device__ uint32_t scales_in_lane(int) const { return scale_offset; }
  __device__ uint32_t scales_in_wave(int tile) const { return tile * kTile * scale_bytes; }
};

/// Any rows of X, one per lane % 16 and tile; a row that does not exist reads 0.
template <int kRowTiles, Scales kScales = Scales::kMx>
struct GatheredRows {
  static constexpr int kMostBetween = 4;  // with longer runs only three waves of one tile fit, not four

  const dev::Buffer payload, scales;
  uint32_t offset[kRowTiles], scale_offset[kRowTiles];

  __device__ GatheredRows(const uint8_t* x, const uint8_t* xs, const uint32_t (&row)[kRowTiles],
                          const bool (&exists)[kRowTiles], uint32_t rows, uint32_t depth, uint32_t lane)
      : payload(dev::make_buffer(x, rows * depth)), scales(dev::make_buffer(xs, rows * scale_row_bytes(kScales, depth))) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      offset[t] = exists[t] ? row[t] * depth + lane / kTile * kPieceBytes : dev::kOutOfRange;
      scale_offset[t] = exists[t] ? row[t] * scale_row_bytes(kScales, depth) : dev::kOutOfRange;
    }
  }

  __device__ uint32_t in_lane(int tile) const { return offset[tile]; }
  __device__ uint32_t in_wave(int) const { return 0; }
  __device__ uint32_t scales_in_lane(int tile) const { return scale_offset[tile]; }
  __device__ uint32_t scales_in_wave(int) const { return 0; }
};

}  // namespace hf::wave_split
