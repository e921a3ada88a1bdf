// A step of the kernels that stream rows of W past a few rows of X: 128 k of TILES x 8 rows of W, which wait in shared memory,
// times ROWS rows of X, which a warp has in registers.
//
// Products: mma.m16n8k16 on f16, to which e4m3 converts without loss. The 16 rows are X's, the 8 columns rows of W. Of a block
// of 32 k, which has one scale in each operand, lane 4 g + t holds bytes 8 t to 8 t + 7 of rows g: two instructions, whose order
// of k is the same in both operands. Each block is summed from zero in float32 and then multiplied by 2^(sx + sw - 254): the four
// bytes of a step are added at once, and a byte is a float's exponent. Bytes outside 64 to 191, rare, are scaled one by one.
// W's elements are a class: E4m3 here, E2m1 of the grouped MXFP4 GEMM.
// Lane 4 g + t ends up with the sums of X's rows g + 8 h and W's rows 8 i + 2 t + j.
#pragma once

#include <type_traits>

#include "stream.h"

namespace hf::row_stream {

constexpr int kStep = 128;    // k of a step: one line of each row of W
constexpr int kTileRows = 8;  // rows of W in a tile
constexpr int kBlock = 32;    // k of an e8m0 scale
constexpr int kFewRows = 4;   // of X: as many as half of an instruction's columns
constexpr int kLineChunks = kStep / 16;
static_assert(kStep % kBlock == 0 && kStep / kBlock == 4, "the scales of a step are one word");

/// Where 16 bytes of a row's line are. Chunks are swapped in pairs by the row, so that the 8-byte loads of half a warp meet no
/// bank twice.
__device__ __forceinline__ int chunk_at(int row, int chunk) { return row * kStep + ((chunk ^ ((row & 3) << 1)) * 16); }
static_assert(32 / kLineChunks == 4, "a copy of a warp has four rows, whose swap is that of the first");

// Top bits of the bytes are set where a byte is in 64..191: then a sum of two, less 63 + 64, fits in a byte.
__device__ __forceinline__ uint32_t in_range(uint32_t scales) { return scales ^ (scales << 1); }

template <int BYTE>
__device__ __forceinline__ float power_of(uint32_t exponents) {
  const uint32_t bits = BYTE == 3 ? exponents >> 1 : exponents << (23 - 8 * BYTE);
  return __uint_as_float(bits & 0x7f800000u);
}

/// The four scale bytes at `from` of a row, of the blocks from k0 on; those past K are 1. ALIGNED: K is a multiple of a step.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t scale_word(const uint8_t* from, int k0, int k) {
  if (ALIGNED) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) word |= uint32_t(k0 + b * kBlock < k ? from[b] : 127) << (8 * b);
  return word;
}

/// The same in shared memory.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t shared_scales(uint32_t from, int k0, int k) {
  if (ALIGNED) return load_shared<uint32_t>(from);
  uint32_t word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    uint32_t byte = 127;
    if (k0 + b * kBlock < k) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from + b) : "memory");
    word |= byte << (8 * b);
  }
  return word;
}

/// X's part of a step: as it comes from memory, and as the instructions take it.
template <int ROWS>
struct Part {
  static constexpr int kHalves = ROWS / 8;           // groups of 8 rows of X
  static constexpr int kGroups = (kHalves + 1) / 2;  // instructions' 16 rows of X

  uint2 bytes[kHalves][4];
  uint32_t scales[kHalves];

  /// Loads from each half's row at `at` bytes, for this lane's t; k0 is the step's first k.
  template <bool ALIGNED>
  __device__ __forceinline__ void load(const uint8_t* const (&x)[kHalves], const uint8_t* const (&xs)[kHalves], int at, int k0,
                                       int k) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int b = 0; b < 4; ++b)
        bytes[h][b] = ALIGNED || k0 + b * kBlock < k ? __ldg(reinterpret_cast<const uint2*>(x[h] + at + b * kBlock))
                                                     : make_uint2(0, 0);
      scales[h] = scale_word<ALIGNED>(xs[h] + at / kBlock, k0, k);
    }
  }
};

/// Where this lane reads block b of a tile's row g.
struct LaneOfW {
  int at[4];
  __device__ __forceinline__ LaneOfW(int g, int t) {
#pragma unroll
    for (int b = 0; b < 4; ++b) at[b] = chunk_at(g, 2 * b + t / 2) + t % 2 * 8;
  }
};

