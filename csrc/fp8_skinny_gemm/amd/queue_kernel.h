// Skinny GEMM: D[m, n] += scale A[m, k] B[k, n], A row-major, B column-major with a pitch, both e4m3 in the format of the
// architecture, D fp16. For m <= 32 the loads of the weights B dominate: each byte is loaded once per tile of rows.
//
//                     n ->  16 b_lanes columns (32 b_lanes for op_m 32)
//                   +--------+--------+    one work-group: a_producers + b_producers + consumers waves, persistent
//   m  op_m a_lanes | B lane | B lane |    one k block: ops instructions of gfx942 deep, 512 / op_m k each
//                   |   0    |   1    |    fragment: 64 lanes x 16 bytes (x 8 for the sparse A), in LDS in the order in
//                   +--------+--------+    which the lanes of the matrix instruction hold it
//
//   A producers   parts w, w + a_producers, ... of (block, A lane)      global -> registers -> LDS
//   B producers   parts w, w + b_producers, ... of (block, B lane)
//   consumers     blocks c, c + consumers, ... of every tile: LDS -> MFMA; a partial sum of its own per consumer
//
// Lane -> operand: i = lane % rows is the row of A or column of B, g = lane / rows the chunk of 16 k, with rows = 16 (32 for
// op_m 32). Dense tiles compute the transpose, so that a lane holds neighbouring columns of one row of D. With op_m 8 the
// sparse MFMA takes each dense row as two sparse ones: 64 k per instruction, no padding of m. Its producer loads each byte
// once, 8 rows x 128 k at a time, and splits a lane's chunk into the parts of the two sparse rows, 16 neighbouring bytes of
// LDS.
//
// gfx950 takes two fragments a side in one instruction: 16x16x128 for op_m 8 (sparse) and 16, 32x32x64 for op_m 32; each
// takes half the cycles of gfx942's for the same k.
//
// Bounds: a part is addressed through a buffer that begins at its first byte and ends with the tensor, so that rows and
// columns past the matrix read 0 without memory traffic and nothing past a tensor is touched; only the k block that holds
// the end of k compares. No tile is moved or computed twice at the edges.
//
// Results: with a workspace, fp32 [split_k consumers, m, n], one slice per split and consumer, added in order by
// reduce_partials: independent of timing and of the grid. Without one, packed fp16 atomics on D.
//
// Bytes: k n (B) + column tiles x k m (A, from L2); the bound is k n / bandwidth.
#pragma once

#include <type_traits>

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/fp8_mfma.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"
#include "queue.h"
#include "sink.h"
#include "tiles.h"

namespace hf::skinny {

using dev::f32x16;
using dev::f32x4;
using dev::u32x2;
using dev::u32x4;

constexpr int kChunk = 16;  // bytes (and k) that a lane loads at once
constexpr int kMostWaves = 16;
constexpr int kGfx942Depth = 512;  // op_m times the k of an instruction

template <int kOpM_, int kALanes_, int kBLanes_, int kOps>
struct Shape {
  static_assert(kOpM_ == 8 || kOpM_ == 16 || kOpM_ == 32);
  static constexpr int kOpM = kOpM_, kALanes = kALanes_, kBLanes = kBLanes_;
  static constexpr bool kSparse = kOpM == 8;
  static constexpr int kRows = kOpM == 32 ? 32 : 16;  // lanes along i
  static constexpr int kStepK = kChunk * dev::kWaveSize / kRows;
  static constexpr int kBlockK = kGfx942Depth / kOpM * kOps;
  static constexpr int kSteps = kBlockK / kStepK;  // fragments of a part
  static constexpr int kTileM = kOpM * kALanes, kColumns = kRows * kBLanes;
  static constexpr int kAPart = kOpM * kBlockK, kBPart = kRows * kBlockK;  // bytes
  static constexpr int kSlotBytes = kALanes * kAPart + kBLanes * kBPart;
  static constexpr int kParts = kALanes + kBLanes;
  // Four waves share 512 registers a lane, so the registers of the sums limit the work-group.
  static constexpr int kSums = kALanes * kBLanes * (kOpM == 32 ? 16 : 4);
  static constexpr int kMaxWaves = kSums <= 64 ? kMostWaves : 8;

