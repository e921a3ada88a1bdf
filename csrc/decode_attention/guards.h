// What decode attention demands of everything but its caches, on every vendor's GPUs.
#pragma once

#include "hipforge/device/fused_fp8_guards.h"
#include "hipforge/device/mx.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "problem.h"

namespace hf::decode_attention {

constexpr int64_t kMaxGrid = 65535;  // of the grid's second and third axes
// A tile of 16 keys is one raw buffer, of at most 2^31 - 1 bytes.
constexpr int64_t max_slot_stride(int64_t row) { return ((int64_t{1} << 31) - 1) / kTileN - row; }

/// What every entry takes. out is like q [B, Mq, Hq, D] and lse float32 [B, Hq, Mq]; or with q_starts int32 [B + 1]
/// (cu_seqlens_q) q is [tokens, Hq, D] and lse [Hq, tokens]. block_tables int32 [B, max_pages]; seqlens int32 [B]
/// (or [B, Hkv, max_pages] and [B, Hkv]: each KV head has its own keys); sinks
/// float32 [Hq]; out_scale float32 [1] for fp8 out, or block_scales uint8 [tokens, Hq * D/32] for MX-FP8. Workspaces where
/// splits > 1: float32 [splits, tokens * Hq, D] and [splits, tokens * Hq].
struct Operands {
  Tensor out, lse;
  OptionalTensor partial, partial_lse;
  Tensor q, k, v;
  OptionalTensor block_tables;
  Tensor seqlens;
  OptionalTensor q_starts, sinks, out_scale, block_scales;
};

/// What a token sees and how it is weighed; a window or softcap of 0 is none. `max_tokens`: of a sequence, with q_starts.
struct Options {
  int64_t max_tokens;
  double scale;
  bool causal;
  int64_t window;
  double softcap;
  bool programmatic;  // of the launch, for GPUs that have it
  int64_t new_keys;   // programmatic: 0, or how many keys of a sequence's end the launches before may still write, and no others
};

/// How elements are scaled, as far as a format of caches has it: float32 [1] or [Hkv] for all rows; int32 [pages, page_size, Hkv],
/// a word of float16 scale and shift per row; or such words for `groups` parts of an int4 row, which then starts with them.
struct Scales {
  OptionalTensor k, v, k_rows, v_rows;
  int64_t groups;
};

/// Keys of a block (0 where the format has one size), waves of a work-group and parts of a sequence's keys.
struct Configuration {
  int64_t block_n, waves, splits;
};

/// The entry of every format's module, which runs `kRun` on what it is given.
template <void (*kRun)(const Operands&, const Scales&, const Options&, const Configuration&, hipStream_t)>
void entry(Tensor out, Tensor lse, OptionalTensor partial, OptionalTensor partial_lse, Tensor q, Tensor k, Tensor v,
           OptionalTensor block_tables, Tensor seqlens, OptionalTensor k_scale, OptionalTensor v_scale,
           OptionalTensor k_scale_shift, OptionalTensor v_scale_shift, OptionalTensor q_starts, OptionalTensor sinks,
           OptionalTensor out_scale, OptionalTensor scale_out, int64_t groups, double scale, int64_t max_tokens, bool causal,
           int64_t window, double softcap, bool programmatic, int64_t new_keys, int64_t block_n, int64_t waves, int64_t splits,
           hipStream_t stream) {
  kRun({out, lse, partial, partial_lse, q, k, v, block_tables, seqlens, q_starts, sinks, out_scale, scale_out},
       {k_scale, v_scale, k_scale_shift, v_scale_shift, groups}, {max_tokens, scale, causal, window, softcap, programmatic, new_keys},
       {block_n, waves, splits}, stream);
}

inline void check_query(const Operands& o, hf_dtype input, int d) {
  HF_CHECK_ARCH(o.q, HF_ARCHS);
  if (o.q_starts)
    check_operand(o.q, "q", input, {"tokens", "Hq", d}, " with cu_seqlens_q", kAligned);
  else
    check_operand(o.q, "q", input, {"B", "Mq", "Hq", d}, " without cu_seqlens_q", kAligned);
}

/// The sizes of q [B, Mq, Hq, D], or with q_starts of q [tokens, Hq, D].
struct Queries {
  int64_t batch, mq, tokens, heads, d;

