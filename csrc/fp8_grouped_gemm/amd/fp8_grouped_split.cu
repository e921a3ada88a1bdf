// Scaled fp8 grouped GEMM of a mixture of experts for gfx950 and gfx942, K split over the waves of a work-group.
// ../../mxfp8_grouped_gemm/amd/split_kernel.h has the kernel. A variant serves one number of slots per work-group (HF_ROWS)
// and one kind of scales (HF_SCALES, the values of Scales).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "../../mxfp8_grouped_gemm/amd/split_kernel.h"

#if !defined(HF_ROWS) || !defined(HF_SCALES)
#error "build a variant: -DHF_ROWS=16 or 32, -DHF_SCALES=0 to 3"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr Scales kScales{HF_SCALES};
static_assert(HF_ROWS == 16 || HF_ROWS == 32);
static_assert(kScales < Scales::kMx);

/// As grouped_split, with K a multiple of 16 and the scales of guards.h.
void fp8_grouped_split_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                           Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                           OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens,
                           int64_t M_act, int64_t a_div, int64_t block_m, int64_t scales, int64_t rows, int64_t waves,
                           int64_t columns, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w)};
  Problem problem = checked(given, scales, kScales);
  take_output(problem, out, mul_weight_by, given);
  launch_split<kRowTiles>(fp8_grouped_split<kRowTiles, true, kScales>, fp8_grouped_split<kRowTiles, false, kScales>, problem,
                          rows, waves, columns, stream);
}
HF_EXPORT(fp8_grouped_split_out);
