// The residual norm of a few tokens and their router's logits in one launch on sm_90:
//
//   sum [T, H] = x + residual;  y = norm(sum) weight;  q, q_scales = MX-FP8 of y;  logits [T, E] = y w^T (+ bias)
//
//   of each token, blocks 0 .. E/4 - 1    each makes all of y in shared memory, and the logits of its four experts, whose first rows
//                                         of w it asks for before the launch before has ended
//                  the last block         makes y too, and stores the sum, q and q_scales
//
// The norm is that of row_source.h, the product that of router_kernel.h for one token: the bits are those of rmsnorm_fp8.cu and
// router_gemm.cu. Bytes: w once, and for each further token from L2; x, residual and weight, 6 H, for each block from L2. Bound: the
// chain of loads, two meetings and the store, of which two launches have two.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../../mxfp8_gemm/guards.h"
#include "../../mxfp8_gemm/nvidia/made/row_source.h"
#include "router_piece.h"

#if !defined(HF_WEIGHT)
#error "build with -DHF_WEIGHT=f32 or bf16"
#endif

namespace {

using namespace hf::router;
using hf::made_stream::Chunk, hf::made_stream::high_of, hf::made_stream::kChunk, hf::made_stream::low_of, hf::made_stream::Norm;
using hf::made_stream::rounded_pair, hf::made_stream::SharedX;
using Weight = HF_ELEMENT(HF_WEIGHT);
constexpr int kTile = 4;   // experts of a block
constexpr int kWarps = 8;  // that share H
constexpr int64_t kMostTokens = 65535;  // that a grid has room for
constexpr int64_t kMostHidden = 8192, kOneChunkHidden = 2048;
static_assert(kPiece == kChunk);

struct Router {
  const Weight* w;
  const float* bias;
  float* logits;
  int experts, hidden;
};

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1) norm_router(const Norm all_tokens, const Router router, uint8_t* q, uint8_t* q_scales) {
  constexpr int kGroups = THREADS / (kWarps * 32), kExperts = kTile / kGroups;  // groups of warps share the tile's experts
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ float meeting[Norm::kMost * THREADS / 32], partial[kWarps][kTile];
  Chunk* const y = reinterpret_cast<Chunk*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / kWarps, part = warp % kWarps, hidden = router.hidden;
  const int64_t token = blockIdx.y, row = token * hidden;
  Norm norm = all_tokens;
  norm.x += row, norm.residual += row, norm.sum += row;
  const bool stores = blockIdx.x == gridDim.x - 1;
  const int first = blockIdx.x * kTile, own = first + group * kExperts;
  Piece<Weight> next[kExperts];
  const auto load_next = [&](int h) {
    if (stores || h >= hidden) return;
#pragma unroll
    for (int e = 0; e < kExperts; ++e)  // experts past the last one are the last one again, and not stored
      next[e] = load_piece<Weight>(router.w + int64_t{min(own + e, router.experts - 1)} * hidden, h);
  };
  int h = part * kStep + lane * kPiece;
  load_next(h);
  const float bias = router.bias ? router.bias[min(first + static_cast<int>(threadIdx.x) % kTile, router.experts - 1)] : 0.f;
  const auto weights = norm.ask_weights<THREADS>(1, hidden);
  hf::let_next_start();
  hf::wait_for_predecessor();
  auto loaded = norm.load<THREADS>(1, hidden);
  const SharedX codes{q + row, q_scales + row / hf::kMxBlock, 0, 0};
  const auto take = [&](int, int chunk, const float (&values)[kChunk], bool has) {
    if (stores) return codes.store(0, chunk, values, has);
    Chunk rounded;
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) rounded[i] = rounded_pair(values[2 * i], values[2 * i + 1]);
    if (has) y[chunk] = rounded;
  };
  norm.make_each<THREADS>(weights, loaded, 1, hidden, meeting, gridDim.x - 1, take);
  if (stores) return;
  __syncthreads();
  float sums[kExperts] = {};
  for (; h < hidden; h += kWarps * kStep) {
    Piece<Weight> here[kExperts];
#pragma unroll
    for (int e = 0; e < kExperts; ++e) here[e] = next[e];
    load_next(h + kWarps * kStep);
    const Chunk x = y[h / kChunk];
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
#pragma unroll
      for (int e = 0; e < kExperts; ++e) sums[e] = __builtin_fmaf(here[e][i], i % 2 ? high_of(x[i / 2]) : low_of(x[i / 2]), sums[e]);
  }
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    const float total = hf::dev::wave_sum(sums[e]);
    if (lane == 0) partial[part][group * kExperts + e] = total;
  }
  __syncthreads();
  if (threadIdx.x >= kTile || first + static_cast<int>(threadIdx.x) >= router.experts) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += partial[i][threadIdx.x];
  router.logits[token * router.experts + first + threadIdx.x] = router.bias ? sum + bias : sum;
}

}  // namespace

