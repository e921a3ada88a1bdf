// MX-FP8 grouped GEMM of a mixture of experts in tiles, for any number of slots of an expert, on sm_90. tiles_kernel.h has the
// kernel. A variant multiplies HF_SLOTS slots at once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "tiles_kernel.h"

#if !defined(HF_SLOTS)
#error "build a variant: -DHF_SLOTS=32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

static_assert(HF_SLOTS == 32 || HF_SLOTS == 64);

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. Operands as in mxfp8_grouped_split;
/// slots, of a tile at a time; programmatic: the launch may start before its predecessor has ended.
void mxfp8_grouped_tiles_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                             Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                             OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act,
                             int64_t a_div, int64_t block_m, int64_t slots, bool programmatic,
                             hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, HF_E4M3FN};
  Problem problem = problem_of(given);
  take_output(problem, out, mul_weight_by, given);
  multiply_tiles<HF_SLOTS, false>(problem, given, slots, programmatic, stream);
}
HF_EXPORT(mxfp8_grouped_tiles_out);
