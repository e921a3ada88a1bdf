// Y[M, N] = X[M, K] W[N, K]^T for few rows of X on sm_90, W in MXFP4, X in bf16 or MXFP4: W is streamed once.
//
//            K, in steps of 128: 64 bytes of each row            A block, or a cluster of blocks that split K between them, has
//          0     1     2     3     4     5    ...                consecutive rows of W, as many as the others (+- 1), and visits
//        +-----+-----+-----+-----+-----+-----+--                 them in passes of TILES x 8. 2^part_shift warps share the steps
//  rows  | w 0 | w 1 | ... | w15 | w 0 | w 1 |    one pass       of a pass: warp w takes steps w, w + 2^part_shift, ...; with
//   of W |     |     |     |     |     |     |                   fewer than all warps, teams of them take different passes at once.
//        +-----+-----+-----+-----+-----+-----+--                 Lane 4 g + t copies chunk t of row g of each tile, a block of 32 k
//        | w 0 | ...                              next pass      with its own scale, into a ring of SLOTS steps (cp.async) that is
//                                                                not emptied between passes, and reads back only what it copied.
//
// Products: mma.m16n8k16 on f16, 16 rows of W by 8 of X, summed over all of K in float32. W: a code's sign and three bits are
// moved to where an f16 has its sign and the end of its exponent, which is the value less 2^14, e2m1's subnormal included (11
// instructions for 8 codes); a product by 2^(scale - 113) makes it exact, scale included, for scales of 105 to 128 (2^-22 to 2).
// Where another one is among a block's rows of W, each block of 32 k is summed alone and scaled in float32.
// X is made f16 once, in shared memory, times a power of two for each row.
// bf16: the power is of the row's first 8 values, whose largest becomes 16 to 32. Values down to 2^-21 of those 8 stay exact; smaller
// ones are rounded to multiples of 2^-28 of them. Where a row's f16 overflow, its power is taken from its largest value instead.
// MXFP4: all values are exact. The power is of the row's first scale, which fits where scales of blocks that are not all zeros are 2^-14
// to 2^10 of that one; else it is of the largest of them, which fits where the least is at least 2^-35 of it; a row that neither fits is
// zeros in shared memory, and in each step its blocks are summed alone, and scaled in float32 by both scales. A block whose scale is
// NaN is NaNs. All of that depends on a row alone.
//
// A step of a warp with 2 and 4 tiles takes 25 and 23 instructions for each 8 codes of a lane, 15 of them the conversion.
// Bytes moved: N K (1/2 + 1/32) for each ROWS rows of X; X per block from L2; 2 M N written. Bound: W over the memory's bandwidth.
#pragma once

#include "hipforge/device/vector.h"
#include "hipforge/module.h"
#include "../../mxfp8_gemm/nvidia/row_step.h"

