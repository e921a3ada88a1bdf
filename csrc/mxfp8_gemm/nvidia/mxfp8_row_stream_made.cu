// MX-FP8 GEMM for up to 8 rows on sm_90 whose X is made in the same launch: the norm of a residual stream, or SwiGLU, quantised; or
// copied to shared memory.
// row_source.h makes X, row_stream_kernel.h has the kernel. A variant takes HF_TILES x 8 rows of W in a pass.
#include "made/launch.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::made_stream;

namespace {

/// Checks x [M, of_k K] and out, and launches.
template <class Source>
void run(Tensor out, const Tensor& x, int64_t of_k, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t tiles, int64_t sharers,
         int64_t blocks, bool programmatic, const Source& source, hipStream_t stream) {
  const int64_t m = x.size(0), n = Wq.size(0), k = Wq.size(1);
  HF_CHECK(x.size(1) == of_k * k, "the input must have ", of_k, " K = ", of_k * k, " columns; got ", x);
  hf::check_operand(out, "out", HF_BF16, {m, n});
  hf::mxfp8::check_bias(bias, n, out);
  launch_rows(out.data<hf::dev::bf16>(), nullptr, nullptr, m, Wq, Ws, bias, tiles, sharers, blocks, programmatic, source, OneMatrix{}, 0,
              stream);
}

/// Checks what a norm reads and writes, and calls `then` with it.
template <class Then>
void with_norm(const Tensor& sum_out, const Tensor& x, const Tensor& residual, const Tensor& norm_weight, double epsilon,
               double weight_offset, const Then& then) {
  hf::check_operand(x, "x", HF_BF16, {"M", "K"}, "", hf::kAligned);
  const int64_t m = x.size(0), k = x.size(1);
  hf::check_operand(norm_weight, "norm_weight", HF_BF16, {k}, "", hf::kAligned);
  hf::check_operand(residual, "residual", HF_BF16, {m, k}, ", x's shape", hf::kAligned);
  hf::check_operand(sum_out, "sum_out", HF_BF16, {m, k}, ", x's shape", hf::kAligned);
  hf::check_not_in_place({sum_out, "sum_out"}, {{x, "x"}, {residual, "residual"}});
  check_norm(m, k, epsilon, weight_offset);
  const auto filled = [&](auto source) {
    source = {x.data<const hf::dev::bf16>(), residual.data<const hf::dev::bf16>(), norm_weight.data<const hf::dev::bf16>(),
              sum_out.data<hf::dev::bf16>(), static_cast<float>(epsilon), static_cast<float>(weight_offset)};
    then(source);
  };
  if (m * hf::ceil_div(k / kChunk, L::kThreads) == 1) return filled(NormOf<1>());
  filled(NormOf<2>());
}

}  // namespace

/// out bf16 [M, N] = X W^T by way of shared memory; Xq, Wq e4m3 [M, K], [N, K]; Xs, Ws e8m0 [M, K/32], [N, K/32]; the others as
/// mxfp8_row_stream_out has them.
void mxfp8_row_copied_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t tiles,
                          int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  hf::mxfp8::check_payload(Xq, "Xq");
  const int64_t m = Xq.size(0), k = Wq.size(1);
  hf::check_operand(Xs, "Xs", hf::kE8m0, {m, k / hf::kMxBlock}, hf::mxfp8::kPerBlock, {4});
  HF_CHECK(m * k <= Copied::most_bytes(L::kThreads), "M K must be at most ", Copied::most_bytes(L::kThreads), "; got ", Xq);
  const auto from = [&](const auto& source) {
    run(out, Xq, 1, Wq, Ws, bias, tiles, sharers, blocks, programmatic, source, stream);
  };
  if (m <= kFewRows) return from(CopiedOf<kFewRows>{Xq.data<uint8_t>(), Xs.data<uint8_t>()});
  from(Copied{Xq.data<uint8_t>(), Xs.data<uint8_t>()});
}
HF_EXPORT(mxfp8_row_copied_out);

/// out bf16 [M, N] = norm(x + residual) W^T; x, residual and sum_out, the sum, bf16 [M, K]; norm_weight bf16 [K]; Wq e4m3 [N, K],
/// Ws e8m0 [N, K/32]; the others as mxfp8_row_stream_out has them.
void mxfp8_row_stream_norm_out(Tensor out, Tensor sum_out, Tensor x, Tensor residual, Tensor norm_weight, Tensor Wq, Tensor Ws,
                               OptionalTensor bias, double epsilon, double weight_offset, int64_t tiles, int64_t sharers,
                               int64_t blocks, bool programmatic, hipStream_t stream) {
  with_norm(sum_out, x, residual, norm_weight, epsilon, weight_offset, [&](const auto& source) {
    run(out, x, 1, Wq, Ws, bias, tiles, sharers, blocks, programmatic, source, stream);
  });
}
HF_EXPORT(mxfp8_row_stream_norm_out);

/// out bf16 [M, N] = swiglu(gate_up) W^T; gate_up bf16 [M, 2 K], gate in its first K columns.
void mxfp8_row_stream_swiglu_out(Tensor out, Tensor gate_up, Tensor Wq, Tensor Ws, OptionalTensor bias, double alpha, double beta,
                                 double limit, int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic,
                                 hipStream_t stream) {
  hf::check_operand(gate_up, "gate_up", HF_BF16, {"M", "2 K"}, "", hf::kAligned);
  const Swiglu source{gate_up.data<const hf::dev::bf16>(), hf::checked_activation(alpha, beta, limit, false)};
  run(out, gate_up, 2, Wq, Ws, bias, tiles, sharers, blocks, programmatic, source, stream);
}
HF_EXPORT(mxfp8_row_stream_swiglu_out);
