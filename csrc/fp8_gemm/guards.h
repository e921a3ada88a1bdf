// What every entry of the scaled fp8 GEMM demands of its operands: payloads as in MX-FP8, scales of one of four kinds.
#pragma once

#include "hipforge/module.h"
#include "hipforge/amd/split_k.h"
#include "../mxfp8_gemm/amd/wave_split_problem.h"
#include "../mxfp8_gemm/guards.h"

namespace hf::fp8_gemm {

using wave_split::Scales;

constexpr int64_t kMaxRows = int64_t{1} << 24;

inline void check_scales(const Tensor& tensor, const char* name, Scales kind, int64_t rows, int64_t k, uint32_t shared) {
  if (kind == Scales::kOnce) {
    check_numbers(tensor, name, HF_F32);
    HF_CHECK(tensor.numel() == 1 || tensor.is_shape(rows) || tensor.is_shape(rows, 1), name, " must be one scale or [", rows,
             "], one per row; got ", tensor);
    return;
  }
  const bool mx = kind == Scales::kMxShared;
  const int64_t groups = ceil_div(rows, shared), block = mx ? kMxBlock : wave_split::kStep;
  static_assert(kMxBlock == 32 && wave_split::kStep == 128, "as the message says");
  check_operand(tensor, name, kind == Scales::kBlocks ? Dtypes(HF_F32) : kE8m0, {groups, ceil_div(k, block)},
                mx ? ", one scale per 32 elements of K" : ", one scale per 128 elements of K");
}

/// Checks the operands and returns the problem; its options are for the kernel, without the sizes of work-groups.
inline wave_split::Problem check_operands(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq,
                                          const Tensor& ws, const OptionalTensor& bias, int64_t scales, Scales kind) {
  using Options = wave_split::Problem;
  HF_CHECK_ARCH(wq, "gfx950", "gfx942");
  HF_CHECK(scales == static_cast<int64_t>(kind), "this variant of the module has scales = ", static_cast<int64_t>(kind), "; got ",
           scales);
  const auto [m, n, k] = mxfp8::check_payloads(out, xq, wq, kMaxRows, kMaxRows << 32, mxfp8::payload_of(wq),
                                               {HF_BF16, HF_F16});
  const int64_t of_k = kind == Scales::kMxShared ? kMxBlock : 16;
  HF_CHECK(k > 0 && k % of_k == 0 && k <= wave_split::kMaxK, "K must be a positive multiple of ", of_k, ", at most ",
           wave_split::kMaxK, "; got ", k);
  HF_CHECK(n < 1 << 29, "N must be less than 2^29; got ", n);
  check_scales(xs, "Xs", kind, m, k, 1);
  check_scales(ws, "Ws", kind, n, k, wave_split::shared_rows(kind));
  mxfp8::check_bias(bias, n, out);
  uint32_t options = wave_split::options_of(out, xs, ws, n, k, kind == Scales::kMxShared);
  if (out.dtype() == HF_F16) options |= Options::kHalfOutput;
  if (xs.numel() == 1) options |= Options::kOneXScale;
  if (ws.numel() == 1) options |= Options::kOneWScale;
  return wave_split::problem_of(out, xq, xs, wq, ws, bias, options);
}

}  // namespace hf::fp8_gemm
