// Matrix products of 16-bit elements, bf16 or f16, 16 x 16; operands as mfma_k16 and mfma_k32 have them.
#pragma once

#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"
#include "query.h"

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

}  // namespace hf::decode_attention
