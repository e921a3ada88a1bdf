// The ring of stages of the MX-FP8 GEMM in tiles on sm_90: places of tiles, stages, their producer, and the results.
//
// A block multiplies kColumns = 64 kGroups rows of W by kRows rows of X, tile after tile: W is the left operand of wgmma, 64 rows
// for each group of four warps (consumers). One thread of four warps more, the producer, asks the copy engine for all that they
// read: the bytes of both operands, 128 k of kColumns + kRows lines a stage, in the 128-byte swizzle, and with every fourth step
// the scales of 512 k, in a ring of their own, where groups take turns with barriers of their own. A cluster of `splits` blocks shares the K of one tile; its blocks add their sums
// through distributed shared memory, in the order of the blocks.
//
// Tiles of 128 rows of X are for teams: clusters of two blocks with the same rows of X and k, and neighbouring rows of W. Each block
// asks for half of X and the copy engine brings it to both, so a slot is free when both blocks' consumers have read it. Teams take whole
// tiles in turn; what is left is shared by steps (Ranges), a part of a tile's sums in the workspace, added in the order of its steps.
#pragma once

#include "hipforge/device/vector.h"
#include "stream.h"
#include "team.h"
#include "wgmma.h"

namespace hf::mx_tiles {

#if defined(HF_FOR_RACECHECK)
constexpr bool kGroupsMeetAlike = true;  // it miscounts meetings at named barriers of which one group has more than the other
#else
constexpr bool kGroupsMeetAlike = false;
#endif

constexpr int kStep = 128, kBlock = 32, kBand = 16;
constexpr int kSpan = 4;  // steps whose scales are copied at once: 16 bytes of a row, the least that the copy engine takes
static_assert(kStep / kBlock == 4, "the scales of a row in a step are a word");

struct Problem {
  dev::bf16* out;
  const dev::bf16* bias;
  int m, n, k;
  int splits;         // blocks of a cluster, which share K
  int tiles, whole;   // tiles in all, and those that no teams share
  float4* parts;      // of the teams that share tiles: sums of each block, and whether they are there
  uint32_t* there;
  int ahead;          // stages of W that are asked for before X: X comes behind them
  bool made_scales;   // the predecessor has written the scales of W too
  bool made_codes;    // and its codes
  bool whole_stores;  // rows of the result start at multiples of 16 bytes
};

/// What the copy engine reads: codes of X and W; words of X [K / 128, rows], four scales each; scales of W.
struct Maps {
  CUtensorMap x, w, words, scales;
};

/// ROWS of X, GROUPS of four warps with 64 rows of W each, STAGES of the ring; BLOCKS that a multiprocessor holds. TURNS: the groups
/// have the same 64 rows of W and take steps in turn. TEAM: blocks of a cluster, which have the same rows of X.
template <int ROWS, int GROUPS, int STAGES, int BLOCKS, int TEAM = 1, bool TURNS = false>
struct Ring {
  static constexpr int kTeam = TEAM;
  static constexpr bool kTurns = TURNS;
  static constexpr bool kWhole = ROWS >= 128;  // a step whose rows have one scale each is summed in the tensor core
  static constexpr int kRows = ROWS, kGroups = GROUPS, kStages = STAGES, kBlocks = BLOCKS;
  static constexpr int kWarps = GROUPS * 4, kConsumers = kWarps * 32, kThreads = kConsumers + 128;
  static constexpr int kColumns = TURNS ? 64 : GROUPS * 64, kLines = kColumns + ROWS;
  static constexpr int kXAt = kColumns * kStep, kStageBytes = kLines * kStep;
  // Scales of a span: of W, 16 bytes a row; of X, a word a row for each step. A span may have one step, and a slot is free once the
  // last step that reads it is.
  static constexpr int kSlots = STAGES + 1, kWordsAt = kColumns * 16, kSlotBytes = kWordsAt + ROWS * 16;
  static constexpr int kScalesAt = STAGES * kStageBytes, kUnitsAt = kScalesAt + kSlots * kSlotBytes;
  static constexpr int kExchangeAt = kUnitsAt + GROUPS * ROWS * 4;  // sums that groups which take turns give each other
  static constexpr int kBarriersAt = kExchangeAt + (TURNS ? kColumns * ROWS * 4 : 0);
  // Groups that take turns wait for scales that came for another's step. Its stage may have been filled again by then, a slot of scales not:
  // kSlots spans are more steps than the ring has stages, and the group that waits has one of them.
  static constexpr int kScaleBarriers = TURNS ? kSlots : 0;
  static constexpr int kBytes = kBarriersAt + (2 * STAGES + kScaleBarriers) * 8 + 1024;  // stages start at a multiple of 1,024
  static constexpr int kPitch = kColumns + 4;  // floats of a row of sums, so that those of a warp meet no bank twice
  // Registers of a thread of the producer's four warps and of a consumer, in all those that the block has at the start.
  static constexpr int kAtStart = 65536 / (kThreads * BLOCKS) / 8 * 8;
  static constexpr int kOfProducer = 40, kOfConsumer = (kAtStart * (GROUPS + 1) - kOfProducer) / GROUPS / 8 * 8;
  static_assert(TEAM > 1 || ROWS * kPitch * 4 <= kScalesAt, "the sums of a tile take the place of its stages");
  static_assert(!TURNS || GROUPS == 2);
  static_assert(ROWS % 32 == 0 && kColumns <= 256 && kBytes <= kMostShared && BLOCKS * (kBytes + 1024) <= 228 * 1024);
};

/// Where a block's tile is, and its part of K.
template <class L>
struct Place {
  int split, m0, n0, first, steps;  // steps of 128
  bool whole;                       // all steps of the tile
  __device__ __forceinline__ void put(const Problem& p, int tile) {
    // Tiles in bands of kBand along M, so that those at work at a time share rows of both operands in L2.
    const int across = (p.m + L::kRows - 1) / L::kRows, down = (p.n + L::kColumns * L::kTeam - 1) / (L::kColumns * L::kTeam);
    const int band = tile / (kBand * down), height = min(kBand, across - band * kBand), in_band = tile - band * kBand * down;
    m0 = (band * kBand + in_band % height) * L::kRows, n0 = in_band / height * L::kColumns * L::kTeam;
    if (L::kTeam > 1) n0 += static_cast<int>(blockIdx.x) % L::kTeam * L::kColumns;
  }
};

/// The steps of tiles past Problem::whole, one after the other, cut into as many ranges as there are teams: the first team has the
/// last one, so that the team whose range starts a tile, and which waits for the sums of the others, comes after them.
struct Ranges {
  int teams, of_tile;
  uint32_t units;  // fewer than 132 tiles of at most 2^17 steps, times at most 66
  __device__ __forceinline__ explicit Ranges(const Problem& p, int team)
      : teams(static_cast<int>(gridDim.x) / team), of_tile((p.k + kStep - 1) / kStep), units((p.tiles - p.whole) * of_tile) {}
  __device__ __forceinline__ int from(int range) const { return static_cast<int>(units * range / static_cast<uint32_t>(teams)); }
};

/// This block's tile of a turn; false if it has had all.
template <class L>
__device__ __forceinline__ bool place_of(const Problem& p, int turn, Place<L>& at) {
  if constexpr (L::kTeam > 1) {
    const Ranges ranges(p, L::kTeam);
    int team = static_cast<int>(blockIdx.x) / L::kTeam;
    asm volatile("" : "+r"(team));  // what follows from it is found in every turn, so that no registers hold it meanwhile
    const int range = ranges.teams - 1 - team;
    int tile = team + turn * ranges.teams;
    at.first = at.split = 0, at.steps = ranges.of_tile;
    if (tile >= p.whole) {
      const int past = turn - (p.whole - team + ranges.teams - 1) / ranges.teams, unit = ranges.from(range), end = ranges.from(range + 1);
      tile = unit / ranges.of_tile + past;
      const int from = past == 0 ? unit : tile * ranges.of_tile;
      if (from >= end) return false;
      at.first = from - tile * ranges.of_tile, at.steps = min(ranges.of_tile - at.first, end - from);
      tile += p.whole;
    }
    at.whole = at.steps == ranges.of_tile;
    at.put(p, tile);
  } else {
    const int all = (p.k + kStep - 1) / kStep, tile = (static_cast<int>(blockIdx.x) + turn * static_cast<int>(gridDim.x)) / p.splits;
    if (tile >= p.tiles) return false;
    at.split = static_cast<int>(blockIdx.x) % p.splits, at.whole = p.splits == 1;
    at.first = static_cast<int>(int64_t(all) * at.split / p.splits);
    at.steps = static_cast<int>(int64_t(all) * (at.split + 1) / p.splits) - at.first;
    at.put(p, tile);
  }
  return true;
}

/// Calls `visit` with every tile of this block and its turn.
template <class L, class Visit>
__device__ __forceinline__ void for_each_tile(const Problem& p, Visit visit) {
  Place<L> at;
  for (int turn = 0; place_of(p, turn, at); ++turn) visit(at, turn);
}

/// Where a role is in the rings: a slot of the stages and the parity of its round, and a slot of the scales.
template <class L>
struct Cursor {
  int slot = 0, parity = 0, span = L::kSlots - 1, span_parity = 1;
  __device__ __forceinline__ void advance() {
    if (++slot == L::kStages) slot = 0, parity ^= 1;
  }
  /// Before a step of a tile: whether it starts a span.
  __device__ __forceinline__ bool starts_span(const Place<L>& at, int step) {
    const bool starts = step == 0 || (at.first + step) % kSpan == 0;
    if (starts && ++span == L::kSlots) span = 0, span_parity ^= 1;
    return starts;
  }
};

/// Addresses in shared memory: stages, scales and barriers.
template <class L>
struct Shared {
  uint32_t stages, full, empty, full_scales;
  __device__ __forceinline__ explicit Shared(uint8_t* at)
      : stages(shared_address(at)), full(stages + L::kBarriersAt), empty(full + 8 * L::kStages), full_scales(empty + 8 * L::kStages) {}
  __device__ __forceinline__ uint32_t stage(const Cursor<L>& c) const { return stages + c.slot * L::kStageBytes; }
  __device__ __forceinline__ uint32_t scales(const Cursor<L>& c) const { return stages + L::kScalesAt + c.span * L::kSlotBytes; }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < L::kStages; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, (L::kTurns ? 4 : L::kWarps) * kArrivals * L::kTeam);
    for (int s = 0; s < L::kScaleBarriers; ++s) init_barrier(full_scales + 8 * s, 1);
  }
  __device__ __forceinline__ void wait_full(const Cursor<L>& c) const { wait_phase(full + 8 * c.slot, c.parity); }
  __device__ __forceinline__ void wait_scales(const Cursor<L>& c) const { wait_phase(full_scales + 8 * c.span, c.span_parity); }
  /// At once in the first round, whose slots nobody has used.
  __device__ __forceinline__ void wait_empty(const Cursor<L>& c) const { wait_phase(empty + 8 * c.slot, c.parity ^ 1); }
  /// Of a warp: its lanes have read the stage.
  __device__ __forceinline__ void release(const Cursor<L>& c) const {
    __syncwarp();
    if constexpr (L::kTeam == 1) {
      if (threadIdx.x % 32 < kArrivals) arrive(empty + 8 * c.slot);
    } else {  // both blocks' producers write the X of both
      static_assert(kArrivals == 1 || kArrivals == 32);
      for (int block = 0; block < L::kTeam; ++block)
        if (kArrivals == 32 || threadIdx.x % 32 == block) arrive_in(empty + 8 * c.slot, block);
    }
  }
};

