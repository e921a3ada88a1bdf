// Y[slot] = A[slot / a_div] W[expert]^T from MX-FP8 for some slots of an expert on sm_90: as in pass_stream_kernel.h the rows of W of
// all experts that have slots are one stream, of which every multiprocessor has an equal share. Here wgmma multiplies them, by up to
// SLOTS slots at once: for K a multiple of 128, and N of 16.
//
//    groups of up to SLOTS slots of one expert, in the order of the tiles         A block lists the groups of its part of all passes. A
//    +------------+------------+------------+-- ... --+                           pass is 64 rows of a group's W, all of K. Teams of
//    | expert 3   | expert 8   | expert 8   |         |   x  N rows of W          four warps take passes in turn; for each of them a
//    +------------+------------+------------+-- ... --+                           warp asks the copy engine for W, in stages of 128 k,
//      | pass 0 | pass 1 | ...   | pass N/64 | ...                                in a ring that does not empty between passes.
//
// X of a group stays in shared memory for all of its passes. The warps that are left gather it there, that of the next group while the
// teams multiply. W is the left operand of wgmma, so that slots are its columns: 16, 24, 32 or 48, as a group needs. A product has 32 k, a
// block of scales: its sums, from zero, are multiplied by 2^(sx - 127) and 2^(sw - 127) and added in float32, as in wgmma_tile.h.
//
// With GATE_UP a pass is 8 rows of the gate, the 8 of up, 8 of the gate, ..., which the copy engine picks out of W.
//
// Bytes moved: N K (1 + 1/32) of W once for each group, K (1 + 1/32) of X per slot and block from L2, 2 N per slot written (N/2
// (1 + 1/32) with GATE_UP). Bound: W over the memory's bandwidth; 64 x 32 x 128 products take 250 instructions of a warp in each of the
// four schedulers, half of the time in which a multiprocessor's share of the bandwidth brings their W.
#pragma once

#include "../../mxfp8_gemm/nvidia/tensor_map.h"
#include "../../mxfp8_gemm/nvidia/wgmma.h"
#include "pass_ring.h"
#include "tile_results.h"

namespace hf {

// Further widths for wgmma.h.
#define HF_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HF_TEXT_24 HF_TEXT_16 ", %8, %9, %10, %11"
#define HF_TEXT_48 HF_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define HF_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HF_PRODUCT(N, SUMS, A, B)                                                                                          \
  template <>                                                                                                              \
  struct CodeProduct<N> {                                                                                                  \
    static __device__ __forceinline__ void start(float (&d)[N / 2], uint64_t a, uint64_t b) {                              \
      asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {"         \
                   HF_TEXT_##N "}, %" #A ", %" #B ", p, 1, 1;}" : SUMS : "l"(a), "l"(b));                                  \
    }                                                                                                                      \
  };
#define HF_SUMS_12 HF_SUMS_8(0), HF_SUMS_4(8)
#define HF_SUMS_24 HF_SUMS_8(0), HF_SUMS_8(8), HF_SUMS_8(16)
HF_PRODUCT(16, HF_SUMS_8(0), 8, 9)
HF_PRODUCT(24, HF_SUMS_12, 12, 13)
HF_PRODUCT(48, HF_SUMS_24, 24, 25)
#undef HF_PRODUCT

}  // namespace hf

namespace hf::moe {

constexpr int kStreamRows = wgmma_tiles::kGroupRows, kStreamStageBytes = kStreamRows * kStep;
constexpr int kMostRing = 8, kLeastRing = 2, kMostXBuffers = 2;  // stages of a team; groups whose X is there
constexpr int kAheadOfX = 2;                     // stages of W that a team asks for before X: what is asked for later comes later
constexpr int kStreamStaticBytes = 10 * 1024;    // of shared memory
static_assert(kStreamRows == 64 && kStep == 128, "a stage is 64 lines of the 128-byte swizzle");

struct Depth {
  int stages, x_shift;  // of a team; log2 of the buffers of X
};

/// Where everything is in shared memory. X and stages start at a multiple of 1,024.
template <int SLOTS, int TEAMS>
struct StreamMemory {
  static constexpr int kOfTeam = 2 * (kMostRing + 2);  // barriers: full and empty, of stages and of the scales of two passes
  static constexpr int kBarriers = TEAMS * kOfTeam + 2 * kMostXBuffers + 1;
  static constexpr int kXPitch = SLOTS * kStep;  // from step to step
  static_assert(kBarriers <= kThreads, "a thread makes one");
  uint32_t base, barriers, x_bytes, stages_at, scales_at, scale_bytes, x_scales_at, list_at;
  int stages;