namespace hf::code_stream {

using row_stream::added, row_stream::kBlock, row_stream::kStep, row_stream::kTileRows;
constexpr int kWarps = 16, kThreads = 32 * kWarps, kWarpsShift = 4;
constexpr int kLine = kStep / 2;        // bytes of a row of W in a step
constexpr int kTileBytes = 32 * 16;     // of a tile of W in a step: 16 of each lane
// Bytes of 8 rows of X in a step, as f16: chunk q of lane 4 g + t has 8 k of row g's block t.
constexpr int kFragment = 4 * 32 * 16;
constexpr uint32_t kLeastScale = 105, kMostScale = 128;
constexpr uint32_t kPower14 = 0x74007400;  // 2^14 twice in f16

struct Problem {
  void* out;
  const uint8_t *x, *xs, *w, *ws;
  int m, n, k;
  int x_pitch, w_pitch;  // bytes from row to row
  int part_shift;        // log2 of the warps that share the steps of K
  int base, more;        // rows of W of a cluster, and how many clusters have one more
};

/// Where things are in a block's shared memory: ring, the warps' sums, X's powers, sums that a cluster shares, X, scales of W.
template <int ROWS, int TILES>
struct Layout {
  static constexpr int kSlots = ROWS == 8 && TILES > 2 ? 3 : 2;
  static constexpr int kPassRows = TILES * kTileRows;
  static constexpr int kSlotBytes = TILES * kTileBytes;
  static constexpr int kPitch = kPassRows + 4;  // floats from column to column of a warp's sums: no bank is met twice
  static constexpr int kPart = kPitch * ROWS;
  static constexpr int kPartsAt = kWarps * kSlots * kSlotBytes;
  static constexpr int kPowersAt = kPartsAt + kWarps * kPart * int(sizeof(float));
  static constexpr int kSharedSumsAt = kPowersAt + 128;
  static constexpr int kStepBytes = ROWS / 8 * kFragment;
};

constexpr int steps_of(int64_t k) { return static_cast<int>((k + kStep - 1) / kStep); }

/// Bytes from row to row of W's scales in shared memory: whole 16 bytes of the source, wherever a row's run begins in them.
__host__ __device__ constexpr int scale_pitch(int steps) { return (4 * steps + 15 + 15) / 16 * 16; }

/// Bytes of shared memory of a block that has `rows` rows of W.
template <int ROWS, int TILES>
constexpr int64_t shared_bytes(int64_t rows, int64_t k, int64_t splits, int64_t sharers) {
  using L = Layout<ROWS, TILES>;
  const int64_t steps = (steps_of(k) + splits - 1) / splits;
  const int64_t sums = splits > 1 ? 2 * (kWarps / sharers) * L::kPassRows * ROWS * int64_t(sizeof(float)) : 0;
  return L::kSharedSumsAt + sums + steps * L::kStepBytes + rows * scale_pitch(static_cast<int>(steps));
}

/// Codes j and j + 4 of a word as f16, less a factor of 2^14.
__device__ __forceinline__ void pairs_of(uint32_t codes, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSize = 0x0e0e0e0e, kSign = 0x80808080, kHigh = 0xff00ff00;
  const uint32_t even = (codes << 1 & kSize) | (codes << 4 & kSign), odd = (codes >> 3 & kSize) | (codes & kSign);
  pairs[0] = __byte_perm(even, 0, 0x2404), pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & kHigh, pairs[3] = odd & kHigh;
}

__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

__device__ __forceinline__ uint32_t f16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float power_of(int exponent) { return __int_as_float((exponent + 127) << 23); }

/// sum 2^exponent, right where a factor alone would overflow.
__device__ __forceinline__ float scaled_by(float sum, int exponent) {
  const int half = exponent >> 1;
  return sum * power_of(half) * power_of(exponent - half);
}

/// Shared memory by its 32-bit address.
__device__ __forceinline__ uint4 load_chunk(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_byte(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ void copy_chunk(uint32_t to, uint64_t from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_size() {
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// What block `rank` of the cluster has where this one has `mine`.
__device__ __forceinline__ float load_from(const float* mine, int rank) {
  float value;
  asm volatile("{.reg .u32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.f32 %0, [at];}"
               : "=f"(value) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(mine))), "r"(rank) : "memory");
  return value;
}

/// Hides what a value is made of.
__device__ __forceinline__ void hidden(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void hidden(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

/// Activations in bf16: how a lane reads 32 k of a row, and makes them f16.
struct Bf16Rows {
  static constexpr int kBytes = 64, kAtOnce = 2;
  static constexpr bool kScaled = false;
  struct Part {
    uint4 chunks[4];
  };
  static __device__ __forceinline__ Part load(const uint8_t* from, const uint8_t*) {
    Part part;
#pragma unroll
    for (int q = 0; q < 4; ++q) part.chunks[q] = __ldg(reinterpret_cast<const uint4*>(from) + q);
    return part;
  }
  /// The largest exponent of 8 values.
  static __device__ __forceinline__ int most_of(const uint4& v) {
    constexpr uint32_t kSize = 0x7fff7fff;
    const uint32_t most = __vmaxu2(__vmaxu2(v.x & kSize, v.y & kSize), __vmaxu2(v.z & kSize, v.w & kSize));
    return static_cast<int>(max(most >> 16, most & 0xffff)) >> 7;
  }
  static __device__ __forceinline__ int most(const Part& part) {
    return max(max(most_of(part.chunks[0]), most_of(part.chunks[1])), max(most_of(part.chunks[2]), most_of(part.chunks[3])));
  }
  using First = uint4;
  static __device__ __forceinline__ First load_first(const uint8_t* row, const uint8_t*) {
    return __ldg(reinterpret_cast<const uint4*>(row));
  }
  /// The power of a row by its first values, and by its largest exponent: then the largest is 2^14 to 2^15.
  static __device__ __forceinline__ int first_power(const First& first) { return min(131 - most_of(first), 126); }
  static __device__ __forceinline__ int power(int most) { return min(141 - most, 126); }
  /// Puts a part times 2^power; false where a value is too large.
  static __device__ __forceinline__ bool put(const Part& part, int power, uint4* to) {
    const float by = power_of(power);
    const auto low = [&](uint32_t pair) { return __uint_as_float(pair << 16) * by; };
    const auto high = [&](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u) * by; };
    uint32_t most = 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4 v = part.chunks[q];
      const uint4 f = make_uint4(f16_pair(low(v.x), low(v.z)), f16_pair(high(v.x), high(v.z)), f16_pair(low(v.y), low(v.w)),
                                 f16_pair(high(v.y), high(v.w)));
      most = __vmaxu2(most, __vmaxu2(__vmaxu2(f.x & 0x7fff7fff, f.y & 0x7fff7fff), __vmaxu2(f.z & 0x7fff7fff, f.w & 0x7fff7fff)));
      to[q * 32] = f;
    }
    return max(most >> 16, most & 0xffff) < 0x7c00;
  }
};

/// Activations in e2m1 with scales.
struct E2m1Rows {
  static constexpr int kBytes = 16, kAtOnce = 4;
  static constexpr bool kScaled = true;
  static constexpr int kLeast = -23, kMost = 1, kMostTwice = 12;  // exponents of a block's f16 by one product, and by two
  struct Part {
    uint4 codes;
    int scale;
    __device__ __forceinline__ bool counts() const {
      return scale != 255 && ((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) != 0;
    }
  };
  static __device__ __forceinline__ Part load(const uint8_t* from, const uint8_t* scale) {
    return {__ldg(reinterpret_cast<const uint4*>(from)), __ldg(scale)};
  }
  using First = int;
  static __device__ __forceinline__ First load_first(const uint8_t*, const uint8_t* scales) { return __ldg(scales); }
  static __device__ __forceinline__ int first_power(First scale) { return min(max(118 - scale, -120), 126); }
  static __device__ __forceinline__ bool fits(int scale, int power) {
    return static_cast<unsigned>(scale - 127 + power - kLeast) <= kMost - kLeast;
  }
  /// The power of a row by its largest scale.
  static __device__ __forceinline__ int power(int most) { return min(127 + kMostTwice - most, 126); }
  static __device__ __forceinline__ bool fits_twice(int most, int least) { return most - least <= kMostTwice - kLeast; }

  static __device__ __forceinline__ uint4 times(uint32_t codes, uint32_t by) {
    uint32_t f[4];
    pairs_of(codes, f);
#pragma unroll
    for (int i = 0; i < 4; ++i) f[i] = product(f[i], by);
    return make_uint4(f[0], f[1], f[2], f[3]);
  }
  /// Puts a part times 2^power by one product; false where that is not exact.
  static __device__ __forceinline__ bool put(const Part& part, int power, uint4* to) {
    const int e = min(max(part.scale - 127 + power, kLeast), kMost);
    const uint32_t by = part.scale == 255 ? 0x7fff7fff : (e + 14 + 15) * 0x04000400u;
    to[0] = times(part.codes.x, by), to[32] = times(part.codes.y, by);
    to[64] = times(part.codes.z, by), to[96] = times(part.codes.w, by);
    return fits(part.scale, power) || !part.counts();
  }
  /// The same by two; zeros of a row that is summed `alone`.
  static __device__ __forceinline__ void put_twice(const Part& part, int power, bool alone, uint4* to) {
    const int e = min(max(part.scale - 127 + power, kLeast), kMostTwice);
    const uint32_t one = part.scale == 255 ? 0x7fff : alone ? 0 : e >= -14 ? (e + 15) << 10 : 1 << (e + 24);
    const uint32_t words[4] = {part.codes.x, part.codes.y, part.codes.z, part.codes.w}, by = one * 0x10001u;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint4 f = times(words[q], kPower14);
      to[q * 32] = make_uint4(product(f.x, by), product(f.y, by), product(f.z, by), product(f.w, by));
    }
  }
};

/// The products of a step.
template <int ROWS, int TILES>
struct Step {
  static constexpr int kHalves = ROWS / 8, kPairs = (TILES + 1) / 2;
  using Sums = float[kPairs][kHalves][4];  // lane 4 g + t: rows 16 i + g + 8 (c / 2) of W by rows 8 h + 2 t + c % 2 of X

  /// Adds a step's products: lane 4 g + t has block t of row g of each tile, times `power`; X's chunks q are x_of(h, q). Pairs of
  /// tiles from row `here` of the pass on are left out. AT_ONCE: how many chunks are unrolled.
  template <int AT_ONCE = 4, class XOf>
  static __device__ __forceinline__ void multiply(const uint4 (&codes)[TILES], const uint32_t (&power)[TILES], XOf x_of, int here,
                                                  Sums& sums) {
#pragma unroll AT_ONCE
    for (int q = 0; q < 4; ++q) {
      uint4 f[kHalves];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) f[h] = x_of(h, q);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (i > 0 && 2 * i * kTileRows >= here) break;
        uint32_t w[2][4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s)
          if (2 * i + s < TILES) {
            const uint4& of = codes[2 * i + s];
            pairs_of(q == 0 ? of.x : q == 1 ? of.y : q == 2 ? of.z : of.w, w[s]);
#pragma unroll
            for (int j = 0; j < 4; ++j) w[s][j] = product(w[s][j], power[2 * i + s]);
          }
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          const uint32_t low[4] = {w[0][0], w[1][0], w[0][1], w[1][1]}, high[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
          multiply_add(sums[i][h], low, f[h].x, f[h].y);
          multiply_add(sums[i][h], high, f[h].z, f[h].w);
        }
      }
    }
  }

  /// The same for any scales: each of the step's `blocks` blocks is summed alone, and scaled by 2^down_of(b, h, j) as well.
  template <class CodesOf, class XOf, class DownOf>
  static __device__ __forceinline__ void multiply_with_care(CodesOf codes_of, const uint32_t (&scale_at)[TILES], int blocks, int t,
                                                            XOf x_of, DownOf down_of, Sums& sums) {
#pragma unroll 1
    for (int b = 0; b < min(blocks, 4); ++b) {
      Sums d = {};
      uint4 mine[TILES];
      uint32_t ones[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) mine[i] = t == b ? codes_of(i) : make_uint4(0, 0, 0, 0), ones[i] = kPower14;
      multiply<1>(mine, ones, x_of, TILES * kTileRows, d);
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int down = down_of(b, h, j);
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            const int scale = load_byte(scale_at[i] + b - t);
            sums[i / 2][h][i % 2 * 2 + j] +=
                scale == 255 ? __int_as_float(0x7fc00000) : scaled_by(d[i / 2][h][i % 2 * 2 + j], scale - 127 + down);
          }
        }
    }
  }
};

