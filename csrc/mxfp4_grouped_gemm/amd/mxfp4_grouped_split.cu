// Grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, for gfx950 and gfx942, K split over the waves of a
// work-group. ../../mxfp8_grouped_gemm/amd/split_kernel.h has the kernel. A variant serves one number of slots (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/amd/split_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16 or 32"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

constexpr int kRowTiles = HF_ROWS / kTile;
static_assert(HF_ROWS == 16 || HF_ROWS == 32);

/// As mxfp8_grouped_split_out, with w uint8 [E, N, K/2], two e2m1 elements in a byte, the first in its low half.
void mxfp4_grouped_split_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                             Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                             OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens,
                             int64_t M_act, int64_t a_div, int64_t block_m, int64_t rows, int64_t waves,
                             int64_t columns, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w), true};
  Problem problem = checked(given);
  take_output(problem, out, mul_weight_by, given);
  launch_split<kRowTiles>(mxfp4_grouped_split<kRowTiles, true>, mxfp4_grouped_split<kRowTiles, false>, problem, rows, waves,
                          columns, stream);
}
HF_EXPORT(mxfp4_grouped_split_out);
