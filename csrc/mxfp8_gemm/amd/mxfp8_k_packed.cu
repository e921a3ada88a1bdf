// MX-FP8 GEMM for M <= 8 on gfx950 and gfx942: out[M, N] = X[M, K] W[N, K]^T (+ bias), with parts of K in the rows of the matrix
// instruction that few rows of X leave empty. k_packed_kernel.h has the kernel. A variant serves one number of columns per
// group of waves (HF_COLUMNS), which is also the largest M.
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "k_packed_kernel.h"

#ifndef HF_COLUMNS
#error "build a variant: -DHF_COLUMNS=4 or 8"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::k_packed;

static_assert(HF_COLUMNS == 4 || HF_COLUMNS == 8);
static_assert(HF_COLUMNS * hf::wave_split::kMaxK < (int64_t{1} << 31), "a group's rows are within one resource");

/// out bf16 [M, N]; Xq, Wq e4m3 in the architecture's format (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32],
/// [N, K/32], aligned to 4 bytes; bias bf16 [N] or none; M <= columns; K a multiple of 128 (16 / columns); groups of waves,
/// each with `columns` columns, and waves (a power of two) of each, groups waves <= 16.
void mxfp8_k_packed_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t columns,
                        int64_t groups, int64_t waves, hipStream_t stream) {
  constexpr int kStepOfAllParts = hf::wave_split::kStep * parts(HF_COLUMNS);
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, HF_COLUMNS, hf::wave_split::kMaxK << 32);
  HF_CHECK(columns == HF_COLUMNS, "this variant of the module has columns = ", HF_COLUMNS, "; got ", columns);
  HF_CHECK(shape.k <= hf::wave_split::kMaxK && shape.k % kStepOfAllParts == 0, "K must be a multiple of ", kStepOfAllParts,
           " with ", HF_COLUMNS, " columns, at most ", hf::wave_split::kMaxK, "; got ", shape.k);
  HF_CHECK(hf::aligned_to(Xs.data(), 4) && hf::aligned_to(Ws.data(), 4), "Xs and Ws must be aligned to 4 bytes");
  HF_CHECK(waves == 1 || waves == 2 || waves == 4 || waves == 8 || waves == 16, "waves must be 1, 2, 4, 8 or 16; got ", waves);
  HF_CHECK(groups >= 1 && groups * waves <= kMaxWaves, "groups must be at least 1, and groups times waves at most ", kMaxWaves,
           "; got groups = ", groups, ", waves = ", waves);
  hf::mxfp8::check_bias(bias, shape.n, out);
  const Problem problem = hf::wave_split::problem_of(out, Xq, Xs, Wq, Ws, bias, pack_options(__builtin_ctzll(waves), groups));
  const uint32_t lds = static_cast<uint32_t>(groups * waves) * kTileFloats * sizeof(float);
  hf::wave_split::launch(mxfp8_k_packed<HF_COLUMNS>, problem, hf::ceil_div(shape.n, groups * HF_COLUMNS), groups * waves, lds,
                         stream);
}
HF_EXPORT(mxfp8_k_packed_out);
