// Passes of 16 rows of W that the copy engine brings into a ring in shared memory, and their products with up to 8 rows of X,
// which a warp has in registers.
//
//        K, in steps of 128 (a line of a row)              A team of 2^k_shift warps has the next `stages` passes under way at
//      +-----+-----+-----+-----+-----+--                   any time. A row is one copy; rows are 32 bytes apart modulo 128, so
//  16  | w 0 | w 1 | w 2 | w 3 | w 0 |     one pass        that a half warp's loads of 8 bytes meet no bank twice. The scales
// rows |     |     |     |     |     |                     of the rows of a pass are one run of bytes in memory, and one copy.
//      +-----+-----+-----+-----+-----+--                   K is at most 4096, of which two passes fit in shared memory.
//
// Products: mma.m16n8k16, W's rows in its 16 rows and those of X in its 8 columns; order of k, scales and their rare cases as in
// row_step.h. Lane 4 g + t ends up with the sums of W's rows g + 8 h and X's rows 2 t + j.
#pragma once

#include "../../mxfp8_gemm/nvidia/tma.h"
#include "groups.h"

namespace hf::moe {

constexpr int kMostStages = 2;            // more do not read faster
constexpr int kMostSteps = 3;             // of a warp
constexpr int kStaticBytes = 2560;        // of shared memory

/// How passes of W's elements are kept: bytes between lines of 128 of neighbouring rows, the largest K and what it is a multiple of. E2m1
/// has no NaN, so what lies behind a row may be multiplied by zeros.
template <class W>
struct Passes {
  static constexpr bool kFour = W::kLine < kStep, kWhole = !kFour;  // K is a multiple of a step
  static constexpr int kPacking = kStep / W::kLine, kApart = 4 * W::kLaneBytes;
  static constexpr int kMostK = kFour ? kMostSteps * kWarps * kStep : 4096, kMultiple = kFour ? kStep / 2 : kStep;
  static_assert(8 * kApart == 2 * kStep || 8 * kApart == kStep, "the rows of half a warp, or of one, are in different banks");
  static_assert(kMultiple / kPacking % 16 == 0 && kTileRows * (kMultiple / kBlock) % 16 == 0, "runs are copied whole");
};

/// Returns how many steps of K a warp has, at most, where so many share it.
template <class W = E4m3>
inline int steps_of_warp(int64_t k, int64_t sharers) {
  using P = Passes<W>;
  HF_CHECK(k % P::kMultiple == 0 && k <= P::kMostK, "K must be a multiple of ", P::kMultiple, " up to ", P::kMostK, "; got ", k);
  const int64_t steps = hf::ceil_div(k / kStep, sharers);
  HF_CHECK(steps <= kMostSteps, "K = ", k, " is ", steps, " steps of ", kStep, " for each of ", sharers,
           " warps that share it, more than ", kMostSteps, ": give more sharers");
  return static_cast<int>(steps);
}

struct Ring {
  int pitch, scale_pitch, stage_bytes, stages;  // from row to row of W and of its scales; of a stage, and how many a team has

  /// For teams of so many warps, in as many bytes of shared memory.
  template <class W = E4m3>
  static Ring of(int64_t k, int64_t sharers, int64_t bytes) {
    const int64_t pitch = hf::ceil_div(k / Passes<W>::kPacking, 128) * 128 + Passes<W>::kApart, scale_pitch = k / kBlock;
    const int64_t stage = kPassRows * (pitch + scale_pitch);
    return {static_cast<int>(pitch), static_cast<int>(scale_pitch), static_cast<int>(stage),
            static_cast<int>(hf::smaller(int64_t{kMostStages}, bytes / (kWarps / sharers * stage)))};
  }
  int bytes(int64_t sharers) const { return static_cast<int>(kWarps / sharers) * stages * stage_bytes; }
  __device__ __forceinline__ int scales_at() const { return kPassRows * pitch; }
};

/// The team of a thread, 2^k_shift warps that share K, and the barriers of its stages, which its last warp makes and asks with: they are
/// there for all behind __syncthreads().
struct Team {
  int sharers, part, number, count;  // warps, and which of them this is; teams, likewise
  bool issuer;
  uint32_t full;