  __host__ __device__ __forceinline__ StreamMemory(uint32_t memory, uint32_t of_barriers, int k, const Depth& depth)
      : base(memory), barriers(of_barriers), x_bytes(k / kStep * kXPitch), stages_at(x_bytes << depth.x_shift),
        scales_at(stages_at + TEAMS * depth.stages * kStreamStageBytes), scale_bytes(kStreamRows * (k / kBlock)),
        x_scales_at(scales_at + TEAMS * 2 * scale_bytes), list_at(x_scales_at + (x_bytes / kBlock * 4 << depth.x_shift)), stages(depth.stages) {}
  /// Of a barrier by its number; of_x: of those who fill a buffer of X.
  static __device__ __forceinline__ int arrivals(int barrier, int of_x) {
    const int of_team = barrier % kOfTeam, of_scales = of_team - 2 * kMostRing;
    if (barrier == kBarriers - 1) return of_x;
    if (barrier >= TEAMS * kOfTeam) return barrier - TEAMS * kOfTeam < kMostXBuffers ? of_x : TEAMS * 4 * kArrivals;
    const bool filled = of_scales < 0 ? of_team < kMostRing : of_scales < 2;
    return filled ? 1 : 4 * kArrivals;
  }
  __device__ __forceinline__ uint32_t x(int buffer) const { return base + buffer * x_bytes; }
  __device__ __forceinline__ uint32_t x_scales(int buffer) const { return base + x_scales_at + buffer * (x_bytes / kBlock * 4); }
  __device__ __forceinline__ uint32_t stage(int team, int slot) const { return base + stages_at + (team * stages + slot) * kStreamStageBytes; }
  __device__ __forceinline__ uint32_t scales(int team, int turn) const { return base + scales_at + (team * 2 + turn) * scale_bytes; }
  __device__ __forceinline__ uint32_t full(int team, int slot) const { return barriers + (team * kOfTeam + slot) * 8; }
  __device__ __forceinline__ uint32_t empty(int team, int slot) const { return full(team, slot + kMostRing); }
  __device__ __forceinline__ uint32_t scales_full(int team, int turn) const { return full(team, 2 * kMostRing + turn); }
  __device__ __forceinline__ uint32_t scales_empty(int team, int turn) const { return full(team, 2 * kMostRing + 2 + turn); }
  __device__ __forceinline__ uint32_t x_full(int buffer) const { return full(TEAMS, buffer); }
  __device__ __forceinline__ uint32_t x_empty(int buffer) const { return full(TEAMS, kMostXBuffers + buffer); }
  __device__ __forceinline__ uint32_t x_asked() const { return full(0, kBarriers - 1); }  // for, of the first group
};

/// A block's part of all passes.
struct Share {
  int first, passes, first_group, groups;
};

/// Copies 64 rows and 128 k of what map_of_w has at these places; L2 keeps them no longer than it must.
__device__ __forceinline__ void copy_stage(uint32_t to, const CUtensorMap& map, int k, int place, int outer, uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // as createpolicy.fractional.L2::evict_first makes it
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %3, %4, %5}], [%6], "
      "%7;" ::"r"(to),
      "l"(&map), "r"(k), "r"(0), "r"(place), "r"(outer), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}

