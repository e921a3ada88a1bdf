// MXFP4 GEMM for gfx950 at any M: out[M, N] = X[M, K] W[N, K]^T, both e2m1 with e8m0 block scales. mx_tiles/kernel.h has the
// kernel. A variant serves one tile size (HF_TILE: rows of X * 1000 + rows of W).
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/mx_tiles/host.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/module.h"
#include "../guards.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::tiles;

using Instance = Variant<E2m1>;

__global__ __launch_bounds__(Instance::kThreads, (Instance::kWaves + 3) / 4) void mxfp4_gemm_tiles(Problem p) {
  multiply_tile<Instance>(p);
}

/// out bf16 [M, N]; Xq, Wq uint8 [M, K/2], [N, K/2], the even element in the low nibble; Xs [M, K/32]; Ws [N, K/32], or with
/// `shuffled` the 32 x 8 shuffle of [round_up(N, 256), round_up(K/32, 8)] (then Wq is in 16 x 16-byte tiles); k_splits 1, 2,
/// 4 or 8, at most ceil(K/256), and where it is above 1 a workspace: float32
/// [tiles (k_splits BM BN + 2 (k_splits - 1))] for tiles of BM x BN, with any contents.
void mxfp4_gemm_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor workspace, bool shuffled,
                          int64_t tile, int64_t k_splits, hipStream_t stream) {
  const auto [m, n, k] = hf::mxfp4::check_operands(out, Xq, Xs, Wq, Ws, shuffled, kMaxRows << 32);
  HF_CHECK(m <= kMaxRows, "M must be at most ", kMaxRows, "; got ", m);
  HF_CHECK(k <= kMaxK, "K must be at most ", kMaxK, "; got ", k);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  if (shuffled) hf::check_aligned(Ws, "shuffled Ws", kWordBlocks);
  const Launch<Instance> launch{m, n, k, k_splits};
  hf::check_k_splits(k_splits, launch.steps(), k, "k_splits", Instance::kStep);
  uint8_t* const room =
      k_splits == 1 ? nullptr : hf::check_split_workspace(workspace, launch.workspace_bytes(), k_splits);
  HF_CHECK_ARCH(Wq, "gfx950");
  hf::launch(mxfp4_gemm_tiles, {launch.groups(), Instance::kThreads, 0, stream},
             launch.problem(out, Xq, Xs, Wq, Ws, {}, room, shuffled));
}
HF_EXPORT(mxfp4_gemm_tiles_out);
