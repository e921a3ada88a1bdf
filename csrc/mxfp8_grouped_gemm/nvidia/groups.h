// The groups of slots of an expert that the kernels which stream W share: a block lists those that have a slot by itself, so that
// no launch before it and no workspace are needed.
#pragma once

#include "../../mxfp8_gemm/nvidia/row_step.h"
#include "problem.h"

namespace hf::moe {

using namespace row_stream;

constexpr int kMostGroups = 2048;  // that a block can list
constexpr int64_t kMaxK = int64_t{1} << 22, kMaxN = int64_t{1} << 23;
static_assert(kMostGroups * kMaxN / 16 < kMaxInt32, "passes are counted in 31 bits");
constexpr int kWarps = 16, kThreads = kWarps * 32;  // of a block
constexpr int kPassTiles = 2, kPassRows = kPassTiles * kTileRows, kUnitPasses = 4;
constexpr int kGateUpRows = kUnitPasses * kPassRows;  // of W for a block of 32 results
static_assert(kGateUpRows == 2 * kMxBlock);

struct Streamed : Problem {
  int k_shift;             // log2 of the warps that share K
  int most_groups;         // that there can be, if each slot stands in one tile
  Divisor chunks, passes;  // of 32 entries, of a tile; of a group
};

inline void check_sharing(int64_t sharers, int64_t blocks) {
  HF_CHECK(sharers >= 1 && sharers <= kWarps && (sharers & (sharers - 1)) == 0, "sharers must be a power of two up to ",
           kWarps, "; got ", sharers);
  HF_CHECK(blocks >= 1 && blocks <= kMaxInt32, "blocks must be between 1 and 2^31 - 1; got ", blocks);
}

/// A problem whose groups have up to `rows` slots, for `sharers` warps that share K and so many blocks, checked.
inline Streamed streamed_of(const Problem& problem, const Operands& given, int64_t rows, int64_t sharers, int64_t blocks) {
  check_sharing(sharers, blocks);
  HF_CHECK(given.k <= kMaxK, "K must be at most ", kMaxK, "; got ", given.k);
  HF_CHECK(given.n <= kMaxN, "N must be at most ", kMaxN, "; got ", given.n);
  const int64_t groups = hf::smaller(problem.tiles * hf::ceil_div(given.block_m, rows), given.num_valid);
  HF_CHECK(groups <= kMostGroups, "a block lists the groups of up to ", rows, " slots, at most ", kMostGroups, "; there can be ",
           groups, " of num_valid_tokens = ", given.num_valid, ": use the kernel in tiles");
  return {problem, __builtin_ctzll(static_cast<uint64_t>(sharers)), static_cast<int>(groups),
          Divisor::of(hf::ceil_div(given.block_m, 32)), Divisor::of(hf::ceil_div(given.n, kPassRows))};
}

/// Waits for the other warps of a team of so many threads, at barrier team + 1: barrier 0 is that of __syncthreads(), where other
/// teams may wait for the whole block. At most 8 teams have more than one warp.
__device__ __forceinline__ void meet(int team, int threads) {
  if (threads == 32)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

struct Group {
  int entry, count, expert;  // entries of sorted_ids

  /// The slot of its row m, or a number that is none.
  __device__ __forceinline__ int slot(const Problem& p, int m) const { return m < count ? p.sorted_ids[entry + m] : -1; }
};

/// Lists the groups that have a slot, in order, up to p.most_groups; returns how many there are. All threads of the block take part.
///
/// Chunks are 32 entries of a tile, a line, which a warp reads and a thread then looks at; the warps take them in turn, so that a
/// decode step's are all asked for at once, with their experts. Until num_tokens_post_padded has come, as many tiles as there are
/// slots are looked at.
template <int ROWS>
__device__ __forceinline__ int list_groups(const Streamed& p, Group* groups) {
  constexpr int kChunkGroups = 32 / ROWS, kBatch = 8;
  static_assert(kChunkGroups < 8, "the counts of a chunk have three bits");
  __shared__ uint32_t found[kThreads];
  __shared__ int counts[kWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, per_tile = static_cast<int>(p.chunks.value);
  int listed = 0, end = min(p.tiles, p.num_valid) * per_tile;
  for (int base = 0; base < end;) {
    const int here = min(end - base, kThreads), mine = base + thread, tile = p.chunks.quotient(mine);
    const int expert = thread < here ? p.expert_ids[tile] : -1, in_use = p.tiles_in_use();
    for (int j = warp; j < here; j += kBatch * kWarps) {
      int ids[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int in_round = j + i * kWarps, chunk = base + in_round, of = p.chunks.quotient(chunk);
        const int at = (chunk - of * per_tile) * 32 + lane;
        ids[i] = in_round < here && at < p.block_m ? p.sorted_ids[of * p.block_m + at] : -1;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t slots = __ballot_sync(~0u, p.is_slot(ids[i]));
        if (lane == 0 && j + i * kWarps < here) found[j + i * kWarps] = slots;
      }
    }
    __syncthreads();
    const bool used = thread < here && tile < in_use && static_cast<uint32_t>(expert) < static_cast<uint32_t>(p.experts);
    const uint32_t slots = used ? found[thread] : 0;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kChunkGroups; ++i) count += (slots >> (i * ROWS) & (~0u >> (32 - ROWS))) != 0;
    int before = 0, all = 0;  // of lower lanes, of the warp
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      const uint32_t have = __ballot_sync(~0u, count >> bit & 1);
      before += __popc(have & ((1u << lane) - 1)) << bit, all += __popc(have) << bit;
    }
    if (lane == 0) counts[warp] = all;
    __syncthreads();
    base = min(base + kThreads, end), end = in_use * per_tile;
    int at = listed + before;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      at += w < warp ? counts[w] : 0;
      listed += counts[w];
    }
    const int in_tile = (mine - tile * per_tile) * 32;
#pragma unroll
    for (int i = 0; i < kChunkGroups; ++i)
      if ((slots >> (i * ROWS) & (~0u >> (32 - ROWS))) != 0 && at < p.most_groups)
        groups[at++] = {tile * p.block_m + in_tile + i * ROWS, min(ROWS, p.block_m - in_tile - i * ROWS), expert};
    __syncthreads();
  }
  return min(listed, p.most_groups);  // more only where slots stand in several tiles
}

}  // namespace hf::moe