/// Asks for the W of a team's passes and for their scales, as places fall free. One thread calls it.
template <bool GATE_UP, class Memory>
__device__ __forceinline__ void ask_for_w(const Streamed& p, const CUtensorMap& map, const Memory& memory, const Share& share,
                                          const Group* groups, int team, int teams) {
  const int pitch = p.k / kBlock, of_group = static_cast<int>(p.passes.value);
  const bool split = GATE_UP && !p.activation.interleaved;  // up's rows are n / 2 below the gate's
  int slot = 0, parity = 1, ahead = kAheadOfX;
#pragma unroll 1
  for (int i = team, number = 0; i < share.passes; i += teams, ++number) {
    const int group = p.passes.quotient(share.first + i), in_group = share.first + i - group * of_group, turn = number & 1;
    const int expert = groups[group - share.first_group].expert, row = in_group * kStreamRows, rows = min(kStreamRows, p.n - row);
    const uint32_t full = memory.scales_full(team, turn), to = memory.scales(team, turn);
    const uint8_t* const from = p.w_scales + (size_t(expert) * p.n + (split ? row / 2 : row)) * pitch;
    wait_phase(memory.scales_empty(team, turn), (number >> 1 & 1) ^ 1);
    arrive_expecting(full, rows * pitch);
    copy_run(to, from, (split ? kStreamRows / 2 : rows) * pitch, full);
    if (split) copy_run(to + kStreamRows / 2 * pitch, from + size_t(p.n / 2) * pitch, kStreamRows / 2 * pitch, full);
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep) {
      if (ahead >= 0 && ahead-- == 0) wait_phase(memory.x_asked(), 0);
      wait_phase(memory.empty(team, slot), parity);
      arrive_expecting(memory.full(team, slot), kStreamStageBytes);
      const int sixteen = in_group * (kStreamRows / 16);
      copy_stage(memory.stage(team, slot), map, k, GATE_UP ? sixteen : 0, GATE_UP ? expert : expert * (p.n / 16) + sixteen,
                 memory.full(team, slot));
      if (++slot == memory.stages) slot = 0, parity ^= 1;
    }
  }
}

/// What is known of a group beside its X: columns of its products, whether those who gathered it saw scales outside of 64 to 191.
template <int SLOTS, int LOADERS>
struct Columns : Slots<SLOTS> {
  int count, expert, rare[LOADERS];
};

/// Where the scale of a column is among those of a block of k, which are floats: thread t's are neighbours.
template <int SLOTS>
__device__ __forceinline__ int scale_place(int column) { return column % 8 / 2 * (SLOTS / 4) + column / 8 * 2 + column % 2; }

/// Whether a byte of a scale word is outside of 64 to 191.
__device__ __forceinline__ bool has_rare(uint32_t word) { return (in_range(word) & 0x80808080u) != 0x80808080u; }

