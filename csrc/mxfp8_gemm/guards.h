// What every small-M MX-FP8 entry demands of its operands, with the messages that say so.
#pragma once

#include "hipforge/host/addresses.h"
#include "hipforge/module.h"
#include "hipforge/device/mx.h"

namespace hf::mxfp8 {

struct Shape {
  int64_t m, n, k;
};

// Raw-buffer offsets are signed 32-bit numbers; a wrapped one is a GPU fault that nothing can catch.
constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;
constexpr int kLoadBytes = 16;

inline void check_elements(const Tensor& tensor, const char* name, int32_t dtype = HF_E4M3FN) {
  const char* const format = dtype == HF_E4M3FN ? "e4m3fn" : "e4m3fnuz";
  HF_CHECK(tensor.dtype() == dtype || tensor.dtype() == HF_U8, name, " holds ", format, " elements: float8_", format,
           ", or uint8 with the same bits; got ", tensor.dtype());
}

inline void check_payload(const Tensor& tensor, const char* name, int32_t dtype = HF_E4M3FN) {
  check_elements(tensor, name, dtype);
  HF_CHECK(tensor.dim() == 2, name, " must have 2 dimensions, [rows, K]; got ", tensor);
}

inline void check_scale_dtype(const Tensor& tensor, const char* name) {
  HF_CHECK(tensor.dtype() == HF_U8 || tensor.dtype() == HF_E8M0FNU, name,
           " holds e8m0 bytes: uint8 or float8_e8m0fnu; got ", tensor.dtype());
}

inline void check_scales(const Tensor& tensor, const char* name, int64_t rows, int64_t k) {
  check_scale_dtype(tensor, name);
  HF_CHECK(tensor.is_shape(rows, k / kMxBlock), name, " must be [", rows, ", ", k / kMxBlock,
           "], one scale per row and 32 elements of K; got ", tensor);
}

inline void check_layout(const Tensor& tensor, const char* name, const Tensor& like, const char* like_name = "Wq") {
  HF_CHECK(tensor.is_contiguous(), name, " must be contiguous (row-major); got ", tensor,
           " with other strides: pass ", name, ".contiguous()");
  HF_CHECK(tensor.on_gpu() == like.on_gpu() && tensor.device_index() == like.device_index(), name,
           " must be on the device of ", like_name);
}

inline void check_alignment(const Tensor& tensor, const char* name) {
  HF_CHECK(reinterpret_cast<uintptr_t>(tensor.data()) % kLoadBytes == 0, name,
           " must start at a multiple of 16 bytes (lanes load 16 bytes at once); pass a copy of this view");
}

inline void check_bytes(int64_t rows, int64_t k, const char* name, const char* rows_name,
                        int64_t max_bytes = kMaxBytes) {
  HF_CHECK(rows * k <= max_bytes, name, " has ", rows_name, "*K = ", rows, "*", k, " = ", rows * k,
           " bytes; the kernel takes at most 2^31 - 1 (2 GB), because a raw-buffer offset is a signed 32-bit number: "
           "split ", rows_name, " over several calls");
}

// Checks what is true of operands whatever their scales, and returns the problem's shape. Kernels with a resource of its own for
// each tile take payloads of any size: max_bytes.
inline Shape check_payloads(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                            int64_t max_m, int64_t max_bytes, int32_t payload) {
  check_payload(xq, "Xq", payload);
  check_payload(wq, "Wq", payload);
  const Shape shape{xq.size(0), wq.size(0), xq.size(1)};
  const auto [m, n, k] = shape;
  HF_CHECK(wq.size(1) == k, "Xq and Wq must have the same K; got Xq ", xq, " and Wq ", wq);
  HF_CHECK(m >= 1 && m <= max_m, "M must be between 1 and ", max_m, "; got ", m);
  HF_CHECK(n >= 1, "N must be at least 1; got ", n);
  HF_CHECK(out.is_shape(m, n), "out must be [", m, ", ", n, "]; got ", out);
  check_bytes(n, k, "Wq", "N", max_bytes);
  check_bytes(m, k, "Xq", "M", max_bytes);
  check_layout(xq, "Xq", wq);
  check_layout(xs, "Xs", wq);
  check_layout(wq, "Wq", wq);
  check_layout(ws, "Ws", wq);
  check_layout(out, "out", wq);
  check_alignment(xq, "Xq");
  check_alignment(wq, "Wq");
  check_apart({out, "out"}, {{xq, "Xq"}, {xs, "Xs"}, {wq, "Wq"}, {ws, "Ws"}});
  return shape;
}

// The same with MX scales.
inline Shape check_shapes(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                          int64_t max_m, int64_t max_bytes, int32_t payload) {
  const Shape shape = check_payloads(out, xq, xs, wq, ws, max_m, max_bytes, payload);
  const auto [m, n, k] = shape;
  HF_CHECK(k > 0 && k % kMxBlock == 0, "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ", k);
  check_scales(xs, "Xs", m, k);
  check_scales(ws, "Ws", n, k);
  HF_CHECK(out.dtype() == HF_BF16, "out must be bfloat16; got ", out.dtype());
  return shape;
}

inline Shape check_operands(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                            int64_t max_m, int64_t max_bytes = kMaxBytes) {
  const Shape shape = check_shapes(out, xq, xs, wq, ws, max_m, max_bytes, HF_E4M3FN);
  HF_CHECK_ARCH(wq, "gfx950");
  return shape;
}

/// The e4m3 format that the architecture of a tensor's device reads.
inline int32_t payload_of(const Tensor& tensor) {
  return arch_of(tensor.device_index()).is("gfx942") ? HF_E4M3FNUZ : HF_E4M3FN;
}

/// The same where both architectures have the kernel, each in its own fp8 format.
inline Shape check_gemm(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                        int64_t max_m, int64_t max_bytes) {
  HF_CHECK_ARCH(wq, "gfx950", "gfx942", "sm_90");
  return check_shapes(out, xq, xs, wq, ws, max_m, max_bytes, payload_of(wq));
}

inline void check_workspace(const OptionalTensor& workspace, const Shape& shape, int64_t k_splits, const Tensor& like) {
  HF_CHECK(workspace.has_value(), "k_splits = ", k_splits, " needs a workspace: float32 [", k_splits, ", ", shape.m,
           ", ", shape.n, "]; got None");
  const Tensor given = *workspace;
  HF_CHECK(given.dtype() == HF_F32, "workspace must be float32; got ", given.dtype());
  HF_CHECK(given.is_shape(k_splits, shape.m, shape.n), "workspace must be [k_splits, M, N] = [", k_splits, ", ",
           shape.m, ", ", shape.n, "]; got ", given);
  check_layout(given, "workspace", like);
}

inline void check_bias(const OptionalTensor& bias, int64_t n, const Tensor& like, const Tensor& out) {
  if (!bias.has_value()) return;
  const Tensor given = *bias;
  HF_CHECK(given.dtype() == out.dtype(), "bias must be ", out.dtype(), "; got ", given.dtype());
  HF_CHECK(given.is_shape(n), "bias must be [N] = [", n, "]; got ", given);
  check_layout(given, "bias", like);
  check_apart({out, "out"}, {{given, "bias"}});
}

}  // namespace hf::mxfp8