/// The producer, one thread. W is asked for before the predecessor has ended, as far as Problem::ahead says, unless the predecessor
/// writes it.
template <class L>
__device__ __forceinline__ void produce(const Problem& p, const Shared<L>& shared, const Maps& maps) {
  Cursor<L> cursor;
  bool first = true;
  for_each_tile<L>(p, [&](const Place<L>& at, int) {
    const auto ask = [&](int step, bool for_w, bool for_x) {
      const uint32_t barrier = shared.full + 8 * cursor.slot;
      const int from = at.first + step;
      const bool starts = cursor.starts_span(at, step);
      const uint32_t of_scales = L::kTurns ? shared.full_scales + 8 * cursor.span : barrier;
      if (for_w) {
        shared.wait_empty(cursor);
        arrive_expecting(barrier, L::kStageBytes + (starts && !L::kTurns ? L::kSlotBytes : 0));
        if (starts && L::kTurns) arrive_expecting(of_scales, L::kSlotBytes);
        copy_tile(shared.stage(cursor), maps.w, from * kStep, at.n0, barrier);
      }
      if (for_x && L::kTeam == 1) copy_tile(shared.stage(cursor) + L::kXAt, maps.x, from * kStep, at.m0, barrier);
      if (for_x && L::kTeam > 1) {  // a part of X's rows, for all blocks of the team
        const int rows = static_cast<int>(blockIdx.x) % L::kTeam * (L::kRows / L::kTeam);
        copy_tile(shared.stage(cursor) + L::kXAt + rows * kStep, maps.x, from * kStep, at.m0 + rows, barrier, (1 << L::kTeam) - 1);
      }
      if (starts && for_x) copy_tile(shared.scales(cursor) + L::kWordsAt, maps.words, at.m0, from / kSpan * kSpan, of_scales);
      if (starts && (p.made_scales ? for_x : for_w)) copy_tile(shared.scales(cursor), maps.scales, from / kSpan * 16, at.n0, of_scales);
      cursor.advance();
    };
    int step = 0;
    if (first) {
      const int ahead = p.made_codes ? 0 : min(at.steps, p.ahead);
#pragma unroll 1
      for (; step < ahead; ++step) ask(step, true, false);
      if (L::kTeam > 1) wait_for_cluster();
      wait_for_predecessor();  // from here on X may be read and, by those that waited for it, the output written
      cursor = {};
#pragma unroll 1
      for (step = 0; step < ahead; ++step) ask(step, false, true);
      first = false;
    }
#pragma unroll 1
    for (; step < at.steps; ++step) ask(step, true, true);
  });
}