/// Gathers X of all groups of the block, one after the other. LOADERS warps call it, of which this one has number `loader`; `shared` is
/// memory.base.
template <int SLOTS, int LOADERS, class Memory>
__device__ __forceinline__ void gather_x(const Streamed& p, const Memory& memory, uint8_t* shared, const Share& share, const Group* groups,
                                         int x_shift, Columns<SLOTS, LOADERS>* columns, int loader) {
  constexpr int kLines = (SLOTS + 31) / 32;  // of 32 entries
  const int lane = threadIdx.x % 32, chunks = p.k / 16;
#pragma unroll 1
  for (int number = 0; number < share.groups; ++number) {
    const int buffer = number & x_shift;
    const Group of = groups[number];
    int id[kLines], own[kLines], last = 0;
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      id[line] = line * 32 + lane < SLOTS ? of.slot(p, line * 32 + lane) : -1;
      if (!p.is_slot(id[line])) id[line] = -1;
      const uint32_t slots = __ballot_sync(~0u, id[line] >= 0);
      if (slots != 0) last = line * 32 + 31 - __clz(slots);
      own[line] = id[line] < 0 ? -1 : static_cast<int>(p.a_div.quotient(id[line]));
    }
    const int count = last < 16 ? 16 : last < 24 ? 24 : last < 32 ? 32 : 48;
    wait_phase(memory.x_empty(buffer), (number >> x_shift & 1) ^ 1);
#pragma unroll 1
    for (int column = loader; column < count; column += LOADERS) {
      const int row = __shfl_sync(~0u, column < 32 ? own[0] : own[kLines - 1], column % 32);
      const uint8_t* const from = p.a + size_t(max(row, 0)) * p.k;
      uint8_t* const to = shared + buffer * memory.x_bytes + column * kStep;
      for (int c = lane; c < chunks; c += 32)
        copy_async(to + c / 8 * Memory::kXPitch + ((c % 8) ^ (column % 8)) * 16, from + c * 16, row >= 0 ? 16 : 0);
    }
    commit_copies();
    if (number == 0) arrive(memory.x_asked());
    bool rare = false;
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
      const int column = line * 32 + lane;
      if (column >= count) continue;
      const auto* const from = reinterpret_cast<const uint32_t*>(p.a_scales + size_t(max(own[line], 0)) * (p.k / kBlock));
#pragma unroll 4
      for (int step = loader; step < p.k / kStep; step += LOADERS) {
        const uint32_t word = own[line] >= 0 ? __ldg(from + step) : 0x7f7f7f7fu;
        rare |= has_rare(word);
#pragma unroll
        for (int b = 0; b < 4; ++b)
          store_shared(memory.x_scales(buffer) + ((step * 4 + b) * SLOTS + scale_place<SLOTS>(column)) * 4, (word >> 8 * b & 255) << 23);
      }
    }
    rare = __any_sync(~0u, rare);
    if (lane == 0) columns[buffer].rare[loader] = rare;
    if (loader == LOADERS - 1) {
#pragma unroll
      for (int line = 0; line < kLines; ++line)
        if (line * 32 + lane < SLOTS) columns[buffer].set(p, line * 32 + lane, id[line]);
      if (lane == 0) columns[buffer].count = count, columns[buffer].expert = of.expert;
    }
    wait_copies<0>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what cp.async wrote
    arrive(memory.x_full(buffer));
  }
}

/// Whether any of the four warps that call it with this barrier has the condition; they meet.
__device__ __forceinline__ bool any_of_team(int barrier, bool condition) {
  uint32_t any;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred.aligned q, %2, 128, p; selp.u32 %0, 1, 0, q;}"
               : "=r"(any) : "r"(static_cast<uint32_t>(condition)), "r"(barrier) : "memory");
  return any != 0;
}

/// The floats of the scales of this thread's columns of a block, which are neighbours.
template <int COUNT>
__device__ __forceinline__ void load_scales(uint32_t (&to)[COUNT], uint32_t from) {
#pragma unroll
  for (int i = 0; i + 4 <= COUNT; i += 4) {
    const uint4 v = load_shared<uint4>(from + i * 4);
    to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
  }
  if constexpr (COUNT % 4 == 2) {
    const uint2 v = load_shared<uint2>(from + (COUNT - 2) * 4);
    to[COUNT - 2] = v.x, to[COUNT - 1] = v.y;
  }
}

/// sums += d times the scales of block b of a step. w: the words of this thread's two rows; x: load_scales of the block.
template <int SUMS>
__device__ __forceinline__ void add_scaled(float (&sums)[SUMS], const float (&d)[SUMS], const uint32_t (&w)[2], const uint32_t (&x)[SUMS / 2], int b) {
  const auto factor = [&](uint32_t word) { return __uint_as_float((b < 3 ? word << (23 - 8 * b) : word >> 1) & 0x7f800000u); };
  const float of_rows[2] = {factor(w[0]), factor(w[1])};
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = fmaf(d[i] * __uint_as_float(x[i / 4 * 2 + i % 2]), of_rows[i % 4 / 2], sums[i]);
}
/// The same, where a byte may be outside of 64 to 191.
template <int SUMS>
__device__ __forceinline__ void add_scaled_with_care(float (&sums)[SUMS], const float (&d)[SUMS], const uint32_t (&w)[2],
                                                     const uint32_t (&x)[SUMS / 2], int b) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int of_row = w[i % 4 / 2] >> 8 * b & 255, of_column = x[i / 4 * 2 + i % 2] >> 23, exponent = of_row + of_column - 254;
    const float value = d[i] * wgmma_tiles::power(exponent >> 1) * wgmma_tiles::power(exponent - (exponent >> 1));
    sums[i] += of_row == 255 || of_column == 255 ? __int_as_float(0x7fc00000) : value;
  }
}

