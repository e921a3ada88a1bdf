// The arithmetic of RMS norms, of a row that one work-group has: what rmsnorm_fp8.cu and the sums over GPUs
// (all_reduce.cu) share, so that both give the same bits.
#pragma once

#include "hipforge/device/element.h"
#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/math.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f16 or bf16"
#endif

namespace {

using Half = HF_ELEMENT(HF_INPUT);
constexpr bool kIsF16 = __is_same(Half, hf::dev::f16);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;

constexpr int kMaxWaves = 16;
constexpr int kMaxThreads = kMaxWaves * hf::dev::kWaveSize;
constexpr int kChunk = 8;  // elements per 16-byte access

enum class Output { half, fp8, mx, rows, blocks };
constexpr bool is_dynamic(Output output) { return output == Output::rows || output == Output::blocks; }

template <int kWidth>
using Vector = hf::dev::Vector<Half, kWidth>;
template <int kWidth>
using Floats = hf::dev::Vector<float, kWidth>;

// Chunks of a thread, `threads` apart.
template <int kWidth>
struct Pair {
  Vector<kWidth> chunk[2];
};

// 16-bit arithmetic: each operation rounds once to 16 bits. Where bf16 has no instructions, an fp32 sum of two bf16 is
// rounded again, as torch does, which gives the same, and a product is exact in fp32.
constexpr bool kHasArithmetic = kIsF16 || hf::dev::kBf16Arithmetic;
template <int kWidth>
__device__ inline Vector<kWidth> add(Vector<kWidth> a, Vector<kWidth> b) {
  if constexpr (kHasArithmetic) return a + b;
  Vector<kWidth> sum;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = static_cast<Half>(static_cast<float>(a[i]) + static_cast<float>(b[i]));
  return sum;
}

template <int kWidth>
__device__ inline Vector<kWidth> multiply(Vector<kWidth> a, Vector<kWidth> b) {
  if constexpr (kHasArithmetic) return a * b;
  Vector<kWidth> product;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) product[i] = static_cast<Half>(static_cast<float>(a[i]) * static_cast<float>(b[i]));
  return product;
}

template <int kWidth>
__device__ inline Vector<kWidth> round_product(Floats<kWidth> product) {
  if constexpr (kIsF16) product = hf::dev::before_rounding_to_half(product);
  return hf::dev::converted<Vector<kWidth>>(product);
}

template <int kWidth>
__device__ inline Vector<kWidth> normalise(Vector<kWidth> r, float factor, Vector<kWidth> weight, float offset) {
  const Floats<kWidth> n = hf::dev::converted<Floats<kWidth>>(r) * factor;
  if (offset != 0.f) return round_product<kWidth>(n * (offset + hf::dev::converted<Floats<kWidth>>(weight)));
  return multiply<kWidth>(round_product<kWidth>(n), weight);
}

// The sum over the work-group, in all its threads; the order is fixed.
__device__ inline float group_sum(float value, uint32_t threads) {
  __shared__ float of_wave[kMaxWaves];
  value = hf::dev::wave_sum(value);
  if (threadIdx.x % hf::dev::kWaveSize == 0) of_wave[threadIdx.x / hf::dev::kWaveSize] = value;
  __syncthreads();
  float total = 0.f;
  for (uint32_t i = 0; i < threads / hf::dev::kWaveSize; ++i) total += of_wave[i];
  return total;
}

// y over its scale: the static one, whose inverse is given, or that of the chunk's block, which is stored here and returned.
template <Output kOutput, int kWidth>
__device__ inline uint32_t scale_chunk(Vector<kWidth> y, float inverse, uint8_t* block_scales, int64_t chunk,
                                       float (&result)[kWidth]) {
  const Floats<kWidth> values = hf::dev::converted<Floats<kWidth>>(y);
  uint32_t byte = 0;
  if constexpr (kOutput == Output::mx) {
    constexpr int kLanes = hf::kMxBlock / kWidth;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) amax = hf::dev::larger(amax, hf::dev::magnitude_bits(values[i]));
    byte = hf::dev::e4m3_block_scale(hf::dev::largest_of_lanes<kLanes>(amax));
    if (chunk % kLanes == 0) block_scales[chunk / kLanes] = static_cast<uint8_t>(byte);
    inverse = hf::dev::e8m0_inverse(byte);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result[i] = values[i] * inverse;
  return byte;
}

}  // namespace
