// Y[slot] = A[slot / a_div] W[expert]^T from MX-FP8 in tiles on sm_90, for any number of slots of an expert.
//
//     W[expert]: 2 x 64 rows                     A block multiplies up to 64 slots of a tile of sorted_ids, whose rows of A it
//          +--------+--------+ ...               gathers, by 128 rows of their expert's W. mxfp8_gemm/nvidia/wgmma_tile.h has the
//   64     | group  | group  |                   product. Entries that are no slot are zeros; a block without a slot or an expert
//   slots  |   0    |   1    |                   ends at once. Neighbouring blocks have neighbouring slots: those of one expert
//          +--------+--------+                   read the same rows of W at the same time.
//
// With GATE_UP a group's 64 rows of W are 32 of the gate and those of up (interleaved: 64 rows of both), so that four lanes have a
// block of 32 results of a slot, and write it as MX-FP8.
//
// Bytes moved: N K (1 + 1/32) of W for each 64 slots of a tile, of memory once; N / 128 times K (1 + 1/32) of each slot's X, from
// L2; 2 N per slot written. Bound: W over the memory's bandwidth for few slots of an expert, else as in wgmma_tile.h.
#pragma once

#include "../../mxfp8_gemm/nvidia/wgmma_tile.h"
#include "hipforge/device/wave.h"
#include "problem.h"

namespace hf::moe {

using Tile = wgmma_tiles::Layout<1, 2, 64, 4>;
constexpr int kBlocksHeld = 2;  // by a multiprocessor
constexpr int64_t kMostTileK = int64_t{1} << 24, kMostTileN = int64_t{65535} * Tile::kColumns;
static_assert(kBlocksHeld * (Tile::kBytes + 2 * 1024) <= kMostShared + 1024);
static_assert(Tile::kWidth == 2 * kMxBlock, "a group has gate and up of a block of results");

struct Tiled : Problem {
  bool whole_words;
  Divisor parts;  // of 64 entries, of a tile of sorted_ids
};

/// The gathered rows of A, then the block's rows of W.
template <bool GATE_UP>
struct Gathered {
  const Tiled& p;
  const int* rows;  // of A, or -1
  size_t of_expert;
  int n0;
  bool split;

  /// The row of W of a line of the tile.
  __device__ __forceinline__ int row_of(int line) const {
    if (!GATE_UP || !split) return n0 + line;
    const int in_group = line % Tile::kWidth, result = n0 / 2 + line / Tile::kWidth * kMxBlock + in_group % kMxBlock;
    return result < p.n / 2 ? result + (in_group < kMxBlock ? 0 : p.n / 2) : p.n;
  }
  __device__ __forceinline__ wgmma_tiles::Line payload(int line) const {
    const bool of_a = line < Tile::kRows;
    const int row = of_a ? rows[line] : row_of(line - Tile::kRows);
    const bool there = of_a ? row >= 0 : row < p.n;
    return {(of_a ? p.a : p.w) + (there ? (of_a ? row : of_expert + row) * p.k : 0), there};
  }
  __device__ __forceinline__ const uint8_t* scales(int line) const {
    const bool of_a = line < Tile::kRows;
    const size_t row = of_a ? max(rows[line], 0) : of_expert + min(row_of(line - Tile::kRows), p.n - 1);
    return (of_a ? p.a_scales : p.w_scales) + row * (p.k / kMxBlock);
  }
};

template <bool GATE_UP>
__global__ void __launch_bounds__(Tile::kThreads, kBlocksHeld) mxfp8_grouped_tiles(const Tiled p) {
  constexpr int kSums = Tile::kWidth / 2;
  extern __shared__ uint8_t unaligned[];
  __shared__ int ids[Tile::kRows], rows[Tile::kRows];
  const wgmma_tiles::Place<Tile> place;
  let_next_start();
  wait_for_predecessor();

  const int tile = p.parts.quotient(blockIdx.x), first = (static_cast<int>(blockIdx.x) - tile * static_cast<int>(p.parts.value)) * Tile::kRows;
  if (tile >= p.tiles_in_use()) return;
  const int expert = p.expert_ids[tile];
  if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(p.experts)) return;
  bool there = false;
  if (place.thread < Tile::kRows) {
    const int at = first + place.thread, id = at < p.block_m ? p.sorted_ids[size_t(tile) * p.block_m + at] : -1;
    there = p.is_slot(id);
    ids[place.thread] = there ? id : -1;
    rows[place.thread] = there ? static_cast<int>(p.a_div.quotient(id)) : -1;
  }
  if (!__syncthreads_or(there)) return;

