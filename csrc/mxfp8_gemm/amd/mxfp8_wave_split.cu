// MX-FP8 GEMM for decode batches on gfx950 and gfx942: out[M, N] = X[M, K] W[N, K]^T (+ bias), K split over the waves of a
// work-group. wave_split_kernel.h has the kernel. A variant serves one number of rows per work-group (HF_ROWS) and 16 or, on
// gfx950, up to 80 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "wave_split_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16, 32 or 64"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::wave_split;

constexpr int kRowTiles = HF_ROWS / kTile;
constexpr int64_t kMaxRows = int64_t{1} << 24;
static_assert(HF_ROWS == 16 || HF_ROWS == 32 || HF_ROWS == 64);
static_assert(HF_ROWS * kMaxK < (int64_t{1} << 31) && kMostColumnTiles * kTile * kMaxK < (int64_t{1} << 31),
              "a work-group's rows of X, and of W, are within one resource");

/// out bf16 [M, N]; Xq, Wq e4m3 in the architecture's format (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32],
/// [N, K/32]; bias bf16 [N] or none; columns a multiple of 4 from 16 to 80; waves 1, 2, 4, up to 32 columns 8, and with 16
/// rows and columns 16.
void mxfp8_wave_split_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t rows,
                          int64_t columns, int64_t waves, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 32);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(rows == HF_ROWS, "this variant of the module has rows = ", HF_ROWS, "; got ", rows);
  HF_CHECK(columns >= kTile && columns <= kMostColumnTiles * kTile && columns % hf::dev::kColumnsPerLane == 0,
           "columns must be a multiple of ", hf::dev::kColumnsPerLane, " from ", kTile, " to ", kMostColumnTiles * kTile,
           "; got ", columns);
  const uint32_t column_tiles = hf::ceil_div(columns, kTile);
  HF_CHECK(column_tiles == 1 || hf::arch_of(Wq.device_index()).is("gfx950"), "more than 16 columns are for gfx950; got ",
           columns);
  check_waves(waves, max_waves(kRowTiles, static_cast<int>(column_tiles)), HF_ROWS, columns);
  hf::mxfp8::check_bias(bias, shape.n, Wq, out);
  const bool word_scales = hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4);
  const bool aligned_output = shape.n % hf::dev::kColumnsPerLane == 0 && hf::aligned_to(out.data(), 8);
  const Problem problem = problem_of(out, Xq, Xs, Wq, Ws, bias,
                                     pack_options(__builtin_ctzll(waves), word_scales && shape.k % kStep == 0, aligned_output,
                                                  static_cast<uint32_t>(columns), word_scales && shape.k % kStep != 0));
  const uint32_t lds = waves > 1 ? static_cast<uint32_t>(waves) * kRowTiles * column_tiles * kTileBytes : 0;
  constexpr decltype(&mxfp8_wave_split<kRowTiles, 1>) kKernels[kMostColumnTiles] = {
      mxfp8_wave_split<kRowTiles, 1>, mxfp8_wave_split<kRowTiles, 2>, mxfp8_wave_split<kRowTiles, 3>,
      mxfp8_wave_split<kRowTiles, 4>, mxfp8_wave_split<kRowTiles, 5>};
  launch(kKernels[column_tiles - 1], problem,
         dim3(hf::ceil_div(shape.n, columns), hf::ceil_div(shape.m, HF_ROWS)), waves, lds, stream);
}
HF_EXPORT(mxfp8_wave_split_out);
