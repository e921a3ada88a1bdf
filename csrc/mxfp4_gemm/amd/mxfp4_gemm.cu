// MXFP4 GEMM for gfx950: out[M, N] = X[M, K] W[N, K]^T, both e2m1 with e8m0 block scales. mxfp4_kernel.h has the kernel.
// A variant serves one tile of 16 HF_M_SUB rows by 16 HF_N_SUB columns per wave.
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "mxfp4_kernel.h"

#if !defined(HF_M_SUB) || !defined(HF_N_SUB)
#error "build a variant: -DHF_M_SUB=1, 2 or 4 and -DHF_N_SUB=1, 2 or 4"
#endif

using hf::Tensor;
using namespace hf::mxfp4;

/// out bf16 [M, N]; Xq, Wq uint8 [M, K/2], [N, K/2], the even element in the low nibble; Xs [M, K/32]; Ws [N, K/32], or with
/// `shuffled` the 32 x 8 shuffle of [round_up(N, 256), round_up(K/32, 8)] (then Wq is in 16 x 16-byte tiles); k_splits 1, 2,
/// 4 or 8, at most ceil(K/128) and 64 / (m_sub n_sub).
void mxfp4_gemm_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, bool shuffled, int64_t m_sub, int64_t n_sub,
                    int64_t k_splits, hipStream_t stream) {
  const auto [m, n, k] = check_operands(out, Xq, Xs, Wq, Ws, shuffled, kMaxBytes);
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
  hf::launch(mxfp4_mfma<HF_M_SUB, HF_N_SUB>,
             {grid, static_cast<uint32_t>(k_splits) * hf::dev::kWaveSize, static_cast<uint32_t>(lds), stream},
             Wq.data<uint8_t>(), Ws.data<uint8_t>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(), static_cast<uint32_t>(m),
             static_cast<uint32_t>(n), static_cast<uint32_t>(k), options, out.data<hf::dev::bf16>());
}
HF_EXPORT(mxfp4_gemm_out);
