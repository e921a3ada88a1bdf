// MX blocks on the way out: the e8m0 scale of a block from its largest magnitude, by integer operations on fp32 bits, the
// maximum over the lanes that hold a block, and e4m3 codes under such a scale.
#pragma once

#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/mx.h"
#include "hipforge/device/wave.h"

namespace hf::dev {

/// An element format: exponent of its largest power of two, mantissa bits, and its largest value as an integer and as the
/// fraction field of that value's fp32 bits.
struct MxFormat {
  uint32_t exponent, mantissa_bits, largest, largest_fraction;
};

constexpr MxFormat kE2m1{2, 1, 6, 0x400000};
constexpr MxFormat kE4m3fn{8, 3, 448, 0x600000};
constexpr MxFormat kE4m3fnuz{7, 3, 240, 0x700000};

constexpr MxFormat kMxE4m3 = kFnuz ? kE4m3fnuz : kE4m3fn;
constexpr uint32_t kE4m3Nan = kFnuz ? 0x80 : 0x7F;

enum class ScaleMode { round_down, round_up, even, ceil, triton };

/// A mode as constants: the byte is ((bits + rounding) >> 23) - exponent, not below 0, and not below 1 for bits above
/// one_above; bits from special_from on (infinity and NaN, or what rounds to infinity) get the byte `special`.
struct ScaleRule {
  uint32_t rounding, exponent, special_from, special, one_above;
};

constexpr ScaleRule scale_rule(ScaleMode mode, MxFormat format) {
  constexpr uint32_t kInfinity = 0x7F800000, kFractionMask = 0x7FFFFF, kNever = 0xFFFFFFFF;
  switch (mode) {
    case ScaleMode::round_down: return {0, format.exponent, kInfinity, kE8m0Nan, kNever};
    // The quotient amax / largest in fp32: largest * 2^-150 is the tie between 0 and the smallest subnormal.
    case ScaleMode::round_up:
      return {kFractionMask - format.largest_fraction, format.exponent, kInfinity, kE8m0Nan, format.largest / 2};
    case ScaleMode::ceil: return {kFractionMask, format.exponent, kInfinity, kE8m0Nan, kNever};
    case ScaleMode::triton: return {0x200000, format.exponent, kInfinity - 0x200000, kE8m0Nan - 1, kNever};
    case ScaleMode::even: break;
  }
  const uint32_t rounding = 1u << (22 - format.mantissa_bits);
  const bool e2m1 = format.mantissa_bits == 1;  // whose rule is Triton's
  return {rounding, format.exponent, e2m1 ? kInfinity - rounding : kInfinity, e2m1 ? kE8m0Nan - 1 : kE8m0Nan, kNever};
}

/// The e8m0 byte of a block whose largest magnitude has these bits.
__device__ inline uint32_t block_scale(uint32_t amax_bits, ScaleRule rule) {
  const int32_t exponent = static_cast<int32_t>((amax_bits + rule.rounding) >> 23) - static_cast<int32_t>(rule.exponent);
  const int32_t least = amax_bits > rule.one_above ? 1 : 0;
  return amax_bits >= rule.special_from ? rule.special : static_cast<uint32_t>(exponent > least ? exponent : least);
}

/// The bits of |value|: they order as integers, and a NaN is above infinity.
__device__ inline uint32_t magnitude_bits(float value) { return __builtin_bit_cast(uint32_t, value) & 0x7FFFFFFFu; }

__device__ inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/// The largest `value` among each kLanes neighbouring lanes (4, 8 or 32), in all of them; each group active or not as one.
template <int kLanes>
__device__ inline uint32_t largest_of_lanes(uint32_t value) {
  static_assert(kLanes == 4 || kLanes == 8 || kLanes == 32);
  return lanes_combined<kLanes>(value, larger);
}

/// block_scale of an e4m3 block that clips nothing (round_up).
__device__ inline uint32_t e4m3_block_scale(uint32_t amax_bits) {
  constexpr ScaleRule kRule = scale_rule(ScaleMode::round_up, kMxE4m3);
  return block_scale(amax_bits, kRule);
}

/// The factor 2^(127 - byte) that brings a block's elements into range. kE8m0Nan has none; its elements do not matter.
__device__ inline float e8m0_inverse(uint32_t byte) {
  constexpr uint32_t kSubnormal = 0x00400000;  // 2^-127
  const uint32_t inverse = byte >= 2 * kE8m0Bias ? kSubnormal : (2 * kE8m0Bias - byte) << 23;
  return __builtin_bit_cast(float, inverse);
}

/// The code of one scaled element of an e4m3 block; all codes of a block with scale kE8m0Nan are NaN.
__device__ inline uint8_t encode_mx_e4m3(float scaled, uint32_t byte) {
  constexpr float kLimit = static_cast<float>(kMxE4m3.largest);
  const uint32_t code = e4m3_code(limited(scaled, -kLimit, kLimit));
  return static_cast<uint8_t>(byte == kE8m0Nan ? kE4m3Nan : code);
}

/// Four codes in memory order. A NaN can be in a block with another scale only in ScaleMode::triton; it is not kept.
__device__ inline uint32_t encode_mx_e4m3x4(const float* scaled, uint32_t byte) {
  constexpr float kLimit = static_cast<float>(kMxE4m3.largest);
  constexpr uint32_t kNans = kE4m3Nan * 0x01010101u;
  float clamped[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) clamped[i] = limited(scaled[i], -kLimit, kLimit);
  const uint32_t codes = e4m3_codes(clamped[0], clamped[1], clamped[2], clamped[3]);
  return byte == kE8m0Nan ? kNans : codes;
}

/// Eight of them.
__device__ inline u32x2 encode_mx_e4m3x8(const float (&scaled)[8], uint32_t byte) {
  return {encode_mx_e4m3x4(scaled, byte), encode_mx_e4m3x4(scaled + 4, byte)};
}

}  // namespace hf::dev
