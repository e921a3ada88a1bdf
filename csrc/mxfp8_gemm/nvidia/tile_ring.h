// What the kernels in tiles of the MX-FP8 GEMM on sm_90 share: places of blocks, the ring of stages, its producer, and the end.
//
// A block multiplies kColumns = 64 kGroups kSets rows of W by kRows rows of X: W is the left operand of wgmma, 64 rows for each
// set of each group of four warps (consumers). One more group of four is the producer: its first warp asks the copy engine for the
// bytes of both operands, 128 k of kColumns + kRows lines a stage, in the 128-byte swizzle; its other three load the e8m0 scales
// some steps ahead and store them in the form that the consumers multiply by. A cluster of `splits` blocks shares K; its blocks
// add their sums through distributed shared memory, in the order of the blocks.
#pragma once

#include "hipforge/device/vector.h"
#include "stream.h"
#include "wgmma.h"

namespace hf::mx_tiles {

// A warp lets a stage go by one arrival, of its first lane, which __syncwarp() puts behind what the others have read. racecheck does not
// follow that order: what it checks is built with an arrival of each lane.
#if defined(HF_EVERY_LANE_ARRIVES)
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

constexpr int kStep = 128, kBlock = 32, kBand = 16;
static_assert(kStep / kBlock == 4, "the scales of a row in a step are a word");

struct Problem {
  dev::bf16* out;
  const uint8_t *x, *xs, *w, *ws;
  const dev::bf16* bias;
  int m, n, k;
  int splits;         // blocks of a cluster, which share K
  bool whole_stores;  // rows of the result start at multiples of 16 bytes
};

/// ROWS of X, GROUPS of four warps with SETS times 64 rows of W each, STAGES of the ring; BLOCKS that a multiprocessor holds.
/// SCALE_BYTES: of a row in a stage. EXTRA: bytes of shared memory beside the ring.
template <int ROWS, int GROUPS, int SETS, int STAGES, int BLOCKS, int SCALE_BYTES, int EXTRA>
struct Ring {
  static constexpr int kRows = ROWS, kGroups = GROUPS, kSets = SETS, kStages = STAGES, kBlocks = BLOCKS;
  static constexpr int kWarps = GROUPS * 4, kConsumers = kWarps * 32, kThreads = kConsumers + 128, kLoaders = 96;
  static constexpr int kColumns = GROUPS * SETS * 64, kLines = kColumns + ROWS;
  static constexpr int kXAt = kColumns * kStep, kScalesAt = kLines * kStep, kXScalesAt = kScalesAt + kColumns * SCALE_BYTES;
  static constexpr int kNotesAt = kXScalesAt + ROWS * SCALE_BYTES;  // of each loading warp, whether a scale is rare
  static constexpr int kStageBytes = (kNotesAt + 16 + 1023) / 1024 * 1024;
  static constexpr int kExtraAt = STAGES * kStageBytes, kBarriersAt = kExtraAt + EXTRA;
  static constexpr int kBytes = kBarriersAt + (2 * STAGES + 4) * 8 + 1024;  // stages start at a multiple of 1,024
  static constexpr int kPitch = kColumns + 4;  // floats of a row of sums, so that those of a warp meet no bank twice
  static constexpr int kWords = (kLines + kLoaders - 1) / kLoaders;  // of scales that a loading thread has in a step
  // Registers of a thread of a consumer and of the producer, in all those of three groups of four warps at the start.
  static constexpr int kAtStart = 65536 / (kThreads * BLOCKS) / 8 * 8;
  static constexpr int kOfProducer = 56, kOfConsumer = (kAtStart * (GROUPS + 1) - kOfProducer) / GROUPS / 8 * 8;
  static_assert(ROWS * kPitch * 4 <= kExtraAt, "the sums of a tile take the place of its stages");
  static_assert(ROWS % 32 == 0 && kColumns <= 256 && kBytes <= kMostShared && BLOCKS * (kBytes + 1024) <= 228 * 1024);
};

/// Where a block stands.
template <class L>
struct Place {
  int split, m0, n0, first, steps;  // its part of K: steps of 128
  __device__ __forceinline__ explicit Place(const Problem& p) {
    const int block = static_cast<int>(blockIdx.x), tile = block / p.splits;
    split = block % p.splits;
    // Tiles in bands of kBand along M, so that those at work at a time share rows of both operands in L2.
    const int across = (p.m + L::kRows - 1) / L::kRows, down = (p.n + L::kColumns - 1) / L::kColumns;
    const int band = tile / (kBand * down), height = min(kBand, across - band * kBand), in_band = tile - band * kBand * down;
    m0 = (band * kBand + in_band % height) * L::kRows, n0 = in_band / height * L::kColumns;
    const int all = (p.k + kStep - 1) / kStep;
    first = static_cast<int>(int64_t(all) * split / p.splits);
    steps = static_cast<int>(int64_t(all) * (split + 1) / p.splits) - first;
  }
};

/// Addresses in shared memory: stages, their barriers, and two pairs more for the kernel.
template <class L>
struct Shared {
  uint32_t stages, full, empty, more;
  __device__ __forceinline__ explicit Shared(uint8_t* at)
      : stages(shared_address(at)), full(stages + L::kBarriersAt), empty(full + 8 * L::kStages), more(empty + 8 * L::kStages) {}
  __device__ __forceinline__ uint32_t stage(int step) const { return stages + step % L::kStages * L::kStageBytes; }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < L::kStages; ++s) init_barrier(full + 8 * s, 1 + L::kLoaders), init_barrier(empty + 8 * s, L::kWarps * kArrivals);
  }
  __device__ __forceinline__ void wait_full(int step) const { wait_phase(full + 8 * (step % L::kStages), step / L::kStages & 1); }
  /// Of the consumers' warp: its lanes have read the stage.
  __device__ __forceinline__ void release(int step) const {
    __syncwarp();
    if (threadIdx.x % 32 < kArrivals) arrive(empty + 8 * (step % L::kStages));
  }
  __device__ __forceinline__ void wait_empty(int step) const {
    if (step >= L::kStages) wait_phase(empty + 8 * (step % L::kStages), (step / L::kStages - 1) & 1);
  }
};