/// W's elements: how a step of a row lies in shared memory, and becomes f16.
struct E4m3 {
  using Lane = LaneOfW;
  static constexpr int kLine = kStep, kLaneBytes = 8;  // of a row's step; of a lane's eight k
  static constexpr uint32_t kLessened = 0;             // its f16 are its values over 2^kLessened
  static __device__ __forceinline__ int chunk_at(int row, int chunk) { return row_stream::chunk_at(row, chunk); }
  /// Eight k of X as bytes, in the order of halves().
  static __device__ __forceinline__ uint2 ordered(uint2 bytes) { return bytes; }
  /// Top bits where scales, and what a lessened W needs beyond them, are in range.
  static __device__ __forceinline__ uint32_t usual(uint32_t scales) { return in_range(scales); }
  static __device__ __forceinline__ void halves(const uint8_t* from, uint32_t (&w)[4]) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(from);
    halves_of(bytes.x, w[0], w[1]);
    halves_of(bytes.y, w[2], w[3]);
  }
};

template <int ROWS, class W = E4m3>
struct Factors {
  static constexpr int kHalves = Part<ROWS>::kHalves, kGroups = Part<ROWS>::kGroups;

  uint32_t a[4][kGroups][2][4], scales[kHalves], usual;

  __device__ __forceinline__ explicit Factors(const Part<ROWS>& part) : usual(0x80808080u) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      scales[h] = part.scales[h];
      usual &= in_range(scales[h]) & in_range(scales[h] + 0x01010101u);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint2 bytes = W::ordered(part.bytes[h][b]);
        halves_of(bytes.x, a[b][h / 2][0][h % 2], a[b][h / 2][0][h % 2 + 2]);
        halves_of(bytes.y, a[b][h / 2][1][h % 2], a[b][h / 2][1][h % 2 + 2]);
      }
    }
    if (kHalves == 1) {
#pragma unroll
      for (int b = 0; b < 4; ++b) a[b][0][0][1] = a[b][0][0][3] = a[b][0][1][1] = a[b][0][1][3] = 0;
    }
  }
};

/// Adds the products of a step. `here` has W's lines, sw the scale words of rows 8 i + 2 t + j; fast where every scale is usual.
template <int ROWS, int TILES, class W = E4m3>
__device__ __forceinline__ void multiply_step(const uint8_t* here, const typename W::Lane& lane, const Factors<ROWS, W>& x,
                                              const uint32_t (&sw)[TILES][2], bool fast,
                                              float (&sums)[TILES][Part<ROWS>::kGroups][4]) {
  constexpr int kHalves = Part<ROWS>::kHalves, kGroups = Part<ROWS>::kGroups;
  constexpr uint32_t kBias = (64 - W::kLessened) * 0x01010101u;
  // Sums of one block of 32 k of tile i.
  const auto multiply = [&](int i, int b, float (&d)[kGroups][4]) {
    uint32_t w[4];
    W::halves(here + i * kTileRows * W::kLine + lane.at[b], w);
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) d[m][c] = 0;
      multiply_add(d[m], x.a[b][m][0], w[0], w[1]);
      multiply_add(d[m], x.a[b][m][1], w[2], w[3]);
    }
  };
  if (fast) {
    uint32_t exponents[TILES][kHalves][2];
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) exponents[i][h][j] = (sw[i][j] - kBias) + (x.scales[h] - 0x3f3f3f3fu);
    const auto block_of = [&](auto which) {
      constexpr int b = decltype(which)::value;
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float d[kGroups][4];
        multiply(i, b, d);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& sum = sums[i][h / 2][h % 2 * 2 + j];
            sum = fmaf(d[h / 2][h % 2 * 2 + j], power_of<b>(exponents[i][h][j]), sum);
          }
      }
    };
    block_of(std::integral_constant<int, 0>{}), block_of(std::integral_constant<int, 1>{});
    block_of(std::integral_constant<int, 2>{}), block_of(std::integral_constant<int, 3>{});
  } else {
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float d[kGroups][4];
        multiply(i, b, d);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            sums[i][h / 2][h % 2 * 2 + j] +=
                scaled(d[h / 2][h % 2 * 2 + j] * (1 << W::kLessened), sw[i][j] >> (8 * b) & 255, x.scales[h] >> (8 * b) & 255);
      }
  }
}