  Queries(const Tensor& q, const OptionalTensor& q_starts, const Tensor& seqlens, int64_t max_tokens)
      : heads(q.size(q.dim() - 2)), d(q.size(q.dim() - 1)) {
    batch = q_starts ? seqlens.size(0) : q.size(0);
    mq = q_starts ? max_tokens : q.size(1);
    tokens = q_starts ? q.size(0) : batch * mq;
    HF_CHECK(mq >= 1 && mq <= kMaxMq, q_starts ? "max_seqlen_q" : "Mq", " must be 1 to ", kMaxMq,
             " query tokens per sequence; got ", mq);
    if (q_starts)
      check_operand(*q_starts, "cu_seqlens_q", HF_I32, {batch + 1}, ", the first token of each sequence and the end");
  }
};

/// Checks the distance of the keys of a cache [pages, page_size, Hkv, ...], and fills what the kernel takes of it. The kernels cut
/// a tile's buffer to its keys times the bytes between two of them, which takes rows for absent where they overlap, as those of an
/// expanded cache do.
inline Cache cache_of(const Tensor& data, const char* name) {
  const int64_t element = data.element_bytes(), row = data.size(3) * element;
  const int64_t slot = data.size(1) == 1 ? row : data.stride(1) * element;
  HF_CHECK(slot >= row, name, " has keys of ", row, " bytes that overlap, ", slot,
           " bytes apart (an expanded cache has 0); pass contiguous() of it");
  HF_CHECK(slot <= max_slot_stride(row), name, " has keys ", slot, " bytes apart; at most ", max_slot_stride(row),
           " are addressed");
  Cache cache = {};
  cache.data = static_cast<const uint8_t*>(data.data());
  cache.page_stride = element * data.stride(0);
  cache.slot_stride = static_cast<uint32_t>(slot);
  cache.head_stride = element * data.stride(2);
  return cache;
}

/// Fills in the scale of a cache's elements, one or one per KV head.
inline void fill_scale(Cache& cache, const Tensor& scale, const char* name, int64_t kv_heads) {
  cache.scale_stride = check_one_or(scale, *name == 'k' ? "k_scale" : "v_scale", HF_F32, kv_heads, "KV head");
  cache.scale = scale.data<const float>();
}

/// Checks what kind of output is asked for, and fills it in. `out` has q's shape.
inline void fill_output(Problem& p, const Tensor& out, const OptionalTensor& out_scale, const OptionalTensor& block_scales,
                        const Tensor& q, const Queries& sizes) {
  HF_CHECK(!out_scale || !block_scales, "out_scale and scale_out must not both be given: out has one scale, or one per ",
           kMxBlock, " elements");
  const bool quantised = out_scale || block_scales;
  const auto format = fused_fp8::format_of(q);
  const Dtypes results = quantised ? Dtypes(format.dtype()) : Dtypes(q.dtype(), HF_F32);
  const Placement stored{out.dtype() == q.dtype() ? 8u : 16u};  // what a lane stores at once
  if (q.dim() == 3)
    check_operand(out, "out", results, {q.size(0), q.size(1), q.size(2)}, ", the shape of q", stored);
  else
    check_operand(out, "out", results, {q.size(0), q.size(1), q.size(2), q.size(3)}, ", the shape of q", stored);
  p.output = out_scale ? Output::fp8 : block_scales ? Output::mxfp8 : out.dtype() == HF_F32 ? Output::f32 : Output::input;
  if (out_scale) {
    check_one(*out_scale, "out_scale", HF_F32);
    p.out_scale = out_scale.data<const float>();
  }
  if (block_scales) {
    check_operand(*block_scales, "scale_out", kE8m0, {sizes.tokens, sizes.heads * sizes.d / kMxBlock});
    p.block_scales = block_scales.data<uint8_t>();
  }
}

/// Checks the operands, whose q and caches have been checked, and fills what the problem has besides its caches.
inline void fill_problem(Problem& p, const Operands& o, const Options& options, int64_t splits, int64_t ranges) {
  const auto& [out, lse, partial, partial_lse, q, k, v, block_tables, seqlens, q_starts, sinks, out_scale, block_scales] = o;
  const Queries sizes(q, q_starts, seqlens, options.max_tokens);
  const auto [batch, mq, tokens, heads, d] = sizes;
  const int64_t kv_heads = k.size(2), rows = tokens * heads;
  HF_CHECK(v.is_shape(k.size(0), k.size(1), k.size(2), k.size(3)), "v must have the shape of k, ", k, "; got ", v);
  HF_CHECK(kv_heads >= 1 && heads >= 1 && heads % kv_heads == 0, "Hq must be a positive multiple of Hkv; got Hq = ", heads,
           " and Hkv = ", kv_heads);
  HF_CHECK(heads / kv_heads <= kMaxGroup, "Hq / Hkv must be at most ", kMaxGroup, "; got ", heads / kv_heads);
  HF_CHECK(rows <= UINT32_MAX, "q must have fewer than 2^32 rows of D; got ", rows);
  HF_CHECK(batch * kv_heads <= kMaxGrid, "B * Hkv must be at most ", kMaxGrid, "; got ", batch * kv_heads);
  HF_CHECK(splits >= 1 && splits <= kMaxSplits, "split_k must be 1 to ", kMaxSplits, "; got ", splits);
  const bool own_keys = seqlens.dim() == 2;
  if (own_keys)
    check_operand(seqlens, "seqlens", HF_I32, {batch, kv_heads}, " = [B, Hkv]");
  else
    check_operand(seqlens, "seqlens", HF_I32, {batch}, ", or [B, Hkv] where KV heads have their own keys");
  HF_CHECK(!own_keys || block_tables, "seqlens [B, Hkv] needs block_tables [B, Hkv, max_pages]");
  int64_t max_keys = k.size(1);
  if (block_tables) {
    const Tensor tables = *block_tables;
    if (own_keys)
      check_operand(tables, "block_tables", HF_I32, {batch, kv_heads, "max_pages"}, " = [B, Hkv, max_pages]");
    else
      check_operand(tables, "block_tables", HF_I32, {batch, "max_pages"}, " = [B, max_pages]");
    HF_CHECK(k.size(1) >= kTileN && k.size(1) % kTileN == 0, "page_size must be a positive multiple of ", kTileN,
             " (keys of one matrix instruction); got ", k.size(1));
    p.block_tables = tables.data<const int32_t>();
    p.max_pages = static_cast<uint32_t>(tables.size(-1));
    max_keys *= tables.size(-1);
  } else {
    p.block_tables = seqlens.data<const int32_t>();
    HF_CHECK(k.size(0) == batch, "k without block_tables must have a page per sequence, with B = ", batch, "; got ", k);
  }
  HF_CHECK(max_keys <= kMaxKeys, "a sequence may have at most ", kMaxKeys, " keys; got room for ", max_keys);
  const bool ragged = q_starts.has_value();
  fill_output(p, out, out_scale, block_scales, q, sizes);
  if (ragged)
    check_operand(lse, "lse", HF_F32, {heads, tokens}, " = [Hq, tokens]");
  else
    check_operand(lse, "lse", HF_F32, {batch, heads, mq}, " = [B, Hq, Mq]");
  if (splits > 1) {
    HF_CHECK(partial && partial_lse, "split_k > 1 needs both workspaces");
    check_operand(*partial, "partial", HF_F32, {splits, rows, d}, "", kAligned);
    check_operand(*partial_lse, "partial_lse", HF_F32, {splits, rows});
    p.partial = partial.data<float>();
    p.partial_lse = partial_lse.data<float>();
  }
  p.q = q.data();
  p.out = out.data();
  p.lse = lse.data<float>();
  p.seqlens = seqlens.data<const int32_t>();
  p.page_size = Divisor::of(k.size(1) > 1 ? static_cast<uint32_t>(k.size(1)) : 1u);
  p.max_keys = static_cast<uint32_t>(max_keys);
  p.kv_heads = Divisor::of(static_cast<uint32_t>(kv_heads));
  p.lists = Divisor::of(own_keys ? p.kv_heads.value : 1u);
  p.group = static_cast<uint32_t>(heads / kv_heads);
  p.mq = static_cast<uint32_t>(mq);
  p.rows = static_cast<uint32_t>(rows);
  p.q_starts = ragged ? q_starts.value().data<const int32_t>() : nullptr;
  p.lse_stride = static_cast<uint32_t>(ragged ? tokens : mq);
  p.splits = static_cast<uint32_t>(splits);
  p.ranges = static_cast<uint32_t>(ranges);
  p.parts = Divisor::of(p.splits * p.ranges);
  p.causal = options.causal;
  p.factor = static_cast<float>(options.scale) * kLog2E;
  HF_CHECK(options.window >= 0, "window must be at least 1, or 0 for none; got ", options.window);
  HF_CHECK(options.window == 0 || options.causal, "a window needs causal attention");
  p.window = options.window == 0 || options.window > kMaxKeys ? kNoWindow : static_cast<uint32_t>(options.window);
  HF_CHECK(options.new_keys >= 0 && options.new_keys <= kMaxKeys, "new_keys must be at least 0; got ", options.new_keys);
  p.new_keys = options.programmatic && !ragged ? static_cast<uint32_t>(options.new_keys) : 0;
  p.all_seen = p.window == kNoWindow && (!options.causal || (mq == 1 && !ragged));
  HF_CHECK(options.softcap >= 0, "softcap must be positive, or 0 for none; got ", options.softcap);
  p.cap = static_cast<float>(options.softcap) * kLog2E;
  p.cap_exponent = options.softcap > 0 ? static_cast<float>(2 / options.softcap) : 0.f;
  if (sinks) {
    check_operand(*sinks, "sinks", HF_F32, {heads}, ", one per query head");
    p.sinks = sinks.data<const float>();
  }
}

}  // namespace hf::decode_attention
