// The caches that decode attention reads, one format each: what an entry demands of them.
#pragma once

#include "guards.h"

namespace hf::decode_attention {

/// A cache of fp8 rows, with one scale for all or per KV head, or a word per row.
inline Cache fp8_cache(const Tensor& data, const char* name, int d, const OptionalTensor& scale, const OptionalTensor& rows) {
  HF_CHECK(data.dtype() == HF_U8 || data.dtype() == HF_E4M3FN || data.dtype() == HF_E4M3FNUZ, name,
           " holds fp8: float8_e4m3fn, or uint8 with its bits; got ",
           data.dtype());
  HF_CHECK(data.dim() == 4 && data.size(3) == d, name, " must be [pages, page_size, Hkv, ", d, "]; got ", data);
  check_aligned(data, name);
  HF_CHECK(scale.has_value() != rows.has_value(), name, " needs one scale per tensor or head, or one word per row, not both");
  Cache cache = {};
  fill_strides(cache, data, name, 1, 16, d);
  cache.data = data.data<const uint8_t>();
  if (scale) {
    fill_scale(cache, *scale, name, data.size(2));
  } else {
    const Tensor value = *rows;
    HF_CHECK(value.dtype() == HF_I32 && value.is_shape(data.size(0), data.size(1), data.size(2)), name,
             "'s scale_shift must be int32 [", data.size(0), ", ", data.size(1), ", ", data.size(2), "]; got ", value);
    for (int axis = 0; axis < 3; ++axis)
      HF_CHECK(value.stride(axis) >= 0, name, "'s scale_shift must not have negative strides");
    HF_CHECK(value.stride(1) <= max_slot_stride(d) / 4, name, "'s scale_shift has rows ", value.stride(1), " words apart");
    cache.rows = static_cast<const uint8_t*>(value.data());
    cache.rows_page_stride = 4 * value.stride(0);
    cache.rows_slot_stride = 4 * static_cast<uint32_t>(value.stride(1));
    cache.rows_head_stride = 4 * value.stride(2);
  }
  return cache;
}

/// A cache of q's own 16-bit dtype.
inline Cache half_cache(const Tensor& data, const char* name, int d, hf_dtype input, const OptionalTensor& given) {
  HF_CHECK(data.dtype() == input && data.dim() == 4 && data.size(3) == d, name, " must be ", input,
           " [pages, page_size, Hkv, ", d, "], like q; got ", data);
  check_aligned(data, name);
  HF_CHECK(given, name, "_scale must be given for a cache of 16-bit elements; got None");
  Cache cache = {};
  fill_strides(cache, data, name, 2, 8, 2 * d);
  cache.data = static_cast<const uint8_t*>(data.data());
  fill_scale(cache, *given, name, data.size(2));
  return cache;
}

/// A cache of int4 rows, each with the words of its scales in front.
inline Cache int4_cache(const Tensor& data, const char* name, int d, int64_t groups) {
  const int64_t words = groups + d / 8;
  HF_CHECK(data.dtype() == HF_I32 && data.dim() == 4 && data.size(3) == words, name,
           " must be int32 [pages, page_size, Hkv, ", words, "], the words of scales and those of ", d,
           " nibbles; got ", data);
  Cache cache = {};
  fill_strides(cache, data, name, 4, 1, 4 * words);
  cache.data = static_cast<const uint8_t*>(data.data());
  return cache;
}

}  // namespace hf::decode_attention
