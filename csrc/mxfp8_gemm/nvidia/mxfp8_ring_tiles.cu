// MX-FP8 GEMM for any M on sm_90: out[M, N] = X[M, K] W[N, K]^T (+ bias) in tiles that a producer warp fills and a cluster may
// share. tile_ring.h has what all tiles share; code_tiles_kernel.h those of up to 64 rows of X, bf16_tiles_kernel.h the larger. A
// variant has one tile: HF_TILE = rows of X times 1,000 plus rows of W.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "code_tiles_kernel.h"
#include "bf16_tiles_kernel.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::mx_tiles;

#if !defined(HF_TILE)
#error "build a variant: -DHF_TILE=32128, 64128, 128128 or 128256"
#elif HF_TILE == 32128
using Tile = CodeTile<32, 2, 4, 2>;
#define HF_KERNEL code_tiles
#elif HF_TILE == 64128
using Tile = CodeTile<64, 2, 6, 1>;
#define HF_KERNEL code_tiles
#elif HF_TILE == 128128
using Tile = Bf16Tile<128, 2, 1, 4, 1>;
#define HF_KERNEL bf16_tiles
#elif HF_TILE == 128256
using Tile = Bf16Tile<128, 2, 2, 3, 1>;
#define HF_KERNEL bf16_tiles
#endif
static_assert(HF_TILE == Tile::kRows * 1000 + Tile::kColumns);
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1, kMaxK = int64_t{1} << 24, kMostSplits = 8;

/// out bf16 [M, N]; Xq, Wq e4m3 (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; tile that of the variant; k_splits: blocks that share K, 1 to 8 and at most one for each 128 of K; programmatic: the
/// launch may start before its predecessor has ended.
void mxfp8_ring_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t tile,
                           int64_t k_splits, bool programmatic, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 24);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(shape.n <= kMaxRows, "N must be at most ", kMaxRows, "; got ", shape.n);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  const int64_t steps = hf::ceil_div(shape.k, kStep);
  HF_CHECK(k_splits >= 1 && k_splits <= kMostSplits && k_splits <= steps, "k_splits must be 1 to ", kMostSplits,
           " and at most ceil(K / ", kStep, ") = ", steps, "; got ", k_splits);
  HF_CHECK(shape.k % kStep != 0 || (hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4)),
           "Xs and Ws must start at a multiple of 4 bytes (four scales are copied at once); pass a copy of the view");
  hf::mxfp8::check_bias(bias, shape.n, out);
  const int64_t blocks = hf::ceil_div(shape.m, Tile::kRows) * hf::ceil_div(shape.n, Tile::kColumns) * k_splits;
  HF_CHECK(blocks <= kMaxRows, "M and N make ", blocks, " blocks; a launch has at most ", kMaxRows);
  const Problem problem{out.data<hf::dev::bf16>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(), Wq.data<uint8_t>(), Ws.data<uint8_t>(),
                        bias.data<hf::dev::bf16>(), static_cast<int>(shape.m), static_cast<int>(shape.n), static_cast<int>(shape.k),
                        static_cast<int>(k_splits), shape.n % 8 == 0 && hf::aligned_to(out.data(), 16)};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks)), Tile::kThreads, Tile::kBytes, stream};
  at.cluster = static_cast<uint32_t>(k_splits);
  at.programmatic = programmatic;
  hf::launch(HF_KERNEL<Tile>, at, hf::map_of(problem.x, shape.m, shape.k, Tile::kRows),
             hf::map_of(problem.w, shape.n, shape.k, Tile::kColumns), problem);
}
HF_EXPORT(mxfp8_ring_tiles_out);
