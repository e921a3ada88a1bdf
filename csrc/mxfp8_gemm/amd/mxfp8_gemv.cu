// Small-M MX-FP8 GEMV for gfx950: out[M, N] = X[M, K] W[N, K]^T for M of 1 to 16. gemv_kernel.h has the kernel.
//
// A variant serves the values of M that fit in HF_ROWS (1, 2, 4, 8 or 16) accumulated rows, with one kernel per width
// of a wave's sub-tile; surplus rows read as 0 and are not stored.
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/module.h"
#include "gemv_kernel.h"
#include "../guards.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=1, 2, 4, 8 or 16"
#endif
static_assert(HF_ROWS == 1 || HF_ROWS == 2 || HF_ROWS == 4 || HF_ROWS == 8 || HF_ROWS == 16);

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::gemv;

template <int kCols>
static void launch(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                   const OptionalTensor& bias, const hf::mxfp8::Shape& shape, int64_t block_n,
                   hipStream_t stream) {
  const dim3 grid(static_cast<uint32_t>((shape.n + block_n - 1) / block_n));
  hf::launch(smallm_mxfp8_gemv<HF_ROWS, kCols>, {grid, kThreads, 0, stream}, out.data<hf::dev::bf16>(), xq.data<uint8_t>(),
             xs.data<uint8_t>(), wq.data<uint8_t>(), ws.data<uint8_t>(), static_cast<uint32_t>(shape.m),
             static_cast<uint32_t>(shape.n), static_cast<uint32_t>(shape.k), static_cast<uint32_t>(block_n / kWaves),
             bias.data<hf::dev::bf16>());
}

/// out bf16 [M, N]; Xq, Wq e4m3fn (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32];
/// block_n columns per work-group: 4, 8, 16, 32 or 64; bias bf16 [N] or None, added in float32.
void smallm_mxfp8_gemv_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, int64_t block_n, OptionalTensor bias,
                           hipStream_t stream) {
  const auto shape = hf::mxfp8::check_operands(out, Xq, Xs, Wq, Ws, kMaxRows);
  HF_CHECK(block_n == 4 || block_n == 8 || block_n == 16 || block_n == 32 || block_n == 64,
           "block_n must be 4, 8, 16, 32 or 64 (columns per work-group); got ", block_n);
  HF_CHECK(shape.m <= HF_ROWS, "this variant of the module accumulates ", HF_ROWS, " rows; got M = ", shape.m);
  hf::mxfp8::check_bias(bias, shape.n, out);
  const int64_t columns = block_n / kWaves;
  if (columns == 1) return launch<1>(out, Xq, Xs, Wq, Ws, bias, shape, block_n, stream);
  if (columns == 2 || most_columns(HF_ROWS) == 2) return launch<2>(out, Xq, Xs, Wq, Ws, bias, shape, block_n, stream);
  if constexpr (most_columns(HF_ROWS) == 4) launch<4>(out, Xq, Xs, Wq, Ws, bias, shape, block_n, stream);
}
HF_EXPORT(smallm_mxfp8_gemv_out);
