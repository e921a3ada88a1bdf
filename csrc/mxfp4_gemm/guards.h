// What every MXFP4 GEMM demands of its operands, with the messages that say so.
#pragma once

#include "hipforge/device/mx.h"
#include "hipforge/device/mx_shuffled.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace hf::mxfp4 {

struct Shape {
  int64_t m, n, k;
};

constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline void check_payload(const Tensor& tensor, const char* name, int64_t max_bytes) {
  check_operand(tensor, name, {HF_U8, HF_E2M1FN_X2}, {"rows", "K/2"}, ", two e2m1 codes per byte", kAligned);
  HF_CHECK(tensor.bytes() <= max_bytes, name, " has ", tensor.bytes(),
           " bytes; the kernel takes at most 2^31 - 1 (2 GB), because a raw-buffer offset is a signed 32-bit number");
}

/// Checks W and its scales beside X [m, k] and the result.
inline void check_weights(const Tensor& out, const Tensor& Wq, const Tensor& Ws, int64_t m, int64_t k, bool shuffled) {
  const int64_t n = Wq.size(0);
  HF_CHECK(k > 0 && k % kMxBlock == 0, "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ", k);
  HF_CHECK(m >= 1 && n >= 1, "M and N must be at least 1; got ", m, " and ", n);
  if (shuffled) {
    HF_CHECK(n % 16 == 0 && k % 64 == 0, "shuffled weights need N % 16 == 0 and K % 64 == 0; got N = ", n, ", K = ", k);
    check_operand(Ws, "Ws (shuffled)", kE8m0,
                  {round_up(n, kShuffledPaddedRows), round_up(k / kMxBlock, kShuffledScaleColumns)});
  } else {
    check_operand(Ws, "Ws", kE8m0, {n, k / kMxBlock});
  }
  check_operand(out, "out", HF_BF16, {m, n});
}

/// Checks what all entries share and returns the problem's shape. Kernels with a resource of its own for each tile take payloads
/// of any size: max_bytes.
inline Shape check_operands(const Tensor& out, const Tensor& Xq, const Tensor& Xs, const Tensor& Wq, const Tensor& Ws,
                            bool shuffled, int64_t max_bytes) {
  check_payload(Xq, "Xq", max_bytes);
  check_payload(Wq, "Wq", max_bytes);
  const int64_t m = Xq.size(0), n = Wq.size(0), k = 2 * Xq.size(1);
  HF_CHECK(Wq.size(1) == Xq.size(1), "Xq and Wq must have the same K; got Xq ", Xq, " and Wq ", Wq);
  check_weights(out, Wq, Ws, m, k, shuffled);
  check_operand(Xs, "Xs", kE8m0, {m, k / kMxBlock});
  return {m, n, k};
}

/// The same with activations X bf16 [m, k], plain weights.
inline Shape check_bf16_operands(const Tensor& out, const Tensor& x, const Tensor& Wq, const Tensor& Ws, int64_t max_bytes) {
  check_payload(Wq, "Wq", max_bytes);
  const int64_t m = x.dim() == 2 ? x.size(0) : 0, n = Wq.size(0), k = 2 * Wq.size(1);
  check_operand(x, "x", HF_BF16, {m, k}, " = [M, K]", kAligned);
  check_weights(out, Wq, Ws, m, k, false);
  return {m, n, k};
}

}  // namespace hf::mxfp4