/// The producer, in its own group of warps. `store` writes a row's four scale bytes into a stage, (address of the stage, line, word)
/// with the rows of X after those of W, and returns whether one of them is rare.
template <class L, class Store>
__device__ __forceinline__ void produce(const Problem& p, const Place<L>& at, const Shared<L>& shared, const CUtensorMap& x_map,
                                        const CUtensorMap& w_map, Store store) {
  const int thread = static_cast<int>(threadIdx.x) - L::kConsumers;
  if (thread < 32) {
    if (thread == 0) {
      const auto ask_w = [&](int i) {
        const uint32_t barrier = shared.full + 8 * (i % L::kStages);
        shared.wait_empty(i);
        arrive_expecting(barrier, L::kLines * kStep);
        copy_tile(shared.stage(i), w_map, (at.first + i) * kStep, at.n0, barrier);
      };
      const auto ask_x = [&](int i) {
        copy_tile(shared.stage(i) + L::kXAt, x_map, (at.first + i) * kStep, at.m0, shared.full + 8 * (i % L::kStages));
      };
      const int ahead = min(at.steps, L::kStages);
      for (int i = 0; i < ahead; ++i) ask_w(i);
      wait_for_predecessor();  // from here on, X may be read and, by those that have waited for it, the output written
      for (int i = 0; i < ahead; ++i) ask_x(i);
      for (int i = ahead; i < at.steps; ++i) ask_w(i), ask_x(i);
    }
    __syncwarp();
    return;
  }
  constexpr int kAhead = L::kWords <= 2 ? 4 : L::kWords == 3 ? 2 : 1;
  const int loader = thread - 32, pitch = p.k / kBlock;
  const bool whole = p.k % kStep == 0;
  uint32_t words[kAhead][L::kWords];
  const auto load = [&](uint32_t (&to)[L::kWords], int step, int from_line, int to_line) {
    const int block = (at.first + step) * 4;
#pragma unroll
    for (int j = 0; j < L::kWords; ++j) {
      const int line = loader + j * L::kLoaders;
      if (line < from_line || line >= to_line) continue;
      const bool of_x = line >= L::kColumns;
      const int row = of_x ? at.m0 + line - L::kColumns : at.n0 + line;
      uint32_t word = 0x7f7f7f7fu;
      if (step < at.steps && row < (of_x ? p.m : p.n)) {
        const uint8_t* const from = (of_x ? p.xs : p.ws) + size_t(row) * pitch + block;
        if (whole) {
          word = __ldg(reinterpret_cast<const uint32_t*>(from));
        } else {
#pragma unroll 1
          for (int b = min(4, pitch - block) - 1; b >= 0; --b) word = word << 8 | __ldg(from + b);
        }
      }
      to[j] = word;
    }
  };
#pragma unroll
  for (int s = 0; s < kAhead; ++s) load(words[s], s, 0, L::kColumns);
  wait_for_predecessor();
#pragma unroll
  for (int s = 0; s < kAhead; ++s) load(words[s], s, L::kColumns, L::kLines);
  for (int i = 0; i < at.steps; i += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int step = i + s;
      if (step >= at.steps) break;
      shared.wait_empty(step);
      const uint32_t stage = shared.stage(step);
      bool rare = false;
#pragma unroll
      for (int j = 0; j < L::kWords; ++j)
        if (loader + j * L::kLoaders < L::kLines) rare |= store(stage, loader + j * L::kLoaders, words[s][j]);
      const uint32_t note = __any_sync(~0u, rare);
      if (loader % 32 == 0) store_shared(stage + L::kNotesAt + loader / 32 * 4, note);
      arrive(shared.full + 8 * (step % L::kStages));
      load(words[s], step + kAhead, 0, L::kLines);
    }
  }
}

/// Whether a loading warp found a rare scale in the step; the same for all lanes.
template <class L>
__device__ __forceinline__ bool has_rare(uint32_t stage) {
  const uint4 notes = load_shared<uint4>(stage + L::kNotesAt);
  return __any_sync(~0u, notes.x | notes.y | notes.z);
}

/// All consumers meet.
template <class L>
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(L::kConsumers) : "memory"); }

/// The consumers meet, with those of the cluster where there is one; its producers meet them too. A block alone must not call
/// meet_cluster() from the two roles: there it is __syncthreads(), of which all threads have to reach the same one.
template <class L>
__device__ __forceinline__ void meet_for_sums(const Problem& p) {
  if (p.splits > 1)
    meet_cluster();
  else
    meet_consumers<L>();
}

/// Where a consumer's sum i of a set belongs: row of X, row of W.
template <class L>
__device__ __forceinline__ float& part_of(float* parts, int set, int i) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = (warp / 4 * L::kSets + set) * 64 + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8;
  return parts[(i / 4 * 8 + 2 * (lane % 4) + i % 2) * L::kPitch + column];
}

/// The consumers' end, once `parts` hold the block's sums and the cluster has met: the sums of all its blocks, and the bias.
template <class L>
__device__ __forceinline__ void store_results(const Problem& p, const Place<L>& at, uint32_t parts) {
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

template <int REGISTERS>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

}  // namespace hf::mx_tiles
