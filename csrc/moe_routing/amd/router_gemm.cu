// logits[t, e] = sum over h of x[t, h] w[e, h] (+ bias[e]), products and sums in fp32.
//
//              4 experts                 one work-group: 4 experts, kTokens tokens, all of H in 16 waves
//            +-----------+
//   kTokens  |           |    wave w:    steps w, w + 16, w + 32, ... of 128 h
//            +-----------+    lane l:    l % 4 is its expert (of A) and its token (of B), l / 4 its 8 h of the step
//
// v_mfma_f32_4x4x1_16b multiplies 16 pairs of 4-vectors at once: block l / 4 of it takes one h of each lane, so that a
// lane's own 16-byte pieces of w and of x feed it without a shuffle, 8 instructions for 128 h, 4 experts and 4 tokens.
// Its 16 blocks are added over the lanes, the 16 waves in LDS in their order: no second launch, no atomics.
// Bytes: w once per kTokens tokens (from memory once, then from L2), x once per 4 experts, from L2. Up to 8 tokens w from
// memory is the bound; for many tokens it is the matrix cores: 256 fp32 products in 8 cycles.
#include "hipforge/amd/buffer.h"
#include "hipforge/amd/element.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/wave.h"
#include "hipforge/host/addresses.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT) || !defined(HF_WEIGHT)
#error "build with -DHF_INPUT=f32, f16 or bf16 and -DHF_WEIGHT=f32 or bf16"
#endif

namespace {

using Input = HF_ELEMENT(HF_INPUT);
using Weight = HF_ELEMENT(HF_WEIGHT);
using F32x8 = float __attribute__((ext_vector_type(8)));

constexpr int kWaves = 16;
constexpr int kThreads = kWaves * hf::dev::kWaveSize;
constexpr int kTile = 4;        // experts of a work-group, and tokens of an instruction
constexpr int kPiece = 8;       // h of a lane in a step
constexpr int kStep = kPiece * hf::dev::kWaveSize / kTile;
constexpr int kFewTokens = 8, kMoreTokens = 16, kManyTokens = 32;
constexpr int64_t kEnoughGroups = 256;  // a work-group for each compute unit of an MI355X
constexpr int64_t kMaxBytes = (int64_t{1} << 31) - 1;
static_assert(kStep == 128);

// The kernel takes these one by one, in this order: all are in SGPRs when a wave starts (kernel-argument preload).
struct Arguments {
  const void* x;
  const void* w;
  const float* bias;
  float* out;
  uint32_t tokens, experts, hidden;
  uint32_t x_row_bytes;
};

template <class T>
__device__ inline F32x8 load_piece(hf::dev::Buffer buffer, uint32_t offset) {
  if constexpr (sizeof(T) == 2) {
    using T8 = T __attribute__((ext_vector_type(8)));
    return __builtin_convertvector(__builtin_bit_cast(T8, hf::dev::load_b128(buffer, offset, 0)), F32x8);
  } else {
    const auto low = __builtin_bit_cast(hf::dev::f32x4, hf::dev::load_b128(buffer, offset, 0));
    const auto high = __builtin_bit_cast(hf::dev::f32x4, hf::dev::load_b128(buffer, offset, 16));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
}

// The sum over the 16 lanes that share lane % 4, in all of them.
__device__ inline float sum_of_blocks(float value) {
  value = hf::dev::detail::add_row_rotated<4>(value);
  value = hf::dev::detail::add_row_rotated<8>(value);
  return hf::dev::column_combined(value, [](float a, float b) { return a + b; });
}

template <int kTokens, int kUnroll>
__global__ __launch_bounds__(kThreads) void router_gemm_kernel(
    const void* x_rows, const void* weights, const float* bias, float* out, uint32_t tokens, uint32_t experts, uint32_t hidden,
    uint32_t x_row_bytes) {
  const Arguments a{x_rows, weights, bias, out, tokens, experts, hidden, x_row_bytes};
  constexpr int kTiles = kTokens / kTile;
  __shared__ float partial[kWaves][kTokens][kTile];
  const uint32_t lane = threadIdx.x % hf::dev::kWaveSize;
  const uint32_t wave = hf::dev::uniform(threadIdx.x / hf::dev::kWaveSize);
  const uint32_t first_expert = blockIdx.x * kTile, first_token = blockIdx.y * kTokens;
  const auto w = hf::dev::make_buffer(a.w, a.experts * a.hidden * static_cast<uint32_t>(sizeof(Weight)));
  const auto x = hf::dev::make_buffer(
      static_cast<const char*>(a.x) + uint64_t{first_token} * a.x_row_bytes,
      (min(a.tokens - first_token, static_cast<uint32_t>(kTokens)) - 1) * a.x_row_bytes +
          a.hidden * static_cast<uint32_t>(sizeof(Input)));
  const uint32_t expert = first_expert + lane % kTile, own = lane / kTile * kPiece;
  const uint32_t w_row = expert < a.experts ? expert * a.hidden * static_cast<uint32_t>(sizeof(Weight)) : hf::dev::kOutOfRange;
  uint32_t x_row[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const uint32_t token = t * kTile + lane % kTile;
    x_row[t] = first_token + token < a.tokens ? token * a.x_row_bytes : hf::dev::kOutOfRange;
  }
  const uint32_t steps = (a.hidden + kStep - 1) / kStep;
  hf::dev::f32x4 sums[kTiles] = {};
  for (uint32_t base = wave; base < steps; base += kWaves * kUnroll) {
    F32x8 of_w[kUnroll], of_x[kUnroll][kTiles];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWaves >= steps) break;
      const uint32_t h = (base + u * kWaves) * kStep + own;
      const bool inside = h < a.hidden;  // hidden is a multiple of kPiece
      of_w[u] = load_piece<Weight>(w, inside ? w_row + h * static_cast<uint32_t>(sizeof(Weight)) : hf::dev::kOutOfRange);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        of_x[u][t] = load_piece<Input>(x, inside ? x_row[t] + h * static_cast<uint32_t>(sizeof(Input)) : hf::dev::kOutOfRange);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + u * kWaves >= steps) break;
#pragma unroll
      for (int i = 0; i < kPiece; ++i)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
          sums[t] = __builtin_amdgcn_mfma_f32_4x4x1f32(of_w[u][i], of_x[u][t][i], sums[t], 0, 0, 0);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    hf::dev::f32x4 total;
#pragma unroll
    for (int r = 0; r < kTile; ++r) total[r] = sum_of_blocks(sums[t][r]);
    if (lane < kTile) *reinterpret_cast<hf::dev::f32x4*>(partial[wave][t * kTile + lane]) = total;
  }
  __syncthreads();
  if (threadIdx.x >= kTokens * kTile) return;
  const uint32_t token = threadIdx.x / kTile, column = threadIdx.x % kTile;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWaves; ++i) sum += partial[i][token][column];
  if (first_token + token >= a.tokens || first_expert + column >= a.experts) return;
  if (a.bias) sum += a.bias[first_expert + column];
  a.out[uint64_t{first_token + token} * a.experts + first_expert + column] = sum;
}