template <int BITS, int ROWS, int TILES>
__global__ void __launch_bounds__(kThreads, 1) code_stream(const __grid_constant__ Problem p) {
  using L = Layout<ROWS, TILES>;
  using S = Step<ROWS, TILES>;
  using X = std::conditional_t<BITS == 4, E2m1Rows, Bf16Rows>;
  constexpr int kHalves = S::kHalves, kSlots = L::kSlots;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.y * ROWS, m = min(p.m - m0, ROWS);
  const int splits = cluster_size(), rank = cluster_rank(), group = blockIdx.x / splits;
  const int first = group * p.base + min(group, p.more), rows = p.base + (group < p.more);
  const int sharers = 1 << p.part_shift, part = warp & (sharers - 1), team = warp >> p.part_shift, teams = kWarps >> p.part_shift;
  const int steps = (p.k + kStep - 1) / kStep, most_steps = (steps + splits - 1) / splits;
  const int begin = rank * steps / splits, own = (rank + 1) * steps / splits - begin;  // this block's steps
  const int row_blocks = p.k / kBlock, blocks = min(4 * own, row_blocks - 4 * begin);  // of a row, and those of this block
  const int passes = (rows + L::kPassRows - 1) / L::kPassRows, rounds = (passes + teams - 1) >> (kWarpsShift - p.part_shift);

  const int shared_sums = teams * L::kPassRows * ROWS;  // of a round
  const int x_at = L::kSharedSumsAt + (splits > 1 ? 2 * shared_sums * int(sizeof(float)) : 0);
  const int scales_at = x_at + most_steps * L::kStepBytes, pitch = scale_pitch(most_steps);
  float* const parts = reinterpret_cast<float*>(shared + L::kPartsAt);
  int* const powers = reinterpret_cast<int*>(shared + L::kPowersAt);
  const uint32_t shared_at = static_cast<uint32_t>(__cvta_generic_to_shared(shared));

  // The next step of W to ask for. What is the same in every step is kept: the empty asm hides what it is made of.
  uint64_t w = reinterpret_cast<uint64_t>(p.w + size_t(first) * p.w_pitch);
  const int to_start = (begin + part) * kLine + 16 * t;
  int last_chunk = p.w_pitch - 16, stride = sharers * kLine, ask_end = (begin + own) * kLine;
  uint32_t ring = shared_at + warp * kSlots * L::kSlotBytes + 16 * lane;
  uint32_t scale_stride = 4 * sharers, x_stride = sharers * L::kStepBytes;
  asm volatile("" : "+l"(w), "+r"(last_chunk), "+r"(stride), "+r"(ask_end), "+r"(ring), "+r"(scale_stride), "+r"(x_stride));
  int ask_pass = part < own ? team : passes, ask_at = to_start, row_at[TILES];
  const auto find_rows = [&] {  // rows past the last one repeat it
#pragma unroll
    for (int i = 0; i < TILES; ++i) row_at[i] = min(ask_pass * L::kPassRows + i * kTileRows + g, rows - 1) * p.w_pitch;
  };
  const auto ask = [&](uint32_t to) {
    if (ask_pass >= passes) return;
    const int at = min(ask_at, last_chunk);  // past K, where X is 0, any codes will do
#pragma unroll
    for (int i = 0; i < TILES; ++i) copy_chunk(to + i * kTileBytes, w + static_cast<uint32_t>(row_at[i] + at));
    if ((ask_at += stride) >= ask_end) ask_at = to_start, ask_pass += teams, find_rows();
  };
  find_rows();
  ask(ring);

  // The scales: of each row the 16-byte pieces that its blocks' are in, a power of two of lanes for a row.
  const int lanes_shift = min(5, 32 - __clz(pitch / 16 - 1)), rows_at_once = kThreads >> lanes_shift;
  const int my_row = threadIdx.x >> lanes_shift, my_piece = 16 * (threadIdx.x & ((1 << lanes_shift) - 1));
  const size_t end = size_t(p.n) * row_blocks;
  const auto run_of = [&](int row) { return size_t(first + row) * row_blocks + 4 * begin; };
  for (int row = my_row; row < rows; row += rows_at_once) {
    const size_t run = run_of(row), from = run & ~size_t(15);
    for (int at = my_piece; from + at < run + blocks; at += 16 * 32)
      copy_async(shared + scales_at + row * pitch + at, p.ws + from + at, static_cast<int>(min(end - from - at, size_t(16))));
  }
  commit_copies();
#pragma unroll
  for (int i = 1; i < kSlots - 1; ++i) ask(ring + i * L::kSlotBytes), commit_copies();
  let_next_start();
  wait_for_predecessor();  // from here on, X may be read and the output written

  // X: a lane makes 32 k at a time of one row, a warp 4 blocks of 8 rows, whose stores meet no bank twice, or more of fewer rows.
  const int rows_shift = m > 4 ? 3 : m > 2 ? 2 : m - 1, halves_shift = m > 8;
  const int x_row = (warp & halves_shift) * 8 + (lane >> 2 & ((1 << rows_shift) - 1));
  const int first_step = (warp >> halves_shift << (3 - rows_shift)) + (lane >> (2 + rows_shift));
  const int steps_by = kWarps >> halves_shift << (3 - rows_shift), first_block = x_row < m ? 4 * first_step + t : blocks;
  const auto row_of = [&](int row) { return p.x + size_t(m0 + row) * p.x_pitch; };
  const auto scales_of = [&](int row) { return X::kScaled ? p.xs + size_t(m0 + row) * row_blocks : nullptr; };
  const uint8_t* x_from = row_of(min(x_row, m - 1));
  const uint8_t* xs_from = scales_of(min(x_row, m - 1));
  asm volatile("" : "+l"(x_from), "+l"(xs_from));
  const auto load = [&](int block) { return X::load(x_from + (4 * begin + block) * X::kBytes, xs_from + 4 * begin + block); };
  const auto place = [&](int block) {
    return reinterpret_cast<uint4*>(shared + x_at + block / 4 * L::kStepBytes + x_row / 8 * kFragment) + x_row % 8 * 4 + t;
  };
  const auto each_block = [&](auto given) {
    for (int block = first_block; block < blocks; block += 4 * steps_by) given(block);
  };
  if (blocks < 4 * own && threadIdx.x < 8 * 4 * kHalves && blocks % 4 <= t)  // blocks past K are 0
#pragma unroll
    for (int q = 0; q < 4; ++q)
      reinterpret_cast<uint4*>(shared + x_at + (own - 1) * L::kStepBytes + threadIdx.x / 32 * kFragment)[lane + q * 32] = {};
  const typename X::First first_of_row = X::load_first(x_from, xs_from);
  bool fits = true;
  for (int block = first_block; block < blocks; block += X::kAtOnce * 4 * steps_by) {  // nothing waits before all are asked for
    typename X::Part some[X::kAtOnce];
#pragma unroll
    for (int j = 0; j < X::kAtOnce; ++j)
      if (const int at = block + j * 4 * steps_by; at < blocks) some[j] = load(at);
    typename X::First first = first_of_row;
    hidden(first);  // or the compiler waits for it before the loads
#pragma unroll
    for (int j = 0; j < X::kAtOnce; ++j)
      if (const int at = block + j * 4 * steps_by; at < blocks) fits &= X::put(some[j], X::first_power(first), place(at));
  }
  const int first_power = X::first_power(first_of_row);
  if (first_block == 0) powers[x_row] = first_power;

  // Whether all scales of W are usual; those of blocks past K, which have no products, are made so.
  wait_copies<kSlots - 2>();
  uint32_t other = 0, none = 0xffffffffu;
  for (int row = my_row; row < rows; row += rows_at_once)
    for (int at = my_piece; at < pitch; at += 16 * 32) {
      const int low = static_cast<int>(run_of(row) & 15) - at, high = low + blocks;  // where the row's are
      uint32_t* const words = reinterpret_cast<uint32_t*>(shared + scales_at + row * pitch + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t kept = 0xffffffffu;
        if (low > 4 * j) kept &= low - 4 * j >= 4 ? 0 : 0xffffffffu << 8 * (low - 4 * j);
        if (high < 4 * j + 4) kept &= high <= 4 * j ? 0 : 0xffffffffu >> 8 * (4 * j + 4 - high);
        const uint32_t word = (words[j] & kept) | (0x71717171u & ~kept), less = word - 0x01010101u;
        if (kept != 0xffffffffu) words[j] = word;
        other |= less ^ 0x60606060u, none &= less | less << 1;  // 104 to 127: 011 and one of the next two bits
      }
    }
  static_assert(kLeastScale == 104 + 1 && kMostScale == 127 + 1);
  const bool mine_usual = (other & 0xe0e0e0e0u) == 0 && (none & 0x10101010u) == 0x10101010u;
  const bool fast = __syncthreads_and(mine_usual && fits), usual = fast || __syncthreads_and(mine_usual);
  uint32_t alone = 0;  // the rows of X that are summed alone, a bit each
  if (!fast && __syncthreads_or(!fits)) {
    int* const most = reinterpret_cast<int*>(parts);  // of the rows: until there are sums
    if constexpr (X::kScaled) {
      int* const depth = most + ROWS;  // 255 less the least scale
      uint32_t* const rows_alone = reinterpret_cast<uint32_t*>(powers + ROWS);
      if (threadIdx.x < 2 * ROWS) most[threadIdx.x] = -1;
      if (threadIdx.x == 0) *rows_alone = 0;
      __syncthreads();
      each_block([&](int block) {
        if (const typename X::Part part = load(block); part.counts())
          atomicMax(most + x_row, part.scale), atomicMax(depth + x_row, 255 - part.scale);
      });
      __syncthreads();
      const int largest = most[x_row], least = 255 - depth[x_row], power = X::power(largest);
      const bool zeros = !X::fits_twice(largest, least);
      if (largest >= 0 && !(X::fits(largest, first_power) && X::fits(least, first_power))) {
        each_block([&](int block) { X::put_twice(load(block), power, zeros, place(block)); });
        if (first_block == 0) {
          powers[x_row] = zeros ? 0 : power;
          if (zeros) atomicOr(rows_alone, 1u << x_row);
        }
      }
      __syncthreads();
      alone = *rows_alone;
    } else {
      // A row that is too large in f16 is one with a value of 2^16: its power is of its largest value.
      if (threadIdx.x < ROWS) most[threadIdx.x] = 0;
      __syncthreads();
      each_block([&](int block) { atomicMax(most + x_row, X::most(load(block))); });
      __syncthreads();
      if (most[x_row] + first_power > 127 + 15) {
        const int power = X::power(most[x_row]);
        each_block([&](int block) { X::put(load(block), power, place(block)); });
        if (first_block == 0) powers[x_row] = power;
      }
      __syncthreads();
    }
  }

  int down[kHalves][2];
#pragma unroll
  for (int h = 0; h < kHalves; ++h)
#pragma unroll
    for (int j = 0; j < 2; ++j) down[h][j] = -powers[min(8 * h + 2 * t + j, m - 1)];

  // The warps of a team meet, also without a pass in the last round (racecheck wants as many meetings of each); where a cluster
  // shares K, those of all teams.
  const bool whole = splits > 1;
  const auto meet = [&] {
    if (whole) __syncthreads();
    else if (sharers == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * sharers) : "memory");
  };
  constexpr int kPassSums = L::kPassRows * ROWS;

  uint32_t slot = ring, free_slot = ring + (kSlots - 1) * L::kSlotBytes;
  for (int round = 0; round < rounds; ++round) {
    const int pass = round * teams + team, pass_rows = rows - pass * L::kPassRows;
    uint32_t scale[TILES], x = shared_at + x_at + part * L::kStepBytes + 16 * lane;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int row = min(pass * L::kPassRows + i * kTileRows + g, rows - 1);
      scale[i] = shared_at + scales_at + row * pitch + static_cast<uint32_t>(run_of(row) & 15) + 4 * part + t;
    }
    typename S::Sums sums = {};
