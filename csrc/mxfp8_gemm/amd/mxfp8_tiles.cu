// MX-FP8 GEMM for gfx950 at any M: out[M, N] = X[M, K] W[N, K]^T (+ bias). mx_tiles/kernel.h has the kernel. A variant
// serves one tile size (HF_TILE: rows of X * 1000 + rows of W).
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/mx_tiles/host.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/module.h"
#include "../guards.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::tiles;

using Instance = Variant<E4m3>;

__global__ __launch_bounds__(Instance::kThreads, Instance::kWaves / 4) void mxfp8_gemm(Problem p) {
  multiply_tile<Instance>(p);
}

/// out bf16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; k_splits 1, 2, 4 or 8, at most ceil(K/128), and where it is above 1 a workspace: float32
/// [tiles (k_splits BM BN + 2 (k_splits - 1))] for tiles of BM x BN, with any contents.
void mxfp8_gemm_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, OptionalTensor workspace,
                    int64_t tile, int64_t k_splits, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_operands(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 32);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  const Launch<Instance> launch{shape.m, shape.n, shape.k, k_splits};
  hf::check_k_splits(k_splits, launch.steps(), shape.k);
  hf::mxfp8::check_bias(bias, shape.n, out);
  uint8_t* const room =
      k_splits == 1 ? nullptr : hf::check_split_workspace(workspace, launch.workspace_bytes(), k_splits);
  hf::launch(mxfp8_gemm, {launch.groups(), Instance::kThreads, 0, stream},
             launch.problem(out, Xq, Xs, Wq, Ws, bias, room, false));
}
HF_EXPORT(mxfp8_gemm_out);
