// Skinny fp8 GEMM for sm_90: out (+)= scale a b with few rows of a, b's columns streamed once by all multiprocessors.
// e4m3_plain_step.h has the products, mxfp8_gemm's row_stream_kernel.h the loop. A variant takes up to HF_ROWS rows of a at once
// and HF_TILES x 8 columns of b in a pass.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "e4m3_plain_step.h"

#if !defined(HF_ROWS) || !defined(HF_TILES)
#error "build a variant: -DHF_ROWS=8, 16 or 32 -DHF_TILES=1 to 4"
#endif

using hf::Tensor;
using namespace hf::row_stream;

static_assert(HF_ROWS == 8 || HF_ROWS == 16 || HF_ROWS == 32);
static_assert(HF_TILES >= 1 && HF_TILES <= 4);
constexpr int64_t kMaxRows = int64_t{65535} * HF_ROWS, kMaxPitch = int64_t{1} << 30;

/// out fp16 [m, n], added to with `accumulate`; a e4m3 [m, k]; b e4m3 [k, n] with stride(0) == 1; scale fp32 [1]; rows and tiles
/// those of the variant; sharers: warps that share k, a power of two up to 16 (8 with 4 tiles or 32 rows); blocks: how many the
/// columns of b are spread over; programmatic: the launch may start before its predecessor has ended.
void skinny_row_stream_out(Tensor out, Tensor a, Tensor b, Tensor scale, bool accumulate, int64_t rows, int64_t tiles,
                           int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  using L = Layout<HF_ROWS, HF_TILES>;
  const auto of = hf::skinny::check_operands(out, a, b, scale);
  HF_CHECK_ARCH(b, "sm_90");
  HF_CHECK(of.m <= kMaxRows, "m must be at most ", kMaxRows, "; got ", of.m);
  HF_CHECK(of.pitch <= kMaxPitch, "a column of b must take at most 2^30 bytes; got a pitch of ", of.pitch);
  HF_CHECK(rows == HF_ROWS && tiles == HF_TILES, "this variant of the module has rows = ", HF_ROWS, " and tiles = ", HF_TILES,
           "; got ", rows, " and ", tiles);
  check_spread(L::kWarps, sharers, blocks, of.n, "n");
  const Problem problem{out.data(), a.data<uint8_t>(), nullptr, b.data<uint8_t>(), nullptr, scale.data<float>(),
                        static_cast<int>(of.m), static_cast<int>(of.n), static_cast<int>(of.k), static_cast<int>(of.k),
                        static_cast<int>(of.pitch), __builtin_ctzll(sharers), static_cast<int>(of.n / blocks),
                        static_cast<int>(of.n % blocks)};
  hf::Launch at{dim3(static_cast<uint32_t>(blocks), static_cast<uint32_t>(hf::ceil_div(of.m, HF_ROWS))), L::kThreads,
                static_cast<uint32_t>(shared_bytes<HF_ROWS, HF_TILES>(0, of.k)), stream};
  at.programmatic = programmatic;
  const auto launch = [&](auto adds, auto whole) {
    hf::launch(row_stream<E4m3PlainStep<HF_ROWS, HF_TILES, decltype(adds)::value, decltype(whole)::value>>, at, problem);
  };
  const bool whole = of.k % kStep == 0;
  if (accumulate) whole ? launch(std::true_type{}, std::true_type{}) : launch(std::true_type{}, std::false_type{});
  else whole ? launch(std::false_type{}, std::true_type{}) : launch(std::false_type{}, std::false_type{});
}
HF_EXPORT(skinny_row_stream_out);