/// tile_at in two parts, so that places are 32 bits: of 16 bytes each.
__device__ __forceinline__ uint32_t of_tile(uint32_t address) { return static_cast<uint32_t>(tile_at(address)); }
__device__ __forceinline__ uint64_t tile_of(uint32_t place) { return tile_at(0) >> 32 << 32 | place; }

/// Calls with(a constant of so many columns).
template <int SLOTS, int COLUMNS = 16, class With>
__device__ __forceinline__ void with_columns(int count, const With& with) {
  constexpr int kNext = COLUMNS + (COLUMNS < 32 ? 8 : 16);
  if constexpr (kNext <= SLOTS)
    if (count > COLUMNS) return with_columns<SLOTS, kNext>(count, with);
  with(std::integral_constant<int, COLUMNS>{});
}

template <int SLOTS, int TEAMS, bool GATE_UP>
__global__ void __launch_bounds__(kThreads, 1) mxfp8_grouped_tile_stream(const __grid_constant__ CUtensorMap map, const Streamed p,
                                                                         const Depth depth) {
  using Memory = StreamMemory<SLOTS, TEAMS>;
  constexpr int kTeamWarps = TEAMS * 4, kLoaders = kWarps - kTeamWarps - TEAMS;
  static_assert(kLoaders >= 1 && (SLOTS == 16 || SLOTS == 32 || SLOTS == 48));
  extern __shared__ uint8_t unaligned[];
  __shared__ uint64_t barriers[Memory::kBarriers];
  __shared__ Columns<SLOTS, kLoaders> columns[kMostXBuffers];
  __shared__ uint32_t largest[TEAMS][2][4 * SLOTS];
  uint8_t* const shared = unaligned + (1024 - (shared_address(unaligned) & 1023)) % 1024;
  const Memory memory(shared_address(shared), shared_address(barriers), p.k, depth);
  Group* const groups = reinterpret_cast<Group*>(shared + memory.list_at);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x < Memory::kBarriers) {
    init_barrier(memory.full(0, threadIdx.x), Memory::arrivals(threadIdx.x, 32 * kLoaders));
    barriers_ready();
  }
  if (threadIdx.x == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  let_next_start();
  wait_for_predecessor();

  // All threads meet here, at least once where there is a group.
  constexpr int kBatch = 24;  // those of hundreds of tokens
  Chunk chunk{};
  int rounds = 0;
  const int of_group = static_cast<int>(p.passes.value);
  const int all = for_chunks<SLOTS, kBatch>(p, [&](const Chunk& seen, int) { chunk = seen, ++rounds; }) * of_group;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x), each = all / blocks, more = all % blocks;
  Share share{block * each + min(block, more), each + (block < more), 0, 0};
  if (share.passes == 0) return;
  share.first_group = p.passes.quotient(share.first);
  share.groups = p.passes.quotient(share.first + share.passes - 1) - share.first_group + 1;
  const auto list = [&](const Chunk& seen, int before) {
    store_groups<SLOTS>(p, seen, before + seen.before - share.first_group, groups, share.groups);
  };
  if (rounds == 1)
    list(chunk, 0);
  else
    for_chunks<SLOTS, kBatch>(p, list);
  __syncthreads();

  if (warp >= kTeamWarps) {
    if (warp >= kTeamWarps + TEAMS)
      gather_x<SLOTS, kLoaders>(p, memory, shared, share, groups, depth.x_shift, columns, warp - kTeamWarps - TEAMS);
    else if (lane == 0)
      ask_for_w<GATE_UP>(p, map, memory, share, groups, warp - kTeamWarps, TEAMS);
    return;
  }

  const int team = warp / 4, steps = p.k / kStep, pitch = p.k / kBlock;
  const GroupPlace place{warp % 4, lane / 4, lane % 4};
  const bool split = GATE_UP && !p.activation.interleaved;
  // Where the scales of this thread's rows are among those of a pass, and how far apart.
  const int result = place.warp * 8 + place.g;
  const int scales_at = (!GATE_UP ? row_in_group(place.line(0)) : split ? result : 2 * result) * pitch;
  const int apart = (!GATE_UP ? 2 : split ? kStreamRows / 2 : 1) * pitch;
  const auto let_go = [&](uint32_t empty) {
    __syncwarp();
    if (lane < kArrivals) arrive(empty);
  };
  const uint32_t first_stage = of_tile(memory.stage(team, 0));
  int number = -1, buffer = 0, slot = 0, parity = 0;  // of the group whose X is multiplied, of the next stage
  bool rare_x = false;
  const auto take_x = [&](int next) {
    if (number == next) return;
    while (number < next) {  // one after the other, because phases are counted
      if (number >= 0) let_go(memory.x_empty(buffer));
      ++number, buffer = number & depth.x_shift;
      wait_phase(memory.x_full(buffer), number >> depth.x_shift & 1);
    }
    rare_x = false;
#pragma unroll
    for (int loader = 0; loader < kLoaders; ++loader) rare_x |= columns[buffer].rare[loader] != 0;
  };
