// Grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, for gfx950 and a K of 128 to 512.
// ../../mxfp8_grouped_gemm/amd/stream_kernel.h has the kernel. A variant serves one K (HF_STEPS of 128).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/amd/stream_kernel.h"

#ifndef HF_STEPS
#error "build a variant: -DHF_STEPS=1, 2, 3 or 4"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

static_assert(HF_STEPS >= 1 && HF_STEPS <= kMostSteps);

/// As mxfp4_grouped_split_out, with 16 slots at a time; K is 128 HF_STEPS, both scale tensors start at a multiple of 4 bytes;
/// columns of a work-group a multiple of 64 up to 512.
void mxfp4_grouped_stream_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                              Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                              OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act,
                              int64_t a_div, int64_t block_m, int64_t columns, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w), true};
  Problem problem = checked(given);
  take_output(problem, out, mul_weight_by, given);
  launch_stream<HF_STEPS>(mxfp4_grouped_stream<HF_STEPS>, problem, columns, stream);
}
HF_EXPORT(mxfp4_grouped_stream_out);
