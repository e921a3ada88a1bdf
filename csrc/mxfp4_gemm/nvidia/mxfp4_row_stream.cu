// MXFP4 weights times few rows of X on sm_90: out[M, N] = X[M, K] W[N, K]^T, X in bf16 or MXFP4, W streamed once by all
// multiprocessors. e2m1_step.h has the products, row_stream_kernel.h the loop. A variant takes up to HF_ROWS rows of X at once
// and HF_TILES x 8 rows of W in a pass; HF_BITS are those of X's elements.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "e2m1_step.h"

#if !defined(HF_BITS) || !defined(HF_ROWS) || !defined(HF_TILES)
#error "build a variant: -DHF_BITS=4 or 16 -DHF_ROWS=8 or 16 -DHF_TILES=1 to 4"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::row_stream;

static_assert(HF_BITS == 4 || HF_BITS == 16);
static_assert(HF_ROWS == 8 || HF_ROWS == 16);
static_assert(HF_TILES >= 1 && HF_TILES <= 4);
constexpr int64_t kMaxRows = int64_t{65535} * HF_ROWS, kMaxN = (int64_t{1} << 31) - 1;
using X = std::conditional_t<HF_BITS == 4, E2m1Part, Bf16Part>;

/// out bf16 [M, N]; x bf16 [M, K] without Xs, or uint8 [M, K/2] with Xs [M, K/32]; Wq uint8 [N, K/2], the even element in the
/// low nibble; Ws [N, K/32]; bits, rows and tiles those of the variant; sharers: warps that share K, a power of two up to 16 (8
/// with 4 tiles); blocks: how many the rows of W are spread over; programmatic: the launch may start before its predecessor has
/// ended.
void mxfp4_row_stream_out(Tensor out, Tensor x, OptionalTensor Xs, Tensor Wq, Tensor Ws, int64_t bits, int64_t rows,
                          int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  using L = Layout<HF_ROWS, HF_TILES>;
  HF_CHECK(bits == HF_BITS && rows == HF_ROWS && tiles == HF_TILES, "this variant of the module has bits = ", HF_BITS,
           ", rows = ", HF_ROWS, " and tiles = ", HF_TILES, "; got ", bits, ", ", rows, " and ", tiles);
  HF_CHECK(Xs.has_value() == X::kScaled, "activations of 4 bits have scales, those of 16 have none; got bits = ", bits,
           Xs ? " and Xs" : " without Xs");
  const auto [m, n, k] = HF_BITS == 4 ? hf::mxfp4::check_operands(out, x, *Xs, Wq, Ws, false, kMaxN << 24)
                                      : hf::mxfp4::check_bf16_operands(out, x, Wq, Ws, kMaxN << 24);
  HF_CHECK_ARCH(Wq, "sm_90");
  HF_CHECK(m <= kMaxRows, "M must be at most ", kMaxRows, "; got ", m);
  HF_CHECK(k <= kMaxK, "K must be at most ", kMaxK, "; got ", k);
  HF_CHECK(n <= kMaxN, "N must be at most ", kMaxN, "; got ", n);
  check_spread(L::kWarps, sharers, blocks, n, "N");
  hf::check_aligned(Ws, "Ws");
  const int64_t most = shared_bytes<HF_ROWS, HF_TILES>(hf::ceil_div(n, blocks), k);
  check_shared(most, blocks);
  const bool whole_steps = k % kStep == 0;
  HF_CHECK(whole_steps || HF_TILES != 3, "tiles = 3 needs K % 128 == 0 (scales are read as words); got K = ", k);
  if (whole_steps && Xs) hf::check_aligned(*Xs, "Xs", 4);
  const Problem problem{out.data<hf::dev::bf16>(), static_cast<const uint8_t*>(x.data()), Xs.data<uint8_t>(), Wq.data<uint8_t>(), Ws.data<uint8_t>(),
                        nullptr, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                        static_cast<int>(k * HF_BITS / 8), static_cast<int>(k / 2), __builtin_ctzll(sharers),
                        static_cast<int>(n / blocks), static_cast<int>(n % blocks)};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks), static_cast<uint32_t>(hf::ceil_div(m, HF_ROWS))), L::kThreads,
                static_cast<uint32_t>(most), stream};
  at.programmatic = programmatic;
#if HF_TILES != 3
  if (!whole_steps) return hf::launch(row_stream<E2m1Step<X, HF_ROWS, HF_TILES, false>>, at, problem);
#endif
  hf::launch(row_stream<E2m1Step<X, HF_ROWS, HF_TILES, true>>, at, problem);
}
HF_EXPORT(mxfp4_row_stream_out);
