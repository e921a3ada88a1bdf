// MX-FP8 GEMM for any M on sm_90: out[M, N] = X[M, K] W[N, K]^T (+ bias) in tiles. wgmma_tiles_kernel.h has the kernel. A variant
// has one tile: HF_TILE = rows of X times 1,000 plus rows of W.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "wgmma_tiles_kernel.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::wgmma_tiles;

#if !defined(HF_TILE)
#error "build a variant: -DHF_TILE=64032, 64256 or 128128"
#elif HF_TILE == 64032
using Tile = Layout<1, 1, 32, 6>;
#elif HF_TILE == 64256
using Tile = Layout<1, 4, 64, 4>;
#elif HF_TILE == 128128
using Tile = Layout<2, 2, 64, 5>;
#endif
static_assert(HF_TILE == Tile::kRows * 1000 + Tile::kColumns);
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1, kMaxK = int64_t{1} << 24, kMaxN = int64_t{65535} * Tile::kColumns;

/// out bf16 [M, N]; Xq, Wq e4m3 (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; tile that of the variant; programmatic: the launch may start before its predecessor has ended.
void mxfp8_wgmma_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t tile,
                           bool programmatic, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 24);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(shape.n <= kMaxN, "N must be at most ", kMaxN, " with this tile; got ", shape.n);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  HF_CHECK(shape.k % kStep != 0 || (hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4)),
           "Xs and Ws must start at a multiple of 4 bytes (lanes load four scales at once); pass a copy of the view");
  hf::mxfp8::check_bias(bias, shape.n, out);
  const Problem problem{out.data<hf::dev::bf16>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(), Wq.data<uint8_t>(), Ws.data<uint8_t>(),
                        bias.data<hf::dev::bf16>(), static_cast<int>(shape.m), static_cast<int>(shape.n), static_cast<int>(shape.k)};
  hf::Launch at{dim3(hf::ceil_div(shape.m, Tile::kRows), hf::ceil_div(shape.n, Tile::kColumns)), Tile::kThreads, Tile::kBytes, stream};
  at.programmatic = programmatic;
  hf::launch(wgmma_tiles<Tile>, at, problem);
}
HF_EXPORT(mxfp8_wgmma_tiles_out);
