// The shuffled order of MXFP4 weights and their scales, in which a wave's load is one run of memory.
//
//   weights [N, Kb = K/2 bytes]: tiles of 16 rows by 16 bytes. Those of 16 rows follow each other along K, and a tile has the
//     16 bytes of its rows one after the other: byte (n, b) is at n / 16 * 16 Kb + b / 16 * 256 + n % 16 * 16 + b % 16
//   scales [N, S = K/32], padded to multiples of 256 rows and 8 columns: tiles of 32 rows by 8, 256 bytes each, that follow each
//     other along K: scale (n, s) is at n / 32 * 32 S + s / 8 * 256 + s % 4 * 64 + n % 16 * 4 + s % 8 / 4 * 2 + n % 32 / 16
#pragma once

namespace hf {

constexpr int kShuffledRows = 16;
constexpr int kShuffledScaleRows = 32, kShuffledScaleColumns = 8;
constexpr int kShuffledScaleBytes = kShuffledScaleRows * kShuffledScaleColumns;
constexpr int kShuffledPaddedRows = 256;  // shuffled scales have so many rows, or a multiple

}  // namespace hf
