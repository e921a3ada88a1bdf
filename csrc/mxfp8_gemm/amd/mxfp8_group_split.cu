// MX-FP8 GEMM for 16 to 64 rows on gfx950: out[M, N] = X[M, K] W[N, K]^T (+ bias), K split over two or four work-groups and their
// waves. group_split_kernel.h has the kernel. A variant serves one number of rows per work-group (HF_ROWS) and 16, 24, 32 or
// 48 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "group_split_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16, 32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::group_split;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr int64_t kMaxRows = int64_t{1} << 24;
static_assert(HF_ROWS == 16 || HF_ROWS == 32 || HF_ROWS == 64);

/// out bf16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; k_splits 2 or 4, at most ceil(K/128); workspace float32 [results (k_splits tiles 256 + 2 (k_splits - 1))] with any
/// contents, for results of `tiles` tiles of 16 x 16.
void mxfp8_group_split_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, OptionalTensor workspace,
                           int64_t rows, int64_t columns, int64_t k_splits, hipStream_t stream) {
  hf::mxfp8::check_operands(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 32);
  const Problem problem = hf::wave_split::mx_problem(out, Xq, Xs, Wq, Ws, bias);
  constexpr decltype(&mxfp8_group_split<kRowTiles, 1>) kKernels[] = {
      mxfp8_group_split<kRowTiles, 1>, mxfp8_group_split<kRowTiles, 2>, mxfp8_group_split<kRowTiles, 3>};
  launch_groups<kRowTiles>(kKernels, problem, workspace, rows, columns, k_splits, stream);
}
HF_EXPORT(mxfp8_group_split_out);
