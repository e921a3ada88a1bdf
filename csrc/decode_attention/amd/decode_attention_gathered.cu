// Decode attention over pages of any size and head dimensions that the other modules have no variant for, gfx950 and gfx942.
// gathered_kernel.h has the kernels. A variant serves one format of caches and one dtype of q.
#include "../guards.h"
#include "gathered_kernel.h"
#include "launch_split.h"
#include "hipforge/device/element.h"
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"

#if !defined(HF_CACHE) || !defined(HF_INPUT)
#error "build a variant: -DHF_CACHE=fp8, half or int4 and -DHF_INPUT=f16 or bf16"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::decode_attention;

namespace {

enum class Format { fp8, half, int4 };

using Half = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;
constexpr Format kFormat = Format::HF_CACHE;
constexpr int64_t kRowUnit = 8;  // bytes that rows of fp8 and 16-bit elements start at multiples of

/// int4 rows [pages, page_size, Hkv, groups + D/8], the words of scales and those of codes.
Cache int4_cache_of(const Tensor& data, const char* name, int64_t d, int64_t groups) {
  const int64_t words = groups + d / 8;
  HF_CHECK(data.dtype() == HF_I32 && data.dim() == 4 && data.size(3) == words, name, " must be int32 [pages, page_size, Hkv, ",
           words, "], the words of scales and those of ", d, " nibbles; got ", data);
  Cache cache = {};
  fill_strides(cache, data, name, 4, 1, 4 * words);
  cache.data = static_cast<const uint8_t*>(data.data());
  return cache;
}

/// One of fp8 rows or of q's dtype [pages, page_size, Hkv, D], with one scale for all or per KV head, or a word per fp8 row.
Cache cache_of(const Tensor& data, const char* name, int64_t d, const OptionalTensor& scale, const OptionalTensor& words) {
  const bool fp8 = kFormat == Format::fp8;
  const bool accepted = fp8 ? data.dtype() == HF_U8 || data.dtype() == HF_E4M3FN || data.dtype() == HF_E4M3FNUZ
                            : data.dtype() == kInputDtype;
  HF_CHECK(accepted && data.dim() == 4 && data.size(3) == d, name, " must be ", fp8 ? "fp8, or uint8 with its bits," : "of q's dtype",
           " [pages, page_size, Hkv, ", d, "]; got ", data);
  hf::check_aligned(data, name, kRowUnit);
  HF_CHECK(scale.has_value() != words.has_value(), name, " needs one scale per tensor or head, or one word per row, not both");
  HF_CHECK(fp8 || scale, name, "_scale must be given for a cache of 16-bit elements; got None");
  const int64_t element = data.element_bytes();
  Cache cache = {};
  fill_strides(cache, data, name, element, kRowUnit / element, d * element);
  cache.data = static_cast<const uint8_t*>(data.data());
  if (scale) {
    fill_scale(cache, *scale, name, data.size(2));
    return cache;
  }
  const Tensor value = *words;
  HF_CHECK(value.dtype() == HF_I32 && value.is_shape(data.size(0), data.size(1), data.size(2)), name,
           "'s scale_shift must be int32 [", data.size(0), ", ", data.size(1), ", ", data.size(2), "]; got ", value);
  for (int axis = 0; axis < 3; ++axis)
    HF_CHECK(value.stride(axis) >= 0 && value.stride(axis) <= max_slot_stride(0), name, "'s scale_shift has a stride of ",
             value.stride(axis), " words along axis ", axis, "; 0 to ", max_slot_stride(0), " are taken");
  cache.rows = static_cast<const uint8_t*>(value.data());
  cache.rows_page_stride = 4 * value.stride(0);
  cache.rows_slot_stride = 4 * static_cast<uint32_t>(value.stride(1));
  cache.rows_head_stride = 4 * value.stride(2);
  return cache;
}

/// fill_problem for pages of any size. It takes pages of whole tiles, so it is shown caches whose pages have one, and what it
/// takes from that is put right.
void fill_gathered(Problem& p, const Operands& o, const Options& options, int64_t splits, int64_t ranges) {
  const int64_t page_size = o.k.size(1);
  HF_CHECK(o.v.is_shape(o.k.size(0), page_size, o.k.size(2), o.k.size(3)), "v must have the shape of k, ", o.k, "; got ", o.v);
  if (!o.block_tables || page_size % kTileN == 0) return fill_problem(p, o, options, splits, ranges);
  const int64_t pages = o.block_tables.value().size(-1), widest = page_size > kTileN ? page_size : kTileN;
  HF_CHECK(pages <= kMaxKeys / widest, "block_tables may have at most ", kMaxKeys / widest, " pages of ", page_size,
           " keys for a sequence; got ", pages);
  const int64_t shape[] = {o.k.size(0), kTileN, o.k.size(2), o.k.size(3)};
  hf_tensor k = o.k.view(), v = o.v.view();
  k.shape = v.shape = shape;
  const Operands shown = {o.out, o.lse, o.partial, o.partial_lse, o.q, Tensor(k), Tensor(v), o.block_tables,
                          o.seqlens, o.q_starts, o.sinks, o.out_scale, o.block_scales};
  fill_problem(p, shown, options, splits, ranges);
  p.page_size = hf::Divisor::of(static_cast<uint32_t>(page_size));
  p.max_keys = static_cast<uint32_t>(page_size) * p.max_pages;
}

template <class Part>
void launch(const Problem& p, int64_t batch, uint32_t d, int64_t groups, uint32_t waves, hipStream_t stream) {
  const uint32_t parts = parts_of(d), heads = p.kv_heads.value * p.group;
  launch_split(decode_split_gathered<Half, Part>, p, batch, waves * hf::dev::kWaveSize, gathered_lds_bytes<Part>(parts, waves),
               stream, d, parts, static_cast<uint32_t>(groups));
  if (p.splits == 1) return;
  hf::launch(decode_merge_gathered<Half>, {dim3(heads * parts, p.mq, static_cast<uint32_t>(batch)), kMergeThreads, 0, stream},
             p.partial, p.partial_lse, p.q_starts, p.rows, p.splits, heads, p.mq, p, d);
}

void run(const Operands& o, const Scales& scales, const Options& options, const Configuration& configuration,
         hipStream_t stream) {
  const int64_t d = o.q.size(-1), waves = configuration.waves;
  HF_CHECK(d % 8 == 0 && d >= kLeastDim && d <= kMaxDim, "D must be a multiple of 8 from ", kLeastDim, " to ", kMaxDim, "; got ", d);
  check_query(o.q, kInputDtype, static_cast<int>(d));
  const int64_t parts = parts_of(static_cast<uint32_t>(d)), ranges = waves / parts;
  HF_CHECK(waves <= kMaxWaves && waves % parts == 0 && (ranges == 1 || ranges == 2 || ranges == 4), "waves must be ", parts,
           " at D = ", d, ", one for each ", kPartColumns, " columns, or 2 or 4 times as many up to ", kMaxWaves, "; got ", waves);
  HF_CHECK(!o.block_scales || d % hf::kMxBlock == 0, "MX-FP8 output needs a D of whole blocks of ", hf::kMxBlock, "; got ", d);
  const int64_t groups = scales.groups;
  Problem p = {};
  if constexpr (kFormat == Format::int4) {
    HF_CHECK(groups >= 1 && groups <= 8 && (groups & (groups - 1)) == 0, "groups must be 1, 2, 4 or 8 per row; got ", groups);
    HF_CHECK(d % (8 * groups) == 0, "D must be a multiple of ", 8 * groups, ", so that each of ", groups,
             " groups has whole words of eight; got ", d);
    p.k = int4_cache_of(o.k, "k", d, groups);
    p.v = int4_cache_of(o.v, "v", d, groups);
  } else {
    p.k = cache_of(o.k, "k", d, scales.k, scales.k_rows);
    p.v = cache_of(o.v, "v", d, scales.v, scales.v_rows);
    HF_CHECK(scales.k.has_value() == scales.v.has_value(), "k and v must be scaled in the same way");
  }
  fill_gathered(p, o, options, configuration.splits, ranges);
  const int64_t batch = o.seqlens.size(0);
  if (batch == 0) return;
  const auto dim = static_cast<uint32_t>(d), width = static_cast<uint32_t>(waves);
  if constexpr (kFormat == Format::half)
    launch<HalfPart<Half>>(p, batch, dim, groups, width, stream);
  else if constexpr (kFormat == Format::int4)
    launch<Int4Part<Half>>(p, batch, dim, groups, width, stream);
  else if (p.k.rows)
    launch<Fp8Part<Half, true>>(p, batch, dim, groups, width, stream);
  else
    launch<Fp8Part<Half, false>>(p, batch, dim, groups, width, stream);
}

constexpr auto& decode_attention_gathered_out = entry<run>;

}  // namespace

HF_EXPORT(decode_attention_gathered_out);
