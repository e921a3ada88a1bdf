// MXFP4 GEMM for gfx950 that quantises X in its launch: out[M, N] = mxfp4(X[M, K]) W[N, K]^T. mxfp4_made_kernel.h has the kernel.
// A variant serves one dtype of X and a wave's tile of 16 HF_M_SUB rows by 16 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "mxfp4_made_kernel.h"

#if !defined(HF_INPUT) || !defined(HF_M_SUB)
#error "build a variant: -DHF_INPUT=bf16 or f16 and -DHF_M_SUB=1, 2 or 4"
#endif

using hf::Tensor;
using namespace hf::mxfp4;
using Input = HF_ELEMENT(HF_INPUT);

/// out bf16 [M, N]; x bf16 or f16 [M, K]; Wq uint8 [N, K/2], the even element in the low nibble; Ws [N, K/32], or with
/// `shuffled` the 32 x 8 shuffle of [round_up(N, 256), round_up(K/32, 8)] (then Wq is in 16 x 16-byte tiles). A work-group has
/// `columns` waves beside each other, each with 16 columns, times k_splits (1, 2, 4 or 8, at most ceil(K/128)) that share
/// K: 8 waves at most. Its rows of X and its sums fit into 64 KiB of LDS.
void mxfp4_made_out(Tensor out, Tensor x, Tensor Wq, Tensor Ws, bool shuffled, int64_t m_sub, int64_t columns,
                    int64_t k_splits, hipStream_t stream) {
  check_payload(Wq, "Wq", kMaxBytes);
  const int64_t m = x.dim() == 2 ? x.size(0) : 0, n = Wq.size(0), k = 2 * Wq.size(1);
  hf::check_operand(x, "x", hf::dev::dtype_of<Input>, {m, k}, " = [M, K]", hf::kAligned);
  HF_CHECK(x.bytes() <= kMaxBytes, "x must have at most 2^31 - 1 bytes, because a raw-buffer offset is a signed 32-bit number; got ",
           x.bytes());
  check_weights(out, Wq, Ws, m, k, shuffled);
  HF_CHECK(m_sub == HF_M_SUB, "this variant has m_sub = ", HF_M_SUB, "; got ", m_sub);
  const int64_t steps = hf::ceil_div(k, kStep);
  hf::check_k_splits(k_splits, steps, k);
  HF_CHECK(columns >= 1 && columns * k_splits <= kMadeWaves, "columns * k_splits must be 1 to ", kMadeWaves, "; got ", columns,
           " * ", k_splits);
  const int64_t made = steps * HF_M_SUB * kMadeBytes;
  const int64_t sums = k_splits > 1 ? HF_M_SUB * columns * k_splits * kSumBytes : 0;
  static_assert(HF_M_SUB * kMadeWaves * kSumBytes <= kMaxLds);
  HF_CHECK(made <= kMaxLds, "m_sub = ", m_sub, " rows of 16 of X with K = ", k, " need ", made, " bytes of LDS; there are ",
           kMaxLds);
  HF_CHECK_ARCH(Wq, "gfx950");

  const uint32_t options = pack_made_options(__builtin_ctzll(static_cast<unsigned long long>(k_splits)),
                                             static_cast<uint32_t>(columns), shuffled,
                                             n % hf::dev::kColumnsPerLane == 0 && hf::aligned_to(out.data(), 8));
  const dim3 grid(hf::ceil_div(n, kTile * columns), hf::ceil_div(m, kTile * HF_M_SUB));
  const hf::Launch at{grid, static_cast<uint32_t>(columns * k_splits) * hf::dev::kWaveSize,
                      static_cast<uint32_t>(made > sums ? made : sums), stream};
  const bool wide = !shuffled && k % kStep == 0 && hf::aligned_to(Ws.data(), sizeof(uint32_t));
  hf::launch(wide ? mxfp4_made<Input, HF_M_SUB, true> : mxfp4_made<Input, HF_M_SUB, false>, at,
             x.data<Input>(), Wq.data<uint8_t>(), Ws.data<uint8_t>(), static_cast<uint32_t>(m), static_cast<uint32_t>(n),
             static_cast<uint32_t>(k), options, out.data<hf::dev::bf16>());
}
HF_EXPORT(mxfp4_made_out);