/// All consumers meet.
template <class L>
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(L::kConsumers) : "memory"); }

/// Where a consumer's sum i belongs: row of X, row of W.
template <class L>
__device__ __forceinline__ float& part_of(float* parts, int i) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = warp / 4 * 64 + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8;
  return parts[(i / 4 * 8 + 2 * (lane % 4) + i % 2) * L::kPitch + column];
}

/// The end of a cluster's tile, once `parts` hold the block's sums and the cluster has met: the sums of all its blocks, and the bias.
template <class L>
__device__ __forceinline__ void store_shared_sums(const Problem& p, const Place<L>& at, uint32_t parts) {
  for (int i = threadIdx.x;; i += L::kConsumers) {  // 8 at a time, of every row whose number has this block's remainder
    const int row = at.split + i / (L::kColumns / 8) * p.splits, column = i % (L::kColumns / 8) * 8, n = at.n0 + column;
    if (row >= L::kRows || at.m0 + row >= p.m) break;
    if (n >= p.n) continue;
    float total[8] = {};
    for (int s = 0; s < p.splits; ++s) {
      const uint32_t from = address_in(parts + (row * L::kPitch + column) * 4, s);
      const float4 low = load_cluster(from), high = load_cluster(from + 16);
      total[0] += low.x, total[1] += low.y, total[2] += low.z, total[3] += low.w;
      total[4] += high.x, total[5] += high.y, total[6] += high.z, total[7] += high.w;
    }
    dev::bf16* const to = p.out + size_t(at.m0 + row) * p.n + n;
    dev::Vector<dev::bf16, 8> results;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (p.bias && n + j < p.n) total[j] += static_cast<float>(p.bias[n + j]);
      results[j] = static_cast<dev::bf16>(total[j]);
    }
    if (p.whole_stores) {
      *reinterpret_cast<dev::Vector<dev::bf16, 8>*>(to) = results;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (n + j < p.n) to[j] = results[j];
    }
  }
}

