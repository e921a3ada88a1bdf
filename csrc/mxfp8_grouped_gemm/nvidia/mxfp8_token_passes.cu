// The GEMMs of one token's experts on sm_90, for K up to 4096: W of the chosen experts streamed once by all multiprocessors, without
// sorted slots. mxfp8_token.cu is for K above that.
//
//   inner [S, I] = swiglu(X [1, K] W[ids]^T)          token_gate_up_kernel.h: the experts' rows, shared by the blocks evenly
//   out [1, N]   = sum weights inner W[ids]^T         token_down_kernel.h: 16 rows of all experts at a time
//
// Bytes moved: W of the experts, once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "token_down_kernel.h"
#include "token_gate_up_kernel.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;

namespace {

struct Experts {
  int64_t count, n, k;
};

Experts check_experts(const Tensor& W, const Tensor& Ws, int64_t sharers, int64_t blocks) {
  HF_CHECK_ARCH(W, "sm_90");
  hf::mxfp8::check_payload(W, "W", HF_E4M3FN, {"E", "N", "K"});
  const Experts of{W.size(0), W.size(1), W.size(2)};
  HF_CHECK(of.n >= kPassRows && of.n % kPassRows == 0 && of.k >= kStep && of.k % kStep == 0, "N must be a positive multiple of ",
           kPassRows, " and K of ", kStep, "; got ", W);
  HF_CHECK(of.n <= kMaxN, "N must be at most ", kMaxN, "; got ", W);
  hf::check_operand(Ws, "Ws", hf::kE8m0, {of.count, of.n, of.k / hf::kMxBlock}, "", hf::kAligned);
  check_sharing(sharers, blocks);
  return of;
}

int64_t check_ids(const Tensor& ids) {
  hf::check_operand(ids, "ids", HF_I32, {"S"});
  HF_CHECK(ids.size(0) >= 1 && ids.size(0) <= kMostTokenSlots, "ids must be of 1 to ", kMostTokenSlots, " slots; got ", ids);
  return ids.size(0);
}

void check_chosen(const Tensor& chosen, int64_t slots) { hf::check_operand(chosen, "chosen", HF_I32, {slots}); }

Choice check_choice(const Tensor& logits, const OptionalTensor& bias, int64_t experts, int64_t choices, int64_t shared, bool sigmoid,
                    bool renormalize, double scale) {
  using namespace hf::gating;
  hf::check_operand(logits, "logits", HF_F32, {1, "E"});
  const int64_t routed = logits.size(1);
  HF_CHECK(routed >= 1 && routed <= kMaxExperts, "logits must be of 1 to ", kMaxExperts, " experts; got ", logits);
  HF_CHECK(choices >= 1 && choices <= kMaxChoices && choices <= routed, "k must be 1 to ", kMaxChoices, " and at most the experts, ",
           routed, "; got ", choices);
  HF_CHECK(shared >= 0 && shared <= kMaxShared, "shared must be 0 to ", kMaxShared, "; got ", shared);
  HF_CHECK(routed + shared == experts, "W must be of the experts of the logits and the shared ones, ", routed + shared, "; got ", experts);
  HF_CHECK(scale - scale == 0, "scale must be finite; got ", scale);
  HF_CHECK(!bias || sigmoid, "a bias of the choice needs sigmoid scores");
  if (bias) hf::check_operand(*bias, "bias", HF_F32, {routed});
  return {logits.data<const float>(),  bias.data<const float>(), static_cast<int>(routed), static_cast<int>(choices),
          static_cast<int>(shared), sigmoid, renormalize, static_cast<float>(scale)};
}

/// Checks the first product and launches it; ids are null where the experts are chosen, and chosen where they are not.
template <bool CHOOSES>
void run_gate_up(const Tensor& out, const Tensor& Xq, const Tensor& Xs, const Tensor& W, const Tensor& Ws, const Experts& of,
                 int64_t slots, const int32_t* ids, int32_t* chosen, const Choice& choice, const hf::Activation& activation,
                 int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  hf::mxfp8::check_payload(Xq, "Xq", HF_E4M3FN, {1, of.k});
  hf::check_operand(Xs, "Xs", hf::kE8m0, {1, of.k / hf::kMxBlock}, "", {4});
  hf::check_operand(out, "out", HF_F32, {slots, of.n / 2});
  const TokenGateUp first{Xq.data<uint8_t>(), Xs.data<uint8_t>(), W.data<uint8_t>(), Ws.data<uint8_t>(), ids, chosen,
                          out.data<float>(), activation, static_cast<int>(slots), static_cast<int>(of.n), static_cast<int>(of.k), 0,
                          hf::Divisor::of(static_cast<uint32_t>(of.n / kPassRows))};
  stream_token_gate_up<CHOOSES>(first, choice, sharers, blocks, programmatic, stream);
}

/// Checks the weighted product and launches it; weights are null where the experts are chosen.
template <bool CHOOSES, bool MADE>
void run_down(const Tensor& out, const Tensor& inner, const Tensor& W, const Tensor& Ws, const Experts& of, int64_t slots,
              const int32_t* ids, const float* weights, const Choice& choice, const hf::Activation& activation, int64_t sharers,
              int64_t blocks, bool programmatic, hipStream_t stream) {
  hf::check_operand(inner, "inner", MADE ? HF_F32 : HF_BF16, {slots, MADE ? of.k : 2 * of.k}, "", hf::kAligned);
  hf::check_operand(out, "out", HF_BF16, {1, of.n});
  const TokenDown down{inner.data(), W.data<uint8_t>(), Ws.data<uint8_t>(), ids, weights, out.data<hf::dev::bf16>(), activation,
                       static_cast<int>(slots), static_cast<int>(of.n), static_cast<int>(of.k), 0};
  stream_token_down<CHOOSES, MADE>(down, choice, sharers, blocks, programmatic, stream);
}

}  // namespace

