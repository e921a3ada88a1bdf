// What every small-M MX-FP8 entry demands of its operands, with the messages that say so.
#pragma once

#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "hipforge/device/mx.h"

namespace hf::mxfp8 {

struct Shape {
  int64_t m, n, k;
};

// Raw-buffer offsets are signed 32-bit numbers; a wrapped one is a GPU fault that nothing can catch.
constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;
constexpr const char* kPerBlock = ", one e8m0 scale per row and 32 elements of K";

/// Elements [..., K] of an fp8 format, or their bits.
inline void check_payload(const Tensor& tensor, const char* name, int32_t dtype = HF_E4M3FN, Sizes shape = {"rows", "K"}) {
  check_operand(tensor, name, {static_cast<hf_dtype>(dtype), HF_U8}, shape, ", fp8 elements or their bits", kAligned);
}

inline void check_bytes(int64_t rows, int64_t k, const char* name, const char* rows_name,
                        int64_t max_bytes = kMaxBytes) {
  HF_CHECK(rows * k <= max_bytes, name, " has ", rows_name, "*K = ", rows, "*", k, " = ", rows * k,
           " bytes; the kernel takes at most 2^31 - 1 (2 GB), because a raw-buffer offset is a signed 32-bit number: "
           "split ", rows_name, " over several calls");
}

// Checks what is true of operands whatever their scales, and returns the problem's shape. Kernels with a resource of its own for
// each tile take payloads of any size: max_bytes.
inline Shape check_payloads(const Tensor& out, const Tensor& xq, const Tensor& wq, int64_t max_m, int64_t max_bytes,
                            int32_t payload, Dtypes results = HF_BF16) {
  check_payload(xq, "Xq", payload);
  check_payload(wq, "Wq", payload);
  const Shape shape{xq.size(0), wq.size(0), xq.size(1)};
  const auto [m, n, k] = shape;
  HF_CHECK(wq.size(1) == k, "Xq and Wq must have the same K; got Xq ", xq, " and Wq ", wq);
  HF_CHECK(m >= 1 && m <= max_m, "M must be between 1 and ", max_m, "; got ", m);
  HF_CHECK(n >= 1, "N must be at least 1; got ", n);
  check_operand(out, "out", results, {m, n});
  check_bytes(n, k, "Wq", "N", max_bytes);
  check_bytes(m, k, "Xq", "M", max_bytes);
  return shape;
}

// The same with MX scales.
inline Shape check_shapes(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                          int64_t max_m, int64_t max_bytes, int32_t payload) {
  const Shape shape = check_payloads(out, xq, wq, max_m, max_bytes, payload);
  const auto [m, n, k] = shape;
  HF_CHECK(k > 0 && k % kMxBlock == 0, "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ", k);
  check_operand(xs, "Xs", kE8m0, {m, k / kMxBlock}, kPerBlock);
  check_operand(ws, "Ws", kE8m0, {n, k / kMxBlock}, kPerBlock);
  return shape;
}

inline Shape check_operands(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                            int64_t max_m, int64_t max_bytes = kMaxBytes) {
  const Shape shape = check_shapes(out, xq, xs, wq, ws, max_m, max_bytes, HF_E4M3FN);
  HF_CHECK_ARCH(wq, "gfx950");
  return shape;
}

/// The e4m3 format that the architecture of a tensor's device reads.
inline hf_dtype payload_of(const Tensor& tensor) {
  return e4m3_of(has_fnuz(tensor));
}

/// The same where both architectures have the kernel, each in its own fp8 format.
inline Shape check_gemm(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                        int64_t max_m, int64_t max_bytes) {
  HF_CHECK_ARCH(wq, "gfx950", "gfx942", "sm_90");
  return check_shapes(out, xq, xs, wq, ws, max_m, max_bytes, payload_of(wq));
}

inline void check_workspace(const OptionalTensor& workspace, const Shape& shape, int64_t k_splits) {
  HF_CHECK(workspace.has_value(), "k_splits = ", k_splits, " needs a workspace: float32 [", k_splits, ", ", shape.m,
           ", ", shape.n, "]; got None");
  check_operand(*workspace, "workspace", HF_F32, {k_splits, shape.m, shape.n}, " = [k_splits, M, N]");
}

inline void check_bias(const OptionalTensor& bias, int64_t n, const Tensor& out) {
  if (bias) check_operand(*bias, "bias", out.dtype(), {n}, " = [N]");
}

}  // namespace hf::mxfp8
