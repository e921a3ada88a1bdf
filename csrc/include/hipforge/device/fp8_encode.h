// Floats to e4m3 or e5m2 with saturation, and 16-byte stores of codes from lanes that hold 8 elements each. The
// conversion writes the architecture's own formats: OCP e4m3fn and e5m2, on gfx942 e4m3fnuz and e5m2fnuz.
#pragma once

#include "hipforge/device/fp8_codes.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/math.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"

namespace hf::dev {

enum class Fp8Format { e4m3, e5m2 };

/// Four codes in memory order.
template <Fp8Format kFormat>
__device__ inline uint32_t encode_fp8x4(const float* values, float limit) {
  const float a = saturated(values[0], limit), b = saturated(values[1], limit);
  const float c = saturated(values[2], limit), d = saturated(values[3], limit);
  if constexpr (kFormat == Fp8Format::e4m3) return e4m3_codes(a, b, c, d);
  return e5m2_codes(a, b, c, d);
}

/// One code in the low byte.
__device__ inline uint8_t encode_e4m3(float value, float limit) {
  return static_cast<uint8_t>(e4m3_code(saturated(value, limit)));
}

/// Eight codes in memory order.
__device__ inline u32x2 encode_e4m3x8(const float (&values)[8], float limit) {
  return {encode_fp8x4<Fp8Format::e4m3>(values, limit), encode_fp8x4<Fp8Format::e4m3>(values + 4, limit)};
}

/// Stores chunks of 8 codes, `low` as chunk `at` and `high` as chunk `at + step`, of `out`, which has `count` chunks.
/// Lanes 2i and 2i + 1 hold neighbouring chunks (`at` and `step` even in lane 0); each gives the other one of its two,
/// so that either has 16 contiguous bytes to store. All lanes of the wave must be active.
__device__ inline void store_chunk_pairs(uint8_t* out, int64_t count, int64_t at, int64_t step, u32x2 low, u32x2 high) {
  const bool odd = threadIdx.x & 1;
  const u32x2 given = odd ? low : high, kept = odd ? high : low;
  u32x2 taken;
#pragma unroll
  for (int i = 0; i < 2; ++i) taken[i] = from_pair_partner(given[i]);
  const int64_t first = odd ? at + step - 1 : at;
  const u32x2 left = odd ? taken : kept, right = odd ? kept : taken;
  if (first + 1 < count) {
    store_at8(out + 8 * first, u32x4{left[0], left[1], right[0], right[1]});
  } else if (first < count) {
    *reinterpret_cast<u32x2*>(out + 8 * first) = left;
  }
}

/// The factor that replaces division by a static scale: its inverse; a scale of 0 counts as 1.
__device__ inline float inverse_scale(float scale) { return scale == 0.f ? 1.f : 1.f / scale; }

/// The share of thread `thread` of `threads` in zeroing `count` 16-bit elements, where there are any: `out` may be null.
__device__ inline void zero_fill(uint16_t* out, int64_t count, int64_t thread, int64_t threads) {
  if (out == nullptr) return;
  constexpr int kPerStore = 8;
  const int64_t vectors = reinterpret_cast<uintptr_t>(out) % 16 == 0 ? count / kPerStore : 0;
#pragma unroll 1
  for (int64_t i = thread; i < vectors; i += threads) reinterpret_cast<u32x4*>(out)[i] = u32x4{0, 0, 0, 0};
#pragma unroll 1
  for (int64_t i = vectors * kPerStore + thread; i < count; i += threads) out[i] = 0;
}

}  // namespace hf::dev