/// out float32 [S, N/2] = swiglu of the gate, the first half of W's rows, and up, rounded to bf16; Xq e4m3 [1, K], Xs e8m0 [1, K/32];
/// W e4m3 [E, N, K], Ws e8m0 [E, N, K/32]; ids int32 [S], each below E; sharers: warps that share K; blocks: how many share the rows
/// of W; programmatic: the launch may start before its predecessor has ended.
void mxfp8_token_gate_up_passes_out(Tensor out, Tensor Xq, Tensor Xs, Tensor W, Tensor Ws, Tensor ids, double alpha, double beta,
                                    double limit, int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  const Experts of = check_experts(W, Ws, sharers, blocks);
  run_gate_up<false>(out, Xq, Xs, W, Ws, of, check_ids(ids), ids.data<const int32_t>(), nullptr, {},
                     hf::checked_activation(alpha, beta, limit, false), sharers, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_token_gate_up_passes_out);

/// The same with the experts that logits float32 [1, E - shared] choose, the `choices` best of topk_gating_out without groups, then
/// the shared ones; they are left in `chosen` int32 [choices + shared]; bias float32 [E - shared].
void mxfp8_token_choose_gate_up_out(Tensor out, Tensor chosen, Tensor Xq, Tensor Xs, Tensor W, Tensor Ws, Tensor logits,
                                    OptionalTensor bias, double alpha, double beta, double limit, int64_t choices, int64_t shared,
                                    bool sigmoid, bool renormalize, double scale, int64_t sharers, int64_t blocks,
                                    bool programmatic, hipStream_t stream) {
  const Experts of = check_experts(W, Ws, sharers, blocks);
  const Choice choice = check_choice(logits, bias, of.count, choices, shared, sigmoid, renormalize, scale);
  check_chosen(chosen, choices + shared);
  run_gate_up<true>(out, Xq, Xs, W, Ws, of, choices + shared, nullptr, chosen.data<int32_t>(), choice,
                    hf::checked_activation(alpha, beta, limit, false), sharers, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_token_choose_gate_up_out);

/// out bf16 [1, N]; inner float32 [S, K], SwiGLU, or bf16 [S, 2 K], the gate and up that it is made of here; W e4m3 [E, N, K], Ws e8m0
/// [E, N, K/32]; ids int32 [S], each below E, and weights float32 [S]; sharers, blocks and programmatic as above.
void mxfp8_token_down_passes_out(Tensor out, Tensor inner, Tensor W, Tensor Ws, Tensor ids, Tensor weights, double alpha,
                                 double beta, double limit, int64_t sharers, int64_t blocks, bool programmatic,
                                 hipStream_t stream) {
  const Experts of = check_experts(W, Ws, sharers, blocks);
  const int64_t slots = check_ids(ids);
  hf::check_operand(weights, "weights", HF_F32, {slots});
  const auto run = inner.dtype() == HF_F32 ? run_down<false, true> : run_down<false, false>;
  run(out, inner, W, Ws, of, slots, ids.data<const int32_t>(), weights.data<const float>(), {},
      hf::checked_activation(alpha, beta, limit, false), sharers, blocks, programmatic, stream);
}
HF_EXPORT(mxfp8_token_down_passes_out);

/// The same with the experts that mxfp8_token_choose_gate_up_out has left in `chosen`, and their weights by the logits; inner is
/// SwiGLU. A programmatic launch reads both before its predecessor has ended, which must be that launch.
void mxfp8_token_choose_down_out(Tensor out, Tensor inner, Tensor W, Tensor Ws, Tensor chosen, Tensor logits, OptionalTensor bias,
                                 int64_t choices, int64_t shared, bool sigmoid, bool renormalize, double scale, int64_t sharers,
                                 int64_t blocks, bool programmatic, hipStream_t stream) {
  const Experts of = check_experts(W, Ws, sharers, blocks);
  const Choice choice = check_choice(logits, bias, of.count, choices, shared, sigmoid, renormalize, scale);
  check_chosen(chosen, choices + shared);
  run_down<true, true>(out, inner, W, Ws, of, choices + shared, chosen.data<const int32_t>(), nullptr, choice, {}, sharers, blocks,
                       programmatic, stream);
}
HF_EXPORT(mxfp8_token_choose_down_out);