  __device__ __forceinline__ Team(int k_shift, int stages, uint64_t* barriers)
      : sharers(1 << k_shift), part(threadIdx.x / 32 & (sharers - 1)), number(threadIdx.x / 32 >> k_shift), count(kWarps >> k_shift),
        issuer(part == sharers - 1), full(shared_address(barriers + number * kMostStages)) {
    if (issuer && threadIdx.x % 32 < stages) init_barrier(full + threadIdx.x % 32 * 8, 1);
    barriers_ready();
  }
};

// One stage of all teams always fits beside what the kernels keep.
constexpr int kMostStageBytes = kPassRows * kWarps * kMostSteps * (kStep + kStep / kBlock) + kWarps * kPassRows * Passes<E4m3>::kApart;
static_assert(kMostStageBytes + 64 * 1024 <= kMostShared);
template <class W>
constexpr int stage_bytes_at_most() {
  return kPassRows * (Passes<W>::kMostK / Passes<W>::kPacking + Passes<W>::kApart + Passes<W>::kMostK / kBlock);
}
static_assert(stage_bytes_at_most<E4m3>() * kMostStages + 64 * 1024 <= kMostShared);

/// Copies a multiple of 16 bytes, which `barrier` counts.
__device__ __forceinline__ void copy_run(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

/// The same of bytes that no block reads again soon: the first to leave L2.
__device__ __forceinline__ void copy_run_once(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // as createpolicy.fractional.L2::evict_first makes it
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
               : "memory");
}

/// The four scale bytes at `from`, of blocks from k0 on: a word, or where steps need not be whole two pairs, of which those past K are 1.
template <class W>
__device__ __forceinline__ uint32_t pass_scales(const uint8_t* from, int k0, int k) {
  if (Passes<W>::kWhole) return *reinterpret_cast<const uint32_t*>(from);
  const uint16_t* const pairs = reinterpret_cast<const uint16_t*>(from);
  return pairs[0] | (k0 + kStep / 2 < k ? uint32_t{pairs[1]} << 16 : 0x7f7f0000u);
}

/// Adds the products of the step at k0 of K. `here` has this lane's elements of W's row g, `scales` that row's four; x_less: X's words
/// less kScaleBias<W>, of its columns 2 t + j; `usual`: all of them are in 64..191.
template <class W>
constexpr uint32_t kScaleBias = (127 - W::kLessened) * 0x01010101u;
template <class W = E4m3>
__device__ __forceinline__ void multiply_pass_step(const uint8_t* here, const uint8_t* scales, const Ring& r, int k0, int k,
                                                   const uint32_t (&x)[4][4], const uint32_t (&x_less)[2], bool usual,
                                                   float (&sums)[2][2]) {
  uint32_t sw[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) sw[h] = pass_scales<W>(scales + h * kTileRows * r.scale_pitch, k0, k);
  const auto multiply = [&](int b, float (&d)[4]) {
    uint32_t top[4], low[4];
    W::halves(here + b * (W::kLine / 4), top);
    W::halves(here + kTileRows * r.pitch + b * (W::kLine / 4), low);
#pragma unroll
    for (int c = 0; c < 4; ++c) d[c] = 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) multiply_add(d, {top[i], low[i], top[i + 1], low[i + 1]}, x[b][i], x[b][i + 1]);
  };
  if (usual && __all_sync(~0u, (W::usual(sw[0]) & W::usual(sw[1]) & 0x80808080u) == 0x80808080u)) {
    uint32_t exponents[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 2; ++j) exponents[h][j] = sw[h] + x_less[j];
    const auto block_of = [&](auto which) {
      constexpr int b = decltype(which)::value;
      float d[4];
      multiply(b, d);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[h][j] = fmaf(d[2 * h + j], power_of<b>(exponents[h][j]), sums[h][j]);
    };
    block_of(std::integral_constant<int, 0>{}), block_of(std::integral_constant<int, 1>{});
    block_of(std::integral_constant<int, 2>{}), block_of(std::integral_constant<int, 3>{});
  } else {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float d[4];
      multiply(b, d);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          sums[h][j] += scaled(d[2 * h + j] * (1 << W::kLessened), sw[h] >> (8 * b) & 255,
                               (x_less[j] + kScaleBias<W>) >> (8 * b) & 255);
    }
  }
}

}  // namespace hf::moe