/// logits float32 [T, E] = y w^T + bias; q e4m3 [T, H] and q_scales e8m0 [T, H/32] of y = norm(x + residual); x, residual and sum_out,
/// the sum, bf16 [T, H]; norm_weight bf16 [H]; w [E, H]; bias float32 [E].
void norm_router_out(hf::Tensor logits, hf::Tensor sum_out, hf::Tensor q, hf::Tensor q_scales, hf::Tensor x, hf::Tensor residual,
                     hf::Tensor norm_weight, hf::Tensor w, hf::OptionalTensor bias, double epsilon, double weight_offset,
                     bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(x, "sm_90");
  hf::check_operand(x, "x", HF_BF16, {"T", "H"}, "", hf::kAligned);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  HF_CHECK(tokens >= 1 && tokens <= kMostTokens, "x must have 1 to ", kMostTokens, " rows; got ", x);
  HF_CHECK(hidden >= hf::kMxBlock && hidden % hf::kMxBlock == 0 && hidden <= kMostHidden, "H must be a multiple of ", hf::kMxBlock,
           " up to ", kMostHidden, "; got ", hidden);
  hf::check_operand(norm_weight, "norm_weight", HF_BF16, {hidden}, "", hf::kAligned);
  hf::check_operand(residual, "residual", HF_BF16, {tokens, hidden}, ", x's shape", hf::kAligned);
  hf::check_operand(sum_out, "sum_out", HF_BF16, {tokens, hidden}, ", x's shape", hf::kAligned);
  hf::check_not_in_place({sum_out, "sum_out"}, {{x, "x"}, {residual, "residual"}});
  hf::mxfp8::check_payload(q, "q", HF_E4M3FN, {tokens, hidden});
  hf::check_operand(q_scales, "q_scales", hf::kE8m0, {tokens, hidden / hf::kMxBlock});
  hf::check_operand(w, "w", hf::dev::dtype_of<Weight>, {"E", hidden}, "", hf::kAligned);
  const int64_t experts = w.size(0);
  HF_CHECK(experts >= 1 && experts <= 1 << 20, "w must be of 1 to 2^20 experts; got ", w);
  hf::check_operand(logits, "logits", HF_F32, {tokens, experts});
  if (bias) hf::check_operand(*bias, "bias", HF_F32, {experts});
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  const Norm norm{x.data<const hf::dev::bf16>(), residual.data<const hf::dev::bf16>(), norm_weight.data<const hf::dev::bf16>(),
                  sum_out.data<hf::dev::bf16>(), static_cast<float>(epsilon), static_cast<float>(weight_offset)};
  const Router router{w.data<const Weight>(), bias.data<const float>(), logits.data<float>(), static_cast<int>(experts),
                      static_cast<int>(hidden)};
  const bool is_short = hidden <= kOneChunkHidden;
  const dim3 grid(static_cast<uint32_t>((experts + kTile - 1) / kTile + 1), static_cast<uint32_t>(tokens));
  hf::Launch at{grid, is_short ? 256u : 512u, static_cast<uint32_t>(hidden * 2), stream};
  at.programmatic = programmatic;
  hf::launch(is_short ? norm_router<256> : norm_router<512>, at, norm, router, q.data<uint8_t>(), q_scales.data<uint8_t>());
}
HF_EXPORT(norm_router_out);
