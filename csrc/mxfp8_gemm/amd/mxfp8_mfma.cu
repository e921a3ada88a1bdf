// Small-M MX-FP8 GEMM for gfx950 through scaled MFMA: out[M, N] = X[M, K] W[N, K]^T for M of 1 to 64. mfma_kernel.h has
// the kernels. A variant serves one n_sub (HF_N_SUB: 1, 2 or 4 tiles of 16 columns per wave).
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "mfma_kernel.h"
#include "reduce_splits.h"

#ifndef HF_N_SUB
#error "build a variant: -DHF_N_SUB=1, 2 or 4"
#endif
static_assert(HF_N_SUB == 1 || HF_N_SUB == 2 || HF_N_SUB == 4);

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::mfma;

/// out bf16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32];
/// workspace float32 [k_splits, M, N] where k_splits > 1; n_sub 1, 2 or 4; k_splits 1, 2, 4 or 8, at most ceil(K/128);
/// bias bf16 [N] or None, added in float32.
void smallm_mxfp8_mfma_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor workspace,
                           int64_t n_sub, int64_t k_splits, OptionalTensor bias, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_operands(out, Xq, Xs, Wq, Ws, kMaxRows);
  HF_CHECK(n_sub == 1 || n_sub == 2 || n_sub == 4, "n_sub must be 1, 2 or 4 (tiles of 16 columns per wave); got ",
           n_sub);
  HF_CHECK(n_sub == HF_N_SUB, "this variant of the module has n_sub = ", HF_N_SUB, "; got ", n_sub);
  const int64_t steps = hf::ceil_div(shape.k, kStep);
  hf::check_k_splits(k_splits, steps, shape.k);
  if (k_splits > 1) hf::mxfp8::check_workspace(workspace, shape, k_splits);

  hf::mxfp8::check_bias(bias, shape.n, out);

  float* partials = k_splits > 1 ? workspace.data<float>() : nullptr;
  const Problem problem{
      .out = out.data<hf::dev::bf16>(),
      .partials = partials,
      .xq = Xq.data<uint8_t>(),
      .xs = Xs.data<uint8_t>(),
      .wq = Wq.data<uint8_t>(),
      .ws = Ws.data<uint8_t>(),
      .bias = bias.data<hf::dev::bf16>(),
      .m = static_cast<uint32_t>(shape.m),
      .n = static_cast<uint32_t>(shape.n),
      .k = static_cast<uint32_t>(shape.k),
      .log2_splits = static_cast<uint32_t>(__builtin_ctzll(static_cast<unsigned long long>(k_splits))),
      .aligned_scales = shape.k % kStep == 0 && hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4),
      .aligned_output = shape.n % hf::dev::kColumnsPerLane == 0 &&
                        (partials ? hf::aligned_to(partials, 16) : hf::aligned_to(out.data(), 8))};
  const dim3 grid(hf::ceil_div(shape.n, kTile * HF_N_SUB), static_cast<uint32_t>(k_splits),
                  hf::ceil_div(shape.m, kTile));
  hf::launch(smallm_mxfp8_mfma<HF_N_SUB>, {grid, kThreads, 0, stream}, problem);
  if (k_splits > 1)
    hf::launch_reduce_splits(out.data<hf::dev::bf16>(), partials, shape.m * shape.n, k_splits, stream,
                             problem.bias, shape.n);
}
HF_EXPORT(smallm_mxfp8_mfma_out);