#pragma unroll 1
  for (int i = team, turn = 0; i < share.passes; i += TEAMS, ++turn) {
    const int pass = share.first + i, group = p.passes.quotient(pass), in_group = pass - group * of_group, scales = turn & 1;
    take_x(group - share.first_group);
    wait_phase(memory.scales_full(team, scales), turn >> 1 & 1);
    const uint32_t of_w = memory.scales(team, scales) + scales_at;
    // All warps of a team go the same way, because they start products together.
    bool rare = rare_x;
    for (int step = place.t; step < steps; step += 4)
      rare |= has_rare(load_shared<uint32_t>(of_w + step * 4)) | has_rare(load_shared<uint32_t>(of_w + apart + step * 4));
    rare = any_of_team(1 + team, rare);
    with_columns<SLOTS>(columns[buffer].count, [&](auto count) {
      constexpr int kColumns = decltype(count)::value, kSums = kColumns / 2;
      float sums[kSums] = {}, d[2][kSums];  // one product is scaled while another is under way
      uint32_t x = of_tile(memory.x(buffer)), of_x = memory.x_scales(buffer) + place.t * SLOTS, of_rows = of_w;
#pragma unroll 1
      for (int step = 0; step < steps; ++step, x += Memory::kXPitch / 16, of_x += 4 * SLOTS * 4, of_rows += 4) {
        const uint32_t stage = first_stage + slot * (kStreamStageBytes / 16);
        const auto start = [&](float (&to)[kSums], int block) {
          order_registers();
          CodeProduct<kColumns>::start(to, tile_of(stage + 2 * block), tile_of(x + 2 * block));
          commit_products();
        };
        const uint32_t sw[2] = {load_shared<uint32_t>(of_rows), load_shared<uint32_t>(of_rows + apart)};
        uint32_t sx[2][kColumns / 4];
        if (!rare) {
          load_scales(sx[0], of_x);
          wait_phase(memory.full(team, slot), parity);
          start(d[0], 0);
          start(d[1], 1);
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            if (b < 3) {
              load_scales(sx[(b + 1) % 2], of_x + (b + 1) * SLOTS * 4);
              wait_products<1>(d[b % 2]);
            } else {
              wait_products<0>(d[b % 2]);
              let_go(memory.empty(team, slot));
            }
            add_scaled(sums, d[b % 2], sw, sx[b % 2], b);
            if (b < 2) start(d[b], b + 2);
          }
        } else {
          wait_phase(memory.full(team, slot), parity);
#pragma unroll 1
          for (int b = 0; b < 4; ++b) {
            load_scales(sx[0], of_x + b * SLOTS * 4);
            start(d[0], b);
            wait_products<0>(d[0]);
            add_scaled_with_care(sums, d[0], sw, sx[0], b);
          }
          let_go(memory.empty(team, slot));
        }
        if (++slot == memory.stages) slot = 0, parity ^= 1;
      }
      let_go(memory.scales_empty(team, scales));
      const int first = in_group * (GATE_UP ? kGroupResults : kStreamRows);
      store_results<GATE_UP>(p, place, columns[buffer], size_t(columns[buffer].expert) * p.n, first, sums, largest[team][scales], 1 + team);
    });
  }
  take_x(share.groups - 1);  // lets go what other teams have yet to multiply
}

