// Where the kernel that streams rows of W gets X from: MX-FP8 codes in memory, or what it makes itself in shared memory.
//
// A norm and its quantisation, or SwiGLU and its, need one wave of loads, a meeting and a few instructions an element: every block
// does them for all rows of X while the first steps of W are under way, and no launch is between. Each block then reads X's
// source from L2, which is 4 M K bytes for either.
//
// The arithmetic is that of rmsnorm_fp8.cu and swiglu_fp8.cu, in their order: the products are those of two launches, bit for bit.
#pragma once

#include "hipforge/device/element.h"
#include "hipforge/device/math.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/swiglu.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"
#include "../row_step.h"

namespace hf::made_stream {

using row_stream::chunk_at, row_stream::kBlock, row_stream::kLineChunks, row_stream::kStep, row_stream::kTileRows;

constexpr int kChunk = 8;  // elements of a 16-byte access
using Chunk = dev::u32x4;  // of them: words, which the compiler moves whole

/// Elements 2 i and 2 i + 1 of a chunk.
__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) { return dev::detail::rounded_pair(dev::bf16{}, low, high); }

/// X [M, K] in shared memory. Rows are apart by a little more than K, so that those of eight lanes meet no bank twice.
struct SharedX {
  uint8_t *codes, *scales;
  int pitch, scale_pitch;

  static constexpr int kCodesApart = 32, kScalesApart = 4;
  __host__ __device__ static constexpr int bytes(int m, int k) { return m * (k + kCodesApart + k / kBlock + kScalesApart); }
  /// APART: rows have more than their K; otherwise they are one long row.
  template <bool APART = true>
  __device__ __forceinline__ static SharedX at(uint8_t* from, int m, int k) {
    const int pitch = k + (APART ? kCodesApart : 0);
    return {from, from + m * pitch, pitch, k / kBlock + (APART ? kScalesApart : 0)};
  }

  /// Stores a row's chunk, quantised, where this lane has one: the four lanes of a block of 32 have one or not as one. Every lane
  /// must be active.
  __device__ __forceinline__ void store(int row, int chunk, const float (&values)[kChunk], bool has) const {
    float largest = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < kChunk; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(values[i])));
    uint32_t amax = __float_as_uint(largest);
#pragma unroll
    for (int distance = 1; distance < kBlock / kChunk; distance *= 2)
      amax = dev::larger(amax, __shfl_xor_sync(~0u, amax, distance));
    const uint32_t byte = dev::e4m3_block_scale(amax);
    const float inverse = dev::e8m0_inverse(byte);
    dev::u32x2 of;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // within e4m3's range
      const float* const four = values + 4 * i;
      of[i] = dev::e4m3_codes(four[0] * inverse, four[1] * inverse, four[2] * inverse, four[3] * inverse);
      if (byte == kE8m0Nan) of[i] = dev::kE4m3Nan * 0x01010101u;
    }
    if (!has) return;
    *reinterpret_cast<dev::u32x2*>(codes + row * pitch + chunk * kChunk) = of;
    if (chunk % (kBlock / kChunk) == 0) scales[row * scale_pitch + chunk / (kBlock / kChunk)] = static_cast<uint8_t>(byte);
  }
};

/// The row of element `at` of m rows of `of_row`. One row needs no division, which every thread would make several times.
__device__ __forceinline__ int row_of(int at, int of_row, int m) { return m == 1 ? 0 : at / of_row; }

/// X as codes and scales in memory, of at most MOST rows, which one wave of loads brings to shared memory.
template <int MOST>
struct CopiedOf {
  static constexpr bool kMade = true, kPolls = false;
  static constexpr int kMostRows = MOST;
  static constexpr int kAhead = 8;
  static constexpr int kPiece = 16, kAtOnce = 4;  // bytes of an access; of a thread

  const uint8_t *x, *xs;

  __host__ static constexpr int64_t most_bytes(int threads) { return int64_t{kAtOnce} * kPiece * threads; }

  struct Weights {};
  struct Loaded {
    uint4 codes[kAtOnce];
    uint32_t scales;  // of a step
  };
  template <int THREADS>
  __device__ __forceinline__ Weights ask_weights(int, int) const { return {}; }

