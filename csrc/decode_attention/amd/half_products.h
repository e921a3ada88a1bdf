// Matrix products of 16-bit elements, bf16 or f16, 16 x 16; operands as mfma_k16 and mfma_k32 have them.
#pragma once

#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"
#include "hidden_keys.h"
#include "query.h"
#include "tile_rows.h"

namespace hf::decode_attention {

__device__ inline dev::f32x4 product_k16(dev::bf16x4 a, dev::bf16x4 b, dev::f32x4 sum) { return dev::mfma_k16(a, b, sum); }
__device__ inline dev::f32x4 product_k16(Vector<_Float16, 4> a, Vector<_Float16, 4> b, dev::f32x4 sum) {
  return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, sum, 0, 0, 0);
}

__device__ inline dev::f32x4 product_k32(dev::bf16x8 a, dev::bf16x8 b, dev::f32x4 sum) { return dev::mfma_k32(a, b, sum); }
__device__ inline dev::f32x4 product_k32(dev::f16x8 a, dev::f16x8 b, dev::f32x4 sum) {
#if defined(__gfx950__)
  return __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, sum, 0, 0, 0);
#else
  const Vector<_Float16, 4> a_low = a.lo, a_high = a.hi, b_low = b.lo, b_high = b.hi;
  return product_k16(a_high, b_high, product_k16(a_low, b_low, sum));
#endif
}

/// `values` by the weights of kCount tiles: element 4 u + r is key 16 u + 4 g + r of the lane.
template <int kCount, class Half>
__device__ inline dev::f32x4 weighted(Vector<Half, 4 * kCount> values, const Vector<Half, 4>* weights, dev::f32x4 sum) {
  static_assert(kCount == 1 || kCount == 2);
  if constexpr (kCount == 1) {
    return product_k16(values, weights[0], sum);
  } else {
    return product_k32(values, __builtin_shufflevector(weights[0], weights[1], 0, 1, 2, 3, 4, 5, 6, 7), sum);
  }
}

/// Four floats, each as the nearest element.
template <class Half>
__device__ inline Vector<Half, 4> nearest(dev::f32x4 values) {
  if constexpr (__is_same(Half, _Float16)) {
    return __builtin_convertvector(values, Vector<_Float16, 4>);
  } else {
    return dev::nearest_bf16(values);
  }
}

/// Tiles of V whose elements enter the second product as they lie in memory, two columns a word.
template <class Half>
struct HalfValues {
  using Four = Vector<Half, 4>;

  /// The low and the high halves of the keys' words: two rows of V^T.
  template <int kCount>
  __device__ static void add_pair(const uint32_t (&keys)[4 * kCount], const Four* weights, dev::f32x4& even,
                                  dev::f32x4& odd) {
    constexpr uint32_t kLowHalves = 0x05040100, kHighHalves = 0x07060302;
    Vector<uint32_t, 2 * kCount> even_row, odd_row;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      even_row[i] = __builtin_amdgcn_perm(keys[2 * i + 1], keys[2 * i], kLowHalves);
      odd_row[i] = __builtin_amdgcn_perm(keys[2 * i + 1], keys[2 * i], kHighHalves);
    }
    using Row = Vector<Half, 4 * kCount>;
    even = weighted<kCount, Half>(__builtin_bit_cast(Row, even_row), weights, even);
    odd = weighted<kCount, Half>(__builtin_bit_cast(Row, odd_row), weights, odd);
  }

  /// Gives the elements of a tile of V that are infinite or NaN to the rows that see them, those with a 1 in `seen`, as NaN, and
  /// takes them for 0.
  template <int kWords>
  __device__ static void take_specials(Vector<uint32_t, kWords> (&values)[4], Four seen, dev::f32x4* sums) {
    constexpr bool kF16 = __is_same(Half, _Float16);
    constexpr uint32_t kExponent = kF16 ? 0x7C00 : 0x7F80, kOne = kF16 ? 0x3C00 : 0x3F80, kLow = 0xFFFF;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t marks[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t pair = values[r][word];
        const bool low = (pair & kExponent) == kExponent, high = (pair >> 16 & kExponent) == kExponent;
        marks[r] = (low ? kOne : 0) | (high ? kOne << 16 : 0);
        values[r][word] = pair & ((low ? 0 : kLow) | (high ? 0 : kLow << 16));
      }
      dev::f32x4 even = {}, odd = {};
      add_pair<1>(marks, &seen, even, odd);
      sums[2 * word] = spoiled(sums[2 * word], even);
      sums[2 * word + 1] = spoiled(sums[2 * word + 1], odd);
      stay_in_order();
    }
  }
};

}  // namespace hf::decode_attention
