// MXFP4 GEMM for gfx950: out[M, N] = X[M, K] W[N, K]^T, both e2m1 with e8m0 block scales. mxfp4_kernel.h has the kernel.
// A variant serves one tile of 16 HF_M_SUB rows by 16 HF_N_SUB columns per wave.
#include "hipforge/amd/hip.h"
#include "hipforge/host/addresses.h"
#include "hipforge/module.h"
#include "mxfp4_kernel.h"

#if !defined(HF_M_SUB) || !defined(HF_N_SUB)
#error "build a variant: -DHF_M_SUB=1, 2 or 4 and -DHF_N_SUB=1, 2 or 4"
#endif

using hf::Tensor;
using namespace hf::mxfp4;

namespace {

constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

void check_place(const Tensor& tensor, const char* name, const Tensor& like) {
  HF_CHECK(tensor.is_contiguous(), name, " must be contiguous (row-major); got ", tensor,
           " with other strides: pass ", name, ".contiguous()");
  HF_CHECK(tensor.on_gpu() == like.on_gpu() && tensor.device_index() == like.device_index(), name,
           " must be on the device of Wq");
}

void check_payload(const Tensor& tensor, const char* name, const Tensor& like) {
  HF_CHECK(tensor.dtype() == HF_U8 || tensor.dtype() == HF_E2M1FN_X2, name,
           " holds two e2m1 codes per byte: uint8 or float4_e2m1fn_x2; got ", tensor.dtype());
  HF_CHECK(tensor.dim() == 2, name, " must have 2 dimensions, [rows, K/2]; got ", tensor);
  check_place(tensor, name, like);
  HF_CHECK(tensor.bytes() <= kMaxBytes, name, " has ", tensor.bytes(),
           " bytes; the kernel takes at most 2^31 - 1 (2 GB), because a raw-buffer offset is a signed 32-bit number");
  HF_CHECK(hf::aligned_to(tensor.data(), kLaneBytes), name, " must start at a multiple of 16 bytes; pass a copy");
}

void check_scales(const Tensor& tensor, const char* name, int64_t rows, int64_t columns, const Tensor& like) {
  HF_CHECK(tensor.dtype() == HF_U8 || tensor.dtype() == HF_E8M0FNU, name,
           " holds e8m0 bytes: uint8 or float8_e8m0fnu; got ", tensor.dtype());
  HF_CHECK(tensor.is_shape(rows, columns), name, " must be [", rows, ", ", columns, "]; got ", tensor);
  check_place(tensor, name, like);
}

}  // namespace

/// out bf16 [M, N]; Xq, Wq uint8 [M, K/2], [N, K/2], the even element in the low nibble; Xs [M, K/32]; Ws [N, K/32], or with
/// `shuffled` the 32 x 8 shuffle of [round_up(N, 256), round_up(K/32, 8)] (then Wq is in 16 x 16-byte tiles); k_splits 1, 2,
/// 4 or 8, at most ceil(K/128) and 64 / (m_sub n_sub).
void mxfp4_gemm_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, bool shuffled, int64_t m_sub, int64_t n_sub,
                    int64_t k_splits, hipStream_t stream) {
  check_payload(Xq, "Xq", Wq);
  check_payload(Wq, "Wq", Wq);
  const int64_t m = Xq.size(0), n = Wq.size(0), k = 2 * Xq.size(1);
  HF_CHECK(Wq.size(1) == Xq.size(1), "Xq and Wq must have the same K; got Xq ", Xq, " and Wq ", Wq);
  HF_CHECK(k > 0 && k % hf::kMxBlock == 0, "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ", k);
  HF_CHECK(m >= 1 && n >= 1, "M and N must be at least 1; got ", m, " and ", n);
  check_scales(Xs, "Xs", m, k / hf::kMxBlock, Wq);
  if (shuffled) {
    HF_CHECK(n % 16 == 0 && k % 64 == 0, "shuffled weights need N % 16 == 0 and K % 64 == 0; got N = ", n, ", K = ", k);
    check_scales(Ws, "Ws (shuffled)", round_up(n, 256), round_up(k / hf::kMxBlock, kScaleColumns), Wq);
  } else {
    check_scales(Ws, "Ws", n, k / hf::kMxBlock, Wq);
  }
  HF_CHECK(out.dtype() == HF_BF16 && out.is_shape(m, n), "out must be bfloat16 [", m, ", ", n, "]; got ", out);
  check_place(out, "out", Wq);
  hf::check_apart({out, "out"}, {{Xq, "Xq"}, {Xs, "Xs"}, {Wq, "Wq"}, {Ws, "Ws"}});
  HF_CHECK(m_sub == HF_M_SUB && n_sub == HF_N_SUB, "this variant has m_sub = ", HF_M_SUB, ", n_sub = ", HF_N_SUB,
           "; got ", m_sub, ", ", n_sub);
  hf::check_k_splits(k_splits, hf::ceil_div(k, kStep), k);
  const int64_t lds = k_splits > 1 ? HF_M_SUB * HF_N_SUB * k_splits * kSumBytes : 0;
  HF_CHECK(lds <= kMaxLds, "m_sub * n_sub * k_splits must be at most ", kMaxLds / kSumBytes, "; got ", m_sub, " * ", n_sub,
           " * ", k_splits);
  HF_CHECK_ARCH(Wq, "gfx950");

  const uint32_t options = pack_options(__builtin_ctzll(static_cast<unsigned long long>(k_splits)), shuffled,
                                        n % hf::dev::kColumnsPerLane == 0 && hf::aligned_to(out.data(), 8));
  const dim3 grid(hf::ceil_div(n, kTile * HF_N_SUB), hf::ceil_div(m, kTile * HF_M_SUB));
  mxfp4_mfma<HF_M_SUB, HF_N_SUB>
      <<<grid, static_cast<uint32_t>(k_splits) * hf::dev::kWaveSize, static_cast<uint32_t>(lds), stream>>>(
          Wq.data<uint8_t>(), Ws.data<uint8_t>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(), static_cast<uint32_t>(m),
          static_cast<uint32_t>(n), static_cast<uint32_t>(k), options, out.data<hf::dev::bf16>());
  HF_HIP(hipGetLastError());
}
HF_EXPORT(mxfp4_gemm_out);
