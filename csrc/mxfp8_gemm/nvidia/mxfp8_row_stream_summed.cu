// MX-FP8 GEMMs for a row or two on sm_90 around a sum over GPUs: products that send their elements to all ranks, and a product of the
// norm of what comes. made/row_peers.h has both ends, made/row_stream_kernel.h the kernel.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "made/row_peers.h"
#include "made/row_stream_kernel.h"

#if !defined(HF_TILES)
#error "build a variant: -DHF_TILES=1 to 3"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::made_stream;

namespace {

constexpr int kMostRows = 8;
using L = Layout<kMostRows, HF_TILES>;

/// The group of a call whose rows have `columns` elements.
Group group_of(const Tensor& buffer, const Tensor& addresses, int64_t rank, int64_t rows, int64_t columns) {
  hf::check_operand(addresses, "addresses", HF_I64, {"ranks"}, ", of the ranks' buffers");
  const int64_t ranks = addresses.size(0);
  HF_CHECK(ranks >= 1 && ranks <= kMostRanks, "ranks must be 1 to ", kMostRanks, "; got ", ranks);
  HF_CHECK(rank >= 0 && rank < ranks, "rank must be 0 to ", ranks - 1, "; got ", rank);
  const int64_t words = kHeaderWords + kSlots * ranks * columns;
  hf::check_operand(buffer, "buffer", HF_I32, {"buffers", rows, words},
                    ", of hipforge.nn.Peers for exactly these rows and columns", hf::kAligned);
  HF_CHECK(buffer.size(0) == 1 || buffer.size(0) == ranks, "buffer must be this rank's or all ", ranks, " ranks'; got ", buffer);
  HF_CHECK(columns % kChunk == 0, "rows that are added up must have a multiple of ", kChunk, " columns; got ", columns);
  uint8_t* const own = static_cast<uint8_t*>(buffer.data()) + (buffer.size(0) == 1 ? 0 : rank) * rows * words * 4;
  return {own, reinterpret_cast<const uint64_t*>(addresses.data<const int64_t>()), words * 4, static_cast<uint32_t>(rank),
          static_cast<uint32_t>(ranks)};
}

/// Checks what all launches share, over m rows of X, and launches.
template <class Source, class Place>
void run(hf::dev::bf16* out, const uint8_t* x, const uint8_t* xs, int64_t m, Tensor Wq, Tensor Ws, OptionalTensor bias,
         const Tensor& like, int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic, const Source& source,
         const Place& place, hipStream_t stream) {
  HF_CHECK_ARCH(Wq, "sm_90");
  hf::mxfp8::check_payload(Wq, "Wq");
  const int64_t n = Wq.size(0), k = Wq.size(1);
  HF_CHECK(m >= 1 && m <= kMostRows, "M must be between 1 and ", kMostRows, "; got ", m);
  HF_CHECK(k >= kStep && k % kStep == 0 && k <= 1 << 20, "K must be a positive multiple of ", kStep, ", at most 2^20; got ", k);
  HF_CHECK(n >= 1 && n < INT64_C(1) << 31, "N must be between 1 and 2^31 - 1; got ", n);
  hf::check_operand(Ws, "Ws", hf::kE8m0, {n, k / hf::kMxBlock}, hf::mxfp8::kPerBlock, hf::kAligned);
  if (bias) {
    hf::check_operand(*bias, "bias", HF_BF16, {n});
    hf::check_not_in_place({like, "what is written"}, {{*bias, "bias"}});
  }
  HF_CHECK(tiles == HF_TILES, "this variant of the module has tiles = ", HF_TILES, "; got ", tiles);
  hf::row_stream::check_spread(L::kWarps, sharers, blocks, n, "N");
  const int64_t x_at = (shared_bytes<kMostRows, HF_TILES>(hf::ceil_div(n, blocks), k) + 127) / 128 * 128;
  const int64_t most = x_at + (Source::kMade ? SharedX::bytes(static_cast<int>(m), static_cast<int>(k)) : 0);
  hf::row_stream::check_shared(most + 128, blocks);  // and the addresses of buffers
  const Problem problem{out, x, xs, Wq.data<uint8_t>(), Ws.data<uint8_t>(), bias.data<hf::dev::bf16>(), static_cast<int>(m),
                        static_cast<int>(n), static_cast<int>(k), __builtin_ctzll(sharers), static_cast<int>(n / blocks),
                        static_cast<int>(n % blocks)};
  hf::Launch at{static_cast<uint32_t>(blocks), L::kThreads, static_cast<uint32_t>(most), stream};
  at.programmatic = programmatic;
  hf::launch(row_stream<kMostRows, HF_TILES, true, Source, Place>, at, problem, source, static_cast<int>(x_at), place);
}

}  // namespace