/// Stores the sums of a consumer's 64 rows of W and COUNT / 4 * 8 rows of X from registers: 8 x 8 results are turned between lanes, so
/// that a row of the result has 16 neighbours from four lanes.
template <class L, int COUNT>
__device__ __forceinline__ void store_sums(const Problem& p, int m0, int n_of_group, const float (&sums)[COUNT]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n0 = n_of_group + warp % 4 * 16;
  float bias[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (p.bias && n0 + g + 8 * i < p.n) bias[i] = static_cast<float>(p.bias[n0 + g + 8 * i]);
#pragma unroll
  for (int j = 0; j < COUNT / 4; ++j) {
    uint32_t turned[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sums[4 * j + 2 * i + 1] + bias[i]), "f"(sums[4 * j + 2 * i] + bias[i]));
      asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned[i]) : "r"(pair));
    }
    // turned[i]: columns 8 i + 2 t, + 1 of row g. Even lanes take four columns of the first eight, odd ones of the second.
    const uint32_t other = __shfl_xor_sync(~0u, t % 2 ? turned[0] : turned[1], 1);
    const uint32_t low = t % 2 ? other : turned[0], high = t % 2 ? turned[1] : other;
    const int row = m0 + 8 * j + g, n = n0 + t % 2 * 8 + t / 2 * 4;
    if (row >= p.m) continue;
    dev::bf16* const to = p.out + size_t(row) * p.n + n;
    if (p.whole_stores) {
      if (n < p.n) *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (n + e < p.n) reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>((e < 2 ? low : high) >> (e % 2 * 16));
    }
  }
}

