// Decode attention over an fp8 K/V cache, gfx950 (e4m3fn) and gfx942 (e4m3fnuz). decode_kernel.h and merge_kernel.h have the
// kernels. A variant serves one head dimension, one dtype of q and one block of keys.
#include "decode_kernel.h"
#include "../caches.h"
#include "launch_split.h"
#include "hipforge/device/element.h"
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"

#if !defined(HF_HEAD_DIM) || !defined(HF_INPUT) || !defined(HF_BLOCK_N)
#error "build a variant: -DHF_HEAD_DIM=64, 128, 192 or 256, -DHF_INPUT=f16 or bf16 and -DHF_BLOCK_N=16, 32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::decode_attention;

namespace {

using Half = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;
constexpr int kD = HF_HEAD_DIM;
constexpr int kBlockN = HF_BLOCK_N;
using Layout = Shape<Half, kD>;
static_assert(kBlockN % kTileN == 0 && kBlockN <= kMaxBlockN);

/// k, v fp8 [pages, page_size, Hkv, D], or [B, Mkv, Hkv, D] without block_tables, with one scale for all or a word per row.
void run(const Operands& o, const Scales& scales, const Options& options, const Configuration& configuration,
         hipStream_t stream) {
  const auto [block_n, waves, splits] = configuration;
  check_query(o, kInputDtype, kD);
  Problem p = {};
  p.k = fp8_cache(o.k, "k", kD, scales.k, scales.k_rows);
  p.v = fp8_cache(o.v, "v", kD, scales.v, scales.v_rows);
  HF_CHECK(scales.k.has_value() == scales.v.has_value(), "k and v must be scaled in the same way");
  HF_CHECK(block_n == kBlockN, "block_n must be ", kBlockN, " for this variant; got ", block_n);
  HF_CHECK((waves == 1 || waves == 2 || waves == 4) && waves >= Layout::kParts, "waves must be ", Layout::kParts,
           kD == 256 ? " (which share a key range) or 4" : ", 2 or 4", "; got ", waves);
  fill_problem(p, o, options, splits, waves / Layout::kParts);
  const int64_t batch = o.seqlens.size(0);
  if (batch == 0) return;
  const auto threads = static_cast<uint32_t>(waves * hf::dev::kWaveSize);
  const uint32_t lds = Layout::lds_bytes(kBlockN, static_cast<int>(waves), p.k.rows != nullptr);
  const auto kernel = p.k.rows ? decode_split<Half, kD, kBlockN, true> : decode_split<Half, kD, kBlockN, false>;
  launch_split(kernel, p, batch, threads, lds, stream);
  launch_merge<Half, kD>(p, batch, stream);
}

constexpr auto& decode_attention_fp8_out = entry<run>;

}  // namespace

HF_EXPORT(decode_attention_fp8_out);
