// The first grouped MX-FP8 GEMM of a mixture of experts with SwiGLU and MX quantisation in its epilogue, for gfx950 and
// gfx942. gate_up_kernel.h has the kernel. A variant serves one number of slots per work-group (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "gate_up_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16 or 32"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

constexpr int kRowTiles = HF_ROWS / kTile;
static_assert(HF_ROWS == 16 || HF_ROWS == 32);

/// Writes out[slot] and out_scales[slot] for every slot of a tile in use; other rows stay as they are. out e4m3 in the
/// architecture's format [num_valid_tokens, N/2], out_scales uint8 [num_valid_tokens, N/64]; a_q [M_act, K], w [E, N, K]
/// as in mxfp8_grouped_split; bias float32 [E, N] or None; limit infinite for none; rows, slots at a time; parts of K
/// in a work-group, 1 or 2; groups that share K, 1, 2 or 4, and where there are several a workspace: float32
/// [num_valid_tokens (groups N + 2 (groups - 1) N/64)], with any contents.
void mxfp8_gate_up_out(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale,
                       Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias,
                       int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div,
                       int64_t block_m, double alpha, double beta, double limit, bool interleaved,
                       OptionalTensor workspace, int64_t rows, int64_t parts, int64_t groups, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w)};
  launch_gate_up<kRowTiles>(mxfp8_gate_up<kRowTiles, 1>, mxfp8_gate_up<kRowTiles, kMaxParts>, given, out, out_scales,
                            hf::checked_activation(alpha, beta, limit, interleaved), workspace, rows, parts, groups, stream);
}
HF_EXPORT(mxfp8_gate_up_out);
