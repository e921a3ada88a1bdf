// Skinny GEMM: D[m, n] += scale A[m, k] B[k, n], A row-major, B column-major with a pitch, both e4m3 in the format of the
// architecture, D fp16. For m <= 32 the weights B decide: each byte of B is loaded from memory once per tile of op_m rows.
//
//              n ->  16 b_lanes columns (32 b_lanes for op_m 32)
//            +-------+-------+     one work-group: a_producers + b_producers + consumers waves, persistent
//   m  op_m  | lane 0| lane 1|     one k block: 4 fragments a side (256 k; 128 k for op_m 32)
//            +-------+-------+     fragment: 64 lanes x 16 bytes, in LDS in the order in which lanes hold it
//
//   A producers   blocks w, w + a_producers, ...           global -> registers -> LDS
//   B producers   parts w, w + b_producers, ... of (block, lane)
//   consumers     blocks c, c + consumers, ... of every tile: LDS -> MFMA; a partial sum of its own per consumer
//
// Lane -> operand: i = lane % rows is the row of A or column of B, g = lane / rows the chunk of 16 k, with rows = 16 (32 for
// op_m 32). Dense tiles compute the transpose, so that a lane holds neighbouring columns of one row of D. With op_m 8 the
// sparse MFMA takes each dense row as two sparse ones: 64 k per instruction, no padding of m.
//
// Tiles: m fastest, then n, then the split of k; a work-group has one contiguous run of them. Rows and columns past the
// matrix and k past the end are loads out of the buffer's range, which read 0 without memory traffic.
//
// Results: with a workspace, fp32 [split_k consumers, m, n], one slice per split and consumer, added in order by
// reduce_partials: independent of timing and of the grid. Without one, packed fp16 atomics on D.
//
// Bytes: k n (B) + column tiles x k m (A, from L2); the bound is k n / bandwidth.
#pragma once

#include <hip/hip_runtime.h>

#include <type_traits>

#include "hipforge/buffer.h"
#include "hipforge/fp8_mfma.h"
#include "hipforge/wave.h"
#include "queue.h"

namespace hf::skinny {

using dev::f32x16;
using dev::f32x4;
using dev::u32x2;
using dev::u32x4;
using Half2 = _Float16 __attribute__((ext_vector_type(2)));

constexpr int kChunk = 16;  // bytes (and k) of a lane in a fragment
constexpr int kMaxWaves = 16;
constexpr int kMaxThreads = kMaxWaves * dev::kWaveSize;

template <int kOpM, int kBLanes, int kOps>
struct Shape {
  static_assert(kOpM == 8 || kOpM == 16 || kOpM == 32);
  static constexpr bool kSparse = kOpM == 8;
  static constexpr int kRows = kOpM == 32 ? 32 : 16;  // lanes along i
  static constexpr int kStepK = kChunk * dev::kWaveSize / kRows;
  static constexpr int kBlockK = 512 / kOpM * kOps;
  static constexpr int kSteps = kBlockK / kStepK;  // fragments of a k block
  static_assert(kSteps % 2 == 0, "the 128-deep instruction takes two fragments");
  static constexpr int kColumns = kRows * kBLanes;
  static constexpr int kAFragment = kStepK * kOpM;
  static constexpr int kBFragment = kStepK * kRows;
  static constexpr int kParts = 1 + kBLanes;
  static constexpr int kSlotBytes = kSteps * (kAFragment + kBLanes * kBFragment);

  static constexpr uint32_t flag_bytes(uint32_t qsize) { return (4 * kParts * qsize + kChunk - 1) / kChunk * kChunk; }
  static constexpr uint32_t lds_bytes(uint32_t qsize) { return flag_bytes(qsize) + kSlotBytes * qsize; }
};

struct Problem {
  uint32_t m, n, k, pitch, a_bytes, b_bytes;
  uint32_t row_tiles, column_tiles, split_k, blocks;  // blocks: of the whole of k
  uint32_t a_producers, b_producers, consumers, qsize;

  __host__ __device__ uint32_t tiles() const { return row_tiles * column_tiles * split_k; }
};

struct Tile {
  uint32_t row, column, split, first_block, blocks;
};

template <class S, int kOpM>
__device__ inline Tile tile_at(const Problem& p, uint32_t index) {
  const uint32_t rest = index / p.row_tiles, split = rest / p.column_tiles, each = p.blocks / p.split_k;
  const uint32_t first = split * each;
  return {index % p.row_tiles * kOpM, rest % p.column_tiles * S::kColumns, split, first,
          split + 1 == p.split_k ? p.blocks - first : each};
}

/// The work-group's run of tiles: [first, last).
struct Run {
  uint32_t first, last;

