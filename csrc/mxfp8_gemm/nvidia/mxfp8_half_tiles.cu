// MX-FP8 GEMM for many rows on sm_90: out[M, N] = X[M, K] W[N, K]^T (+ bias) in one launch, for K a multiple of 512.
// half_tiles_kernel.h has the kernel. A variant has one tile: HF_TILE = rows of X times 1,000 plus rows of W.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "half_tiles_kernel.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::half_tiles;

#if !defined(HF_TILE)
#error "build a variant: -DHF_TILE=64128, 64256, 128128 or 128256"
#elif HF_TILE == 64128
using Tile = Layout<64, 1, 6, 3>;
#elif HF_TILE == 64256
using Tile = Layout<64, 2, 4, 3>;
#elif HF_TILE == 128128
using Tile = Layout<128, 1, 4, 3>;
#elif HF_TILE == 128256
using Tile = Layout<128, 2, 3, 2>;
#endif
static_assert(HF_TILE == Tile::kRows * 1000 + Tile::kColumns);
constexpr int64_t kMaxSide = (int64_t{1} << 31) - 1, kMaxK = int64_t{1} << 24, kSpanK = kSpan * kStep;

/// out bf16 [M, N]; Xq, Wq e4m3 (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; tile that of the variant; k_splits: blocks that share K, 1 to 8 and at most one for each 128 of K; programmatic: the
/// launch may start before its predecessor has ended.
void mxfp8_half_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t tile,
                          int64_t k_splits, bool programmatic, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxSide, kMaxSide << 24);
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  HF_CHECK(k % kSpanK == 0 && k <= kMaxK, "K must be a multiple of ", kSpanK, " up to ", kMaxK, "; got ", k);
  HF_CHECK(n <= kMaxSide, "N must be at most ", kMaxSide, "; got ", n);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  HF_CHECK(k_splits >= 1 && k_splits <= kMostSplits && k_splits <= k / kStep, "k_splits must be 1 to ", kMostSplits,
           " and at most K / ", kStep, " = ", k / kStep, "; got ", k_splits);
  hf::mxfp8::check_bias(bias, n, out);
  hf::check_aligned(Xs, "Xs");
  hf::check_aligned(Ws, "Ws");
  const int64_t tiles_m = hf::ceil_div(m, Tile::kRows), blocks = tiles_m * hf::ceil_div(n, Tile::kColumns) * k_splits;
  HF_CHECK(blocks <= kMaxSide, "M and N make ", blocks, " blocks; a launch has at most ", kMaxSide);
  if (m == 0 || n == 0) return;
  const Problem problem{out.data<hf::dev::bf16>(), bias.data<hf::dev::bf16>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(),
                        Wq.data<uint8_t>(), Ws.data<uint8_t>(), static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                        static_cast<int>(k_splits), static_cast<int>(tiles_m), programmatic,
                        n % 8 == 0 && hf::aligned_to(out.data(), 16)};
  const Maps maps{hf::map_of({Xq.data<uint8_t>(), m, k, k, Tile::kRows, kStep, 1}),
                  hf::map_of({Wq.data<uint8_t>(), n, k, k, Tile::kColumns, kStep, 1}),
                  hf::map_of({Xs.data<uint8_t>(), m, k / kBlock, k / kBlock, Tile::kRows, kScaleLine, 1}),
                  hf::map_of({Ws.data<uint8_t>(), n, k / kBlock, k / kBlock, Tile::kColumns, kScaleLine, 1})};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks)), kThreads, Tile::kBytes, stream};
  at.cluster = static_cast<uint32_t>(k_splits);
  at.programmatic = programmatic;
  hf::launch(half_tiles<Tile>, at, maps, problem);
}
HF_EXPORT(mxfp8_half_tiles_out);
