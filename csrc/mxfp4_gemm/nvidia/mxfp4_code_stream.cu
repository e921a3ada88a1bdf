// MXFP4 weights times few rows of X on sm_90: out[M, N] = X[M, K] W[N, K]^T, X in bf16 or MXFP4, both made f16, W streamed once by
// all multiprocessors (code_stream_kernel.h). A variant takes up to HF_ROWS rows of X at once and HF_TILES x 8 rows of W in a pass;
// HF_BITS are those of X's elements.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../../mxfp8_gemm/nvidia/row_stream_kernel.h"
#include "../guards.h"
#include "code_stream_kernel.h"

#if !defined(HF_BITS) || !defined(HF_ROWS) || !defined(HF_TILES)
#error "build a variant: -DHF_BITS=4 or 16 -DHF_ROWS=8 or 16 -DHF_TILES=2 to 4"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::code_stream;

static_assert(HF_BITS == 4 || HF_BITS == 16);
static_assert(HF_ROWS == 8 || HF_ROWS == 16);
static_assert(HF_TILES >= 2 && HF_TILES <= 4);
constexpr int64_t kMaxRows = int64_t{65535} * HF_ROWS, kMaxK = int64_t{1} << 21, kMaxN = (int64_t{1} << 31) - 1;

/// out bf16 [M, N]; x bf16 [M, K] without Xs, or uint8 [M, K/2] with Xs [M, K/32]; Wq uint8 [N, K/2], the even element in the low
/// nibble; Ws [N, K/32]; bits, rows and tiles those of the variant; sharers: warps that share K, a power of two up to 16; splits:
/// blocks of a cluster that split K; blocks: how many clusters the rows of W are spread over; programmatic: the launch may start
/// before its predecessor has ended.
void mxfp4_code_stream_out(Tensor out, Tensor x, OptionalTensor Xs, Tensor Wq, Tensor Ws, int64_t bits, int64_t rows,
                           int64_t tiles, int64_t sharers, int64_t splits, int64_t blocks, bool programmatic, hipStream_t stream) {
  HF_CHECK(bits == HF_BITS && rows == HF_ROWS && tiles == HF_TILES, "this variant of the module has bits = ", HF_BITS,
           ", rows = ", HF_ROWS, " and tiles = ", HF_TILES, "; got ", bits, ", ", rows, " and ", tiles);
  HF_CHECK(Xs.has_value() == (HF_BITS == 4), "activations of 4 bits have scales, those of 16 have none; got bits = ", bits,
           Xs ? " and Xs" : " without Xs");
  const auto [m, n, k] = HF_BITS == 4 ? hf::mxfp4::check_operands(out, x, *Xs, Wq, Ws, false, kMaxN << 24)
                                      : hf::mxfp4::check_bf16_operands(out, x, Wq, Ws, kMaxN << 24);
  HF_CHECK_ARCH(Wq, "sm_90");
  HF_CHECK(m <= kMaxRows, "M must be at most ", kMaxRows, "; got ", m);
  HF_CHECK(k <= kMaxK, "K must be at most ", kMaxK, "; got ", k);
  HF_CHECK(n <= kMaxN, "N must be at most ", kMaxN, "; got ", n);
  hf::row_stream::check_spread(kWarps, sharers, blocks, n, "N");
  HF_CHECK((splits == 1 || splits == 2 || splits == 4 || splits == 8) && splits <= steps_of(k),
           "splits must be 1, 2, 4 or 8, at most one for each ", kStep, " k; got ", splits, " with K = ", k);
  hf::check_aligned(Ws, "Ws");
  const int64_t most = shared_bytes<HF_ROWS, HF_TILES>(hf::ceil_div(n, blocks), k, splits, sharers);
  HF_CHECK(most <= hf::kMostShared, "a block keeps X and the scales of its rows of W in shared memory, ", most,
           " bytes in all with blocks = ", blocks, " and splits = ", splits, "; sm_90 has ", hf::kMostShared,
           ": give more blocks, more splits or fewer rows of X");
  const Problem problem{out.data<hf::dev::bf16>(), static_cast<const uint8_t*>(x.data()), Xs.data<uint8_t>(),
                        Wq.data<uint8_t>(), Ws.data<uint8_t>(), static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                        static_cast<int>(k * HF_BITS / 8), static_cast<int>(k / 2), __builtin_ctzll(sharers),
                        static_cast<int>(n / blocks), static_cast<int>(n % blocks)};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks * splits), static_cast<uint32_t>(hf::ceil_div(m, HF_ROWS))), kThreads,
                static_cast<uint32_t>(most), stream, static_cast<uint32_t>(splits)};
  at.programmatic = programmatic;
  hf::launch(code_stream<HF_BITS, HF_ROWS, HF_TILES>, at, problem);
}
HF_EXPORT(mxfp4_code_stream_out);
