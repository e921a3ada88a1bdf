// X in MX-FP8 with one scale for as much of a row as costs no accuracy that the result has, and its scales as the tiles read them.
//
//   block of threads = a row; a thread has 16 codes of it in each turn, two threads an MX block of 32, a warp 512 k
//
//   codes [M, K]: e4m3            words [ceil(K / 128), rows_padded]: the four scales of a row and 128 k
//
// The MX blocks of a row take its largest scale 2^(s - 127); a block whose own is 2^d smaller has its codes divided by 2^d, in e4m3. A
// code that becomes subnormal is rounded, by at most 2^(d - 10). That is done if the block's largest code is 2^(d + 1) or more, so that
// the error is at most 2^-11 of it, a quarter of the error of a bf16 of its size. A row in which a block does not allow it is
// tried in spans of 512 k, a span in quarters of 128 k; there the blocks keep their scales if one does not. Blocks of zeros
// take any scale; NaN codes and the scale 255 stay as they are.
//
// More blocks, after those of rows, copy scales of W whose rows are not multiples of 16 bytes to rows that are.
//
// Bytes moved: M K (1 + 1/32) read and written; they are the bound.
#pragma once

#include "stream.h"

namespace hf::mx_tiles {

/// A matrix of rows of K; the word of a row and a step goes to words[row * by_row + step * by_step].
struct Rows {
  const uint8_t *from, *scales;
  uint8_t* codes;
  uint32_t* words;
  int rows, steps, by_row, by_step;  // steps that have a word: of none of K too, where a span of W ends beyond it
};

struct Sharing {
  Rows x, w;
  int padded, k;  // rows of X with words
  bool codes_of_w;
  uint32_t* there;  // words of the launch after this one that start as zeros
  int count;
};

constexpr int kMostSharing = 512;  // threads of a row

/// Two threads' 32 codes.
struct MxBlock {
  uint4 words;
  uint32_t scale, largest;
  bool zero, whole;
  __device__ __forceinline__ void load(const Rows& p, size_t row, int k, int all) {
    words = make_uint4(0, 0, 0, 0), scale = 0;
    if (k < all) {
      const size_t at = row * all + k;
      words = *reinterpret_cast<const uint4*>(p.from + at), scale = p.scales[at / 32];
    }
    constexpr uint32_t kSizes = 0x7f7f7f7fu;
    uint32_t most = __vmaxu4(__vmaxu4(words.x & kSizes, words.y & kSizes), __vmaxu4(words.z & kSizes, words.w & kSizes));
    most = max(max(most & 255, most >> 8 & 255), max(most >> 16 & 255, most >> 24));
    largest = max(most, __shfl_xor_sync(~0u, most, 1));
    zero = largest == 0 && scale != 255, whole = scale != 255 && largest != 0x7f;
  }
  __device__ __forceinline__ uint32_t wanted() const { return zero ? 0 : scale; }
  /// 2^(d + 1) has the exponent d + 8.
  __device__ __forceinline__ bool allows(uint32_t to) const { return zero || (whole && (scale == to || largest >> 3 >= to - scale + 8)); }
  __device__ __forceinline__ uint4 divided(uint32_t to) const {
    if (zero || to == scale) return words;
    const uint32_t half = (15 - (to - scale)) << 10, by = half | half << 16;  // 2^(scale - to), twice, in f16
    const auto one = [&](uint32_t word) {
      uint32_t low, high, result;
      halves_of(word, low, high);
      asm("{.reg .b16 a, b; .reg .b32 l, h; mul.rn.f16x2 l, %1, %3; mul.rn.f16x2 h, %2, %3;"
          " cvt.rn.satfinite.e4m3x2.f16x2 a, l; cvt.rn.satfinite.e4m3x2.f16x2 b, h; mov.b32 %0, {a, b};}"
          : "=r"(result) : "r"(low), "r"(high), "r"(by));
      return result;
    };
    return make_uint4(one(words.x), one(words.y), one(words.z), one(words.w));
  }
};

/// One row, by all threads of a block. TURNS: pieces of 16 codes that a thread keeps; longer rows are read twice.
template <int TURNS>
__device__ __forceinline__ void share_row(const Rows& rows, int row, int k_of_row) {
  __shared__ uint32_t most_of_warps[kMostSharing / 32];
  const int thread = threadIdx.x, lane = thread % 32, threads = blockDim.x, turns = (k_of_row + 16 * threads - 1) / (16 * threads);
  MxBlock kept[TURNS];
  const auto k_of = [&](int turn) { return (turn * threads + thread) * 16; };
  const auto visit = [&](auto of_block) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      if (turn < turns) of_block(kept[turn], k_of(turn));
    for (int turn = TURNS; turn < turns; ++turn) {
      MxBlock block;
      block.load(rows, row, k_of(turn), k_of_row);
      of_block(block, k_of(turn));
    }
  };
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn)
    if (turn < turns) kept[turn].load(rows, row, k_of(turn), k_of_row);
  uint32_t most = 0;
  visit([&](const MxBlock& block, int) { most = max(most, block.wanted()); });
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) most_of_warps[thread / 32] = most;
  __syncthreads();
  for (int w = 0; w < threads / 32; ++w) most = max(most, most_of_warps[w]);
  bool by_row = true;
  visit([&](const MxBlock& block, int) { by_row = by_row && block.allows(most); });
  by_row = __syncthreads_and(by_row);
  visit([&](const MxBlock& block, int k) {
    uint32_t to = most;
    if (!by_row) {
      uint32_t quarter = block.wanted();
      quarter = max(quarter, __shfl_xor_sync(~0u, quarter, 2));
      quarter = max(quarter, __shfl_xor_sync(~0u, quarter, 4));
      const uint32_t span = __reduce_max_sync(~0u, quarter);
      const bool by_span = __all_sync(~0u, block.allows(span));
      const bool by_quarter = (__ballot_sync(~0u, block.allows(quarter)) >> (lane / 8 * 8) & 255) == 255;
      to = by_span ? span : by_quarter || block.zero ? quarter : block.scale;
    }
    if (block.zero && to == 0) to = 127;
    if (k < k_of_row) *reinterpret_cast<uint4*>(rows.codes + size_t(row) * k_of_row + k) = block.divided(to);
    uint32_t word = to << (lane % 8 / 2 * 8);
    word |= __shfl_xor_sync(~0u, word, 2);
    word |= __shfl_xor_sync(~0u, word, 4);
    if (lane % 8 == 0 && k / 128 < rows.steps) rows.words[size_t(row) * rows.by_row + size_t(k / 128) * rows.by_step] = word;
  });
}

