// The caches that decode attention reads, one format each: what an entry demands of them.
#pragma once

#include "guards.h"

namespace hf::decode_attention {

/// A cache of fp8 rows, a multiple of `unit` bytes apart, with one scale for all or per KV head, or a word per row.
inline Cache fp8_cache(const Tensor& data, const char* name, int64_t d, const OptionalTensor& scale, const OptionalTensor& rows,
                       uint32_t unit = 16) {
  const Dtypes dtypes{e4m3_of(has_fnuz(data)), HF_U8};
  check_operand(data, name, dtypes, {"pages", "page_size", "Hkv", d}, ", fp8 or its bits", {unit, unit});
  HF_CHECK(scale.has_value() != rows.has_value(), name, " needs one scale per tensor or head, or one word per row, not both");
  Cache cache = cache_of(data, name);
  if (scale) {
    fill_scale(cache, *scale, name, data.size(2));
    return cache;
  }
  const Tensor value = *rows;
  check_operand(value, *name == 'k' ? "k_scale_shift" : "v_scale_shift", HF_I32, {data.size(0), data.size(1), data.size(2)},
                ", a word per row", kAnyStrides);
  for (int axis = 0; axis < 3; ++axis)
    HF_CHECK(value.stride(axis) >= 0, name, "_scale_shift must not have negative strides");
  HF_CHECK(value.stride(1) <= max_slot_stride(d) / 4, name, "_scale_shift has rows ", value.stride(1), " words apart");
  cache.rows = static_cast<const uint8_t*>(value.data());
  cache.rows_page_stride = 4 * value.stride(0);
  cache.rows_slot_stride = 4 * static_cast<uint32_t>(value.stride(1));
  cache.rows_head_stride = 4 * value.stride(2);
  return cache;
}

/// A cache of q's own 16-bit dtype.
inline Cache half_cache(const Tensor& data, const char* name, int64_t d, hf_dtype input, const OptionalTensor& given,
                        uint32_t unit = 16) {
  check_operand(data, name, input, {"pages", "page_size", "Hkv", d}, ", of q's dtype", {unit, unit});
  HF_CHECK(given, name, "_scale must be given for a cache of 16-bit elements; got None");
  Cache cache = cache_of(data, name);
  fill_scale(cache, *given, name, data.size(2));
  return cache;
}

/// A cache of int4 rows, each with the words of its scales in front.
inline Cache int4_cache(const Tensor& data, const char* name, int64_t d, int64_t groups) {
  check_operand(data, name, HF_I32, {"pages", "page_size", "Hkv", groups + d / 8}, ", the words of scales and of nibbles", {1, 4});
  return cache_of(data, name);
}

}  // namespace hf::decode_attention
