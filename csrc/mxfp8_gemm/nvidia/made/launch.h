// What the launches of the row stream whose X is made, or whose results are sent, have in common: includes, checks, the launch.
#pragma once

#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../../guards.h"
#include "row_stream_kernel.h"

#if !defined(HF_TILES)
#error "build a variant: -DHF_TILES=1 to 3"
#endif

namespace hf::made_stream {

constexpr int kMostRows = 8;
using L = Layout<kMostRows, HF_TILES>;

inline void check_norm(int64_t m, int64_t k, double epsilon, double weight_offset) {
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  HF_CHECK(m * ceil_div(k / kChunk, L::kThreads) <= Norm::kMost, "M times the pieces of ", kChunk * L::kThreads,
           " columns of a row must be at most ", Norm::kMost, "; got M = ", m, " and K = ", k);
}

/// Calls `then` with a norm in as few chunks of a thread as hold M rows of K.
template <class Then>
void in_few_chunks(int64_t m, int64_t k, const Then& then) {
  if (m * ceil_div(k / kChunk, L::kThreads) == 1) return then(NormOf<1>());
  then(NormOf<2>());
}

/// Checks M, W and how it is spread, and launches. The bias is checked by the caller; `kept`: bytes that the kernel keeps besides.
template <class Source, class Place>
void launch_rows(dev::bf16* out, const uint8_t* x, const uint8_t* xs, int64_t m, const Tensor& Wq, const Tensor& Ws,
                 const OptionalTensor& bias, int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic, const Source& source,
                 const Place& place, int64_t kept, hipStream_t stream) {
  HF_CHECK_ARCH(Wq, "sm_90");
  mxfp8::check_payload(Wq, "Wq");
  const int64_t n = Wq.size(0), k = Wq.size(1);
  HF_CHECK(m >= 1 && m <= Source::kMostRows, "M must be between 1 and ", Source::kMostRows, "; got ", m);
  HF_CHECK(k >= kStep && k % kStep == 0 && k <= 1 << 20, "K must be a positive multiple of ", kStep, ", at most 2^20; got ", k);
  HF_CHECK(n >= 1 && n < INT64_C(1) << 31, "N must be between 1 and 2^31 - 1; got ", n);
  check_operand(Ws, "Ws", kE8m0, {n, k / kMxBlock}, mxfp8::kPerBlock, kAligned);
  HF_CHECK(tiles == HF_TILES, "this variant of the module has tiles = ", HF_TILES, "; got ", tiles);
  row_stream::check_spread(L::kWarps, sharers, blocks, n, "N");
  const int64_t x_at = (shared_bytes<kMostRows, HF_TILES>(ceil_div(n, blocks), k) + 127) / 128 * 128;
  const int64_t most = x_at + (Source::kMade ? SharedX::bytes(static_cast<int>(m), static_cast<int>(k)) : 0);
  row_stream::check_shared(most + kept, blocks);
  Problem problem{out, x, xs, Wq.data<uint8_t>(), Ws.data<uint8_t>(), bias.data<dev::bf16>(), static_cast<int>(m),
                  static_cast<int>(n), static_cast<int>(k), __builtin_ctzll(sharers), static_cast<int>(n / blocks),
                  static_cast<int>(n % blocks)};
  ask_ahead(problem, programmatic && Source::kAhead == 1);
  Launch at{static_cast<uint32_t>(blocks), L::kThreads, static_cast<uint32_t>(most), stream};
  at.programmatic = programmatic;
  launch(row_stream<kMostRows, HF_TILES, true, Source, Place>, at, problem, source, static_cast<int>(x_at), place);
}

}  // namespace hf::made_stream