/// Sums of a block of 32 k with two tiles of W as the 16 rows of an instruction and 8 rows of X as its columns: of rows g of both
/// tiles and columns 2 t and 2 t + 1. `from` is where this lane's bytes of the first tile are, `next` bytes further those of the
/// second, if there is one.
__device__ __forceinline__ void multiply_two(uint32_t from, int next, bool two, const uint32_t (&x)[4], float (&d)[4]) {
  uint32_t first[4] = {}, second[4] = {};
  const uint2 top = load_shared<uint2>(from);
  halves_of(top.x, first[0], first[2]), halves_of(top.y, second[0], second[2]);
  if (two) {
    const uint2 low = load_shared<uint2>(from + next);
    halves_of(low.x, first[1], first[3]), halves_of(low.y, second[1], second[3]);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) d[c] = 0;
  multiply_add(d, first, x[0], x[1]);
  multiply_add(d, second, x[2], x[3]);
}

/// Up to 8 rows of X's part of a step as the columns of instructions: the f16 of a lane's 8 bytes of each block, and its row's
/// scales.
struct Columns {
  uint32_t of[4][4], scales, usual;

  __device__ __forceinline__ explicit Columns(uint32_t scales)
      : scales(scales), usual(in_range(scales) & in_range(scales + 0x01010101u) & 0x80808080u) {}
  __device__ __forceinline__ explicit Columns(const Part<8>& part) : Columns(part.scales[0]) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      halves_of(part.bytes[0][b].x, of[b][0], of[b][1]);
      halves_of(part.bytes[0][b].y, of[b][2], of[b][3]);
    }
  }
};

/// Adds the products of a step for up to 8 rows of X, where the 16 rows of an instruction are those of two tiles of W, of which the
/// last may be alone, and its 8 columns X's rows: half as many products. `at` is where this lane reads W's blocks, x_lane is 8 t,
/// the lane that has the scales of column 2 t, sw has the scale words of rows 8 i + g. Lane 4 g + t ends up with rows g of both tiles
/// and columns 2 t and 2 t + 1, or, where X's rows are in every second column (COLUMNS: 1), up to 4, with column 2 t alone.
template <int TILES, int COLUMNS>
__device__ __forceinline__ void multiply_pairs(const uint32_t (&at)[4], const Columns& x, uint32_t x_lane,
                                               const uint32_t (&sw)[TILES][1], bool fast,
                                               float (&sums)[(TILES + 1) / 2][1][4]) {
  constexpr int kPairs = (TILES + 1) / 2;
  uint32_t sx[COLUMNS];
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) sx[j] = __shfl_sync(~0u, x.scales, x_lane + 4 * j);
  const auto multiply = [&](int pair, int b, float (&d)[4]) {
    const uint32_t from = at[b] + pair * 2 * kTileRows * kStep;
    multiply_two(from, kTileRows * kStep, 2 * pair + 1 < TILES, x.of[b], d);
  };
  const auto each = [&](auto which, const auto& add) {
    constexpr int b = decltype(which)::value;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float d[4];
      multiply(pair, b, d);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (2 * pair + c / 2 < TILES && c % 2 < COLUMNS) add(which, 2 * pair + c / 2, c % 2, d[c], sums[pair][0][c]);
    }
  };
  const auto blocks = [&](const auto& add) {
    each(std::integral_constant<int, 0>{}, add), each(std::integral_constant<int, 1>{}, add);
    each(std::integral_constant<int, 2>{}, add), each(std::integral_constant<int, 3>{}, add);
  };
  if (fast) {
    uint32_t exponents[TILES][COLUMNS];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) exponents[i][j] = (sw[i][0] - 0x40404040u) + (sx[j] - 0x3f3f3f3fu);
    blocks([&](auto which, int i, int j, float d, float& sum) {
      sum = fmaf(d, power_of<decltype(which)::value>(exponents[i][j]), sum);
    });
  } else {
    blocks([&](auto which, int i, int j, float d, float& sum) {
      constexpr int shift = 8 * decltype(which)::value;
      sum += scaled(d, sw[i][0] >> shift & 255, sx[j] >> shift & 255);
    });
  }
}

template <int COUNT, int PITCH>
__device__ __forceinline__ float added(const float* from) {
  float values[COUNT], sum = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = from[i * PITCH];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum += values[i];
  return sum;
}

/// The sums that 2^shift warps, up to 16, left PITCH floats apart, added in the order of the warps.
template <int PITCH>
__device__ __forceinline__ float added(const float* from, int shift) {
  return shift == 4   ? added<16, PITCH>(from)
         : shift == 3 ? added<8, PITCH>(from)
         : shift == 2 ? added<4, PITCH>(from)
         : shift == 1 ? added<2, PITCH>(from)
                      : from[0];
}

}  // namespace hf::row_stream
