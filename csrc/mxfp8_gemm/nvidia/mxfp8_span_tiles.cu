// MX-FP8 GEMM for some rows on sm_90: out[M, N] = X[M, K] W[N, K]^T (+ bias) in one launch, for K a multiple of 512.
// span_tiles_kernel.h has the kernel. A variant takes HF_ROWS rows of X at once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "span_tiles_kernel.h"

#if !defined(HF_ROWS)
#error "build a variant: -DHF_ROWS=32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::span_tiles;

using Tile = Layout<HF_ROWS, HF_ROWS == 64 ? 3 : 4>;
constexpr int64_t kMaxSide = (int64_t{1} << 31) - 1, kMaxK = int64_t{1} << 24;

/// out bf16 [M, N]; Xq, Wq e4m3 (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; rows those of the variant; k_splits: blocks that share K, 1 to 8 and at most one for each 512 of K; programmatic: the
/// launch may start before its predecessor has ended.
void mxfp8_span_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t rows,
                          int64_t k_splits, bool programmatic, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxSide, kMaxSide << 24);
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  HF_CHECK(k % kSpan == 0 && k <= kMaxK, "K must be a multiple of ", kSpan, " up to ", kMaxK, "; got ", k);
  HF_CHECK(n <= kMaxSide, "N must be at most ", kMaxSide, "; got ", n);
  HF_CHECK(rows == HF_ROWS, "this variant of the module has rows = ", HF_ROWS, "; got ", rows);
  HF_CHECK(k_splits >= 1 && k_splits <= kMostSplits && k_splits <= k / kSpan, "k_splits must be 1 to ", kMostSplits,
           " and at most K / ", kSpan, " = ", k / kSpan, "; got ", k_splits);
  hf::mxfp8::check_bias(bias, n, out);
  hf::check_aligned(Xs, "Xs");
  hf::check_aligned(Ws, "Ws");
  const int64_t tiles_m = hf::ceil_div(m, HF_ROWS), blocks = tiles_m * hf::ceil_div(n, kColumns) * k_splits;
  HF_CHECK(blocks <= kMaxSide, "M and N make ", blocks, " blocks; a launch has at most ", kMaxSide);
  if (m == 0 || n == 0) return;
  const Problem problem{out.data<hf::dev::bf16>(), bias.data<hf::dev::bf16>(), static_cast<int>(m), static_cast<int>(n),
                        static_cast<int>(k), static_cast<int>(k_splits), static_cast<int>(tiles_m), programmatic,
                        n % 4 == 0 && hf::aligned_to(out.data(), 8)};
  const Maps maps{hf::map_of({Xq.data<uint8_t>(), m, k, k, HF_ROWS, kStep, 1}), hf::map_of({Wq.data<uint8_t>(), n, k, k, kColumns, kStep, 1}),
                  hf::map_of({Xs.data<uint8_t>(), m, k / kBlock, k / kBlock, HF_ROWS, kScales, 1}),
                  hf::map_of({Ws.data<uint8_t>(), n, k / kBlock, k / kBlock, kColumns, kScales, 1})};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks)), kThreads, Tile::kBytes, stream};
  at.cluster = static_cast<uint32_t>(k_splits);
  at.programmatic = programmatic;
  hf::launch(span_tiles<Tile>, at, maps, problem);
}
HF_EXPORT(mxfp8_span_tiles_out);
