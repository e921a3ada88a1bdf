// Decode attention over pages of any size and head dimensions that the other modules have no variant for, gfx950 and gfx942.
// gathered_kernel.h has the kernels. A variant serves one format of caches and one dtype of q.
#include "../caches.h"
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
constexpr uint32_t kRowUnit = 8;  // bytes that rows of fp8 and 16-bit elements start at multiples of

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
  check_query(o, kInputDtype, static_cast<int>(d));
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
    p.k = int4_cache(o.k, "k", d, groups);
    p.v = int4_cache(o.v, "v", d, groups);
  } else if constexpr (kFormat == Format::half) {
    p.k = half_cache(o.k, "k", d, kInputDtype, scales.k, kRowUnit);
    p.v = half_cache(o.v, "v", d, kInputDtype, scales.v, kRowUnit);
  } else {
    p.k = fp8_cache(o.k, "k", d, scales.k, scales.k_rows, kRowUnit);
    p.v = fp8_cache(o.v, "v", d, scales.v, scales.v_rows, kRowUnit);
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
