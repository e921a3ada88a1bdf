// MX-FP8 GEMMs for a row or two on sm_90 around a sum over GPUs: products that send their elements to all ranks, and a product of the
// norm of what comes. made/row_peers.h has both ends, made/row_stream_kernel.h the kernel.
#include "made/launch.h"
#include "made/row_peers.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::made_stream;

namespace {

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

/// Checks the bias beside what is written, and launches over m rows of X.
template <class Source, class Place>
void run(hf::dev::bf16* out, const uint8_t* x, const uint8_t* xs, int64_t m, Tensor Wq, Tensor Ws, OptionalTensor bias,
         const Tensor& like, int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic, const Source& source,
         const Place& place, hipStream_t stream) {
  if (bias) {
    hf::check_operand(*bias, "bias", HF_BF16, {Wq.size(0)});
    hf::check_not_in_place({like, "what is written"}, {{*bias, "bias"}});
  }
  constexpr int64_t kAddresses = 128;  // bytes of the buffers' addresses
  launch_rows(out, x, xs, m, Wq, Ws, bias, tiles, sharers, blocks, programmatic, source, place, kAddresses, stream);
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
  run(nullptr, Xq.data<uint8_t>(), Xs.data<uint8_t>(), m, Wq, Ws, bias, buffer, tiles, sharers, blocks, programmatic,
      CodesOf<kFewRows>{}, place, stream);
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
  HF_CHECK(polls >= 1 && polls < INT64_C(1) << 32, "polls must be 1 to 2^32 - 1; got ", polls);
  check_norm(m, k, epsilon, weight_offset);
  in_few_chunks(m, k, [&](auto norm) {
    norm = {nullptr, residual.data<const hf::dev::bf16>(), norm_weight.data<const hf::dev::bf16>(), sum_out.data<hf::dev::bf16>(),
            static_cast<float>(epsilon), static_cast<float>(weight_offset)};
    const SummedNorm<decltype(norm)::kMost> source{norm, group_of(buffer, addresses, rank, m, k), static_cast<uint32_t>(polls)};
    run(out.data<hf::dev::bf16>(), nullptr, nullptr, m, Wq, Ws, bias, out, tiles, sharers, blocks, programmatic, source, OneMatrix{},
        stream);
  });
}
HF_EXPORT(mxfp8_row_stream_summed_norm_out);
