// MX-FP8 GEMM for few rows on sm_90: out[M, N] = X[M, K] W[N, K]^T (+ bias), W streamed once by all multiprocessors.
// row_stream_kernel.h has the loop, e4m3_step.h the products. A variant takes up to HF_ROWS rows of X at once and HF_TILES x 8 rows of W in a pass.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "e4m3_step.h"

#if !defined(HF_ROWS) || !defined(HF_TILES)
#error "build a variant: -DHF_ROWS=8, 16 or 32 -DHF_TILES=1 to 4"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::row_stream;

static_assert(HF_ROWS == 8 || HF_ROWS == 16 || HF_ROWS == 32);
static_assert(HF_TILES >= 1 && HF_TILES <= 4);
constexpr int64_t kMaxRows = int64_t{65535} * HF_ROWS, kMaxK = int64_t{1} << 24, kMaxN = (int64_t{1} << 31) - 1;

/// out bf16 [M, N]; Xq, Wq e4m3 (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; rows and tiles those of the variant; sharers: warps that share K, a power of two up to 16 (8 with 4 tiles or 32 rows);
/// blocks: how many the rows of W are spread over; programmatic: the launch may start before its predecessor has ended.
void mxfp8_row_stream_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, int64_t rows,
                          int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  using L = Layout<HF_ROWS, HF_TILES>;
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxN << 24);
  HF_CHECK(shape.k <= kMaxK, "K must be at most ", kMaxK, "; got ", shape.k);
  HF_CHECK(shape.n <= kMaxN, "N must be at most ", kMaxN, "; got ", shape.n);
  HF_CHECK(rows == HF_ROWS && tiles == HF_TILES, "this variant of the module has rows = ", HF_ROWS, " and tiles = ", HF_TILES,
           "; got ", rows, " and ", tiles);
  check_spread(L::kWarps, sharers, blocks, shape.n, "N");
  hf::mxfp8::check_bias(bias, shape.n, out);
  hf::check_aligned(Ws, "Ws");
  const int64_t most = shared_bytes<HF_ROWS, HF_TILES>(hf::ceil_div(shape.n, blocks), shape.k);
  check_shared(most, blocks);
  HF_CHECK(shape.k % kStep == 0 || HF_TILES != 3, "tiles = 3 needs K % 128 == 0 (scales are read as words); got K = ", shape.k);
  if (shape.k % kStep == 0) hf::check_aligned(Xs, "Xs", 4);
  const Problem problem{out.data<hf::dev::bf16>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(), Wq.data<uint8_t>(), Ws.data<uint8_t>(),
                        bias.data<hf::dev::bf16>(), static_cast<int>(shape.m),
                        static_cast<int>(shape.n), static_cast<int>(shape.k), static_cast<int>(shape.k),
                        static_cast<int>(shape.k), __builtin_ctzll(sharers),
                        static_cast<int>(shape.n / blocks), static_cast<int>(shape.n % blocks)};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks), static_cast<uint32_t>(hf::ceil_div(shape.m, HF_ROWS))), L::kThreads,
                static_cast<uint32_t>(most), stream};
  at.programmatic = programmatic;
  const auto with = [&](auto aligned) {
    constexpr bool kAligned = decltype(aligned)::value;
#if HF_ROWS == 8
    if (shape.m <= kFewRows) return hf::launch(row_stream<E4m3Step<HF_ROWS, HF_TILES, kAligned, kFewRows>>, at, problem);
#endif
    hf::launch(row_stream<E4m3Step<HF_ROWS, HF_TILES, kAligned>>, at, problem);
  };
#if HF_TILES != 3
  if (shape.k % kStep != 0) return with(std::false_type{});
#endif
  with(std::true_type{});
}
HF_EXPORT(mxfp8_row_stream_out);
