// The two ends of an MX-FP8 product of many rows on sm_90, between which a library multiplies in bf16: operands out of MX-FP8,
// and the results again where bf16 could not hold an operand.
//
//   mxfp8_dequantise   codes [rows, K] e4m3, scales [rows, K / 32] e8m0  ->  elements [rows, K] bf16; a thread has 16 of them
//   mxfp8_repair       out [M, N] from the codes, a warp per result, K over its lanes; ends at once unless `inexact` is set
//
// An element is a code of 4 significant bits times a power of two, so bf16 holds it exactly from 2^-126 to 2^127 * 1.9; one
// outside sets `inexact`. A NaN code, and all codes under the scale 255, are NaN.
// Bytes: 1 + 1/32 read and 2 written for each element, and the product's own; memory is the bound of the first, which pays
// where the rows are many: 2 M N K operations stand against 3 (M + N) K bytes.
#include "hipforge/device/fp8_codes.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"
#include "hipforge/module.h"
#include "../guards.h"

namespace {

using hf::OptionalTensor;
using hf::Tensor;
using hf::dev::bf16;

constexpr int kThreads = 256, kWarps = kThreads / hf::dev::kWaveSize;
constexpr int kPiece = 16;  // elements of a thread: a load of 16 bytes, two stores
constexpr int kBlock = hf::kMxBlock;
constexpr uint32_t kNan = 255;
static_assert(kBlock % kPiece == 0);
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;

// 2^(byte - 127).
__device__ inline float power(uint32_t byte) {
  if (byte == kNan) return __builtin_nanf("");
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

__global__ __launch_bounds__(kThreads) void mxfp8_dequantise_kernel(const hf::dev::u32x4* codes, const uint8_t* scales, int64_t pieces,
                                                                    hf::dev::Vector<bf16, 8>* out, uint32_t* inexact) {
  constexpr float kLeast = 0x1p-126f, kMost = 0x1.Fp127f;
  for (int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x; at < pieces; at += int64_t{kThreads} * gridDim.x) {
    const hf::dev::u32x4 words = codes[at];
    const float scale = power(scales[at / (kBlock / kPiece)]);
    bool exact = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      hf::dev::Vector<float, 8> values;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = words[2 * half + i / 2];
        const hf::dev::f32x2 pair = i % 2 ? hf::dev::fp8_high_pair(word) : hf::dev::fp8_low_pair(word);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float value = pair[j] * scale, size = __builtin_fabsf(value);
          exact = exact && !(size > kMost || (size < kLeast && pair[j] != 0.f));
          values[2 * i + j] = value;
        }
      }
      out[2 * at + half] = hf::dev::converted<hf::dev::Vector<bf16, 8>>(values);
    }
    if (!exact) *inexact = 1;
  }
}

struct Problem {
  bf16* out;
  const uint8_t *xq, *xs, *wq, *ws;
  const bf16* bias;
  int64_t m, n, k;
};

__global__ __launch_bounds__(kThreads) void mxfp8_repair_kernel(const Problem p, const uint32_t* inexact) {
  if (*inexact == 0) return;
  const int64_t lane = hf::dev::lane_index(), blocks = p.k / kBlock;
  for (int64_t at = blockIdx.x * int64_t{kWarps} + threadIdx.x / hf::dev::kWaveSize; at < p.m * p.n; at += int64_t{kWarps} * gridDim.x) {
    const int64_t row = at / p.n, column = at % p.n;
    float sum = 0.f;
    for (int64_t block = lane; block < blocks; block += hf::dev::kWaveSize) {
      const uint8_t* x = p.xq + row * p.k + block * kBlock;
      const uint8_t* w = p.wq + column * p.k + block * kBlock;
      float part = 0.f;
      for (int i = 0; i < kBlock; ++i)
        part = __builtin_fmaf(hf::dev::fp8_pair(x[i])[0], hf::dev::fp8_pair(w[i])[0], part);
      const uint32_t of_x = p.xs[row * blocks + block], of_w = p.ws[column * blocks + block];
      sum += of_x == kNan || of_w == kNan ? __builtin_nanf("") : ldexpf(part, static_cast<int>(of_x + of_w) - 254);
    }
    sum = hf::dev::wave_sum(sum);
    if (lane == 0) p.out[at] = bf16(p.bias ? sum + static_cast<float>(p.bias[column]) : sum);
  }
}

uint32_t blocks_for(int64_t work) {
  constexpr int64_t kMostBlocks = 132 * 8;  // a full H100
  return static_cast<uint32_t>(work < kMostBlocks ? work : kMostBlocks);
}

}  // namespace

/// out bf16 [rows, K]; inexact int32 [1], set to 1 where an element is not exact and else left; codes e4m3 (or uint8) [rows, K],
/// scales e8m0 (or uint8) [rows, K/32].
void mxfp8_dequantise_out(Tensor out, Tensor inexact, Tensor codes, Tensor scales, hipStream_t stream) {
  HF_CHECK_ARCH(codes, HF_ARCHS);
  hf::mxfp8::check_payload(codes, "codes");
  const int64_t rows = codes.size(0), k = codes.size(1);
  HF_CHECK(k % kBlock == 0, "K must be a multiple of ", kBlock, "; got ", k);
  hf::check_operand(out, "out", HF_BF16, {rows, k}, "", hf::kAligned);
  hf::check_operand(inexact, "inexact", HF_I32, {1});
  hf::check_operand(scales, "scales", hf::kE8m0, {rows, k / kBlock});
  const int64_t pieces = rows * k / kPiece;
  if (pieces == 0) return;
  hf::launch(mxfp8_dequantise_kernel, {blocks_for((pieces + kThreads - 1) / kThreads), kThreads, 0, stream},
             static_cast<const hf::dev::u32x4*>(codes.data()), static_cast<const uint8_t*>(scales.data()), pieces,
             static_cast<hf::dev::Vector<bf16, 8>*>(out.data()), reinterpret_cast<uint32_t*>(inexact.data<int32_t>()));
}
HF_EXPORT(mxfp8_dequantise_out);

/// out bf16 [M, N] written again where inexact, int32 [1], is not 0; operands as for the other MX-FP8 GEMMs.
void mxfp8_repair_out(Tensor out, Tensor inexact, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias,
                      hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 24);
  hf::mxfp8::check_bias(bias, shape.n, out);
  hf::check_operand(inexact, "inexact", HF_I32, {1});
  const Problem problem{out.data<bf16>(), Xq.data<uint8_t>(), Xs.data<uint8_t>(), Wq.data<uint8_t>(), Ws.data<uint8_t>(),
                        bias.data<bf16>(), shape.m, shape.n, shape.k};
  hf::launch(mxfp8_repair_kernel, {blocks_for((shape.m * shape.n + kWarps - 1) / kWarps), kThreads, 0, stream}, problem,
             reinterpret_cast<const uint32_t*>(inexact.data<int32_t>()));
}
HF_EXPORT(mxfp8_repair_out);
