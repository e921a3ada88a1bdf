// Elements of an int4 row: eight codes a word, and a word of float16 scale and shift for a group of them.
#pragma once

#include "hipforge/amd/fp8.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"
#include "hidden_keys.h"
#include "query.h"
#include "tile_rows.h"

namespace hf::decode_attention {

struct ScaleShift {
  float scale, shift;

  __device__ explicit ScaleShift(uint32_t word) {
    const auto both = __builtin_bit_cast(Vector<_Float16, 2>, word);
    scale = static_cast<float>(both[0]);
    shift = static_cast<float>(both[1]);
  }
  /// Nibble 4 kHalf + i of `word` as an element.
  template <int kHalf>
  __device__ dev::f32x4 elements(uint32_t word) const {
    const uint32_t even = (word >> 16 * kHalf) & 0x0f0f0f0fu, odd = (word >> (16 * kHalf + 4)) & 0x0f0f0f0fu;
    const dev::f32x4 codes = {code(even), code(odd), code(even >> 8), code(odd >> 8)};
    return codes * scale + shift;
  }

 private:
  __device__ static float code(uint32_t bytes) { return static_cast<float>(bytes & 0xff); }
};

/// Keys whose scale or shift is no number become NaN in the rows that see them, those with a 1 in `seen`, and 0 otherwise: in
/// kColumns of the lane's columns, which share a scale.
template <int kColumns>
__device__ inline void take_special_scales(uint32_t (&own)[4], dev::bf16x4 seen, dev::f32x4* acc) {
  dev::f32x4 marks;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const bool special = has_special_half(own[r]);
    marks[r] = special ? 1.f : 0.f;
    own[r] = special ? 0 : own[r];
  }
  const dev::f32x4 counts = dev::mfma_k16(dev::nearest_bf16(marks), seen, dev::f32x4{});
#pragma unroll
  for (int j = 0; j < kColumns; ++j) acc[j] = spoiled(acc[j], counts);
  stay_in_order();
}

}  // namespace hf::decode_attention
