// fp8 codes (OCP e4m3fn and e5m2) of floats, four to a word, by the packed conversion.
#pragma once

#include "hipforge/nvidia/hip.h"
#include "hipforge/nvidia/vector.h"

namespace hf::dev {

constexpr bool kFnuz = false;

/// The codes of four floats within the format's range (a NaN stays one), in memory order.
__device__ inline uint32_t e4m3_codes(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(low) : "f"(a), "f"(b));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(high) : "f"(c), "f"(d));
  return uint32_t{high} << 16 | low;
}

/// That of one float, in the low byte.
__device__ inline uint32_t e4m3_code(float value) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(value), "f"(0.f));
  return codes;
}

__device__ inline uint32_t e5m2_codes(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(low) : "f"(a), "f"(b));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(high) : "f"(c), "f"(d));
  return uint32_t{high} << 16 | low;
}

/// Bytes 0 and 1, or 2 and 3, of `packed` as two floats; exact.
__device__ inline f32x2 fp8_pair(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  f16 low, high;
  low.bits = static_cast<uint16_t>(halves);
  high.bits = static_cast<uint16_t>(halves >> 16);
  return {static_cast<float>(low), static_cast<float>(high)};
}
__device__ inline f32x2 fp8_low_pair(uint32_t packed) { return fp8_pair(static_cast<uint16_t>(packed)); }
__device__ inline f32x2 fp8_high_pair(uint32_t packed) { return fp8_pair(static_cast<uint16_t>(packed >> 16)); }

}  // namespace hf::dev
