// MX-FP8 GEMM for decode batches on gfx950 and gfx942: out[M, N] = X[M, K] W[N, K]^T (+ bias), K split over the waves of a
// work-group. wave_split_launch.h has the kernel. A variant serves one number of rows per work-group (HF_ROWS) and 16 or, on
// gfx950, up to 80 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "wave_split_launch.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16, 32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::wave_split;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr int64_t kMaxRows = int64_t{1} << 24;
static_assert(HF_ROWS == 16 || HF_ROWS == 32 || HF_ROWS == 64);

/// out bf16 [M, N]; Xq, Wq e4m3 in the architecture's format (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32],
/// [N, K/32]; bias bf16 [N] or none; columns a multiple of 4 from 16 to 80; waves 1, 2, 4, up to 32 columns 8, and with 16
/// rows and columns 16.
void mxfp8_wave_split_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t rows,
                          int64_t columns, int64_t waves, hipStream_t stream) {
  hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 32);
  const Problem problem = mx_problem(out, Xq, Xs, Wq, Ws, bias);
  constexpr decltype(&mxfp8_wave_split<kRowTiles, 1>) kKernels[kMostColumnTiles] = {
      mxfp8_wave_split<kRowTiles, 1>, mxfp8_wave_split<kRowTiles, 2>, mxfp8_wave_split<kRowTiles, 3>,
      mxfp8_wave_split<kRowTiles, 4>, mxfp8_wave_split<kRowTiles, 5>};
  launch_groups<kRowTiles>(kKernels, problem, Wq, rows, columns, waves, stream);
}
HF_EXPORT(mxfp8_wave_split_out);
