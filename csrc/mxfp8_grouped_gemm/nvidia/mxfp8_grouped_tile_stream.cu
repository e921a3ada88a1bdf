// MX-FP8 grouped GEMM of a mixture of experts for some slots of an expert, on sm_90, and the first one with SwiGLU and MX
// quantisation in its epilogue. tile_stream_kernel.h has the kernel. A variant multiplies up to HF_SLOTS slots at once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "tile_stream_kernel.h"

#if !defined(HF_SLOTS)
#error "build a variant: -DHF_SLOTS=16, 32 or 48"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. Operands as in mxfp8_grouped_split;
/// slots, of an expert at a time; blocks: how many share the rows of W; programmatic: the launch may start before its predecessor has
/// ended.
void mxfp8_grouped_tile_stream_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                                   Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                                   OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act,
                                   int64_t a_div, int64_t block_m, int64_t slots, int64_t blocks, bool programmatic,
                                   hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, HF_E4M3FN};
  Problem problem = problem_of(given);
  take_output(problem, out, mul_weight_by, given);
  stream_tiles<HF_SLOTS, false>(problem, given, slots, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_grouped_tile_stream_out);

/// Writes out[slot] and out_scales[slot] for every slot of a tile in use; other rows stay as they are. out e4m3 [num_valid_tokens,
/// N/2], out_scales uint8 [num_valid_tokens, N/64]; operands as in mxfp8_gate_up; limit infinite for none; slots,
/// blocks and programmatic as above.
void mxfp8_gate_up_tile_stream_out(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale,
                                   Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias,
                                   int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div,
                                   int64_t block_m, double alpha, double beta, double limit, bool interleaved, int64_t slots,
                                   int64_t blocks, bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, HF_E4M3FN};
  Problem problem = problem_of(given);
  take_gate_up(problem, out, out_scales, given, hf::checked_activation(alpha, beta, limit, interleaved));
  stream_tiles<HF_SLOTS, true>(problem, given, slots, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_gate_up_tile_stream_out);