template <int kTokens, int kUnroll>
void launch(const Arguments& a, hipStream_t stream) {
  constexpr uint32_t kMaxGridY = 65535;
  const uint32_t pieces = (a.tokens + kTokens - 1) / kTokens;
  HF_CHECK(pieces <= kMaxGridY, "x must have at most ", int64_t{kMaxGridY} * kTokens, " rows; got ", a.tokens);
  const dim3 grid((a.experts + kTile - 1) / kTile, pieces);
  hf::launch(router_gemm_kernel<kTokens, kUnroll>, {grid, kThreads, 0, stream}, a.x, a.w, a.bias, a.out, a.tokens,
             a.experts, a.hidden, a.x_row_bytes);
}

}  // namespace

/// out float32 [T, E]; x [T, H], rows contiguous; w [E, H]; bias float32 [E].
void router_gemm_out(hf::Tensor out, hf::Tensor x, hf::Tensor w, hf::OptionalTensor bias, hipStream_t stream) {
  HF_CHECK_ARCH(x, "gfx950", "gfx942");
  HF_CHECK(x.dtype() == hf::dev::dtype_of<Input> && w.dtype() == hf::dev::dtype_of<Weight>,
           "x or w has another dtype than this variant was built for");
  HF_CHECK(x.dim() == 2 && x.stride(1) == 1, "x must be [T, H] with contiguous rows; got ", x);
  const int64_t tokens = x.size(0), hidden = x.size(1);
  HF_CHECK(w.dim() == 2 && w.size(1) == hidden && w.is_contiguous(), "w must be contiguous [E, ", hidden, "]; got ", w);
  const int64_t experts = w.size(0);
  HF_CHECK(experts >= 1 && hidden >= kPiece && hidden % kPiece == 0, "H must be a positive multiple of ", kPiece, "; got ",
           hidden);
  HF_CHECK(hf::aligned_to(x.data(), 16) && hf::aligned_to(w.data(), 16) && x.stride(0) * x.element_bytes() % 16 == 0,
           "rows of x and w must start at multiples of 16 bytes; pass copies");
  HF_CHECK(w.bytes() <= kMaxBytes && x.stride(0) * x.element_bytes() <= kMaxBytes / kManyTokens - hidden * 4,
           "w must be at most ", kMaxBytes, " bytes and the rows of x ", kMaxBytes / kManyTokens, " apart; got ", w, " and ", x);
  HF_CHECK(tokens < int64_t{1} << 31, "x must have fewer than 2^31 rows; got ", tokens);
  HF_CHECK(out.dtype() == HF_F32 && out.is_shape(tokens, experts) && out.is_contiguous(), "out must be contiguous float32 [",
           tokens, ", ", experts, "]; got ", out);
  hf::check_slices_apart({out, "out"}, {{x, "x"}, {w, "w"}});
  Arguments a = {};
  if (bias) {
    HF_CHECK(bias.value().dtype() == HF_F32 && bias.value().is_shape(experts) && bias.value().is_contiguous(),
             "bias must be contiguous float32 [", experts, "]; got ", *bias);
    hf::check_apart({out, "out"}, {{*bias, "bias"}});
    a.bias = bias.data<const float>();
  }
  if (tokens == 0) return;
  a.x = x.data();
  a.w = w.data();
  a.out = out.data<float>();
  a.tokens = static_cast<uint32_t>(tokens);
  a.experts = static_cast<uint32_t>(experts);
  a.hidden = static_cast<uint32_t>(hidden);
  a.x_row_bytes = static_cast<uint32_t>(x.stride(0) * x.element_bytes());
  // As many tokens per read of w as leave every compute unit a work-group.
  const auto enough = [&](int64_t at_once) {
    return (experts + kTile - 1) / kTile * ((tokens + at_once - 1) / at_once) >= kEnoughGroups;
  };
  if (enough(kManyTokens)) return launch<kManyTokens, 1>(a, stream);
  if (enough(kMoreTokens)) return launch<kMoreTokens, 2>(a, stream);
  launch<kFewTokens, 4>(a, stream);
}
HF_EXPORT(router_gemm_out);
