// What every MXFP4 GEMM demands of its operands, with the messages that say so.
#pragma once

#include "hipforge/device/mx.h"
#include "hipforge/device/mx_shuffled.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/host/addresses.h"
#include "hipforge/module.h"

namespace hf::mxfp4 {

struct Shape {
  int64_t m, n, k;
};

constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;
constexpr int kLoadBytes = 16;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline void check_place(const Tensor& tensor, const char* name, const Tensor& like) {
  HF_CHECK(tensor.is_contiguous(), name, " must be contiguous (row-major); got ", tensor,
           " with other strides: pass ", name, ".contiguous()");
  HF_CHECK(tensor.on_gpu() == like.on_gpu() && tensor.device_index() == like.device_index(), name,
           " must be on the device of Wq");
}

inline void check_payload(const Tensor& tensor, const char* name, const Tensor& like, int64_t max_bytes) {
  HF_CHECK(tensor.dtype() == HF_U8 || tensor.dtype() == HF_E2M1FN_X2, name,
           " holds two e2m1 codes per byte: uint8 or float4_e2m1fn_x2; got ", tensor.dtype());
  HF_CHECK(tensor.dim() == 2, name, " must have 2 dimensions, [rows, K/2]; got ", tensor);
  check_place(tensor, name, like);
  HF_CHECK(tensor.bytes() <= max_bytes, name, " has ", tensor.bytes(),
           " bytes; the kernel takes at most 2^31 - 1 (2 GB), because a raw-buffer offset is a signed 32-bit number");
  HF_CHECK(hf::aligned_to(tensor.data(), kLoadBytes), name, " must start at a multiple of 16 bytes; pass a copy");
}

inline void check_scales(const Tensor& tensor, const char* name, int64_t rows, int64_t columns, const Tensor& like) {
  HF_CHECK(tensor.dtype() == HF_U8 || tensor.dtype() == HF_E8M0FNU, name,
           " holds e8m0 bytes: uint8 or float8_e8m0fnu; got ", tensor.dtype());
  HF_CHECK(tensor.is_shape(rows, columns), name, " must be [", rows, ", ", columns, "]; got ", tensor);
  check_place(tensor, name, like);
}

/// Checks what all entries share and returns the problem's shape. Kernels with a resource of its own for each tile take payloads
/// of any size: max_bytes.
inline Shape check_operands(const Tensor& out, const Tensor& Xq, const Tensor& Xs, const Tensor& Wq, const Tensor& Ws,
                            bool shuffled, int64_t max_bytes) {
  check_payload(Xq, "Xq", Wq, max_bytes);
  check_payload(Wq, "Wq", Wq, max_bytes);
  const int64_t m = Xq.size(0), n = Wq.size(0), k = 2 * Xq.size(1);
  HF_CHECK(Wq.size(1) == Xq.size(1), "Xq and Wq must have the same K; got Xq ", Xq, " and Wq ", Wq);
  HF_CHECK(k > 0 && k % kMxBlock == 0, "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ", k);
  HF_CHECK(m >= 1 && n >= 1, "M and N must be at least 1; got ", m, " and ", n);
  check_scales(Xs, "Xs", m, k / kMxBlock, Wq);
  if (shuffled) {
    HF_CHECK(n % 16 == 0 && k % 64 == 0, "shuffled weights need N % 16 == 0 and K % 64 == 0; got N = ", n, ", K = ", k);
    check_scales(Ws, "Ws (shuffled)", round_up(n, kShuffledPaddedRows), round_up(k / kMxBlock, kShuffledScaleColumns), Wq);
  } else {
    check_scales(Ws, "Ws", n, k / kMxBlock, Wq);
  }
  HF_CHECK(out.dtype() == HF_BF16 && out.is_shape(m, n), "out must be bfloat16 [", m, ", ", n, "]; got ", out);
  check_place(out, "out", Wq);
  check_apart({out, "out"}, {{Xq, "Xq"}, {Xs, "Xs"}, {Wq, "Wq"}, {Ws, "Ws"}});
  return {m, n, k};
}

}  // namespace hf::mxfp4
