// What both kernels of the skinny fp8 GEMM refuse of their operands.
#pragma once

#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace hf::skinny {

constexpr int64_t kOperandAlignment = 16;  // bytes, of a, b and b's pitch: lanes load 16 at once
constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;

struct Operands {
  int64_t m, n, k;
  int64_t pitch;    // bytes from one column of b to the next
  int64_t b_bytes;  // that b spans
};

/// out fp16 [m, n]; a e4m3 [m, k]; b e4m3 [k, n] with stride(0) == 1; scale fp32 [1].
inline Operands check_operands(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& scale) {
  HF_CHECK_ARCH(b, "gfx942", "gfx950", "sm_90");
  const Dtypes payload{e4m3_of(has_fnuz(b)), HF_U8};
  check_operand(a, "a", payload, {"m", "k"}, kOfDevice, kAligned);
  check_operand(b, "b", payload, {"k", "n"}, kOfDevice, {kOperandAlignment, kAnyStrides.unit});
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  HF_CHECK(b.size(0) == k, "a [m, k] and b [k, n] must have the same k; got a ", a, " and b ", b);
  HF_CHECK(m >= 1 && n >= 1, "m and n must be at least 1; got ", m, " and ", n);
  HF_CHECK(k >= 32 && k % 32 == 0, "k must be a positive multiple of 32; got ", k);
  const int64_t pitch = n == 1 ? k : b.stride(1);
  HF_CHECK(b.stride(0) == 1 && pitch >= k && pitch % kOperandAlignment == 0,
           "b must be column-major: stride(0) == 1 and stride(1) a multiple of 16, at least k = ", k, "; got strides (",
           b.stride(0), ", ", b.stride(1), ")");
  const Operands operands{.m = m, .n = n, .k = k, .pitch = pitch, .b_bytes = (n - 1) * pitch + k};
  HF_CHECK(a.bytes() <= kMaxBytes && operands.b_bytes <= kMaxBytes, "a and b must span at most 2^31 - 1 bytes (2 GB); got ",
           a.bytes(), " and ", operands.b_bytes);
  check_one(scale, "scale", HF_F32);
  check_operand(out, "out", HF_F16, {m, n});
  return operands;
}

}  // namespace hf::skinny
