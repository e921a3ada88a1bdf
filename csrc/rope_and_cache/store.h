// The write of a head to its row of a cache, in the storage of the variant.
#pragma once

#include "chunk.h"
#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/math.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/vector.h"

namespace hf::rope_and_cache {

constexpr int kInt4Codes = 16;
constexpr float kFp8Max = dev::kFnuz ? 240.f : 448.f;

__device__ inline uint32_t word_of(dev::f16 scale, dev::f16 shift) {
  return static_cast<uint32_t>(__builtin_bit_cast(uint16_t, shift)) << 16 | __builtin_bit_cast(uint16_t, scale);
}

// Saturates, as an infinite shift would make every element of the row NaN; keeps a NaN.
__device__ inline dev::f16 shift_of(float x) {
  constexpr float kLargest = 65504.f;
  return dev::stored_half(x > kLargest ? kLargest : x < -kLargest ? -kLargest : x);
}

__device__ inline void store_codes(uint8_t* row, uint32_t chunk, F32x8 scaled) {
  float values[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) values[i] = scaled[i];
  reinterpret_cast<dev::u32x2*>(row)[chunk] = dev::encode_e4m3x8(values, kFp8Max);
}

// An index key to its row of the index cache, by the lanes that are active.
__device__ inline void store_index_key(const Index& index, int64_t slot, uint32_t page_size, Half8 x, uint32_t chunk) {
  const uint32_t page = static_cast<uint32_t>(slot) / page_size, in_page = static_cast<uint32_t>(slot) - page * page_size;
  uint8_t* row = index.cache + page * index.page_stride + in_page * index.slot_stride;
  if (index.fp8)
    store_codes(row, chunk, to_f32(x));
  else
    *reinterpret_cast<Half8*>(row + chunk * sizeof(Half8)) = x;
}

// A head to its row of the cache; all lanes of the wave take part in the reductions, `active` ones store.
template <int kLanes>
__device__ inline void store_head(const CacheRows& cache, int64_t slot, uint32_t page_size, uint32_t head, Half8 x,
                                  uint32_t chunk, bool active, const Arguments& a) {
  const uint32_t page = static_cast<uint32_t>(slot) / page_size, in_page = static_cast<uint32_t>(slot) - page * page_size;
  uint8_t* row = cache.data + page * cache.page_stride + in_page * cache.slot_stride + head * cache.head_stride;
  const F32x8 values = to_f32(x);
  if constexpr (kStorage == Storage::half) {
    if (active) *reinterpret_cast<Half8*>(row + chunk * sizeof(Half8)) = x;
  } else if constexpr (kStorage == Storage::fp8) {
    if (!active) return;
    const float scale = cache.scale ? cache.scale[head * cache.scale_stride] : cache.scale_value;
    store_codes(row, chunk, values * dev::inverse_scale(scale));
  } else if constexpr (kStorage == Storage::rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = sum + values[i];
    const auto shift = shift_of(sum_of_head<kLanes>(sum) / static_cast<float>(a.chunks * kChunk));
    const F32x8 centred = values - static_cast<float>(shift);
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (active) amax = dev::larger(amax, dev::magnitude_bits(centred[i]));
    amax = dev::lanes_combined<kLanes>(amax, dev::larger);
    auto scale = static_cast<dev::f16>(__builtin_bit_cast(float, amax) / kFp8Max);
    const float wide = static_cast<float>(scale);
    // A row of equal values, and one whose range leaves float16, keep their mean alone. A NaN fails both comparisons.
    if (!(wide > 0.f && wide < __builtin_inff())) scale = static_cast<dev::f16>(1.f);
    if (!active) return;
    store_codes(row, chunk, centred / static_cast<float>(scale));
    if (chunk == 0)
      *reinterpret_cast<uint32_t*>(cache.words + page * cache.words_page_stride + in_page * cache.words_slot_stride +
                                   head * cache.words_head_stride) = word_of(scale, shift);
  } else {
    float least = __builtin_inff(), largest = -__builtin_inff();
    bool nan = false;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (!active) continue;
      least = __builtin_fminf(least, values[i]);
      largest = __builtin_fmaxf(largest, values[i]);
      nan = nan || values[i] != values[i];
    }
    least = nan ? __builtin_nanf("") : least;
    largest = nan ? __builtin_nanf("") : largest;
    const auto smaller = [](float x, float y) { return x != x || x < y ? x : y; };  // keeps a NaN, as fminf does not
    const auto greater = [](float x, float y) { return x != x || x > y ? x : y; };
#pragma unroll
    for (uint32_t lanes = 1; lanes < kLanes; lanes *= 2) {
      if (lanes >= a.int4_group_lanes) break;
      const uint32_t other = dev::lane_index() ^ lanes;
      const auto from = [&](float x) {
        return __builtin_bit_cast(float, dev::from_lane(__builtin_bit_cast(uint32_t, x), other));
      };
      const float low = from(least), high = from(largest);
      least = smaller(least, low);
      largest = greater(largest, high);
    }
    if (!active) return;
    const auto shift = shift_of(least);
    auto scale = static_cast<dev::f16>((largest - least) / static_cast<float>(kInt4Codes - 1));
    const float wide = static_cast<float>(scale);
    if (!(__builtin_fabsf(wide) < __builtin_inff())) scale = static_cast<dev::f16>(0.f);
    const bool flat = !(static_cast<float>(scale) > 0.f);
    const F32x8 steps = (values - static_cast<float>(shift)) / (flat ? 1.f : static_cast<float>(scale));
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float code = __builtin_floorf(steps[i] + 0.5f);
      const auto limited = static_cast<uint32_t>(__builtin_fminf(__builtin_fmaxf(code, 0.f), kInt4Codes - 1.f));
      word |= (flat ? 0u : limited) << (4 * i);
    }
    uint32_t* words = reinterpret_cast<uint32_t*>(row);
    const uint32_t groups = a.chunks / a.int4_group_lanes;
    if (chunk % a.int4_group_lanes == 0) words[chunk / a.int4_group_lanes] = word_of(scale, shift);
    words[groups + chunk] = word;
  }
}

}  // namespace hf::rope_and_cache
