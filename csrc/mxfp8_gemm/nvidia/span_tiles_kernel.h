// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 for some rows on sm_90, in one launch: tiles of 64 rows of W whose K four groups share.
//
//              512 k: a span                     A block has kRows rows of X, 64 of W and a part of K in spans of 512. Of a span each
//       +------+------+------+------+            group of four warps has 128 k, in a ring of its own: a group starts products of 32 k,
//  64 W | gr 0 | gr 1 | gr 2 | gr 3 | ...        one block of scales each, and multiplies sums by 2^(sx + sw - 254) while other groups
//       +------+------+------+------+            multiply. One thread asks the copy engine for everything; the scales of a span are 16
//  X    |      |      |      |      | ...        bytes of a row, the least that it takes, in a ring that the groups share.
//       +------+------+------+------+
//
// W is the left operand of wgmma, so that few rows of X are its columns. At the end the groups add up through shared memory; a
// cluster of `splits` blocks shares K, and each block gets what the others have of its rows of X in its inbox. All is added in the
// order of k.
//
// Scales outside of 64 to 191 are rare: then each sum of a step is scaled with care. The tensor core sums 32 products in its own
// precision, which has fewer bits than float32.
//
// Bytes moved: N K (1 + 1/32) of W once for each kRows of X, N / 64 M K (1 + 1/32) of X from L2, 2 M N written. Bound: W over the
// memory's bandwidth; three instructions of a lane for each 32 products are less up to 64 rows.
#pragma once

#include "hipforge/device/vector.h"
#include "stream.h"
#include "team.h"
#include "wgmma.h"

namespace hf::span_tiles {

constexpr int kStep = 128, kBlock = 32, kSpan = 512, kColumns = 64, kGroups = kSpan / kStep, kScales = kSpan / kBlock;
constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
constexpr int kMostSplits = 8;
static_assert(kStep / kBlock == 4, "the scales of a row in a step are a word");
static_assert(kScales == 16, "the copy engine takes 16 bytes of a row");

struct Problem {
  dev::bf16* out;
  const dev::bf16* bias;
  int m, n, k;
  int splits, tiles_m;
  bool w_first;       // W may be read before the predecessor has ended
  bool whole_stores;  // four neighbours of a row start at a multiple of 8 bytes
};

/// What the copy engine reads: codes and scales of X and W.
struct Maps {
  CUtensorMap x, w, x_scales, w_scales;
};

/// ROWS of X; DEPTH spans in the rings.
template <int ROWS, int DEPTH>
struct Layout {
  static constexpr int kRows = ROWS, kDepth = DEPTH;
  static constexpr int kStageBytes = (kColumns + ROWS) * kStep, kXAt = kColumns * kStep;
  static constexpr int kSlotBytes = (kColumns + ROWS) * kScales, kOfX = kColumns * kScales;
  static constexpr int kScalesAt = kGroups * DEPTH * kStageBytes, kInboxAt = kScalesAt + DEPTH * kSlotBytes;
  static constexpr int kInboxRows = ROWS + kMostSplits;  // rows of X: as many of each block as one of them has at most
  static constexpr int kBarriersAt = kInboxAt + kInboxRows * kColumns * 4;
  static constexpr int kBytes = kBarriersAt + 2 * DEPTH * (kGroups + 1) * 8 + 1024;  // stages start at a multiple of 1,024
  static constexpr int kPitch = kColumns + 4;  // floats of a row of sums, so that those of a warp meet no bank twice
  static constexpr int kOfProducer = 32, kOfConsumer = (65536 / kThreads / 8 * 8 * (kGroups + 1) - kOfProducer) / kGroups / 8 * 8;
  static_assert(ROWS % 32 == 0 && kStageBytes % 1024 == 0 && kBytes <= kMostShared);
  static_assert(ROWS * kPitch * 4 <= DEPTH * kStageBytes, "the sums of a group take the place of its stages");
};

/// Addresses in shared memory: stages, each group's together, and barriers. Slots of scales have those of group kGroups.
template <class L>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ explicit Shared(uint32_t at) : base(at) {}
  __device__ __forceinline__ uint32_t stage(int group, int slot) const { return base + (group * L::kDepth + slot) * L::kStageBytes; }
  __device__ __forceinline__ uint32_t scales(int slot) const { return base + L::kScalesAt + slot * L::kSlotBytes; }
  __device__ __forceinline__ uint32_t full(int group, int slot) const { return base + L::kBarriersAt + (group * L::kDepth + slot) * 8; }
  __device__ __forceinline__ uint32_t empty(int group, int slot) const { return full(group + kGroups + 1, slot); }
};

/// The spans of a part of K.
struct Part {
  int first, count;
  __device__ __forceinline__ Part(const Problem& p, int split) {
    const int all = p.k / kSpan;
    first = all * split / p.splits, count = all * (split + 1) / p.splits - first;
  }
};

