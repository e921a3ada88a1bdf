// What every entry of the grouped scaled fp8 GEMM demands of its operands: all as in MX-FP8, but scales of one of four kinds.
#pragma once

#include "../fp8_gemm/guards.h"
#include "../mxfp8_grouped_gemm/amd/problem.h"

namespace hf::moe {

using wave_split::Scales;

/// One scale for each of `rows` rows of each expert, or one for an expert; A is one expert.
inline void check_row_scales(const Tensor& tensor, const char* name, int64_t experts, int64_t rows) {
  check_numbers(tensor, name, HF_F32);
  HF_CHECK(tensor.numel() == experts || tensor.numel() == experts * rows, name, " must have ", experts * rows,
           " scales, one per row, or ", experts, "; got ", tensor);
}

/// Checks everything but the output and returns the problem without it and without slot weights.
inline Problem checked(const Operands& given, int64_t scales, Scales kind) {
  HF_CHECK(scales == static_cast<int64_t>(kind), "this variant of the module has scales = ", static_cast<int64_t>(kind), "; got ",
           scales);
  const int64_t of_k = kind == Scales::kMxShared ? kMxBlock : 16;
  HF_CHECK(given.k > 0 && given.k % of_k == 0, "K must be a positive multiple of ", of_k, "; got ", given.k);
  check_unscaled(given);
  if (kind == Scales::kOnce) {
    check_row_scales(given.a_scales, "a_scale", 1, given.a_rows);
    check_row_scales(given.w_scales, "w_scale", given.experts, given.n);
  } else {
    const Dtypes dtypes = kind == Scales::kBlocks ? Dtypes(HF_F32) : kE8m0;
    const int64_t blocks = ceil_div(given.k, kind == Scales::kMxShared ? kMxBlock : wave_split::kStep);
    check_operand(given.a_scales, "a_scale", dtypes, {given.a_rows, blocks}, ", one scale per row and block of K");
    check_operand(given.w_scales, "w_scale", dtypes, {given.experts, ceil_div(given.n, wave_split::shared_rows(kind)), blocks},
                  ", one scale per block of rows and of K");
  }
  Problem problem = problem_of(given);
  if (kind != Scales::kMxShared) problem.options = kAlignedScales;
  if (kind == Scales::kOnce)
    problem.options |= (given.a_scales.numel() == 1 ? kOneAScale : 0) |
                       (given.n > 1 && given.w_scales.numel() == given.experts ? kOneWScale : 0);
  return problem;
}

/// Checks the results of SwiGLU over gate and up, the rows of W, whose scales are of the operands' kind.
inline void check_gate_up(const Tensor& out, const Tensor& out_scales, const Operands& given, Scales kind) {
  if (kind == Scales::kMxShared) return check_gate_up(out, out_scales, given);
  HF_CHECK(given.n % (2 * kMxBlock) == 0, "N must be a multiple of 64 (gate and up of 32 results); got ", given.n);
  check_operand(out, "out", given.payload, {given.num_valid, given.n / 2}, hf::kOfDevice);
  check_operand(out_scales, "out_scales", kind == Scales::kBlocks ? Dtypes(HF_F32) : kE8m0,
                {given.num_valid, ceil_div(given.n / 2, wave_split::kStep)}, ", one scale per slot and 128 results");
}

}  // namespace hf::moe
