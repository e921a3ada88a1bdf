// The e8m0 scale of an MX block from its largest magnitude, by integer operations on fp32 bits (RCEIL: the smallest
// power of two that clips nothing), and the maximum over the lanes that hold a block.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/amd/mx.h"

namespace hf::dev {

/// The bits of |value|: they order as integers, and a NaN is above infinity.
__device__ inline uint32_t magnitude_bits(float value) { return __builtin_bit_cast(uint32_t, value) & 0x7FFFFFFFu; }

__device__ inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/// The largest `value` among each kLanes neighbouring lanes (4 or 32), in all of them; each group active or not as one.
template <int kLanes>
__device__ inline uint32_t largest_of_lanes(uint32_t value) {
  static_assert(kLanes == 4 || kLanes == 32);
  constexpr int kNeighbour = 1 | 0 << 2 | 3 << 4 | 2 << 6, kOtherPair = 2 | 3 << 2 | 0 << 4 | 1 << 6;
  value = larger(value, __builtin_amdgcn_mov_dpp(static_cast<int32_t>(value), kNeighbour, 0xF, 0xF, true));
  value = larger(value, __builtin_amdgcn_mov_dpp(static_cast<int32_t>(value), kOtherPair, 0xF, 0xF, true));
#pragma unroll
  for (int distance = 4; distance < kLanes; distance *= 2)
    value = larger(value, static_cast<uint32_t>(__shfl_xor(static_cast<int>(value), distance)));
  return value;
}

/// The e8m0 byte of an e4m3 block whose largest magnitude has these bits; kE8m0Nan for infinity and NaN. As in
/// ceil(log2(amax / max)) with the quotient in fp32, one that is subnormal gets byte 1 and one that is zero byte 0.
__device__ inline uint32_t e4m3_block_scale(uint32_t amax_bits) {
#if defined(__gfx942__)
  constexpr uint32_t kMax = 240, kExponent = 7, kFraction = 0x700000;
#else
  constexpr uint32_t kMax = 448, kExponent = 8, kFraction = 0x600000;
#endif
  constexpr uint32_t kInfinity = 0x7F800000, kFractionMask = 0x7FFFFF;
  constexpr uint32_t kTieWithZero = kMax / 2;  // max * 2^-150 as a count of smallest subnormals; ties go to zero
  const int32_t exponent = static_cast<int32_t>(amax_bits >> 23) - static_cast<int32_t>(kExponent) +
                           ((amax_bits & kFractionMask) > kFraction ? 1 : 0);
  const int32_t least = amax_bits > kTieWithZero ? 1 : 0;
  return amax_bits >= kInfinity ? kE8m0Nan : static_cast<uint32_t>(exponent > least ? exponent : least);
}

/// The factor 2^(127 - byte) that brings a block's elements into range. kE8m0Nan has none; its elements do not matter.
__device__ inline float e8m0_inverse(uint32_t byte) {
  constexpr uint32_t kSubnormal = 0x00400000;  // 2^-127
  const uint32_t inverse = byte >= 2 * kE8m0Bias ? kSubnormal : (2 * kE8m0Bias - byte) << 23;
  return __builtin_bit_cast(float, inverse);
}

}  // namespace hf::dev