  static_assert(kSteps % 2 == 0, "the deeper instructions take two fragments");
  static_assert(kStepK * (kSteps - 1) < 4096, "offsets of loads are immediate");

  __host__ __device__ static constexpr uint32_t flag_bytes(uint32_t qsize) {
    return (4 * kParts * qsize + kChunk - 1) / kChunk * kChunk;
  }
  static constexpr uint32_t lds_bytes(uint32_t qsize) { return flag_bytes(qsize) + kSlotBytes * qsize; }
};

/// The queue in LDS; queue.h has the layout.
template <class S>
struct Queue {
  uint32_t *a_flags, *b_flags;
  uint8_t *a_parts, *b_parts;

  __device__ Queue(uint8_t* memory, uint32_t qsize)
      : a_flags(reinterpret_cast<uint32_t*>(memory)),
        b_flags(a_flags + qsize * S::kALanes),
        a_parts(memory + S::flag_bytes(qsize)),
        b_parts(a_parts + qsize * S::kALanes * S::kAPart) {}
};

/// One producer wave of A (kIsA) or B: part number `wave` of its side, then every `waves`-th.
template <class S, bool kIsA>
__device__ inline void produce(const Problem& p, Queue<S> queue, const uint8_t* tensor, uint32_t wave, uint32_t waves,
                               uint32_t lane) {
  constexpr bool kHalves = kIsA && S::kSparse;
  constexpr int kLanes = kIsA ? S::kALanes : S::kBLanes, kPart = kIsA ? S::kAPart : S::kBPart;
  constexpr int kRows = kIsA ? S::kOpM : S::kRows, kLoadK = kChunk * dev::kWaveSize / kRows;
  constexpr int kLoads = S::kBlockK / kLoadK;
  const uint32_t pitch = kIsA ? p.k : p.pitch, limit = kIsA ? p.m : p.n, bytes = kIsA ? p.a_bytes : p.b_bytes;
  // A sparse load holds two fragments: the chunks of the first in lanes 0 to 31, those of the second in the others.
  const uint32_t i = lane % kRows, group = lane / kRows;
  const uint32_t chunk = kChunk * (kHalves ? dev::sparse_chunk(group % 4, group / 4) : group);
  const uint32_t lane_offset = i < limit ? i * pitch + chunk : dev::kOutOfRange;
  uint32_t* const lane_flags = (kIsA ? queue.a_flags : queue.b_flags) + dev::lane_value_here(uint32_t{0});
  auto* const lane_parts = reinterpret_cast<u32x4*>(kIsA ? queue.a_parts : queue.b_parts) + lane;

  const uint32_t ring = p.qsize * kLanes, blocks_ahead = waves / kLanes, parts_ahead = waves % kLanes;
  // In bytes from one part of this wave to the next, and what the step to the next block adds.
  const uint32_t part_pitch = kRows * pitch, ahead = blocks_ahead * S::kBlockK + parts_ahead * part_pitch;
  const uint32_t wrap = S::kBlockK - kLanes * part_pitch;

  uint32_t block = wave / kLanes, part = wave % kLanes;  // block: of the tile
  Place place{wave};
  for (Tiles<S> tile(p); tile.any(); tile.next()) {
    const uint32_t blocks = tile.blocks(), first_k = tile.first_block() * S::kBlockK;
    const uint32_t first_line = kIsA ? tile.row() : tile.column();
    const uint32_t whole_blocks = (p.k - first_k) / S::kBlockK;                // with all of their k inside
    const uint32_t parts = (limit - first_line + kRows - 1) / kRows;           // with lines inside
    uint32_t offset = first_line * pitch + first_k + block * S::kBlockK + part * part_pitch;
    while (block < blocks) {
      const dev::Buffer buffer = dev::make_buffer(tensor + offset, part < parts ? bytes - offset : 0);
      u32x4 loaded[kLoads];
      if (block < whole_blocks) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) loaded[load] = dev::load_b128(buffer, lane_offset + load * kLoadK, 0);
      } else {
        const uint32_t left = p.k - first_k - block * S::kBlockK;
#pragma unroll
        for (int load = 0; load < kLoads; ++load)
          loaded[load] = dev::load_b128(
              buffer, chunk + load * kLoadK < left ? lane_offset + load * kLoadK : dev::kOutOfRange, 0);
        __builtin_amdgcn_sched_barrier(0);  // or the compiler merges the branches' last loads behind a jump
      }

      uint32_t* flag = lane_flags + place.index;
      u32x4* written = lane_parts + place.index * (kPart / kChunk);
      wait_for(flag, place.free);
#pragma unroll
      for (int load = 0; load < kLoads; ++load)
        written[load * dev::kWaveSize] = kHalves ? dev::sparse_halves(loaded[load]) : loaded[load];
      signal(flag, lane, 1);

      place.advance(waves, ring);
      block += blocks_ahead;
      part += parts_ahead;
      offset += ahead;
      if (part >= kLanes) [[unlikely]] {  // never where the waves are a multiple of the lanes
        part -= kLanes;
        ++block;
        offset += wrap;
      }
    }
    block -= blocks;
  }
}

