// MX-FP8 GEMM for gfx950 at any M: out[M, N] = X[M, K] W[N, K]^T (+ bias). mx_tiles/kernel.h has the kernel. A variant
// serves one tile size (HF_TILE: rows of X * 1000 + rows of W).
#include "hipforge/amd/hip.h"
#include "hipforge/amd/last_group.h"
#include "hipforge/amd/mx_tiles/kernel.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "../split_workspace.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::tiles;

#if HF_TILE == 256256
using Instance = Config<2, 4, 4, 2>;
#elif HF_TILE == 128192
using Instance = Config<2, 2, 2, 3>;
#elif HF_TILE == 128128
using Instance = Config<2, 2, 2, 2>;
#elif HF_TILE == 128064
using Instance = Config<2, 2, 2, 1>;
#elif HF_TILE == 64064
using Instance = Config<2, 2, 1, 1>;
#else
#error "build a variant: -DHF_TILE=256256, 128192, 128128, 128064 or 64064"
#endif
static_assert(Instance::kBlockM * 1000 + Instance::kBlockN == HF_TILE);

// A tile's resources count its own rows: 256 of kMaxK bytes stay below 2^31.
constexpr int64_t kMaxK = 1 << 22, kMaxRows = int64_t{1} << 24;
static_assert((Instance::kBlockM > Instance::kBlockN ? Instance::kBlockM : Instance::kBlockN) * kMaxK < (int64_t{1} << 31));

/// out bf16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; k_splits 1, 2, 4 or 8, at most ceil(K/128), and where it is above 1 a workspace: float32
/// [tiles (k_splits BM BN + 2 (k_splits - 1))] for tiles of BM x BN, with any contents.
void mxfp8_gemm_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, OptionalTensor workspace,
                    int64_t tile, int64_t k_splits, hipStream_t stream) {
  const auto shape = hf::smallm_mxfp8::check_operands(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 32);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  const int64_t steps = hf::ceil_div(shape.k, kStep);
  hf::check_k_splits(k_splits, steps, shape.k);
  hf::smallm_mxfp8::check_bias(bias, shape.n, Wq, out);
  const uint32_t row_tiles = hf::ceil_div(shape.m, Instance::kBlockM), column_tiles = hf::ceil_div(shape.n, Instance::kBlockN);
  const uint64_t tiles = uint64_t{row_tiles} * column_tiles, part_bytes = tiles * k_splits * Instance::kPartBytes;
  uint8_t* partials = nullptr;
  if (k_splits > 1)
    partials = hf::smallm_mxfp8::check_workspace_of_parts(
        workspace, part_bytes + tiles * hf::dev::meeting_words(k_splits) * sizeof(uint64_t), k_splits, out, Xq, Xs, Wq, Ws, bias);

  const Problem problem{
      .out = out.data<hf::dev::bf16>(),
      .partials = partials,
      .words = reinterpret_cast<uint64_t*>(partials + part_bytes),
      .number = hf::launch_number(),
      .bias = bias.has_value() ? bias.data<hf::dev::bf16>() : nullptr,
      .xq = Xq.data<uint8_t>(),
      .xs = Xs.data<uint8_t>(),
      .wq = Wq.data<uint8_t>(),
      .ws = Ws.data<uint8_t>(),
      .m = static_cast<uint32_t>(shape.m),
      .n = static_cast<uint32_t>(shape.n),
      .k = static_cast<uint32_t>(shape.k),
      .row_tiles = row_tiles,
      .column_tiles = column_tiles,
      .log2_splits = static_cast<uint32_t>(__builtin_ctzll(static_cast<unsigned long long>(k_splits))),
      .aligned_scales = shape.k % kStep == 0 && hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4),
      .aligned_output = shape.n % 8 == 0 && hf::aligned_to(out.data(), 16)};
  mxfp8_gemm<Instance><<<static_cast<uint32_t>(tiles * k_splits), Instance::kThreads, 0, stream>>>(problem);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(mxfp8_gemm_out);
