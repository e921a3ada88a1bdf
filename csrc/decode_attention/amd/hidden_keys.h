// Keys that some rows of a tile see and others do not. Such a key may hold anything, NaN and infinity included.
//
// The second product adds weight times value over a tile's keys for 16 rows at once. A hidden key's weight is 0, but 0 times
// NaN is NaN, and the rows that see the key need its value. So in tiles with such keys special values become 0, and a second
// product, of marks at their places by 1 for each key that a row sees, tells which outputs they reach.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "work.h"
#include "query.h"

namespace hf::decode_attention {

/// Whether one of two f16 is infinite or NaN.
__device__ inline bool has_special_half(uint32_t pair) {
  constexpr uint32_t kExponent = 0x7C00;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

/// 1 for each of the lane's four keys that its row sees, as weights of a product.
template <class Half>
__device__ inline Vector<Half, 4> ones_where(const Seen& seen) {
  Vector<Half, 4> ones;
#pragma unroll
  for (int r = 0; r < 4; ++r) ones[r] = static_cast<Half>(seen(r) ? 1.f : 0.f);
  return ones;
}

/// The rows' sums, NaN where the count of NaNs that the row sees is not 0.
__device__ inline dev::f32x4 spoiled(dev::f32x4 sums, dev::f32x4 count) {
#pragma unroll
  for (int r = 0; r < 4; ++r) sums[r] = count[r] > 0.f ? __builtin_nanf("") : sums[r];
  return sums;
}

}  // namespace hf::decode_attention
