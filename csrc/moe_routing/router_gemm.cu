// logits[t, e] = sum over h of x[t, h] w[e, h] (+ bias[e]), products and sums in fp32: checks and the launch. The kernel is
// the vendor's (router_kernel.h).
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT) || !defined(HF_WEIGHT)
#error "build with -DHF_INPUT=f32, f16 or bf16 and -DHF_WEIGHT=f32 or bf16"
#endif

namespace {

using Input = HF_ELEMENT(HF_INPUT);
using Weight = HF_ELEMENT(HF_WEIGHT);
constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;

// The kernel takes these one by one, in this order: all are in SGPRs when a wave starts (kernel-argument preload).
struct Arguments {
  const void* x;
  const void* w;
  const float* bias;
  float* out;
  uint32_t tokens, experts, hidden;
  uint32_t x_row_bytes;
};

}  // namespace

#include HF_FAMILY_HEADER(router_kernel.h)

namespace {

template <int kTokens, int kUnroll>
void launch(const Arguments& a, bool programmatic, hipStream_t stream) {
  constexpr uint32_t kMaxGridY = 65535;
  const uint32_t pieces = (a.tokens + kTokens - 1) / kTokens;
  HF_CHECK(pieces <= kMaxGridY, "x must have at most ", int64_t{kMaxGridY} * kTokens, " rows; got ", a.tokens);
  const dim3 grid((a.experts + kTile - 1) / kTile, pieces);
  hf::Launch at{grid, kThreads, 0, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(router_gemm_kernel<kTokens, kUnroll>, at, a.x, a.w, a.bias, a.out, a.tokens,
             a.experts, a.hidden, a.x_row_bytes);
}

}  // namespace

/// out float32 [T, E]; x [T, H], rows contiguous; w [E, H]; bias float32 [E].
void router_gemm_out(hf::Tensor out, hf::Tensor x, hf::Tensor w, hf::OptionalTensor bias, bool programmatic,
                     hipStream_t stream) {
  HF_CHECK_ARCH(x, HF_ARCHS);
  HF_CHECK(x.dtype() == hf::dev::dtype_of<Input> && w.dtype() == hf::dev::dtype_of<Weight>,
           "x or w has another dtype than this variant was built for");
  HF_CHECK(x.dim() == 2 && x.stride(1) == 1, "x must be [T, H] with contiguous rows; got ", x);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  HF_CHECK(w.dim() == 2 && w.size(1) == hidden && w.is_contiguous(), "w must be contiguous [E, ", hidden, "]; got ", w);
  const int64_t experts = w.size(0);
  HF_CHECK(experts >= 1 && hidden >= kPiece && hidden % kPiece == 0, "H must be a positive multiple of ", kPiece, "; got ",
           hidden);
  HF_CHECK(hf::aligned_to(x.data(), 16) && hf::aligned_to(w.data(), 16) && x.stride(0) * x.element_bytes() % 16 == 0,
           "rows of x and w must start at multiples of 16 bytes; pass copies");
  HF_CHECK(w.bytes() <= kMaxBytes && x.stride(0) * x.element_bytes() <= kMaxBytes / kManyTokens - hidden * 4,
           "w must be at most ", kMaxBytes, " bytes and the rows of x ", kMaxBytes / kManyTokens, " apart; got ", w, " and ", x);
  HF_CHECK(tokens < int64_t{1} << 31, "x must have fewer than 2^31 rows; got ", tokens);
  hf::check_operand(out, "out", HF_F32, {tokens, experts});
  hf::check_not_in_place({out, "out"}, {{x, "x"}, {w, "w"}});
  Arguments a = {};
  if (bias) {
    hf::check_operand(*bias, "bias", HF_F32, {experts});
    a.bias = bias.data<const float>();
  }
  if (tokens == 0) return;
  a.x = x.data();
  a.w = w.data();
  a.out = out.data<float>();
  a.tokens = static_cast<uint32_t>(tokens);
  a.experts = static_cast<uint32_t>(experts);
  a.hidden = static_cast<uint32_t>(hidden);
  a.x_row_bytes = static_cast<uint32_t>(x.stride(0) * x.element_bytes());
  // As many tokens per read of w as leave every compute unit a work-group.
  const auto enough = [&](int64_t at_once) {
    return (experts + kTile - 1) / kTile * ((tokens + at_once - 1) / at_once) >= kEnoughGroups;
  };
  if (enough(kManyTokens)) return launch<kManyTokens, 1>(a, programmatic, stream);
  if (enough(kMoreTokens)) return launch<kMoreTokens, 2>(a, programmatic, stream);
  if (tokens <= kLeastTokens) return launch<kLeastTokens, 4>(a, programmatic, stream);
  launch<kFewTokens, 4>(a, programmatic, stream);
}
HF_EXPORT(router_gemm_out);
