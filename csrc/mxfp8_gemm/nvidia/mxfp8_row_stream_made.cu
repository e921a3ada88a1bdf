// MX-FP8 GEMM for up to 8 rows on sm_90 whose X is made in the same launch: the norm of a residual stream, or SwiGLU, quantised.
// row_source.h makes X, row_stream_kernel.h has the kernel. A variant takes HF_TILES x 8 rows of W in a pass.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "made/row_stream_kernel.h"

#if !defined(HF_TILES)
#error "build a variant: -DHF_TILES=1 to 3"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::made_stream;

namespace {

constexpr int kMostRows = 8;
using L = Layout<kMostRows, HF_TILES>;

/// Checks x [M, of_k K] and what all launches share, and launches.
template <class Source>
void run(Tensor out, const Tensor& x, int64_t of_k, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t tiles, int64_t sharers,
         int64_t blocks, bool programmatic, const Source& source, hipStream_t stream) {
  HF_CHECK_ARCH(Wq, "sm_90");
  hf::mxfp8::check_payload(Wq, "Wq");
  const int64_t m = x.size(0), n = Wq.size(0), k = Wq.size(1);
  HF_CHECK(x.size(1) == of_k * k, "the input must have ", of_k, " K = ", of_k * k, " columns; got ", x);
  HF_CHECK(m >= 1 && m <= kMostRows, "M must be between 1 and ", kMostRows, "; got ", m);
  HF_CHECK(k >= kStep && k % kStep == 0 && k <= 1 << 20, "K must be a positive multiple of ", kStep, ", at most 2^20; got ", k);
  HF_CHECK(n >= 1 && n < INT64_C(1) << 31, "N must be between 1 and 2^31 - 1; got ", n);
  hf::check_operand(Ws, "Ws", hf::kE8m0, {n, k / hf::kMxBlock}, hf::mxfp8::kPerBlock, hf::kAligned);
  hf::check_operand(out, "out", HF_BF16, {m, n});
  hf::mxfp8::check_bias(bias, n, out);
  HF_CHECK(tiles == HF_TILES, "this variant of the module has tiles = ", HF_TILES, "; got ", tiles);
  hf::row_stream::check_spread(L::kWarps, sharers, blocks, n, "N");
  const int64_t x_at = (shared_bytes<kMostRows, HF_TILES>(hf::ceil_div(n, blocks), k) + 127) / 128 * 128;
  const int64_t most = x_at + SharedX::bytes(static_cast<int>(m), static_cast<int>(k));
  hf::row_stream::check_shared(most, blocks);
  const Problem problem{out.data<hf::dev::bf16>(), nullptr, nullptr, Wq.data<uint8_t>(), Ws.data<uint8_t>(),
                        bias.data<hf::dev::bf16>(), static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                        __builtin_ctzll(sharers), static_cast<int>(n / blocks), static_cast<int>(n % blocks)};
  hf::Launch at{static_cast<uint32_t>(blocks), L::kThreads, static_cast<uint32_t>(most), stream};
  at.programmatic = programmatic;
  hf::launch(row_stream<kMostRows, HF_TILES, true, Source, OneMatrix>, at, problem, source, static_cast<int>(x_at), OneMatrix{});
}

}  // namespace

/// out bf16 [M, N] = norm(x + residual) W^T; x, residual and sum_out, the sum, bf16 [M, K]; norm_weight bf16 [K]; Wq e4m3 [N, K],
/// Ws e8m0 [N, K/32]; the others as mxfp8_row_stream_out has them.
void mxfp8_row_stream_norm_out(Tensor out, Tensor sum_out, Tensor x, Tensor residual, Tensor norm_weight, Tensor Wq, Tensor Ws,
                               OptionalTensor bias, double epsilon, double weight_offset, int64_t tiles, int64_t sharers,
                               int64_t blocks, bool programmatic, hipStream_t stream) {
  hf::check_operand(x, "x", HF_BF16, {"M", "K"}, "", hf::kAligned);
  const int64_t m = x.size(0), k = x.size(1);
  hf::check_operand(norm_weight, "norm_weight", HF_BF16, {k}, "", hf::kAligned);
  hf::check_operand(residual, "residual", HF_BF16, {m, k}, ", x's shape", hf::kAligned);
  hf::check_operand(sum_out, "sum_out", HF_BF16, {m, k}, ", x's shape", hf::kAligned);
  hf::check_not_in_place({sum_out, "sum_out"}, {{x, "x"}, {residual, "residual"}});
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  HF_CHECK(m * hf::ceil_div(k / kChunk, L::kThreads) <= Norm::kMost, "M times the pieces of ", kChunk * L::kThreads,
           " columns of a row must be at most ", Norm::kMost, "; got M = ", m, " and K = ", k);
  const Norm source{x.data<const hf::dev::bf16>(), residual.data<const hf::dev::bf16>(), norm_weight.data<const hf::dev::bf16>(),
                    sum_out.data<hf::dev::bf16>(), static_cast<float>(epsilon), static_cast<float>(weight_offset)};
  run(out, x, 1, Wq, Ws, bias, tiles, sharers, blocks, programmatic, source, stream);
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