template <int TURNS>
__global__ void __launch_bounds__(kMostSharing, TURNS > 2 ? 1 : 2) share_scales(const Sharing p) {
  const int thread = threadIdx.x, threads = blockDim.x, row = blockIdx.x;
  let_next_start();
  wait_for_predecessor();
  if (row == 0)
    for (int i = thread; i < p.count; i += threads) p.there[i] = 0;
  if (row < p.x.rows) {
    share_row<TURNS>(p.x, row, p.k);
  } else if (row < p.padded) {  // of no row of X, but a tile may read them
    for (int step = thread; step < (p.k + 127) / 128; step += threads) p.x.words[size_t(row) + size_t(step) * p.x.by_step] = 0x7f7f7f7fu;
  } else if (p.codes_of_w) {
    share_row<TURNS>(p.w, row - p.padded, p.k);
  } else {
    const int blocks = p.k / 32, words = p.w.by_row;
    const int64_t every = (gridDim.x - p.padded) * int64_t{threads};
    for (int64_t at = (row - p.padded) * int64_t{threads} + thread; at < int64_t{p.w.rows} * words; at += every) {
      const int64_t of_w = at / words;
      const int first = static_cast<int>(at % words) * 4;
      uint32_t word = 0x7f7f7f7fu;
#pragma unroll
      for (int b = 3; b >= 0; --b) word = word << 8 | (first + b < blocks ? p.w.scales[of_w * blocks + first + b] : 127u);
      p.w.words[at] = word;
    }
  }
}

}  // namespace hf::mx_tiles