template <class L>
__device__ __forceinline__ void produce(const Problem& p, const Shared<L>& shared, const Maps& maps, const Part& part, int m0, int n0) {
  const auto ask = [&](int i, bool for_w, bool for_x) {
    const int slot = i % L::kDepth, parity = i / L::kDepth & 1 ^ 1, k = (part.first + i) * kSpan;
    const uint32_t of_scales = shared.full(kGroups, slot), scales = shared.scales(slot);
    if (for_w) {
      wait_phase(shared.empty(kGroups, slot), parity);
      arrive_expecting(of_scales, L::kSlotBytes);
      copy_tile(scales, maps.w_scales, k / kBlock, n0, of_scales);
    }
    if (for_x) copy_tile(scales + L::kOfX, maps.x_scales, k / kBlock, m0, of_scales);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t full = shared.full(group, slot), stage = shared.stage(group, slot);
      if (for_w) {
        wait_phase(shared.empty(group, slot), parity);
        arrive_expecting(full, L::kStageBytes);
        copy_tile(stage, maps.w, k + group * kStep, n0, full);
      }
      if (for_x) copy_tile(stage + L::kXAt, maps.x, k + group * kStep, m0, full);
    }
  };
  const int ahead = p.w_first ? min(part.count, L::kDepth) : 0;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) ask(i, true, false);
  wait_for_predecessor();
#pragma unroll 1
  for (int i = 0; i < part.count; ++i) ask(i, i >= ahead, true);
}

/// Stores four neighbours of a row.
__device__ __forceinline__ void store(const Problem& p, int m, int n, float4 sum) {
  if (m >= p.m || n >= p.n) return;
  float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (p.bias && n + j < p.n) v[j] += static_cast<float>(p.bias[n + j]);
  dev::bf16* const to = p.out + size_t(m) * p.n + n;
  if (p.whole_stores) {
    dev::Vector<dev::bf16, 4> results;
#pragma unroll
    for (int j = 0; j < 4; ++j) results[j] = static_cast<dev::bf16>(v[j]);
    *reinterpret_cast<dev::Vector<dev::bf16, 4>*>(to) = results;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (n + j < p.n) to[j] = static_cast<dev::bf16>(v[j]);
  }
}

__device__ __forceinline__ void add_to(float4& sum, const float4& more) { sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w; }
__device__ __forceinline__ void store_cluster(uint32_t address, const float4& v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ float4 load_sums(uint32_t address) {
  const uint4 v = load_shared<uint4>(address);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
/// Whether a byte is outside of 64 to 191.
__device__ __forceinline__ bool has_rare(uint32_t word) { return (~(word ^ word << 1) & 0x80808080u) != 0; }
/// 2^(byte b of a word - 127), of a byte of 64 to 191.
__device__ __forceinline__ float factor_of(uint32_t word, int b) { return __uint_as_float(__byte_perm(word, 0, 0x0444 | b << 12) >> 1); }

template <class L>
__global__ void __launch_bounds__(kThreads, 1) span_tiles(const __grid_constant__ Maps maps, const Problem p) {
  constexpr int kHalves = L::kRows / 32, kSums = 16;  // sums of 64 x 32: what a product makes
  extern __shared__ uint8_t unaligned[];
  const Shared<L> shared((shared_address(unaligned) + 1023) & ~1023u);
  const int split = static_cast<int>(blockIdx.x) % p.splits, tile = static_cast<int>(blockIdx.x) / p.splits;
  const int m0 = tile % p.tiles_m * L::kRows, n0 = tile / p.tiles_m * kColumns;
  const Part part(p, split);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < L::kDepth; ++slot)
      for (int group = 0; group <= kGroups; ++group)
        init_barrier(shared.full(group, slot), 1), init_barrier(shared.empty(group, slot), (group < kGroups ? 4 : 4 * kGroups) * kArrivals);
    barriers_ready();
  }
  let_next_start();
  __syncthreads();
  if (p.splits > 1) arrive_at_cluster();  // inboxes are there
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kOfProducer));
    if (threadIdx.x == kConsumers) produce<L>(p, shared, maps, part, m0, n0);
    __syncwarp();
    if (p.splits > 1) {
      wait_for_cluster();
      meet_cluster();
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kOfConsumer));
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), lane = threadIdx.x % 32, t = lane % 4;
  const int row_of_w = threadIdx.x % 128 / 32 * 16 + lane / 4;  // and 8 more
  float sums[kHalves][kSums] = {}, d[2][kSums];
  int slot = 0, parity = 0;
#pragma unroll 1
  for (int i = 0; i < part.count; ++i) {
    const uint32_t of_w = shared.scales(slot) + group * 4, of_x = of_w + L::kOfX, stage = shared.stage(group, slot);
    wait_phase(shared.full(kGroups, slot), parity);
    bool rare = false;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = lane + 32 * j;
      if (n0 + row < p.n) rare |= has_rare(load_shared<uint32_t>(of_w + row * kScales));
      if (j < kHalves && m0 + row < p.m) rare |= has_rare(load_shared<uint32_t>(of_x + row * kScales));
    }
    uint32_t w[2], x[kHalves][8];
