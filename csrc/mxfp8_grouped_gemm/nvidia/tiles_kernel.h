// Y[slot] = A[slot / a_div] W[expert]^T from MX-FP8 in tiles on sm_90, for any number of slots of an expert.
//
//                   SLOTS slots                   A block multiplies 128 rows of an expert's W by up to SLOTS slots of a tile of
//                  +-----------+                  sorted_ids, whose rows of A it gathers. W has the rows of wgmma's tile and the
//   W: 64 rows     |  group 0  |                  slots its columns, so that no product is made for slots that are not there
//                  +-----------+                  beyond SLOTS. mxfp8_gemm/nvidia/wgmma_tile.h has the product. Entries that are
//      64 rows     |  group 1  |                  no slot are zeros; a block without a slot or an expert ends at once.
//                  +-----------+                  Neighbouring blocks have neighbouring slots: those of one expert read the same
//                                                 rows of W at the same time.
//
// tile_results.h has what happens to its sums; with GATE_UP the 16 rows of a warp are 8 of the gate and the 8 of up.
//
// Bytes moved: N K (1 + 1/32) of W for each SLOTS slots of a tile, of memory once; N / 128 times K (1 + 1/32) of each slot's X,
// from L2; 2 N per slot written. Bound: W over the memory's bandwidth for few slots of an expert, else as in wgmma_tile.h.
#pragma once

#include "tile_results.h"

namespace hf::moe {

template <int SLOTS>
using Tile = wgmma_tiles::Layout<2, 1, SLOTS, SLOTS == 32 ? 5 : 4>;
constexpr int kBlocksHeld = 2;  // by a multiprocessor
constexpr int kTileRows = Tile<32>::kRows;
constexpr int64_t kMostTileK = int64_t{1} << 24, kMostTileN = int64_t{65535} * kTileRows;
// With the tables of the kernel below and 1 KiB that each block reserves.
static_assert(kBlocksHeld * (Tile<32>::kBytes + 4 * 1024) <= kMostShared);
static_assert(kBlocksHeld * (Tile<64>::kBytes + 4 * 1024) <= kMostShared);

struct Tiled : Problem {
  bool whole_words;
  Divisor parts;  // of SLOTS entries, of a tile of sorted_ids
};

/// The block's rows of W, then the gathered rows of A.
template <int SLOTS, bool GATE_UP>
struct Gathered {
  const Tiled& p;
  const int* rows;  // of A, or -1
  size_t of_expert;
  int first;  // row of W, or result

  __device__ __forceinline__ int result_of(int line) const {
    return first + line / wgmma_tiles::kGroupRows * kGroupResults + line % wgmma_tiles::kGroupRows / 16 * 8 + line % 8;
  }
  /// The row of W of a line, n or more for none. Of a warp's 16 lines the second 8 are up's of the results of the first.
  __device__ __forceinline__ int row_of(int line) const {
    if (!GATE_UP) return first + row_in_group(line);
    const int result = result_of(line), up = line / 8 % 2;
    return result >= p.n / 2 ? p.n : p.activation.interleaved ? 2 * result + up : result + up * (p.n / 2);
  }
  __device__ __forceinline__ wgmma_tiles::Line payload(int line) const {
    const bool of_w = line < kTileRows;
    const int row = of_w ? row_of(line) : rows[line - kTileRows];
    const bool there = of_w ? row < p.n : row >= 0;
    return {(of_w ? p.w : p.a) + (there ? (of_w ? of_expert + row : row) * p.k : 0), there};
  }
  __device__ __forceinline__ const uint8_t* scales(int line) const {
    const bool of_w = line < kTileRows;
    const size_t row = of_w ? of_expert + min(row_of(line), p.n - 1) : max(rows[line - kTileRows], 0);
    return (of_w ? p.w_scales : p.a_scales) + row * (p.k / kMxBlock);
  }
};

template <int SLOTS, bool GATE_UP>
__global__ void __launch_bounds__(Tile<SLOTS>::kThreads, kBlocksHeld) mxfp8_grouped_tiles(const Tiled p) {
  using L = Tile<SLOTS>;
  extern __shared__ uint8_t unaligned[];
  __shared__ Slots<SLOTS> slots;
  __shared__ int rows[SLOTS];
  __shared__ uint32_t largest[L::kGroupsM][4 * SLOTS];
  const wgmma_tiles::Place<L> place;
  let_next_start();
  wait_for_predecessor();

  const int tile = p.parts.quotient(blockIdx.x), part = static_cast<int>(blockIdx.x) - tile * static_cast<int>(p.parts.value);
  if (tile >= p.tiles_in_use()) return;
  const int expert = p.expert_ids[tile];
  if (static_cast<uint32_t>(expert) >= static_cast<uint32_t>(p.experts)) return;
  bool there = false;
  if (place.thread < SLOTS) {
    const int at = part * SLOTS + place.thread, id = at < p.block_m ? p.sorted_ids[size_t(tile) * p.block_m + at] : -1;
    there = p.is_slot(id);
    slots.set(p, place.thread, there ? id : -1);
    rows[place.thread] = there ? static_cast<int>(p.a_div.quotient(id)) : -1;
  }
  if (!__syncthreads_or(there)) return;

  const int first = static_cast<int>(blockIdx.y) * (GATE_UP ? kTileRows / 2 : kTileRows);
  const Gathered<SLOTS, GATE_UP> lines{p, rows, size_t(expert) * p.n, first};
  float sums[SLOTS / 2];
  wgmma_tiles::multiply_tile<L>(lines, p.k, p.whole_words, unaligned, place, sums);
  const int of_group = first + place.group_m * (GATE_UP ? kGroupResults : wgmma_tiles::kGroupRows);
  store_results<GATE_UP>(p, GroupPlace{place.warp, place.g, place.t}, slots, lines.of_expert, of_group, sums, largest[place.group_m],
                         1 + place.group_m);
}

/// Launches the kernel on a problem that has its results.
template <int SLOTS, bool GATE_UP>
inline void multiply_tiles(const Problem& problem, const Operands& given, int64_t slots, bool programmatic, hipStream_t stream) {
  using L = Tile<SLOTS>;
  HF_CHECK(slots == SLOTS, "this variant of the module has slots = ", SLOTS, "; got ", slots);
  HF_CHECK(given.k <= kMostTileK, "K must be at most ", kMostTileK, "; got ", given.k);
  HF_CHECK(given.n <= kMostTileN, "N must be at most ", kMostTileN, "; got ", given.n);
  const int64_t parts = hf::ceil_div(given.block_m, SLOTS), blocks = problem.tiles * parts;
  HF_CHECK(blocks <= kMaxInt32, "sorted_token_ids must have at most 2^31 - 1 parts of ", SLOTS, " slots; got ", blocks);
  if (blocks == 0 || given.num_valid == 0) return;
  const Tiled tiled{problem, has_scale_words(given), Divisor::of(static_cast<uint32_t>(parts))};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks), hf::ceil_div(given.n, L::kRows)), L::kThreads, L::kBytes, stream};
  at.programmatic = programmatic;
  hf::launch(mxfp8_grouped_tiles<SLOTS, GATE_UP>, at, tiled);
}

}  // namespace hf::moe