#pragma unroll 1
    for (int step = pass_rows > 0 ? part : own; step < own; step += sharers) {
      ask(free_slot), commit_copies();
      wait_copies<kSlots - 1>();
      uint4 codes[TILES];
#pragma unroll
      for (int i = 0; i < TILES; ++i) codes[i] = load_chunk(slot + i * kTileBytes);
      free_slot = slot;
      slot = slot + L::kSlotBytes == ring + kSlots * L::kSlotBytes ? ring : slot + L::kSlotBytes;
      const auto x_of = [&](int h, int q) { return load_chunk(x + h * kFragment + q * 512); };
      const int step_block = 4 * (begin + step);
      if (usual) {
        uint32_t power[TILES];
#pragma unroll
        for (int i = 0; i < TILES; ++i) power[i] = load_byte(scale[i]) * 0x04000400u - 98u * 0x04000400u;
        S::multiply(codes, power, x_of, pass_rows, sums);
      } else {
        S::multiply_with_care([&](int i) { return codes[i]; }, scale, row_blocks - step_block, t, x_of, [&](int, int h, int j) { return down[h][j]; }, sums);
      }
      if constexpr (X::kScaled)
        if (alone != 0) {
          const auto codes_of = [&](int h, int q) {  // word q of block t of row g + 8 h
            if ((alone >> (g + 8 * h) & 1) == 0 || step_block + t >= row_blocks) return make_uint4(0, 0, 0, 0);
            const uint8_t* const at = row_of(g + 8 * h) + (step_block + t) * X::kBytes + 4 * q;
            return X::times(__ldg(reinterpret_cast<const uint32_t*>(at)), kPower14);
          };
          const auto scale_of = [&](int b, int h, int j) {
            return __ldg(scales_of(min(8 * h + 2 * t + j, m - 1)) + step_block + b) - 127;
          };
          const auto again = [&](int i) { return load_chunk(free_slot + i * kTileBytes); };  // no registers keep W's codes
          S::multiply_with_care(again, scale, row_blocks - step_block, t, codes_of, scale_of, sums);
        }
#pragma unroll
      for (int i = 0; i < TILES; ++i) scale[i] += scale_stride;
      x += x_stride;
    }

    float* const mine = parts + warp * L::kPart;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float sum = sums[i / 2][h][i % 2 * 2 + j];
          mine[(8 * h + 2 * t + j) * L::kPitch + i * kTileRows + g] = usual ? sum * power_of(down[h][j]) : sum;
        }
    meet();
    // Two buffers in turn: a block may be ahead of those that read its sums.
    float* const sums_here = reinterpret_cast<float*>(shared + L::kSharedSumsAt) + (round & 1) * shared_sums;
    const auto give = [&](int e, float sum) {
      const int at = e % kPassSums, column = at / L::kPassRows;
      const int row = (round * teams + e / kPassSums) * L::kPassRows + at % L::kPassRows;
      if (column < m && row < rows) static_cast<dev::bf16*>(p.out)[size_t(m0 + column) * p.n + first + row] = dev::bf16(sum);
    };
#pragma unroll 1
    for (int i = whole ? threadIdx.x : threadIdx.x & (32 * sharers - 1); i < (whole ? shared_sums : kPassSums);
         i += whole ? kThreads : 32 * sharers) {
      const int e = whole ? i : team * kPassSums + i;
      const int at = e % kPassSums, column = at / L::kPassRows;
      if (column >= m) continue;
      const float* const from = parts + (e / kPassSums << p.part_shift) * L::kPart;
      const float sum = added<L::kPart>(from + column * L::kPitch + at % L::kPassRows, p.part_shift);
      if (whole) sums_here[e] = sum;
      else give(e, sum);
    }
    if (!whole) {
      meet();  // the warps' sums have been read
    } else {
      meet_cluster();
#pragma unroll 1
      for (int e = rank * kThreads + threadIdx.x; e < shared_sums; e += splits * kThreads) {
        float sum = 0;
#pragma unroll 1
        for (int r = 0; r < splits; ++r) sum += load_from(sums_here + e, r);
        give(e, sum);
      }
    }
  }
  if (whole) meet_cluster();  // nobody reads from a block that has ended
}

}  // namespace hf::code_stream
