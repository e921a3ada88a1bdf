// Scaled fp8 GEMM for gfx950 at any M, with one f32 scale for each row of X and of W, or for all: out[M, N] = X[M, K] W[N, K]^T
// (+ bias). mx_tiles/kernel.h has the kernel. A variant serves one tile size (HF_TILE: rows of X * 1000 + rows of W).
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/mx_tiles/host.h"
#include "hipforge/module.h"
#include "../guards.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::tiles;

using Instance = Variant<PlainE4m3>;

__global__ __launch_bounds__(Instance::kThreads, Instance::kWaves / 4) void fp8_gemm(Problem p) { multiply_tile<Instance>(p); }

/// Operands as for fp8_wave_split_out with scales = 0; k_splits and workspace as for mxfp8_gemm_out.
void fp8_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t scales,
                   OptionalTensor workspace, int64_t tile, int64_t k_splits, hipStream_t stream) {
  hf::fp8_gemm::check_operands(out, Xq, Xs, Wq, Ws, bias, scales, hf::fp8_gemm::Scales::kOnce);
  HF_CHECK_ARCH(Wq, "gfx950");
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  const Launch<Instance> launch{Xq.size(0), Wq.size(0), Xq.size(1), k_splits};
  hf::check_k_splits(k_splits, launch.steps(), launch.k);
  uint8_t* const room =
      k_splits == 1 ? nullptr : hf::check_split_workspace(workspace, launch.workspace_bytes(), k_splits);
  hf::launch(fp8_gemm, {launch.groups(), Instance::kThreads, 0, stream},
             launch.problem(out, Xq, Xs, Wq, Ws, bias, room, false));
}
HF_EXPORT(fp8_tiles_out);
