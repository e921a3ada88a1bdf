// The groups of slots of an expert that the kernels which stream W share: a block lists those that have a slot by itself, so that
// no launch before it and no workspace are needed.
#pragma once

#include "../../mxfp8_gemm/nvidia/row_step.h"
#include "problem.h"

namespace hf::moe {

using namespace row_stream;

constexpr int kMostGroups = 2048;  // that a block can list
constexpr int64_t kMaxK = int64_t{1} << 22, kMaxN = int64_t{1} << 23;
constexpr int kWarps = 16, kThreads = kWarps * 32;  // of a block
constexpr int kPassTiles = 2, kPassRows = kPassTiles * kTileRows, kUnitPasses = 4;
constexpr int kGateUpRows = kUnitPasses * kPassRows;  // of W for a block of 32 results
static_assert(kGateUpRows == 2 * kMxBlock);

/// Entries of a tile that are looked at together, a line of 32 or a group's, for groups of so many rows.
__host__ __device__ constexpr int chunk_of(int rows) { return rows < 32 ? 32 : rows; }

struct Streamed : Problem {
  int k_shift;             // log2 of the warps that share K
  int most_groups;         // that there can be, if each slot stands in one tile
  Divisor chunks, passes;  // of chunk_of() entries, of a tile; of a group
};

/// Operands whose W has elements of a class of row_step.h.
template <class W>
Operands with_elements(Operands given) {
  given.payload = HF_E4M3FN, given.fp4 = W::kLine < kStep;
  return given;
}

inline void check_sharing(int64_t sharers, int64_t blocks) {
  HF_CHECK(sharers >= 1 && sharers <= kWarps && (sharers & (sharers - 1)) == 0, "sharers must be a power of two up to ",
           kWarps, "; got ", sharers);
  HF_CHECK(blocks >= 1 && blocks <= kMaxInt32, "blocks must be between 1 and 2^31 - 1; got ", blocks);
}

/// A problem whose groups have up to `rows` slots and take passes of so many rows of W.
inline Streamed groups_of(const Problem& problem, const Operands& given, int64_t rows, int64_t pass_rows) {
  HF_CHECK(given.k <= kMaxK, "K must be at most ", kMaxK, "; got ", given.k);
  HF_CHECK(given.n <= kMaxN, "N must be at most ", kMaxN, "; got ", given.n);
  const int64_t groups = hf::smaller(problem.tiles * hf::ceil_div(given.block_m, rows), given.num_valid);
  const int64_t passes = hf::ceil_div(given.n, pass_rows);
  HF_CHECK(groups * passes <= kMaxInt32, "passes are counted in 31 bits; there can be ", groups, " groups of up to ", rows,
           " slots, of ", passes, " passes of ", pass_rows, " rows of W each: use the kernel in tiles");
  return {problem, 0, static_cast<int>(groups), Divisor::of(hf::ceil_div(given.block_m, chunk_of(static_cast<int>(rows)))),
          Divisor::of(static_cast<uint32_t>(passes))};
}

/// A problem whose groups have up to `rows` slots, for `sharers` warps that share K and so many blocks, checked.
inline Streamed streamed_of(const Problem& problem, const Operands& given, int64_t rows, int64_t sharers, int64_t blocks) {
  check_sharing(sharers, blocks);
  Streamed streamed = groups_of(problem, given, rows, kPassRows);
  HF_CHECK(streamed.most_groups <= kMostGroups, "a block lists the groups of up to ", rows, " slots, at most ", kMostGroups,
           "; there can be ", streamed.most_groups, " of num_valid_tokens = ", given.num_valid, ": use the kernel in tiles");
  streamed.k_shift = __builtin_ctzll(static_cast<uint64_t>(sharers));
  return streamed;
}

/// Waits for the other warps of a team of so many threads, at barrier team + 1: barrier 0 is that of __syncthreads(), where other
/// teams may wait for the whole block. At most 8 teams have more than one warp.
__device__ __forceinline__ void meet(int team, int threads) {
  if (threads == 32)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

/// Whether group i of a chunk has a slot.
template <int ROWS>
__device__ __forceinline__ bool has_slot(uint32_t slots, int i) {
  static_assert(chunk_of(ROWS) / ROWS < 8, "the counts of a chunk have three bits");
  return (slots >> (i * ROWS) & ~0u >> (32 - (ROWS < 32 ? ROWS : 32))) != 0;
}

struct Group {
  int entry, count, expert;  // entries of sorted_ids

  /// The slot of its row m, or a number that is none.
  __device__ __forceinline__ int slot(const Problem& p, int m) const { return m < count ? p.sorted_ids[entry + m] : -1; }
};

/// What a thread found out about its chunk, and the groups that have a slot: its own, those of chunks before it in its round, the round's.
struct Chunk {
  int tile, in_tile, expert;  // the first entry, in its tile
  uint32_t slots;             // a bit of each entry, or each two
  int own, before, all;
};

/// Looks at the next chunks from `base` on, one for each thread, before `end`, which becomes that of the tiles in use.
///
/// Chunks are 32 entries of a tile, a line, or those of a larger group, which a warp reads and a thread then looks at; the warps take them in
/// turn, BATCH of each at once, with their experts. All threads of the block take part; they meet before the next look.
template <int ROWS, int BATCH>
__device__ __forceinline__ Chunk look_at_chunks(const Streamed& p, int base, int& end) {
  constexpr int kChunk = chunk_of(ROWS), kLines = (kChunk + 31) / 32;
  __shared__ uint32_t found[kThreads];
  __shared__ int counts[kWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, per_tile = static_cast<int>(p.chunks.value);
  const int here = min(end - base, kThreads), mine = base + thread, tile = p.chunks.quotient(mine);
  const int expert = thread < here ? p.expert_ids[tile] : -1, in_use = p.tiles_in_use();
  for (int j = warp; j < here; j += BATCH * kWarps) {
    int ids[BATCH][kLines];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int in_round = j + i * kWarps, chunk = base + in_round, of = p.chunks.quotient(chunk);
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        const int in_chunk = line * 32 + lane, at = (chunk - of * per_tile) * kChunk + in_chunk;
        ids[i][line] = in_round < here && in_chunk < kChunk && at < p.block_m ? p.sorted_ids[of * p.block_m + at] : -1;
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      bool there = false;
#pragma unroll
      for (int line = 0; line < kLines; ++line) there |= p.is_slot(ids[i][line]);
      const uint32_t slots = __ballot_sync(~0u, there);
      if (lane == 0 && j + i * kWarps < here) found[j + i * kWarps] = slots;
    }
  }
  __syncthreads();
  const bool used = thread < here && tile < in_use && static_cast<uint32_t>(expert) < static_cast<uint32_t>(p.experts);
  Chunk chunk{tile, (mine - tile * per_tile) * kChunk, expert, used ? found[thread] : 0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kChunk / ROWS; ++i) chunk.own += has_slot<ROWS>(chunk.slots, i);
  int of_warp = 0;
#pragma unroll
  for (int bit = 0; bit < 3; ++bit) {
    const uint32_t have = __ballot_sync(~0u, chunk.own >> bit & 1);
    chunk.before += __popc(have & ((1u << lane) - 1)) << bit, of_warp += __popc(have) << bit;
  }
  if (lane == 0) counts[warp] = of_warp;
  __syncthreads();
  end = in_use * per_tile;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    chunk.before += w < warp ? counts[w] : 0;
    chunk.all += counts[w];
  }
  return chunk;
}

/// Stores those of a thread's groups whose number, of which `number` is the first, is of [0, most).
template <int ROWS>
__device__ __forceinline__ void store_groups(const Streamed& p, const Chunk& chunk, int number, Group* groups, int most) {
#pragma unroll
  for (int i = 0; i < chunk_of(ROWS) / ROWS; ++i) {
    if (!has_slot<ROWS>(chunk.slots, i)) continue;
    const int in_tile = chunk.in_tile + i * ROWS;
    if (static_cast<uint32_t>(number) < static_cast<uint32_t>(most))
      groups[number] = {chunk.tile * p.block_m + in_tile, min(ROWS, p.block_m - in_tile), chunk.expert};
    ++number;
  }
}

/// Calls with(chunk, groups before its round) for all rounds of chunks; returns how many groups there are. Until num_tokens_post_padded has come, as many tiles as there
/// are slots are looked at. All threads of the block take part.
template <int ROWS, int BATCH, class With>
__device__ __forceinline__ int for_chunks(const Streamed& p, const With& with) {
  int listed = 0, end = min(p.tiles, p.num_valid) * static_cast<int>(p.chunks.value);
  for (int base = 0; base < end;) {
    const int next = min(base + kThreads, end);
    const Chunk chunk = look_at_chunks<ROWS, BATCH>(p, base, end);
    with(chunk, listed);
    listed += chunk.all, base = next;
    __syncthreads();
  }
  return listed;
}

/// Lists the groups that have a slot, in order, up to p.most_groups; returns how many there are. All threads of the block take part.
template <int ROWS>
__device__ __forceinline__ int list_groups(const Streamed& p, Group* groups) {
  constexpr int kBatch = 8;  // those of a decode step
  const int listed = for_chunks<ROWS, kBatch>(p, [&](const Chunk& chunk, int before) {
    store_groups<ROWS>(p, chunk, before + chunk.before, groups, p.most_groups);
  });
  return min(listed, p.most_groups);  // more only where slots stand in several tiles
}

}  // namespace hf::moe
