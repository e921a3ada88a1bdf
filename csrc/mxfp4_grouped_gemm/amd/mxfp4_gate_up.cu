// The first grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, with SwiGLU and MX-FP8 quantisation in its
// epilogue, for gfx950 and gfx942. ../../mxfp8_grouped_gemm/amd/gate_up_kernel.h has the kernel. A variant serves one number of
// slots per work-group (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/amd/gate_up_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16 or 32"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

constexpr int kRowTiles = HF_ROWS / kTile;
static_assert(HF_ROWS == 16 || HF_ROWS == 32);

/// As mxfp8_gate_up_out, with w as in mxfp4_grouped_split.
void mxfp4_gate_up_out(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale,
                       Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias,
                       int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div,
                       int64_t block_m, double alpha, double beta, double limit, bool interleaved,
                       OptionalTensor workspace, int64_t rows, int64_t parts, int64_t groups, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w), true};
  launch_gate_up<kRowTiles>(mxfp4_gate_up<kRowTiles, 1>, mxfp4_gate_up<kRowTiles, kMaxParts>, given, out, out_scales,
                            hf::checked_activation(alpha, beta, limit, interleaved), workspace, rows, parts, groups, stream);
}
HF_EXPORT(mxfp4_gate_up_out);
