// The GEMMs of one token's experts on sm_90: W of the chosen experts streamed once by all multiprocessors, without sorted slots.
//
//   gate_up [S, 2 I] = X [1, K] W[ids]^T               the rows of S experts side by side, shared by the blocks evenly
//   out [1, N]       = sum weights swiglu(gate_up) W[ids]^T   each row's K is that of S experts, one after the other
//
// Every block of the second makes SwiGLU of all experts in shared memory, quantised. ../../mxfp8_gemm/nvidia/made/row_stream_kernel.h
// has the kernel, row_place.h says where rows are. Bytes: W of the experts, once. A variant has HF_TILES x 8 rows in a pass.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../../mxfp8_gemm/guards.h"
#include "../../mxfp8_gemm/nvidia/made/row_stream_kernel.h"

#if !defined(HF_TILES)
#error "build a variant: -DHF_TILES=1 to 3"
#endif

using hf::Tensor;
using namespace hf::made_stream;

namespace {

constexpr int kRows = 8;
constexpr int64_t kMostSlots = 32;  // a lane keeps the expert of one
using L = Layout<kRows, HF_TILES>;

struct Experts {
  int64_t count, n, k;
};

Experts check_experts(const Tensor& W, const Tensor& Ws, const Tensor& ids, int64_t tiles) {
  HF_CHECK_ARCH(W, "sm_90");
  hf::mxfp8::check_payload(W, "W", HF_E4M3FN, {"E", "N", "K"});
  const Experts of{W.size(0), W.size(1), W.size(2)};
  HF_CHECK(of.n >= 1 && of.k >= kStep && of.k % kStep == 0, "N must be at least 1 and K a positive multiple of ", kStep, "; got ",
           W);
  HF_CHECK(of.n * kMostSlots < INT64_C(1) << 31 && of.k * kMostSlots < INT64_C(1) << 24,
           "N must be below 2^26 and K below 2^19; got ", W);
  hf::check_operand(Ws, "Ws", hf::kE8m0, {of.count, of.n, of.k / hf::kMxBlock}, "", hf::kAligned);
  hf::check_operand(ids, "ids", HF_I32, {"S"});
  HF_CHECK(ids.size(0) >= 1 && ids.size(0) <= kMostSlots, "ids must be of 1 to ", kMostSlots, " slots; got ", ids);
  HF_CHECK(tiles == HF_TILES, "this variant of the module has tiles = ", HF_TILES, "; got ", tiles);
  return of;
}

/// n and k: those of the stream, whose W is that of all slots.
template <class Source, class Place>
void run(Tensor out, const uint8_t* x, const uint8_t* xs, const Tensor& W, const Tensor& Ws, int64_t n, int64_t k, int64_t x_bytes,
         int64_t sharers, int64_t blocks, bool programmatic, const Source& source, const Place& place, hipStream_t stream) {
  hf::row_stream::check_spread(L::kWarps, sharers, blocks, n, "the slots' rows of W");
  const int64_t x_at = (shared_bytes<kRows, HF_TILES>(hf::ceil_div(n, blocks), k) + 127) / 128 * 128, most = x_at + x_bytes;
  hf::row_stream::check_shared(most, blocks);
  const Problem problem{out.data<hf::dev::bf16>(), x, xs, W.data<uint8_t>(), Ws.data<uint8_t>(), nullptr, 1,
                        static_cast<int>(n), static_cast<int>(k), __builtin_ctzll(sharers), static_cast<int>(n / blocks),
                        static_cast<int>(n % blocks)};
  hf::Launch at{static_cast<uint32_t>(blocks), L::kThreads, static_cast<uint32_t>(most), stream};
  at.programmatic = programmatic;
  hf::launch(row_stream<kRows, HF_TILES, true, Source, Place>, at, problem, source, static_cast<int>(x_at), place);
}

}  // namespace

/// out bf16 [S, N]; Xq e4m3 [1, K], Xs e8m0 [1, K/32]; W e4m3 [E, N, K], Ws e8m0 [E, N, K/32]; ids int32 [S], each below E.
void mxfp8_token_gate_up_out(Tensor out, Tensor Xq, Tensor Xs, Tensor W, Tensor Ws, Tensor ids, int64_t tiles, int64_t sharers,
                             int64_t blocks, bool programmatic, hipStream_t stream) {
  const Experts of = check_experts(W, Ws, ids, tiles);
  const int64_t slots = ids.size(0), n = slots * of.n;
  HF_CHECK(of.k % 512 == 0, "K must be a multiple of 512, whose scales are whole pieces of 16 bytes; got ", of.k);
  hf::mxfp8::check_payload(Xq, "Xq", HF_E4M3FN, {1, of.k});
  hf::check_operand(Xs, "Xs", hf::kE8m0, {1, of.k / hf::kMxBlock}, "", {4});
  hf::check_operand(out, "out", HF_BF16, {slots, of.n});
  HF_CHECK(hf::ceil_div(n, blocks > 0 ? blocks : 1) <= of.n, "a block's rows must be of two experts at most: give more blocks than ",
           blocks);
  run(out, Xq.data<uint8_t>(), Xs.data<uint8_t>(), W, Ws, n, of.k, 0, sharers, blocks, programmatic, Codes{},
      ExpertRows{ids.data<const int32_t>(), static_cast<int>(of.n)}, stream);
}
HF_EXPORT(mxfp8_token_gate_up_out);

/// out bf16 [1, N]; gate_up bf16 [S, 2 K], gate in its first K columns; W e4m3 [E, N, K], Ws e8m0 [E, N, K/32]; ids int32 [S], each
/// below E, and weights float32 [S].
void mxfp8_token_down_out(Tensor out, Tensor gate_up, Tensor W, Tensor Ws, Tensor ids, Tensor weights, double alpha, double beta,
                          double limit, int64_t tiles, int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  const Experts of = check_experts(W, Ws, ids, tiles);
  const int64_t slots = ids.size(0);
  HF_CHECK(of.k % 256 == 0, "K must be a multiple of 256, whose scales are whole pieces of 8 bytes; got ", of.k);
  hf::check_operand(gate_up, "gate_up", HF_BF16, {slots, 2 * of.k}, "", hf::kAligned);
  hf::check_operand(weights, "weights", HF_F32, {slots});
  hf::check_operand(out, "out", HF_BF16, {1, of.n});
  const Swiglu source{gate_up.data<const hf::dev::bf16>(), hf::checked_activation(alpha, beta, limit, false)};
  const ExpertColumns place{ids.data<const int32_t>(), weights.data<const float>(), static_cast<int>(slots), static_cast<int>(of.n),
                            static_cast<int>(of.k)};
  run(out, nullptr, nullptr, W, Ws, of.n, slots * of.k, SharedX::bytes(static_cast<int>(slots), static_cast<int>(of.k)), sharers,
      blocks, programmatic, source, place, stream);
}
HF_EXPORT(mxfp8_token_down_out);