/// The fragments of one instruction, or of two to four on gfx942.
template <class S>
struct Multiply {
#if defined(__gfx950__)
  static constexpr int kFragments = 2;
#else
  static constexpr int kFragments = 1;
#endif
  using A = std::conditional_t<S::kSparse, u32x2, u32x4>;
  using Sum = std::conditional_t<S::kOpM == 32, f32x16, f32x4>;

  __device__ static Sum add(const A (&a)[kFragments], const u32x4 (&b)[kFragments], Sum sum, uint32_t lane) {
#if defined(__gfx950__)
    if constexpr (S::kOpM == 8) return dev::smfmac_e4m3_8x16x128(a[0], a[1], b[0], b[1], sum, lane);
    if constexpr (S::kOpM == 16) return dev::mfma_e4m3_16x16x128(b[0], b[1], a[0], a[1], sum);
    if constexpr (S::kOpM == 32) return dev::mfma_e4m3_32x32x64(b[0], b[1], a[0], a[1], sum);
#else
    if constexpr (S::kOpM == 8) return dev::smfmac_e4m3_8x16x64(a[0], b[0], sum, lane);
    if constexpr (S::kOpM == 16) return dev::mfma_e4m3_16x16x64(b[0], a[0], sum);
    if constexpr (S::kOpM == 32) return dev::mfma_e4m3_32x32x32(b[0], a[0], sum);
#endif
  }
};

/// Loads a fragment with one LDS instruction. clang 21 loads the halves of a chunk apart for instructions that take 8 bytes;
/// these conflict in LDS banks, and with many products they spill.
template <class T>
__device__ inline T load_whole(const T* from) {
  T fragment = *from;
#if __clang_major__ < 22
  asm("" : "+v"(fragment));
#endif
  return fragment;
}

/// One instruction's 8, 16 or 32 rows from `row` and 16 or 32 columns from `column`.
template <class S>
__device__ inline void put(const Sink& sink, typename Multiply<S>::Sum sums, uint32_t row, uint32_t column, uint32_t lane) {
  const uint32_t i = lane % S::kRows, g = lane / S::kRows;
  if constexpr (S::kOpM == 8) {
    sink.put_rows(sums[0] + sums[1], sums[2] + sums[3], row + 2 * g, column + i, lane);
  } else if constexpr (S::kOpM == 16) {
    sink.put_columns(sums, row + i, column + 4 * g);
  } else {
#pragma unroll
    for (int u = 0; u < 4; ++u)
      sink.put_columns(f32x4{sums[4 * u], sums[4 * u + 1], sums[4 * u + 2], sums[4 * u + 3]}, row + i,
                       column + 8 * u + 4 * g);
  }
}