/// Sends X W^T (+ bias) bf16 [M, N] to all ranks; Xq, Wq e4m3 [M, K], [N, K]; Xs, Ws e8m0 [M, K/32], [N, K/32].
void mxfp8_row_stream_send_out(Tensor buffer, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, Tensor addresses,
                               int64_t rank, int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic,
                               hipStream_t stream) {
  hf::mxfp8::check_payload(Xq, "Xq");
  const int64_t m = Xq.size(0), k = Wq.size(1);
  HF_CHECK(Xq.size(1) == k, "Xq must have K = ", k, " columns; got ", Xq);
  hf::check_operand(Xs, "Xs", hf::kE8m0, {m, k / hf::kMxBlock}, hf::mxfp8::kPerBlock, {4});
  const SentRows place{group_of(buffer, addresses, rank, m, Wq.size(0))};
  run(nullptr, Xq.data<uint8_t>(), Xs.data<uint8_t>(), m, Wq, Ws, bias, buffer, tiles, sharers, blocks, programmatic, Codes{}, place,
      stream);
}
HF_EXPORT(mxfp8_row_stream_send_out);

/// Sends swiglu(gate_up) W^T (+ bias) bf16 [M, N] to all ranks; gate_up bf16 [M, 2 K], gate in its first K columns.
void mxfp8_row_stream_swiglu_send_out(Tensor buffer, Tensor gate_up, Tensor Wq, Tensor Ws, OptionalTensor bias, Tensor addresses,
                                      double alpha, double beta, double limit, int64_t rank, int64_t tiles, int64_t sharers,
                                      int64_t blocks, bool programmatic, hipStream_t stream) {
  hf::check_operand(gate_up, "gate_up", HF_BF16, {"M", "2 K"}, "", hf::kAligned);
  const int64_t m = gate_up.size(0), k = Wq.size(1);
  HF_CHECK(gate_up.size(1) == 2 * k, "gate_up must have 2 K = ", 2 * k, " columns; got ", gate_up);
  const Swiglu source{gate_up.data<const hf::dev::bf16>(), hf::checked_activation(alpha, beta, limit, false)};
  const SentRows place{group_of(buffer, addresses, rank, m, Wq.size(0))};
  run(nullptr, nullptr, nullptr, m, Wq, Ws, bias, buffer, tiles, sharers, blocks, programmatic, source, place, stream);
}
HF_EXPORT(mxfp8_row_stream_swiglu_send_out);

/// out bf16 [M, N] = norm(residual + sum) W^T (+ bias), the sum that of what all ranks have sent; residual and sum_out, which gets
/// residual + sum, bf16 [M, K]; norm_weight bf16 [K].
void mxfp8_row_stream_summed_norm_out(Tensor out, Tensor sum_out, Tensor buffer, Tensor residual, Tensor norm_weight, Tensor Wq,
                                      Tensor Ws, OptionalTensor bias, Tensor addresses, double epsilon, double weight_offset,
                                      int64_t rank, int64_t polls, int64_t tiles, int64_t sharers, int64_t blocks,
                                      bool programmatic, hipStream_t stream) {
  hf::check_operand(residual, "residual", HF_BF16, {"M", "K"}, "", hf::kAligned);
  const int64_t m = residual.size(0), k = residual.size(1);
  HF_CHECK(Wq.size(1) == k, "Wq must have residual's K = ", k, " columns; got ", Wq);
  hf::check_operand(norm_weight, "norm_weight", HF_BF16, {k}, "", hf::kAligned);
  hf::check_operand(sum_out, "sum_out", HF_BF16, {m, k}, ", residual's shape", hf::kAligned);
  hf::check_operand(out, "out", HF_BF16, {m, Wq.size(0)});
  hf::check_not_in_place({sum_out, "sum_out"}, {{residual, "residual"}});
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  HF_CHECK(polls >= 1 && polls < INT64_C(1) << 32, "polls must be 1 to 2^32 - 1; got ", polls);
  HF_CHECK(m * hf::ceil_div(k / kChunk, L::kThreads) <= Norm::kMost, "M times the pieces of ", kChunk * L::kThreads,
           " columns of a row must be at most ", Norm::kMost, "; got M = ", m, " and K = ", k);
  SummedNorm source;
  static_cast<Norm&>(source) = {nullptr, residual.data<const hf::dev::bf16>(), norm_weight.data<const hf::dev::bf16>(),
                                sum_out.data<hf::dev::bf16>(), static_cast<float>(epsilon), static_cast<float>(weight_offset)};
  source.group = group_of(buffer, addresses, rank, m, k);
  source.polls = static_cast<uint32_t>(polls);
  run(out.data<hf::dev::bf16>(), nullptr, nullptr, m, Wq, Ws, bias, out, tiles, sharers, blocks, programmatic, source, OneMatrix{},
      stream);
}
HF_EXPORT(mxfp8_row_stream_summed_norm_out);
