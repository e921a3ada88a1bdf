// MX-FP8 grouped GEMM of a mixture of experts for gfx950. moe_kernel.h has the kernel; a variant serves one number of
// columns per work-group (HF_BLOCK_N: 8 or 16).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "moe_kernel.h"

#ifndef HF_BLOCK_N
#error "build a variant: -DHF_BLOCK_N=8 or 16"
#endif
static_assert(HF_BLOCK_N == 8 || HF_BLOCK_N == 16);

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. out bf16, at least num_valid_tokens
/// rows of N; a_q [M_act, K], w [E, N, K] e4m3fn (or uint8); their scales e8m0 (or uint8) [M_act, K/32], [E, N, K/32];
/// the index tensors int32; mul_weight_by float32 [num_valid_tokens] or None; bias float32 [E, N] or None, added before
/// the weight; block_n columns per work-group: 8 or 16.
void smallm_mxfp8_moe_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                          Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                          OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act,
                          int64_t a_div, int64_t block_m, int64_t block_n, hipStream_t stream) {
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, HF_E4M3FN};
  Problem problem = checked(given);
  HF_CHECK(block_n == 8 || block_n == 16, "block_n must be 8 or 16 (columns per work-group); got ", block_n);
  HF_CHECK(block_n == HF_BLOCK_N, "this variant of the module has block_n = ", HF_BLOCK_N, "; got ", block_n);
  take_output(problem, out, mul_weight_by, given);
  HF_CHECK_ARCH(w, "gfx950");

  if (problem.grid_rows == 0) return;
  const dim3 grid(hf::ceil_div(N, HF_BLOCK_N), problem.grid_rows);
  smallm_mxfp8_moe<HF_BLOCK_N><<<grid, kThreads, 0, stream>>>(problem);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(smallm_mxfp8_moe_out);