/// What copy_stage reads: W as [sixteens of rows, 2, 4, 2, k], whose lines are those of row_in_group. With gate and up [experts, sixteens, 2, 8,
/// k], so that 16 lines are 8 of the gate and the 8 of up.
inline CUtensorMap map_of_w(const Operands& given, bool gate_up, bool interleaved) {
  const int64_t n = given.n, k = given.k, e = given.experts;
  if (!gate_up) return encoded_map<5>(given.w.data(), {k, 2, 4, 2, e * (n / 16)}, {k, 4 * k, 2 * k, 16 * k}, {kStep, 2, 4, 2, kStreamRows / 16});
  const int64_t row = interleaved ? 2 * k : k, up = interleaved ? k : n / 2 * k;
  return encoded_map<5>(given.w.data(), {k, 8, 2, n / 16, e}, {row, up, 8 * row, n * k}, {kStep, 8, 2, kStreamRows / 16, 1});
}

/// Launches it on a problem that has its results; `blocks` share the stream of W.
template <int SLOTS, bool GATE_UP>
inline void stream_tiles(const Problem& problem, const Operands& given, int64_t slots, int64_t blocks, bool programmatic, hipStream_t stream) {
  constexpr int kTeams = 2;
  using Memory = StreamMemory<SLOTS, kTeams>;
  HF_CHECK(slots == SLOTS, "this variant of the module has slots = ", SLOTS, "; got ", slots);
  check_sharing(1, blocks);
  HF_CHECK(given.k % kStep == 0, "K must be a multiple of ", kStep, "; got ", given.k);
  HF_CHECK(given.n % kPassRows == 0, "N must be a multiple of ", kPassRows, "; got ", given.n);
  check_operand(given.w_scales, "w_scale", kE8m0, {given.experts, given.n, given.k / kMxBlock}, mxfp8::kPerBlock, kAligned);
  check_operand(given.a_scales, "a_scale", kE8m0, {given.a_rows, given.k / kMxBlock}, mxfp8::kPerBlock, {4});
  const Streamed p = groups_of(problem, given, SLOTS, kStreamRows);
  if (p.most_groups == 0) return;
  const int64_t of_block = (int64_t{p.most_groups} * p.passes.value + blocks - 1) / blocks, listed = of_block / p.passes.value + 2;
  const int64_t room = kMostShared - kStreamStaticBytes - 1024 - listed * int64_t{sizeof(Group)};
  const auto stages = [&](int x_shift) {
    const int64_t left = room - int64_t{Memory(0, 0, static_cast<int>(given.k), {0, x_shift}).list_at};
    return static_cast<int>(left < 0 ? 0 : hf::smaller(int64_t{kMostRing}, left / (kTeams * kStreamStageBytes)));
  };
  const Depth depth = stages(1) > kLeastRing ? Depth{stages(1), 1} : Depth{stages(0), 0};
  HF_CHECK(depth.stages >= kLeastRing, "X of ", SLOTS, " slots with K = ", given.k, " leaves no room for W in shared memory: give fewer slots");
  hf::Launch at{static_cast<uint32_t>(blocks), kThreads,
                static_cast<uint32_t>(Memory(0, 0, static_cast<int>(given.k), depth).list_at + listed * sizeof(Group) + 1024), stream};
  at.programmatic = programmatic;
  hf::launch(mxfp8_grouped_tile_stream<SLOTS, kTeams, GATE_UP>, at, map_of_w(given, GATE_UP, problem.activation.interleaved), p, depth);
}

}  // namespace hf::moe
