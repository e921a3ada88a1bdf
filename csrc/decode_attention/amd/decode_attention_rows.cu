// Decode attention over a K/V cache whose rows a wave multiplies itself, gfx950 and gfx942: of q's own dtype, bf16 or f16, or int4
// with a scale and a shift per group. half_kernel.h, int4_kernel.h and merge_kernel.h have the kernels. The registry names the
// cache (-DHF_CACHE), a variant one head dimension and one dtype of q.
#include "../caches.h"
#include "half_kernel.h"
#include "int4_kernel.h"
#include "launch_split.h"
#include "hipforge/device/element.h"
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"

#if !defined(HF_HEAD_DIM) || !defined(HF_INPUT) || !defined(HF_CACHE)
#error "build a variant: -DHF_HEAD_DIM=64, 128, 192 or 256, -DHF_INPUT=f16 or bf16 and -DHF_CACHE=half or int4"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::decode_attention;

namespace {

enum class Format { half, int4 };

using Half = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;
constexpr int kD = HF_HEAD_DIM;

/// k, v of q's dtype [pages, page_size, Hkv, D] with one scale for all or per KV head, or int4 as int32
/// [pages, page_size, Hkv, groups + D/8]; without block_tables [B, Mkv, Hkv, ...].
void run(const Operands& o, const Scales& scales, const Options& options, const Configuration& configuration,
         hipStream_t stream) {
  const int64_t groups = scales.groups, waves = configuration.waves;
  check_query(o, kInputDtype, kD);
  HF_CHECK(waves == 1 || waves == 2 || waves == 4, "waves must be 1, 2 or 4; got ", waves);
  Problem p = {};
  if constexpr (Format::HF_CACHE == Format::half) {
    p.k = half_cache(o.k, "k", kD, kInputDtype, scales.k);
    p.v = half_cache(o.v, "v", kD, kInputDtype, scales.v);
  } else {
    HF_CHECK(groups == 1 || groups == 2 || groups == 4 || groups == 8, "groups must be 1, 2, 4 or 8 per row; got ", groups);
    p.k = int4_cache(o.k, "k", kD, groups);
    p.v = int4_cache(o.v, "v", kD, groups);
  }
  fill_problem(p, o, options, configuration.splits, waves);
  const int64_t batch = o.seqlens.size(0);
  if (batch == 0) return;
  const auto threads = static_cast<uint32_t>(waves * hf::dev::kWaveSize);
  const uint32_t lds = row_lds_bytes(kD, static_cast<int>(waves));
  if constexpr (Format::HF_CACHE == Format::half)
    launch_split(decode_split_half<Half, kD>, p, batch, threads, lds, stream);
  else
    launch_split(decode_split_int4<Half, kD>, p, batch, threads, lds, stream, static_cast<uint32_t>(groups));
  launch_merge<Half, kD>(p, batch, stream);
}

#define HF_ENTRY_(cache) decode_attention_##cache##_out
#define HF_ENTRY(cache) HF_ENTRY_(cache)
constexpr auto& HF_ENTRY(HF_CACHE) = entry<run>;

}  // namespace

HF_EXPORT(HF_ENTRY(HF_CACHE));
