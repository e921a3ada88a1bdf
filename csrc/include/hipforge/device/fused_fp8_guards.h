// Host checks shared by the fused ops with fp8 results (RMSNorm, SwiGLU): formats of the architecture, scales, and the
// buffer of the following kernel that they zero.
#pragma once

#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace hf::fused_fp8 {

/// The e4m3 format of the architecture: what outputs must be, in a message too, and its largest value.
struct Format {
  bool fnuz;
  int64_t group_memory;  // LDS of a work-group, bytes

  hf_dtype dtype() const { return e4m3_of(fnuz); }
  double largest() const { return fnuz ? 240 : 448; }
};

inline Format format_of(const Tensor& input) {
  HF_CHECK_ARCH(input, HF_ARCHS);
  const ArchName arch = arch_of(input.device_index());
  return {has_fnuz(arch.text), group_memory(arch.text)};
}

inline const float* scale_of(const Tensor& scale) {
  check_one(scale, "scale", HF_F32);
  return scale.data<const float>();
}

/// `fp8_max` as the kernels take it; at most what the format holds.
inline float limit_of(double fp8_max, Format format) {
  HF_CHECK(fp8_max > 0 && fp8_max <= format.largest(), "fp8_max must be above 0 and at most ", format.largest(),
           ", the largest value of the format; got ", fp8_max);
  return static_cast<float>(fp8_max);
}

/// The e8m0 bytes of out [rows, cols]; `cols_name` is what the op calls the columns.
inline uint8_t* block_scales_of(const Tensor& block_scales, const Tensor& out, int64_t block, const char* cols_name) {
  const int64_t rows = out.size(0), cols = out.size(1);
  HF_CHECK(cols % block == 0, cols_name, " must be a multiple of ", block, ", the block that shares a scale; got ", cols);
  check_operand(block_scales, "block_scales", kE8m0, {rows, cols / block});
  return block_scales.data<uint8_t>();
}

/// Checks the scales of out [rows, cols], one per row or, with `blocks`, per 128 elements of one; returns whether they are e8m0.
inline bool check_dynamic_scales(const Tensor& scales, const Tensor& out, bool blocks) {
  const int64_t rows = out.size(0);
  if (!blocks) {
    check_operand(scales, "scales", HF_F32, {rows}, ", one per row");
    return false;
  }
  const bool e8m0 = kE8m0.have(scales);
  check_operand(scales, "scales", e8m0 ? kE8m0 : Dtypes(HF_F32), {rows, ceil_div(out.size(1), 128)}, ", one per 128 of a row");
  return e8m0;
}

/// The 16-bit elements that the kernel zeroes for the one after it.
struct NextBuffer {
  uint16_t* data = nullptr;
  int64_t count = 0;

  explicit NextBuffer(const OptionalTensor& given, int64_t rows) {
    if (!given) return;
    check_operand(*given, "next_buffer", {HF_F16, HF_BF16}, {rows, "buffer_cols"});
    data = given.data<uint16_t>();
    count = (*given).numel();
  }
};

}  // namespace hf::fused_fp8
