// Decode attention on sm_90 over fp8 caches, those of q's own 16-bit dtype, and int4 ones: stream_kernel.h has the kernel.
// The registry names the cache (-DHF_CACHE), a variant one head dimension and one dtype of q, for fp8 also the keys of a step.
#include "../caches.h"
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "merge_kernel.h"
#include "stream_kernel.h"

#if !defined(HF_HEAD_DIM) || !defined(HF_INPUT) || !defined(HF_CACHE)
#error "build a variant: -DHF_HEAD_DIM=64, 128, 192 or 256, -DHF_INPUT=f16 or bf16 and -DHF_CACHE=fp8, half or int4"
#endif
#if !defined(HF_BLOCK_N)
#define HF_BLOCK_N (HF_HEAD_DIM == 64 || Format::HF_CACHE == Format::int4 ? 32 : 16)
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::decode_attention;

namespace {

using Half = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;
constexpr int kD = HF_HEAD_DIM;
constexpr Format kFormat = Format::HF_CACHE;

template <Format kCache, int kEights>
void launch_stream(const Problem& p, int64_t batch, int64_t waves, int64_t groups, bool programmatic,
                   hipStream_t stream) {
  using L = Layout<Half, kD, kCache, HF_BLOCK_N, kEights>;
  const uint32_t row_tiles = (p.group * p.mq + L::kRows - 1) / L::kRows;
  const Split split(p.splits, static_cast<uint32_t>(waves), L::kMostWarps);
  static_assert(L::shared_bytes(L::kMostWarps, true) <= hf::kMostShared);
  hf::Launch at{dim3(split.blocks(), row_tiles, static_cast<uint32_t>(batch) * p.kv_heads.value), split.warps * hf::dev::kWaveSize,
                L::shared_bytes(static_cast<int>(split.warps), split.cluster.value > 1), stream};
  at.cluster = split.cluster.value;
  hf::may_start_early(at, programmatic);
  const auto in_pieces = [](const Cache& cache) {
    return ((reinterpret_cast<uintptr_t>(cache.data) | cache.page_stride | cache.head_stride | cache.slot_stride) & 15) == 0;
  };
  const bool whole_pieces = groups % 4 == 0 && in_pieces(p.k) && in_pieces(p.v);
  hf::launch(decode_stream<Half, kD, kCache, HF_BLOCK_N, kEights>, at, p, split, static_cast<uint32_t>(groups), whole_pieces);
  if (split.outer == 1) return;
  hf::Launch merge{dim3(p.kv_heads.value * p.group, p.mq, static_cast<uint32_t>(batch)), kMergeThreads, 0, stream};
  hf::may_start_early(merge, programmatic);
  hf::launch(decode_merge<Half, kD>, merge, p, split.outer);
}

template <Format kCache>
void launch_rows(const Problem& p, int64_t batch, int64_t waves, int64_t groups, bool programmatic, hipStream_t stream) {
  if (p.group * p.mq <= 8) return launch_stream<kCache, 1>(p, batch, waves, groups, programmatic, stream);
  launch_stream<kCache, 2>(p, batch, waves, groups, programmatic, stream);
}

/// As the entry says; k and v are [pages, page_size, Hkv, row], or [B, Mkv, Hkv, row] without block_tables.
void run(const Operands& o, const Scales& scales, const Options& options, const Configuration& configuration,
         hipStream_t stream) {
  const auto [block_n, waves, splits] = configuration;
  check_query(o, kInputDtype, kD);
  HF_CHECK(waves == 1 || waves == 2 || waves == 4, "waves must be 1, 2 or 4; got ", waves);
  Problem p = {};
  if constexpr (kFormat == Format::fp8) {
    HF_CHECK(block_n == HF_BLOCK_N, "block_n must be ", HF_BLOCK_N, " for this variant; got ", block_n);
    HF_CHECK(scales.k.has_value() == scales.v.has_value(), "k and v must be scaled in the same way");
    p.k = fp8_cache(o.k, "k", kD, scales.k, scales.k_rows);
    p.v = fp8_cache(o.v, "v", kD, scales.v, scales.v_rows);
  } else if constexpr (kFormat == Format::int4) {
    HF_CHECK(scales.groups == 1 || scales.groups == 2 || scales.groups == 4 || scales.groups == 8,
             "groups must be 1, 2, 4 or 8 per row; got ", scales.groups);
    p.k = int4_cache(o.k, "k", kD, scales.groups);
    p.v = int4_cache(o.v, "v", kD, scales.groups);
  } else {
    p.k = half_cache(o.k, "k", kD, kInputDtype, scales.k);
    p.v = half_cache(o.v, "v", kD, kInputDtype, scales.v);
  }
  fill_problem(p, o, options, splits, waves);
  const int64_t batch = o.seqlens.size(0);
  if (batch == 0) return;
  if constexpr (kFormat == Format::fp8) {
    if (p.k.rows) return launch_rows<Format::rows>(p, batch, waves, scales.groups, options.programmatic, stream);
  }
  launch_rows<kFormat>(p, batch, waves, scales.groups, options.programmatic, stream);
}

#define HF_ENTRY_(cache) decode_attention_##cache##_out
#define HF_ENTRY(cache) HF_ENTRY_(cache)
constexpr auto& HF_ENTRY(HF_CACHE) = entry<run>;

}  // namespace

HF_EXPORT(HF_ENTRY(HF_CACHE));
