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

/// x [tokens, heads, D] of q's dtype; a size is a number, or a name for any.
inline void check_heads(const Tensor& x, const char* name, Size tokens, Size heads, Size dim) {
  check_operand(x, name, dev::dtype_of<Half>, {tokens, heads, dim}, " (tokens and D of q)", {1, sizeof(Half)});
  HF_CHECK(x.size(1) >= 1, name, " must have at least one head; got ", x);
}

inline Heads heads_of(const Tensor& x) {
  return {x.data<const Half>(), x.stride(0), x.stride(1), static_cast<uint32_t>(x.size(1)), sixteen_byte_rows(x)};
}

inline CacheRows cache_of(const Tensor& cache, const char* name, const OptionalTensor& scale, double scale_value,
                          const OptionalTensor& words, int64_t heads, int64_t dim, int64_t groups, bool fnuz) {
  const int64_t last = kStorage == Storage::int4 ? groups + dim / kChunk : dim;
  constexpr uint32_t kUnit = kStorage == Storage::int4 ? 4 : 16;
  const Dtypes dtypes = kStorage == Storage::half   ? Dtypes(dev::dtype_of<Half>)
                        : kStorage == Storage::int4 ? Dtypes(HF_I32)
                                                    : Dtypes(e4m3_of(fnuz), HF_U8);
  check_operand(cache, name, dtypes, {"pages", "page_size", heads, last}, " (heads of k and v)", {kUnit, kUnit});
  const int64_t bytes = cache.element_bytes();
  CacheRows rows = {};
  rows.data = static_cast<uint8_t*>(cache.data());
  rows.page_stride = cache.stride(0) * bytes;
  rows.slot_stride = cache.stride(1) * bytes;
  rows.head_stride = cache.stride(2) * bytes;
  HF_CHECK(!scale || kStorage == Storage::fp8, name, " has no scale per tensor or head in this variant");
  HF_CHECK(words.has_value() == (kStorage == Storage::rows), name, " has a word per row in the variant rows alone");
  rows.scale_value = static_cast<float>(scale_value);
  if (scale) {
    rows.scale_stride = check_one_or(*scale, *name == 'k' ? "k_scale" : "v_scale", HF_F32, heads, "KV head");
    rows.scale = scale.data<const float>();
  }
  if (words) {
    const Tensor given = *words;
    check_operand(given, *name == 'k' ? "k_scale_shift" : "v_scale_shift", HF_I32, {cache.size(0), cache.size(1), heads},
                  ", a word per row", kAnyStrides);
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
  check_operand(*weight, name, dev::dtype_of<Half>, {dim}, ", of q's dtype");
  return weight.data<const Half>();
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
  check_heads(*q, "index_q", tokens, "groups", dim);
  check_heads(*k, "index_k", tokens, 1, dim);
  check_heads(*q_out, "index_q_out", tokens, (*q).size(1), dim);
  check_not_in_place({*q_out, "index_q_out"}, {{*k, "index_k"}});
  const int64_t bytes = rows.element_bytes();
  index.fp8 = bytes == 1;
  check_operand(rows, "index_cache", index.fp8 ? Dtypes(e4m3_of(fnuz), HF_U8) : Dtypes(dev::dtype_of<Half>),
                {k_cache.size(0), k_cache.size(1), dim}, " (pages and page_size of k_cache), of q's dtype or fp8", kAlignedRows);
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
  check_heads(q, "q", "T", "Hq", "D");
  const int64_t tokens = q.size(0), dim = q.size(2);
  HF_CHECK(dim % kChunk == 0 && dim >= kChunk && dim <= kMaxHeadDim, "D must be a multiple of ", kChunk, ", at most ",
           kMaxHeadDim, "; got ", dim);
  HF_CHECK(dim <= kWaveHeadDim, "D must be at most ", kWaveHeadDim, " on this device; got ", dim);
  HF_CHECK(tokens < int64_t{1} << 31, "q must have fewer than 2^31 tokens; got ", tokens);
  check_heads(k, "k", tokens, "Hkv", dim);
  check_heads(v, "v", tokens, k.size(1), dim);
  check_heads(q_out, "q_out", tokens, q.size(1), dim);
  check_not_in_place({q_out, "q_out"}, {{k, "k"}, {v, "v"}});
}

inline void check_tokens(const Tensor& cos_sin, const Tensor& positions, const Tensor& slot_mapping, int64_t tokens,
                         int64_t dim) {
  check_operand(cos_sin, "cos_sin", {HF_F32, dev::dtype_of<Half>}, {"max_pos", "rotary_dim"}, ", float32 or of q's dtype");
  const int64_t rotary_dim = cos_sin.size(1);
  HF_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= dim, "rotary_dim must be even, 2 to D = ", dim, "; got ",
           rotary_dim);
  check_operand(positions, "positions", kIndex, {tokens});
  check_operand(slot_mapping, "slot_mapping", HF_I64, {tokens});
}

}  // namespace hf::rope_and_cache