  template <int THREADS>
  __device__ __forceinline__ Loaded load(int m, int k) const {
    const int pieces = m * (k / kPiece), word = THREADS - 1 - threadIdx.x;
    Loaded loaded = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = i * THREADS + threadIdx.x;
      if (at < pieces) loaded.codes[i] = reinterpret_cast<const uint4*>(x)[at];
    }
    if (word < m * (k / kStep)) loaded.scales = reinterpret_cast<const uint32_t*>(xs)[word];
    return loaded;
  }
  template <int THREADS>
  __device__ __forceinline__ void make(const SharedX& to, const Weights&, const Loaded& loaded, int m, int k, float*) const {
    const int of_row = k / kPiece, words = k / kStep, word = THREADS - 1 - threadIdx.x;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = i * THREADS + threadIdx.x, row = row_of(at, of_row, m);
      if (at < m * of_row) *reinterpret_cast<uint4*>(to.codes + row * to.pitch + (at - row * of_row) * kPiece) = loaded.codes[i];
    }
    const int row = row_of(word, words, m);
    if (word < m * words) *reinterpret_cast<uint32_t*>(to.scales + row * to.scale_pitch + (word - row * words) * 4) = loaded.scales;
  }
};

using Copied = CopiedOf<8>;

/// X as codes and scales in memory, of at most MOST rows.
template <int MOST>
struct CodesOf {
  static constexpr bool kMade = false, kPolls = false;
  static constexpr int kMostRows = MOST;
  static constexpr int kAhead = 8;  // more than a ring has
};

using Codes = CodesOf<8>;

/// X = the RMS norm of the sum x + residual, times weight. Each row's sum is also stored, by one block. MOST: chunks of a thread, of
/// all rows; with one there is half of the arithmetic, which all warps do before they can multiply.
template <int MOST>
struct NormOf {
  static constexpr bool kMade = true, kPolls = false;
  static constexpr int kAhead = 1;  // slots of a ring that are asked for before x
  static constexpr int kMost = MOST, kMostRows = MOST;

  const dev::bf16 *x, *residual, *weight;
  dev::bf16* sum;  // other memory than x and residual
  float epsilon, offset;

  struct Weights {
    Chunk of[kMost];
  };
  struct Loaded {
    Chunk x[kMost], residual[kMost];
  };

  /// A thread's chunk s is chunk s % of_row THREADS + threadIdx.x of row s / of_row.
  template <int THREADS>
  __device__ __forceinline__ static int of_row(int k) { return MOST > 1 && k / kChunk > THREADS ? 2 : 1; }
  template <int THREADS>
  __device__ __forceinline__ static int chunk_of(int s, int k) { return (of_row<THREADS>(k) == 2 ? s * THREADS : 0) + threadIdx.x; }
  template <int THREADS>
  __device__ __forceinline__ static int row_of(int s, int k) { return of_row<THREADS>(k) == 2 ? 0 : s; }
  template <int THREADS>
  __device__ __forceinline__ static bool has(int s, int m, int k) {
    return row_of<THREADS>(s, k) < m && chunk_of<THREADS>(s, k) < k / kChunk;
  }

  template <int THREADS>
  __device__ __forceinline__ Weights ask_weights(int m, int k) const {
    Weights weights = {};
#pragma unroll
    for (int s = 0; s < kMost; ++s)
      if (has<THREADS>(s, m, k)) weights.of[s] = reinterpret_cast<const Chunk*>(weight)[chunk_of<THREADS>(s, k)];
    return weights;
  }

  template <int THREADS>
  __device__ __forceinline__ Loaded load(int m, int k) const {
    Loaded loaded = {};
#pragma unroll
    for (int s = 0; s < kMost; ++s)
      if (has<THREADS>(s, m, k)) {
        const size_t at = size_t(row_of<THREADS>(s, k)) * (k / kChunk) + chunk_of<THREADS>(s, k);
        loaded.x[s] = reinterpret_cast<const Chunk*>(x)[at];
        loaded.residual[s] = reinterpret_cast<const Chunk*>(residual)[at];
      }
    return loaded;
  }

  template <int THREADS>
  __device__ __forceinline__ void make(const SharedX& to, const Weights& weights, Loaded& loaded, int m, int k, float* meeting) const {
    make_each<THREADS>(weights, loaded, m, k, meeting, 0,
                       [&](int row, int chunk, const float (&y)[kChunk], bool has) { to.store(row, chunk, y, has); });
  }