template <class S>
__device__ inline void consume(const Problem& p, Queue<S> queue, _Float16* out, const float* scale, float* workspace,
                               uint32_t consumer, uint32_t lane) {
  using M = Multiply<S>;
  constexpr int kA = S::kALanes, kB = S::kBLanes, kDepth = M::kFragments;
  const float factor = workspace ? 1.f : *scale;
  // Lane l polls and releases the l-th part of a block; the lanes past the parts only look at the first.
  const bool of_b = lane >= kA && lane < S::kParts;
  uint32_t* lane_flag = of_b ? queue.b_flags + (lane - kA) : queue.a_flags + (lane < kA ? lane : 0);
  const uint32_t flag_stride = of_b ? kB : kA;

  Place place{consumer};
  for (Tiles<S> tile(p); tile.any(); tile.next()) {
    const uint32_t blocks = tile.blocks();
    typename M::Sum sums[kA][kB] = {};
    uint32_t block = consumer;
    for (; block < blocks; block += p.consumers) {
      uint32_t* flag = lane_flag + place.index * flag_stride;
      const auto* a_part = reinterpret_cast<const typename M::A*>(queue.a_parts + place.index * kA * S::kAPart) + lane;
      const auto* b_part = reinterpret_cast<const u32x4*>(queue.b_parts + place.index * kB * S::kBPart) + lane;
      wait_for(flag, place.filled());
#pragma unroll
      for (int step = 0; step < S::kSteps; step += kDepth) {
        typename M::A a[kA][kDepth];
#pragma unroll
        for (int ia = 0; ia < kA; ++ia)
#pragma unroll
          for (int d = 0; d < kDepth; ++d) a[ia][d] = load_whole(a_part + (ia * S::kSteps + step + d) * dev::kWaveSize);
#pragma unroll
        for (int ib = 0; ib < kB; ++ib) {
          u32x4 b[kDepth];
#pragma unroll
          for (int d = 0; d < kDepth; ++d) b[d] = load_whole(b_part + (ib * S::kSteps + step + d) * dev::kWaveSize);
          if (step + kDepth == S::kSteps && ib + 1 == kB) signal(flag, lane, S::kParts);
#pragma unroll
          for (int ia = 0; ia < kA; ++ia) sums[ia][ib] = M::add(a[ia], b, sums[ia][ib], lane);
        }
      }
      place.advance(p.consumers, p.qsize);
    }
    // The next tile begins with this consumer's first block again, whose place in the ring may be before or after the current
    // one.
    place.move(static_cast<int32_t>(blocks + consumer - block), p.qsize);

    float* slice = workspace ? workspace + uint64_t{tile.split() * p.consumers + consumer} * p.m * p.n : nullptr;
    const Sink sink{out, slice, factor, p.m, p.n};
#pragma unroll
    for (int ia = 0; ia < kA; ++ia)
#pragma unroll
      for (int ib = 0; ib < kB; ++ib)
        put<S>(sink, sums[ia][ib], tile.row() + ia * S::kOpM, tile.column() + ib * S::kRows, lane);
  }
}

/// Grid: any number of work-groups up to the number of tiles; block: 64 x (a_producers + b_producers + consumers).
template <class S>
__global__ __launch_bounds__(S::kMaxWaves* dev::kWaveSize) void skinny_gemm(_Float16* out, const uint8_t* a,
                                                                            const uint8_t* b, const float* scale,
                                                                            float* workspace, Problem p) {
  extern __shared__ __attribute__((aligned(16))) uint8_t memory[];
  const Queue<S> queue(memory, p.qsize);
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  for (uint32_t f = threadIdx.x; f < p.qsize * S::kParts; f += blockDim.x) queue.a_flags[f] = 0;
  __syncthreads();

  if (wave < p.a_producers)
    produce<S, true>(p, queue, a, wave, p.a_producers, lane);
  else if (wave < p.a_producers + p.b_producers)
    produce<S, false>(p, queue, b, wave - p.a_producers, p.b_producers, lane);
  else
    consume<S>(p, queue, out, scale, workspace, wave - p.a_producers - p.b_producers, lane);
}

}  // namespace hf::skinny
