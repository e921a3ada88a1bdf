// What the fused rotation demands of its operands, and how the kernel sees them.
#pragma once

#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "hipforge/device/wave.h"
#include "problem.h"

namespace hf::rope_and_cache {

constexpr int64_t kMaxHeadDim = 512, kWaveHeadDim = kChunk * dev::kWaveSize;  // a head is held by one wave
constexpr int64_t kMaxCacheSlots = (int64_t{1} << 31) - 1;

inline bool sixteen_byte_rows(const Tensor& x) {
  return aligned_to(x.data(), 16) && x.stride(0) % kChunk == 0 && x.stride(1) % kChunk == 0;
}

inline void check_heads(const Tensor& x, const char* name, int64_t tokens, int64_t dim) {
  HF_CHECK(x.dtype() == dev::dtype_of<Half>, name, " must have q's dtype, ", dev::dtype_of<Half>, "; got ", x);
  HF_CHECK(x.dim() == 3 && x.size(0) == tokens && x.size(1) >= 1 && x.size(2) == dim, name, " must be [", tokens,
           ", heads, ", dim, "] (tokens and D of q); got ", x);
  HF_CHECK(x.stride(2) == 1, name, " must have its last dimension contiguous; got stride ", x.stride(2));
}

inline Heads heads_of(const Tensor& x) {
  return {x.data<const Half>(), x.stride(0), x.stride(1), static_cast<uint32_t>(x.size(1)), sixteen_byte_rows(x)};
}

inline CacheRows cache_of(const Tensor& cache, const char* name, const OptionalTensor& scale, double scale_value,
                          const OptionalTensor& words, int64_t heads, int64_t dim, int64_t groups, bool fnuz) {
  const int64_t last = kStorage == Storage::int4 ? groups + dim / kChunk : dim;
  if constexpr (kStorage == Storage::half) {
    HF_CHECK(cache.dtype() == dev::dtype_of<Half>, name, " must have q's dtype, ", dev::dtype_of<Half>, "; got ", cache);
  } else if constexpr (kStorage == Storage::int4) {
    HF_CHECK(cache.dtype() == HF_I32, name, " must hold int32 words of int4 codes; got ", cache);
  } else {
    HF_CHECK(cache.dtype() == HF_U8 || cache.dtype() == e4m3_of(fnuz), name, " must be ",
             e4m3_of(fnuz), kOfDevice, ", or uint8 with its bits; got ", cache);
  }
  HF_CHECK(cache.dim() == 4 && cache.size(2) == heads && cache.size(3) == last, name, " must be [pages, page_size, ", heads,
           ", ", last, "] (heads of k and v); got ", cache);
  HF_CHECK(cache.stride(3) == 1, name, " must have its last dimension contiguous; got stride ", cache.stride(3));
  const int64_t bytes = cache.element_bytes();
  for (int axis = 0; axis < 3 && kStorage != Storage::int4; ++axis)
    HF_CHECK(cache.stride(axis) * bytes % 16 == 0, name, " must have strides that are multiples of 16 bytes; got ",
             cache.stride(axis) * bytes, " along axis ", axis);
  if (kStorage != Storage::int4) check_aligned(cache, name);
  CacheRows rows = {};
  rows.data = static_cast<uint8_t*>(cache.data());
  rows.page_stride = cache.stride(0) * bytes;
  rows.slot_stride = cache.stride(1) * bytes;
  rows.head_stride = cache.stride(2) * bytes;
  HF_CHECK(!scale || kStorage == Storage::fp8, name, " has no scale per tensor or head in this variant");
  HF_CHECK(words.has_value() == (kStorage == Storage::rows), name, " has a word per row in the variant rows alone");
  rows.scale_value = static_cast<float>(scale_value);
  if (scale) {
    const Tensor given = *scale;
    HF_CHECK(given.dtype() == HF_F32 && given.is_contiguous() && (given.numel() == 1 || given.is_shape(heads)), name,
             "'s scale must be float32, one element or [", heads, "] (one per KV head); got ", given);
    rows.scale = given.data<const float>();
    rows.scale_stride = given.numel() == 1 ? 0 : 1;
  }
  if (words) {
    const Tensor given = *words;
    HF_CHECK(given.dtype() == HF_I32 && given.is_shape(cache.size(0), cache.size(1), heads), name,
             "'s scale_shift must be int32 [", cache.size(0), ", ", cache.size(1), ", ", heads, "]; got ", given);
    rows.words = static_cast<uint8_t*>(given.data());
    rows.words_page_stride = 4 * given.stride(0);
    rows.words_slot_stride = 4 * given.stride(1);
    rows.words_head_stride = 4 * given.stride(2);
  }
  return rows;
}

inline TurnedHeads turned_heads_of(const Tensor& x) {
  return {x.data<Half>(), x.stride(0), x.stride(1), sixteen_byte_rows(x)};
}

inline const Half* weight_of(const OptionalTensor& weight, const char* name, int64_t dim) {
  if (!weight) return nullptr;
  const Tensor given = *weight;
  check_operand(given, name, dev::dtype_of<Half>, {dim}, ", of q's dtype");
  return given.data<const Half>();
}

/// index_q [T, groups, D], index_k [T, 1, D] and index_cache [pages, page_size, D] of K's pages: all three, or none.
inline Index index_of(const OptionalTensor& q_out, const OptionalTensor& cache, const OptionalTensor& q, const OptionalTensor& k,
                      const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& k_cache, int64_t tokens,
                      int64_t dim, bool fnuz) {
  Index index = {};
  const bool any = q_out || cache || q || k || q_weight || k_weight;
  HF_CHECK(!any || (q_out && cache && q && k), "index_q, index_k and index_cache must all be given, or none");
  if (!any) return index;
  const Tensor rows = *cache;
  check_heads(*q, "index_q", tokens, dim);
  check_heads(*k, "index_k", tokens, dim);
  check_heads(*q_out, "index_q_out", tokens, dim);
  HF_CHECK((*k).size(1) == 1, "index_k must be [T, 1, D]; got ", *k);
  HF_CHECK((*q_out).size(1) == (*q).size(1), "index_q_out must have the heads of index_q; got ", *q_out);
  check_not_in_place({*q_out, "index_q_out"}, {{*k, "index_k"}});
  index.fp8 = rows.dtype() == HF_U8 || rows.dtype() == e4m3_of(fnuz);
  HF_CHECK(index.fp8 || rows.dtype() == dev::dtype_of<Half>, "index_cache must be ", e4m3_of(fnuz), kOfDevice,
           ", uint8 with its bits, or of q's dtype; got ", rows);
  HF_CHECK(rows.is_shape(k_cache.size(0), k_cache.size(1), dim), "index_cache must be [", k_cache.size(0), ", ", k_cache.size(1),
           ", ", dim, "] (pages and page_size of k_cache); got ", rows);
  const int64_t bytes = rows.element_bytes();
  HF_CHECK(rows.stride(2) == 1 && rows.stride(0) * bytes % 16 == 0 && rows.stride(1) * bytes % 16 == 0,
           "index_cache must have its last dimension contiguous and other strides that are multiples of 16 bytes; got ", rows);
  check_aligned(rows, "index_cache");
  index.q = heads_of(*q);
  index.k = heads_of(*k);
  index.q_out = turned_heads_of(*q_out);
  index.cache = static_cast<uint8_t*>(rows.data());
  index.page_stride = rows.stride(0) * bytes;
  index.slot_stride = rows.stride(1) * bytes;
  index.q_weight = weight_of(q_weight, "index_q_weight", dim);
  index.k_weight = weight_of(k_weight, "index_k_weight", dim);
  return index;
}

inline void check_queries(const Tensor& q_out, const Tensor& q, const Tensor& k, const Tensor& v) {
  HF_CHECK(q.dim() == 3, "q must be [T, Hq, D]; got ", q);
  const int64_t tokens = q.size(0), dim = q.size(2);
  HF_CHECK(dim % kChunk == 0 && dim >= kChunk && dim <= kMaxHeadDim, "D must be a multiple of ", kChunk, ", at most ",
           kMaxHeadDim, "; got ", dim);
  HF_CHECK(dim <= kWaveHeadDim, "D must be at most ", kWaveHeadDim, " on this device; got ", dim);
  HF_CHECK(tokens < int64_t{1} << 31, "q must have fewer than 2^31 tokens; got ", tokens);
  check_heads(q, "q", tokens, dim);
  check_heads(k, "k", tokens, dim);
  check_heads(v, "v", tokens, dim);
  HF_CHECK(v.size(1) == k.size(1), "v must have the heads of k, ", k.size(1), "; got ", v.size(1));
  check_heads(q_out, "q_out", tokens, dim);
  HF_CHECK(q_out.size(1) == q.size(1), "q_out must have the heads of q, ", q.size(1), "; got ", q_out.size(1));
  check_not_in_place({q_out, "q_out"}, {{k, "k"}, {v, "v"}});
}

inline void check_tokens(const Tensor& cos_sin, const Tensor& positions, const Tensor& slot_mapping, int64_t tokens,
                         int64_t dim) {
  HF_CHECK(cos_sin.dim() == 2 && cos_sin.is_contiguous(), "cos_sin must be contiguous [max_pos, rotary_dim]; got ", cos_sin);
  HF_CHECK(cos_sin.dtype() == HF_F32 || cos_sin.dtype() == dev::dtype_of<Half>,
           "cos_sin must be float32 or of q's dtype; got ", cos_sin);
  const int64_t rotary_dim = cos_sin.size(1);
  HF_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= dim, "rotary_dim must be even, 2 to D = ", dim, "; got ",
           rotary_dim);
  check_operand(positions, "positions", kIndex, {tokens});
  check_operand(slot_mapping, "slot_mapping", HF_I64, {tokens});
}

}  // namespace hf::rope_and_cache