#pragma unroll
    for (int j = 0; j < 2; ++j) w[j] = load_shared<uint32_t>(of_w + (row_of_w + 8 * j) * kScales);
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[half][j] = load_shared<uint32_t>(of_x + (32 * half + j / 2 * 8 + 2 * t + j % 2) * kScales);
    const auto start = [&](float (&to)[kSums], int block, int half) {
      order_registers();
      CodeProduct<32>::start(to, tile_at(stage) + 2 * block, tile_at(stage + L::kXAt + half * 32 * kStep) + 2 * block);
      commit_products();
    };
    rare = __any_sync(~0u, rare);  // the same in all warps of the group, which start products together
    __syncwarp();
    if (lane < kArrivals) arrive(shared.empty(kGroups, slot));
    wait_phase(shared.full(group, slot), parity);
    if (!rare) {
      start(d[0], 0, 0);
#pragma unroll
      for (int unit = 0; unit < 4 * kHalves; ++unit) {
        const int block = unit / kHalves, half = unit % kHalves, next = unit + 1;
        if (next < 4 * kHalves) {
          start(d[next % 2], next / kHalves, next % kHalves);
          wait_products<1>(d[unit % 2]);
        } else {
          wait_products<0>(d[unit % 2]);
          __syncwarp();
          if (lane < kArrivals) arrive(shared.empty(group, slot));
        }
        const float of_w0 = factor_of(w[0], block), of_w1 = factor_of(w[1], block);
#pragma unroll
        for (int e = 0; e < kSums; ++e) {
          const float scaled_by_x = d[unit % 2][e] * factor_of(x[half][e / 4 * 2 + e % 2], block);
          sums[half][e] = fmaf(scaled_by_x, e % 4 < 2 ? of_w0 : of_w1, sums[half][e]);
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll 1
        for (int block = 0; block < 4; ++block) {
          start(d[0], block, half);
          wait_products<0>(d[0]);
          const auto power = [](int e) { return __int_as_float(max((e + 127) << 23, 0x00400000)); };  // for e of -127 to 127
#pragma unroll
          for (int e = 0; e < kSums; ++e) {
            const int of_row = w[e % 4 / 2] >> (8 * block) & 255, of_column = x[half][e / 4 * 2 + e % 2] >> (8 * block) & 255;
            const int exponent = of_row + of_column - 254;
            const float value = d[0][e] * power(exponent >> 1) * power(exponent - (exponent >> 1));
            sums[half][e] += of_row == 255 || of_column == 255 ? __int_as_float(0x7fc00000) : value;
          }
        }
      __syncwarp();
      if (lane < kArrivals) arrive(shared.empty(group, slot));
    }
    if (++slot == L::kDepth) slot = 0, parity ^= 1;
  }
  asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");  // the stages are not read any more
  const uint32_t own = shared.stage(group, 0);
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int e = 0; e < kSums; ++e) {
      const int row = 32 * half + e / 4 * 8 + 2 * t + e % 2;
      store_shared(own + (row * L::kPitch + row_of_w + e % 4 / 2 * 8) * 4, __float_as_uint(sums[half][e]));
    }
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  const int rows = min(L::kRows, p.m - m0), each = (L::kRows + p.splits - 1) / p.splits, quad = threadIdx.x % 16;
  if (p.splits > 1) wait_for_cluster();
  for (int row = threadIdx.x / 16; row < rows; row += kConsumers / 16) {
    float4 sum = load_sums(shared.stage(0, 0) + row * L::kPitch * 4 + quad * 16);
#pragma unroll
    for (int other = 1; other < kGroups; ++other) add_to(sum, load_sums(shared.stage(other, 0) + row * L::kPitch * 4 + quad * 16));
    if (p.splits == 1) {
      store(p, m0 + row, n0 + quad * 4, sum);
    } else {
      const int of_block = row / p.splits;
      const uint32_t inbox = shared.base + L::kInboxAt + ((split * each + of_block) * kColumns + quad * 4) * 4;
      store_cluster(address_in(inbox, row - of_block * p.splits), sum);
    }
  }
  if (p.splits == 1) return;
  meet_cluster();
  for (int of_block = threadIdx.x / 16; of_block * p.splits + split < rows; of_block += kConsumers / 16) {
    float4 sum = {};
    for (int other = 0; other < p.splits; ++other)
      add_to(sum, load_sums(shared.base + L::kInboxAt + ((other * each + of_block) * kColumns + quad * 4) * 4));
    store(p, m0 + of_block * p.splits + split, n0 + quad * 4, sum);
  }
}

}  // namespace hf::span_tiles
