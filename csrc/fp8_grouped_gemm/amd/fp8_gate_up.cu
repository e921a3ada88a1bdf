// The first scaled fp8 GEMM of a mixture of experts with SwiGLU and quantisation in its epilogue, for gfx950 and gfx942.
// ../../mxfp8_grouped_gemm/amd/gate_up_kernel.h has the kernel. A variant serves one number of slots per work-group (HF_ROWS)
// and one kind of scales (HF_SCALES, the values of Scales), of operands and results.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "../../mxfp8_grouped_gemm/amd/gate_up_kernel.h"

#if !defined(HF_ROWS) || !defined(HF_SCALES)
#error "build a variant: -DHF_ROWS=16 or 32, -DHF_SCALES=1 to 3"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr Scales kScales{HF_SCALES};
static_assert(HF_ROWS == 16 || HF_ROWS == 32);
static_assert(kScales > Scales::kOnce && kScales < Scales::kMx);

/// As gate_up, with K and scales as in fp8_grouped_split. out_scales of the operands' kind: [num_valid_tokens, ceil(N/256)] float32
/// or e8m0, for 32 x 32 blocks [num_valid_tokens, N/64] e8m0. A workspace is needed unless there is one group and 32 x 32 blocks:
/// float32 [num_valid_tokens blocks (64 meet + 2 (meet - 1))], where scales of 128 results are `blocks` and meet is 4 groups.
void fp8_gate_up_out(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale,
                     Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias, int64_t E,
                     int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m,
                     double alpha, double beta, double limit, bool interleaved, int64_t scales, OptionalTensor workspace,
                     int64_t rows, int64_t parts, int64_t groups, hipStream_t stream) {
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, hf::mxfp8::payload_of(w)};
  const GateUpLaunch how{hf::checked_activation(alpha, beta, limit, interleaved), workspace, rows, parts, groups};
  const Problem gemm = checked(given, scales, kScales);
  check_gate_up(out, out_scales, given, kScales);
  launch_gate_up<kRowTiles, kScales>(fp8_gate_up<kRowTiles, 1, kScales>, fp8_gate_up<kRowTiles, kMaxParts, kScales>, gemm, out,
                                     out_scales, how, stream);
}
HF_EXPORT(fp8_gate_up_out);
