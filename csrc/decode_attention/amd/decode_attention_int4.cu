// Decode attention over an int4 K/V cache with a scale and a shift per group, gfx950 and gfx942. int4_kernel.h and
// merge_kernel.h have the kernels. A variant serves one head dimension and one dtype of q.
#include "../caches.h"
#include "launch_split.h"
#include "hipforge/device/element.h"
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "int4_kernel.h"

#if !defined(HF_HEAD_DIM) || !defined(HF_INPUT)
#error "build a variant: -DHF_HEAD_DIM=64, 128, 192 or 256 and -DHF_INPUT=f16 or bf16"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::decode_attention;

namespace {

using Half = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;
constexpr int kD = HF_HEAD_DIM;

/// k, v int32 [pages, page_size, Hkv, groups + D/8], or [B, Mkv, Hkv, groups + D/8] without block_tables.
void run(const Operands& o, const Scales& scales, const Options& options, const Configuration& configuration,
         hipStream_t stream) {
  const int64_t groups = scales.groups, waves = configuration.waves;
  check_query(o, kInputDtype, kD);
  HF_CHECK(groups == 1 || groups == 2 || groups == 4 || groups == 8, "groups must be 1, 2, 4 or 8 per row; got ", groups);
  HF_CHECK(waves == 1 || waves == 2 || waves == 4, "waves must be 1, 2 or 4; got ", waves);
  Problem p = {};
  p.k = int4_cache(o.k, "k", kD, groups);
  p.v = int4_cache(o.v, "v", kD, groups);
  fill_problem(p, o, options, configuration.splits, waves);
  const int64_t batch = o.seqlens.size(0);
  if (batch == 0) return;
  const auto threads = static_cast<uint32_t>(waves * hf::dev::kWaveSize);
  const uint32_t lds = row_lds_bytes(kD, static_cast<int>(waves));
  launch_split(decode_split_int4<Half, kD>, p, batch, threads, lds, stream, static_cast<uint32_t>(groups));
  launch_merge<Half, kD>(p, batch, stream);
}

constexpr auto& decode_attention_int4_out = entry<run>;

}  // namespace

HF_EXPORT(decode_attention_int4_out);