  __device__ explicit Run(const Problem& p)
      : first(static_cast<uint32_t>(uint64_t{p.tiles()} * blockIdx.x / gridDim.x)),
        last(static_cast<uint32_t>(uint64_t{p.tiles()} * (blockIdx.x + 1) / gridDim.x)) {}
};

struct Lds {
  uint32_t* flags;
  uint8_t* slots;
};

/// One producer wave of A (kIsA) or B: part number `wave` of its side, then every `waves`-th.
template <class S, int kOpM, int kBLanes, bool kIsA>
__device__ inline void produce(const Problem& p, Lds lds, const uint8_t* base, uint32_t wave, uint32_t waves,
                               uint32_t lane) {
  constexpr uint32_t kLanes = kIsA ? 1 : kBLanes;
  constexpr bool kHalve = kIsA && S::kSparse;
  const dev::Buffer buffer = dev::make_buffer(base, kIsA ? p.a_bytes : p.b_bytes);
  const uint32_t pitch = kIsA ? p.k : p.pitch, limit = kIsA ? p.m : p.n;
  const uint32_t i = kHalve ? lane % S::kRows / 2 : lane % S::kRows;
  const uint32_t chunk = lane / S::kRows * kChunk;

  const Run run(p);
  uint32_t sequence = 0;  // of the tile's first block
  for (uint32_t index = run.first, next = wave; index < run.last; ++index) {
    const Tile tile = tile_at<S, kOpM>(p, index);
    for (; next < (sequence + tile.blocks) * kLanes; next += waves) {
      const uint32_t q = next / kLanes, part = next % kLanes;
      const uint32_t line = (kIsA ? tile.row : tile.column + part * S::kRows) + i;
      const uint32_t first_k = (tile.first_block + q - sequence) * S::kBlockK + chunk;
      u32x4 loaded[S::kSteps];
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        const uint32_t k = first_k + step * S::kStepK;
        loaded[step] = dev::load_b128(buffer, line < limit && k < p.k ? line * pitch + k : dev::kOutOfRange, 0);
      }
      const Place place(q, p.qsize);
      uint32_t* flag = lds.flags + place.slot * S::kParts + (kIsA ? 0 : 1 + part);
      uint8_t* slot = lds.slots + place.slot * S::kSlotBytes;
      wait_for<kProducerWait>(flag, place.free);
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        if constexpr (kHalve) {
          reinterpret_cast<u32x2*>(slot + step * S::kAFragment)[lane] = dev::sparse_half(loaded[step], lane);
        } else {
          const uint32_t fragment = kIsA ? step * S::kAFragment
                                         : S::kSteps * S::kAFragment + (part * S::kSteps + step) * S::kBFragment;
          reinterpret_cast<u32x4*>(slot + fragment)[lane] = loaded[step];
        }
      }
      signal(flag, lane);
    }
    sequence += tile.blocks;
  }
}

/// Where a consumer's sums go: a slice of the workspace, or D through atomics.
struct Sink {
  _Float16* out;
  float* slice;
  float scale;
  uint32_t m, n;

  __device__ void add_pair(uint64_t at, float first, float second) const {
    const Half2 pair = {static_cast<_Float16>(first * scale), static_cast<_Float16>(second * scale)};
    __builtin_amdgcn_global_atomic_fadd_v2f16(
        (__attribute__((address_space(1))) Half2*)(out + at), pair);  // NOLINT: address spaces need a C cast
  }

  /// Four neighbouring columns of one row; `column` is a multiple of 4.
  __device__ void put_columns(f32x4 sums, uint32_t row, uint32_t column) const {
    if (row >= m) return;
    const uint64_t at = uint64_t{row} * n + column;
    if (slice) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (column + c < n) slice[at + c] = sums[c];
      return;
    }
    if (column < n) add_pair(at, sums[0], sums[1]);
    if (column + 2 < n) add_pair(at + 2, sums[2], sums[3]);
  }

  /// Rows `row` and `row` + 1 of one column; neighbouring lanes hold neighbouring columns.
  __device__ void put_rows(float first, float second, uint32_t row, uint32_t column, uint32_t lane) const {
    const uint64_t at = uint64_t{row} * n + column;
    if (slice) {
      if (column < n && row < m) slice[at] = first;
      if (column < n && row + 1 < m) slice[at + n] = second;
      return;
    }
    // The even lane takes the first row of both columns, the odd lane the second.
    const bool odd = lane & 1;
    constexpr int kSwapPairs = 1 | 0 << 2 | 3 << 4 | 2 << 6;
    const float other = __builtin_bit_cast(
        float, __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int32_t, odd ? first : second), kSwapPairs, 0xF, 0xF, true));
    if (column >= n || row + odd >= m) return;
    if (odd)
      add_pair(at + n - 1, other, second);
    else
      add_pair(at, first, other);
  }
};

