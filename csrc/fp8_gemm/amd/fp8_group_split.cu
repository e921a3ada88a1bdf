// Scaled fp8 GEMM for 16 to 64 rows on gfx950: out[M, N] = X[M, K] W[N, K]^T (+ bias), K split over two or four work-groups and
// their waves. ../../mxfp8_gemm/amd/group_split_kernel.h has the kernel. A variant serves one number of rows per work-group
// (HF_ROWS), one kind of scales (HF_SCALES, the values of Scales), and 16, 24, 32 or 48 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "../../mxfp8_gemm/amd/group_split_kernel.h"

#if !defined(HF_ROWS) || !defined(HF_SCALES)
#error "build a variant: -DHF_ROWS=16, 32 or 64, -DHF_SCALES=0 to 3"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::group_split;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr Scales kScales{HF_SCALES};
static_assert(HF_ROWS == 16 || HF_ROWS == 32 || HF_ROWS == 64);
static_assert(kScales < Scales::kMx);

/// out bf16 or f16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws as guards.h has them; bias [N] as out, or none;
/// columns, k_splits and workspace as for mxfp8_group_split_out.
void fp8_group_split_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t scales,
                         OptionalTensor workspace, int64_t rows, int64_t columns, int64_t k_splits, hipStream_t stream) {
  const Problem problem = hf::fp8_gemm::check_operands(out, Xq, Xs, Wq, Ws, bias, scales, kScales);
  HF_CHECK_ARCH(Wq, "gfx950");
  constexpr decltype(&fp8_group_split<kRowTiles, 1, kScales>) kKernels[] = {
      fp8_group_split<kRowTiles, 1, kScales>, fp8_group_split<kRowTiles, 2, kScales>, fp8_group_split<kRowTiles, 3, kScales>};
  launch_groups<kRowTiles>(kKernels, problem, workspace, rows, columns, k_splits, stream);
}
HF_EXPORT(fp8_group_split_out);
