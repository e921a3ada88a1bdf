// Scaled fp8 GEMM on gfx950 and gfx942: out[M, N] = X[M, K] W[N, K]^T (+ bias), K split over the waves of a work-group.
// ../../mxfp8_gemm/amd/wave_split_launch.h has the kernel. A variant serves one number of rows per work-group (HF_ROWS), one
// kind of scales (HF_SCALES, the values of Scales), and 16 or, on gfx950, up to 80 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "../../mxfp8_gemm/amd/wave_split_launch.h"

#if !defined(HF_ROWS) || !defined(HF_SCALES)
#error "build a variant: -DHF_ROWS=16, 32 or 64, -DHF_SCALES=0 to 3"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::wave_split;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr Scales kScales{HF_SCALES};
static_assert(HF_ROWS == 16 || HF_ROWS == 32 || HF_ROWS == 64);
static_assert(kScales < Scales::kMx);

/// out bf16 or f16 [M, N]; Xq, Wq e4m3 in the architecture's format (or uint8) [M, K], [N, K]; Xs, Ws as guards.h has them;
/// bias [N] as out, or none; columns and waves as for mxfp8_wave_split_out.
void fp8_wave_split_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t scales,
                        int64_t rows, int64_t columns, int64_t waves, hipStream_t stream) {
  const Problem problem = hf::fp8_gemm::check_operands(out, Xq, Xs, Wq, Ws, bias, scales, kScales);
  constexpr decltype(&fp8_wave_split<kRowTiles, 1, kScales>) kKernels[kMostColumnTiles] = {
      fp8_wave_split<kRowTiles, 1, kScales>, fp8_wave_split<kRowTiles, 2, kScales>, fp8_wave_split<kRowTiles, 3, kScales>,
      fp8_wave_split<kRowTiles, 4, kScales>, fp8_wave_split<kRowTiles, 5, kScales>};
  launch_groups<kRowTiles>(kKernels, problem, Wq, rows, columns, waves, stream);
}
HF_EXPORT(fp8_wave_split_out);
