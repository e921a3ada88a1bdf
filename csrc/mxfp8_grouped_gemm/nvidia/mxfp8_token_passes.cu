// The GEMMs of one token's experts on sm_90, for K up to 4096: W of the chosen experts streamed once by all multiprocessors, without
// sorted slots. mxfp8_token.cu is for K above that.
//
//   gate_up [S, 2 I] = X [1, K] W[ids]^T                      pass_stream_kernel.h: the experts' rows, shared by the blocks evenly
//   out [1, N]       = sum weights swiglu(gate_up) W[ids]^T   token_down_kernel.h: 16 rows of all experts at a time
//
// Bytes moved: W of the experts, once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "pass_stream_kernel.h"
#include "token_down_kernel.h"

using hf::Tensor;
using namespace hf::moe;

namespace {

struct Experts {
  int64_t count, n, k;
};

Experts check_experts(const Tensor& W, const Tensor& Ws, const Tensor& ids, int64_t sharers, int64_t blocks) {
  HF_CHECK_ARCH(W, "sm_90");
  hf::mxfp8::check_payload(W, "W", HF_E4M3FN, {"E", "N", "K"});
  const Experts of{W.size(0), W.size(1), W.size(2)};
  HF_CHECK(of.n >= kPassRows && of.n % kPassRows == 0 && of.k >= kStep && of.k % kStep == 0, "N must be a positive multiple of ",
           kPassRows, " and K of ", kStep, "; got ", W);
  HF_CHECK(of.n <= kMaxN, "N must be at most ", kMaxN, "; got ", W);
  hf::check_operand(Ws, "Ws", hf::kE8m0, {of.count, of.n, of.k / hf::kMxBlock}, "", hf::kAligned);
  hf::check_operand(ids, "ids", HF_I32, {"S"});
  HF_CHECK(ids.size(0) >= 1 && ids.size(0) <= kMostTokenSlots, "ids must be of 1 to ", kMostTokenSlots, " slots; got ", ids);
  check_sharing(sharers, blocks);
  return of;
}

}  // namespace

/// out bf16 [S, N]; Xq e4m3 [1, K], Xs e8m0 [1, K/32]; W e4m3 [E, N, K], Ws e8m0 [E, N, K/32]; ids int32 [S], each below E; sharers:
/// warps that share K; blocks: how many share the rows of W; programmatic: the launch may start before its predecessor has ended.
void mxfp8_token_gate_up_passes_out(Tensor out, Tensor Xq, Tensor Xs, Tensor W, Tensor Ws, Tensor ids, int64_t sharers,
                                    int64_t blocks, bool programmatic, hipStream_t stream) {
  const Experts of = check_experts(W, Ws, ids, sharers, blocks);
  const int64_t slots = ids.size(0);
  hf::mxfp8::check_payload(Xq, "Xq", HF_E4M3FN, {1, of.k});
  hf::check_operand(Xs, "Xs", hf::kE8m0, {1, of.k / hf::kMxBlock}, "", {4});
  hf::check_operand(out, "out", HF_BF16, {slots, of.n});
  Problem problem = {};
  problem.expert_ids = ids.data<int32_t>(), problem.a = Xq.data<uint8_t>(), problem.a_scales = Xs.data<uint8_t>();
  problem.w = W.data<uint8_t>(), problem.w_scales = Ws.data<uint8_t>(), problem.out = out.data<hf::dev::bf16>();
  problem.num_valid = static_cast<int>(slots), problem.n = static_cast<int>(of.n), problem.k = static_cast<int>(of.k);
  const Streamed streamed{problem, __builtin_ctzll(static_cast<uint64_t>(sharers)), problem.num_valid, hf::Divisor::of(1),
                          hf::Divisor::of(static_cast<uint32_t>(of.n / kPassRows))};
  launch_passes<false, true>(streamed, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_token_gate_up_passes_out);

/// out bf16 [1, N]; gate_up bf16 [S, 2 K], gate in its first K columns; W e4m3 [E, N, K], Ws e8m0 [E, N, K/32]; ids int32 [S], each
/// below E, and weights float32 [S]; sharers, blocks and programmatic as above.
void mxfp8_token_down_passes_out(Tensor out, Tensor gate_up, Tensor W, Tensor Ws, Tensor ids, Tensor weights, double alpha,
                                 double beta, double limit, int64_t sharers, int64_t blocks, bool programmatic,
                                 hipStream_t stream) {
  const Experts of = check_experts(W, Ws, ids, sharers, blocks);
  const int64_t slots = ids.size(0);
  hf::check_operand(gate_up, "gate_up", HF_BF16, {slots, 2 * of.k}, "", hf::kAligned);
  hf::check_operand(weights, "weights", HF_F32, {slots});
  hf::check_operand(out, "out", HF_BF16, {1, of.n});
  const TokenDown down{gate_up.data<const hf::dev::bf16>(), W.data<uint8_t>(), Ws.data<uint8_t>(), ids.data<const int32_t>(),
                       weights.data<const float>(), out.data<hf::dev::bf16>(), hf::checked_activation(alpha, beta, limit, false),
                       static_cast<int>(slots), static_cast<int>(of.n), static_cast<int>(of.k), 0};
  stream_token_down(down, sharers, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_token_down_passes_out);
