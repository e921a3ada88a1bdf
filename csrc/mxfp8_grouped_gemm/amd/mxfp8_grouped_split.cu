// MX-FP8 grouped GEMM of a mixture of experts for gfx950 and gfx942, K split over the waves of a work-group.
// split_kernel.h has the kernel. A variant serves one number of slots per work-group (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "split_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16 or 32"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

constexpr int kRowTiles = HF_ROWS / kTile;
static_assert(HF_ROWS == 16 || HF_ROWS == 32);

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. out bf16, at least num_valid_tokens
/// rows of N; a_q [M_act, K], w [E, N, K] e4m3 in the architecture's format (or uint8); their scales e8m0 (or uint8)
/// [M_act, K/32], [E, N, K/32]; the index tensors int32; mul_weight_by float32 [num_valid_tokens] or None; bias float32
/// [E, N] or None, added before the weight; waves for each 16 columns 1, 2, 4 or 8; columns of a work-group 16 to 128.
void mxfp8_grouped_split_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                             Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                             OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens,
                             int64_t M_act, int64_t a_div, int64_t block_m, int64_t rows, int64_t waves,
                             int64_t columns, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w)};
  Problem problem = checked(given);
  take_output(problem, out, mul_weight_by, given);
  launch_split<kRowTiles>(mxfp8_grouped_split<kRowTiles, true>, mxfp8_grouped_split<kRowTiles, false>, problem, rows, waves,
                          columns, stream);
}
HF_EXPORT(mxfp8_grouped_split_out);
