// The products of passes of W (pass_ring.h) with the only row of X of one token.
//
//   instruction's columns   0    1    2    3    4    5    6    7        W's 16 rows in its rows; a column has a block of 32 k,
//   of a pair of steps      b0   b1   b2   b3 | b0   b1   b2   b3       so that the sums of a pair of steps are one accumulator,
//                           first step        | second                  and a lane multiplies by the scales once a pair
//
// X of a block is zero in the other columns: lane 4 g + t has 8 values of block g % 4 of step g / 4, and gives zeros to the
// instructions of all other blocks. It ends up with the sums of W's rows g + 8 h and columns 2 t + j, which are blocks
// 2 (t % 2) + j of step t / 2. The sums of a row's columns are added up at last.
#pragma once

#include "pass_ring.h"

namespace hf::moe {

/// X of a warp's up to STEPS steps, `sharers` steps apart.
template <int STEPS>
struct TokenRow {
  static constexpr int kPairs = (STEPS + 1) / 2;

  uint32_t x[kPairs][4];       // as f16
  uint32_t scales[kPairs][2];  // bytes of its columns
  bool usual;                  // they are in 64..190

  /// Where this lane's block of pair i is, k of X; and whether the warp has its step.
  __device__ __forceinline__ static int block_at(int i, int g, int part, int sharers) {
    return (part + (2 * i + g / 4) * sharers) * kStep + g % 4 * kBlock;
  }
  /// The same of its sums' first column.
  __device__ __forceinline__ static int columns_at(int i, int t, int part, int sharers) {
    return (part + (2 * i + t / 2) * sharers) * kStep + t % 2 * 2 * kBlock;
  }
  __device__ __forceinline__ static bool has(int i, int quarter, int k0, int k) { return 2 * i + quarter < STEPS && k0 < k; }

  __device__ __forceinline__ void set(int i, uint32_t low, uint32_t high, uint32_t first_scale, uint32_t second_scale) {
    halves_of(low, x[i][0], x[i][1]);
    halves_of(high, x[i][2], x[i][3]);
    scales[i][0] = first_scale, scales[i][1] = second_scale;
    usual = (i == 0 || usual) && first_scale - 64 < 127 && second_scale - 64 < 127;
  }

  /// Returns this lane's sums of rows g and g + 8 of the pass at `stage`.
  __device__ __forceinline__ float2 multiply(const uint8_t* stage, const Ring& r, int part, int sharers, int k, int g, int t) const {
    const uint8_t* const here = stage + g * r.pitch + 8 * t;
    const uint8_t* const scale_row = stage + r.scales_at() + g * r.scale_pitch;
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float d[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k0 = (part + (2 * i + half) * sharers) * kStep;
        if (2 * i + half >= STEPS || k0 >= k) break;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const uint2 top = *reinterpret_cast<const uint2*>(here + k0 + b * kBlock);
          const uint2 low = *reinterpret_cast<const uint2*>(here + kTileRows * r.pitch + k0 + b * kBlock);
          const bool own = g == 4 * half + b;
          uint32_t a[2][4];
          halves_of(top.x, a[0][0], a[0][2]);
          halves_of(low.x, a[0][1], a[0][3]);
          halves_of(top.y, a[1][0], a[1][2]);
          halves_of(low.y, a[1][1], a[1][3]);
          multiply_add(d, a[0], own ? x[i][0] : 0, own ? x[i][1] : 0);
          multiply_add(d, a[1], own ? x[i][2] : 0, own ? x[i][3] : 0);
        }
      }
      const int k0 = columns_at(i, t, part, sharers);
      const bool there = has(i, t / 2, k0, k);
      uint32_t w[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        w[h] = there ? *reinterpret_cast<const uint16_t*>(scale_row + h * kTileRows * r.scale_pitch + k0 / kBlock) : 0x7f7f;
      if (usual && ((in_range(w[0]) & in_range(w[1]) & 0x8080) == 0x8080)) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            sums[h] = fmaf(d[2 * h + j], __uint_as_float(((w[h] >> (8 * j) & 255) + scales[i][j] - 127) << 23), sums[h]);
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < 2; ++j) sums[h] += scaled(d[2 * h + j], w[h] >> (8 * j) & 255, scales[i][j]);
      }
    }
    return make_float2(sums[0], sums[1]);
  }
};

/// A row's sum, of its four lanes, in all of them.
__device__ __forceinline__ float2 sums_of_columns(float2 sums) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    sums.x += __shfl_xor_sync(~0u, sums.x, distance);
    sums.y += __shfl_xor_sync(~0u, sums.y, distance);
  }
  return sums;
}

constexpr int kMostTokenSlots = 32;  // a lane keeps the expert of one
constexpr int kTokenRingAt = 2 * kWarps * kPassRows * int(sizeof(float));  // behind the sums of all warps, twice
static_assert(kTokenRingAt % 128 == 0 && kTokenRingAt + kMostStageBytes + kStaticBytes <= kMostShared);

}  // namespace hf::moe