  const int n0 = static_cast<int>(blockIdx.y) * Tile::kColumns;
  const bool split = GATE_UP && !p.activation.interleaved;
  const Gathered<GATE_UP> lines{p, rows, size_t(expert) * p.n, n0, split};
  float sums[kSums];
  wgmma_tiles::multiply_tile<Tile>(lines, p.k, p.whole_words, unaligned, place, sums);
  const size_t biases = size_t(expert) * p.n;
  if constexpr (GATE_UP) {
    const int block = (n0 / Tile::kWidth + place.group_n) * kMxBlock;  // its first result
    if (block >= p.n / 2) return;
    const auto of_lane = [&](int i) { return split ? place.column(i / 2 * 4 + i % 2) : 4 * i + place.t; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int id = ids[place.row(2 * half)];
      // Value i of a lane: gate and up are its neighbours in W, or 32 rows apart, half of the sums.
      constexpr int kValues = kSums / 4;
      float values[kValues];
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int result = block + of_lane(i);
        const size_t column = biases + (split ? result : 2 * result);
        const float gate = split ? sums[i / 2 * 4 + i % 2 + 2 * half] : sums[4 * i + 2 * half];
        const float up = split ? sums[i / 2 * 4 + i % 2 + 2 * half + kSums / 2] : sums[4 * i + 2 * half + 1];
        values[i] = dev::swiglu(p.stored(gate, column), p.stored(up, column + (split ? p.n / 2 : 1)), p.activation);
        amax = dev::larger(amax, dev::magnitude_bits(values[i]));
      }
      const uint32_t byte = dev::e4m3_block_scale(dev::largest_of_lanes<4>(amax));
      if (id < 0) continue;
      const size_t at = size_t(id) * (p.n / 2) + block;
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        p.q[at + of_lane(i)] = dev::encode_mx_e4m3(values[i] * dev::e8m0_inverse(byte), byte);
      if (place.t == 0) p.q_scales[at / kMxBlock] = static_cast<uint8_t>(byte);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int id = ids[place.row(2 * half)];
      if (id < 0) continue;
      const float weight = p.slot_weights ? p.slot_weights[id] : 1.f;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const int at = i / 2 * 4 + i % 2 + 2 * half, column = n0 + place.group_n * Tile::kWidth + place.column(at);
        if (column < p.n)
          p.out[size_t(id) * p.n + column] =
              static_cast<dev::bf16>((p.biases ? sums[at] + p.biases[biases + column] : sums[at]) * weight);
      }
    }
  }
}

/// Launches the kernel on a problem that has its results.
template <bool GATE_UP>
inline void multiply_tiles(const Problem& problem, const Operands& given, bool programmatic, hipStream_t stream) {
  HF_CHECK(given.k <= kMostTileK, "K must be at most ", kMostTileK, "; got ", given.k);
  HF_CHECK(given.n <= kMostTileN, "N must be at most ", kMostTileN, "; got ", given.n);
  const int64_t parts = hf::ceil_div(given.block_m, Tile::kRows), blocks = problem.tiles * parts;
  HF_CHECK(blocks <= kMaxInt32, "sorted_token_ids must have at most 2^31 - 1 parts of ", Tile::kRows, " slots; got ", blocks);
  if (blocks == 0 || given.num_valid == 0) return;
  const Tiled tiled{problem, has_scale_words(given), Divisor::of(static_cast<uint32_t>(parts))};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks), hf::ceil_div(given.n, Tile::kColumns)), Tile::kThreads, Tile::kBytes, stream};
  at.programmatic = programmatic;
  hf::launch(mxfp8_grouped_tiles<GATE_UP>, at, tiled);
}

}  // namespace hf::moe