/// The end of a team's part of a tile that others have parts of too. The one with the first steps adds the others' sums in their
/// order and goes on; the others leave theirs and are done. Returns whether this block goes on.
template <class L, int COUNT>
__device__ __forceinline__ bool add_parts(const Problem& p, const Place<L>& at, float (&sums)[COUNT]) {
  const Ranges ranges(p, L::kTeam);
  const int rank = static_cast<int>(blockIdx.x) % L::kTeam, own = ranges.teams - 1 - static_cast<int>(blockIdx.x) / L::kTeam;
  const auto parts_of = [&](int range) { return p.parts + size_t(range * L::kTeam + rank) * (COUNT / 4 * L::kConsumers) + threadIdx.x; };
  wait_for_predecessor();  // which has cleared `there`
  if (at.first != 0) {
    float4* const to = parts_of(own);
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) __stcg(to + i * L::kConsumers, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
    meet_consumers<L>();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.there + own * L::kTeam + rank), "r"(1) : "memory");
    return false;
  }
  const int end = (ranges.from(own + 1) - 1) / ranges.of_tile * ranges.of_tile + ranges.of_tile;  // of this tile
  for (int range = own + 1; range < ranges.teams && ranges.from(range) < end; ++range) {
    if (ranges.from(range) == ranges.from(range + 1)) continue;
    if (threadIdx.x == 0) {
      uint32_t there;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(p.there + range * L::kTeam + rank) : "memory");
      while (!there);
    }
    meet_consumers<L>();
    const float4* const from = parts_of(range);
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const float4 more = __ldcg(from + i * L::kConsumers);
      sums[4 * i] += more.x, sums[4 * i + 1] += more.y, sums[4 * i + 2] += more.z, sums[4 * i + 3] += more.w;
    }
  }
  return true;
}

/// Groups that take turns have sums of the same results: each takes one half of X's rows, and what the other has of it.
template <class L>
__device__ __forceinline__ void exchange(uint8_t* memory, int group, const float (&sums)[L::kRows / 2], float (&half)[L::kRows / 4]) {
  float4* const places = reinterpret_cast<float4*>(memory + L::kExchangeAt) + threadIdx.x % 128;
  constexpr int kQuads = L::kRows / 16;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const auto given = [&](int e) { return group ? sums[4 * i + e] : sums[4 * (i + kQuads) + e]; };
    places[(group * kQuads + i) * 128] = make_float4(given(0), given(1), given(2), given(3));
#pragma unroll
    for (int e = 0; e < 4; ++e) half[4 * i + e] = group ? sums[4 * (i + kQuads) + e] : sums[4 * i + e];
  }
  meet_consumers<L>();
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float4 more = places[((1 - group) * kQuads + i) * 128];
    half[4 * i] += more.x, half[4 * i + 1] += more.y, half[4 * i + 2] += more.z, half[4 * i + 3] += more.w;
  }
  meet_consumers<L>();  // the places are written again at the end of the next tile
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

}  // namespace hf::mx_tiles
