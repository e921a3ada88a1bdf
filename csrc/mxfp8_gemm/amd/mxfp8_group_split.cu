// MX-FP8 GEMM for 16 to 64 rows on gfx950: out[M, N] = X[M, K] W[N, K]^T (+ bias), K split over two or four work-groups and their
// waves. group_split_kernel.h has the kernel. A variant serves one number of rows per work-group (HF_ROWS) and 16, 24, 32 or
// 48 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "../split_workspace.h"
#include "group_split_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16, 32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::group_split;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr int64_t kMaxK = hf::wave_split::kMaxK, kMaxRows = int64_t{1} << 24;
static_assert(HF_ROWS == 16 || HF_ROWS == 32 || HF_ROWS == 64);
static_assert(HF_ROWS * kMaxK < (int64_t{1} << 31), "a work-group's rows are within one resource");

/// out bf16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; k_splits 2 or 4, at most ceil(K/128); workspace float32 [results (k_splits tiles 256 + 2 (k_splits - 1))] with any
/// contents, for results of `tiles` tiles of 16 x 16.
void mxfp8_group_split_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, OptionalTensor workspace,
                           int64_t rows, int64_t columns, int64_t k_splits, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_operands(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 32);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(rows == HF_ROWS, "this variant of the module has rows = ", HF_ROWS, "; got ", rows);
  HF_CHECK(columns == 16 || columns == 24 || columns == 32 || columns == 48, "columns must be 16, 24, 32 or 48; got ", columns);
  HF_CHECK(k_splits == 2 || k_splits == 4, "k_splits must be 2 or 4; got ", k_splits);
  hf::check_k_splits(k_splits, hf::ceil_div(shape.k, hf::wave_split::kStep), shape.k);
  hf::mxfp8::check_bias(bias, shape.n, Wq, out);
  const bool word_scales = hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4);
  const bool aligned_output = shape.n % hf::dev::kColumnsPerLane == 0 && hf::aligned_to(out.data(), 8);
  const uint32_t log2_parts = kLog2Waves + __builtin_ctzll(k_splits);
  const Problem problem = hf::wave_split::problem_of(
      out, Xq, Xs, Wq, Ws, bias,
      hf::wave_split::pack_options(log2_parts, word_scales && shape.k % hf::wave_split::kStep == 0, aligned_output,
                                   static_cast<uint32_t>(columns), word_scales && shape.k % hf::wave_split::kStep != 0));
  const uint32_t column_tiles = hf::ceil_div(columns, kTile), tiles = kRowTiles * column_tiles;
  const dim3 grid(hf::ceil_div(shape.n, columns), hf::ceil_div(shape.m, HF_ROWS), static_cast<uint32_t>(k_splits));
  const uint64_t results = uint64_t{grid.x} * grid.y, bytes = results * k_splits * part_bytes(tiles);
  uint8_t* const partials = hf::mxfp8::check_workspace_of_parts(
      workspace, bytes + results * hf::dev::meeting_words(static_cast<uint32_t>(k_splits)) * sizeof(uint64_t), k_splits, out,
      Xq, Xs, Wq, Ws, bias);
  const auto kernel = column_tiles == 1 ? mxfp8_group_split<kRowTiles, 1>
                      : column_tiles == 2 ? mxfp8_group_split<kRowTiles, 2> : mxfp8_group_split<kRowTiles, 3>;
  hf::wave_split::launch(kernel, problem, grid, kWaves, lds_bytes(tiles), stream, reinterpret_cast<float*>(partials),
                         reinterpret_cast<uint64_t*>(partials + bytes), hf::launch_number());
}
HF_EXPORT(mxfp8_group_split_out);