  /// Calls take(row, chunk, y, has) for each chunk of the result, rounded to bf16: whole warps, of which lanes may have none.
  /// `meeting`: kMost floats for each warp; block number `storing` stores the sum of row 0.
  template <int THREADS, class Take>
  __device__ __forceinline__ void make_each(const Weights& weights, const Loaded& loaded, int m, int k, float* meeting,
                                            uint32_t storing, const Take& take) const {
    constexpr int kWarps = THREADS / 32;
    float squares[kMost] = {}, own[kMost][kChunk];
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      Chunk rounded;
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        const uint32_t x = loaded.x[s][i], more = loaded.residual[s][i];
        rounded[i] = rounded_pair(low_of(x) + low_of(more), high_of(x) + high_of(more));
        own[s][2 * i] = low_of(rounded[i]), own[s][2 * i + 1] = high_of(rounded[i]);
      }
      if (has<THREADS>(s, m, k) && blockIdx.x == (storing + row_of<THREADS>(s, k)) % gridDim.x)
        reinterpret_cast<Chunk*>(sum)[size_t(row_of<THREADS>(s, k)) * (k / kChunk) + chunk_of<THREADS>(s, k)] = rounded;
    }
    const bool one_row = of_row<THREADS>(k) == 2;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      squares[0] = __builtin_fmaf(own[0][i], own[0][i], squares[0]);
      if constexpr (MOST > 1) {
        const float second = own[1][i];
        if (one_row) squares[0] = __builtin_fmaf(second, second, squares[0]);
        squares[1] = __builtin_fmaf(second, second, squares[1]);
      }
    }
#pragma unroll
    for (int row = 0; row < kMost; ++row) {
      const float of_warp = dev::wave_sum(squares[row]);
      if (threadIdx.x % 32 == 0) meeting[row * kWarps + threadIdx.x / 32] = of_warp;
    }
    __syncthreads();
    float factors[kMost];
#pragma unroll
    for (int row = 0; row < kMost; ++row) {
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += meeting[row * kWarps + i];
      factors[row] = dev::reciprocal_root(total / static_cast<float>(k) + epsilon);
    }
#pragma unroll
    for (int s = 0; s < kMost; ++s) {
      const int row = row_of<THREADS>(s, k), chunk = chunk_of<THREADS>(s, k);
      if (row >= m || chunk / 32 * 32 >= k / kChunk) continue;
      const float factor = one_row ? factors[0] : factors[s];
      float y[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        const uint32_t w = weights.of[s][i];
        const float n[2] = {own[s][2 * i] * factor, own[s][2 * i + 1] * factor};
        uint32_t pair;
        if (offset != 0.f) {
          pair = rounded_pair(n[0] * (offset + low_of(w)), n[1] * (offset + high_of(w)));
        } else {
          const uint32_t normed = rounded_pair(n[0], n[1]);
          pair = rounded_pair(low_of(normed) * low_of(w), high_of(normed) * high_of(w));
        }
        y[2 * i] = low_of(pair), y[2 * i + 1] = high_of(pair);
      }
      take(row, chunk, y, has<THREADS>(s, m, k));
    }
  }
};

using Norm = NormOf<2>;

/// X = SwiGLU of gate_up [M, 2 K], gate in its first K columns.
struct Swiglu {
  static constexpr bool kMade = true, kPolls = false;
  static constexpr int kMostRows = 4;
  static constexpr int kAhead = 1;
  static constexpr int kAtOnce = 4;  // chunks of a thread

  const dev::bf16* gate_up;
  Activation activation;

  struct Weights {};
  struct Loaded {
    Chunk gate[kAtOnce], up[kAtOnce];
  };
  template <int THREADS>
  __device__ __forceinline__ Weights ask_weights(int, int) const { return {}; }

  template <int THREADS>
  __device__ __forceinline__ Loaded load(int m, int k, int base = 0) const {
    const int of_row = k / kChunk, chunks = m * of_row;
    const Chunk* const from = reinterpret_cast<const Chunk*>(gate_up);
    Loaded loaded = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = base + i * THREADS + threadIdx.x, row = row_of(at, of_row, m);
      if (at < chunks) loaded.gate[i] = from[at + row * of_row], loaded.up[i] = from[at + (row + 1) * of_row];
    }
    return loaded;
  }

  template <int THREADS>
  __device__ __forceinline__ void make(const SharedX& to, const Weights&, Loaded& loaded, int m, int k, float*) const {
    const int of_row = k / kChunk, chunks = m * of_row;
    for (int base = 0;;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = base + i * THREADS + threadIdx.x, row = row_of(at, of_row, m);
        if (at / 32 * 32 >= chunks) continue;  // whole warps
        float values[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          const auto of = [&](const Chunk& from) { return j % 2 ? high_of(from[j / 2]) : low_of(from[j / 2]); };
          values[j] = dev::swiglu(of(loaded.gate[i]), of(loaded.up[i]), activation);
        }
        to.store(row, at - row * of_row, values, at < chunks);
      }
      if ((base += kAtOnce * THREADS) >= chunks) return;
      loaded = load<THREADS>(m, k, base);
    }
  }
};

}  // namespace hf::made_stream