template <class S, int kOpM, int kBLanes>
__device__ inline void consume(const Problem& p, Lds lds, _Float16* out, const float* scale, float* workspace,
                               uint32_t consumer, uint32_t lane) {
  using AFragment = std::conditional_t<S::kSparse, u32x2, u32x4>;
  using Accumulator = std::conditional_t<kOpM == 32, f32x16, f32x4>;
  const float factor = workspace ? 1.f : *scale;

  const Run run(p);
  uint32_t sequence = 0;
  for (uint32_t index = run.first; index < run.last; ++index) {
    const Tile tile = tile_at<S, kOpM>(p, index);
    Accumulator sums[kBLanes] = {};
    for (uint32_t block = consumer; block < tile.blocks; block += p.consumers) {
      const Place place(sequence + block, p.qsize);
      uint32_t* flags = lds.flags + place.slot * S::kParts;
      const uint8_t* slot = lds.slots + place.slot * S::kSlotBytes;
      AFragment a[S::kSteps];
      wait_for<kConsumerWait>(flags, place.filled());
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step)
        a[step] = reinterpret_cast<const AFragment*>(slot + step * S::kAFragment)[lane];
      signal(flags, lane);
#pragma unroll
      for (int l = 0; l < kBLanes; ++l) {
        u32x4 b[S::kSteps];
        wait_for<kConsumerWait>(flags + 1 + l, place.filled());
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step)
          b[step] = reinterpret_cast<const u32x4*>(slot + S::kSteps * S::kAFragment +
                                                   (l * S::kSteps + step) * S::kBFragment)[lane];
        signal(flags + 1 + l, lane);
#if defined(__gfx950__)
        if constexpr (kOpM == 16) {
#pragma unroll
          for (int step = 0; step < S::kSteps; step += 2)
            sums[l] = dev::mfma_e4m3_16x16x128(b[step], b[step + 1], a[step], a[step + 1], sums[l]);
          continue;
        }
#endif
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) {
          if constexpr (kOpM == 8) sums[l] = dev::smfmac_e4m3_8x16x64(a[step], b[step], sums[l], lane);
          if constexpr (kOpM == 16) sums[l] = dev::mfma_e4m3_16x16x64(b[step], a[step], sums[l]);
          if constexpr (kOpM == 32) sums[l] = dev::mfma_e4m3_32x32x32(b[step], a[step], sums[l]);
        }
      }
    }
    sequence += tile.blocks;

    float* slice = workspace ? workspace + uint64_t{tile.split * p.consumers + consumer} * p.m * p.n : nullptr;
    const Sink sink{out, slice, factor, p.m, p.n};
    const uint32_t i = lane % S::kRows, g = lane / S::kRows;
#pragma unroll
    for (int l = 0; l < kBLanes; ++l) {
      const uint32_t column = tile.column + l * S::kRows;
      if constexpr (kOpM == 8) {
        sink.put_rows(sums[l][0] + sums[l][1], sums[l][2] + sums[l][3], tile.row + 2 * g, column + i, lane);
      } else if constexpr (kOpM == 16) {
        sink.put_columns(sums[l], tile.row + i, column + 4 * g);
      } else {
#pragma unroll
        for (int u = 0; u < 4; ++u)
          sink.put_columns(f32x4{sums[l][4 * u], sums[l][4 * u + 1], sums[l][4 * u + 2], sums[l][4 * u + 3]},
                           tile.row + i, column + 8 * u + 4 * g);
      }
    }
  }
}

/// Grid: any number of work-groups up to tiles(); block: 64 x (a_producers + b_producers + consumers).
template <int kOpM, int kBLanes, int kOps>
__global__ __launch_bounds__(kMaxThreads) void skinny_gemm(_Float16* out, const uint8_t* a, const uint8_t* b,
                                                           const float* scale, float* workspace, Problem p) {
  using S = Shape<kOpM, kBLanes, kOps>;
  extern __shared__ __attribute__((aligned(16))) uint8_t memory[];
  const Lds lds{reinterpret_cast<uint32_t*>(memory), memory + S::flag_bytes(p.qsize)};
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  for (uint32_t f = threadIdx.x; f < p.qsize * S::kParts; f += blockDim.x) lds.flags[f] = 0;
  __syncthreads();

  if (wave < p.a_producers)
    produce<S, kOpM, kBLanes, true>(p, lds, a, wave, p.a_producers, lane);
  else if (wave < p.a_producers + p.b_producers)
    produce<S, kOpM, kBLanes, false>(p, lds, b, wave - p.a_producers, p.b_producers, lane);
  else
    consume<S, kOpM, kBLanes>(p, lds, out, scale, workspace, wave - p.a_producers - p.b_producers, lane);
}

constexpr int kReduceThreads = 256;

/// out[i] = fp16([out[i] +] scale (partials[0, i] + partials[1, i] + ...)) for i < count, in that order, in fp32.
/// Grid: ceil(count / kReduceThreads).
__global__ __launch_bounds__(kReduceThreads) inline void reduce_partials(_Float16* out, const float* partials,
                                                                         const float* scale, uint64_t count,
                                                                         uint32_t slices, bool accumulate) {
  const uint64_t i = uint64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  if (i >= count) return;
  float sum = partials[i];
  for (uint32_t s = 1; s < slices; ++s) sum += partials[s * count + i];
  sum *= *scale;
  out[i] = static_cast<_Float16>(accumulate ? static_cast<float>(out[i]) + sum : sum);
}

}  // namespace hf::skinny
