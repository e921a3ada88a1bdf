// fp8 quantisation with an f32 scale for each row of x [rows, K], or one in f32 or e8m0 for each 128 elements of a row.
//
//   rows:    a work-group has a row: 2048 elements at a time, thread t the eight at 8 t; amax over the work-group through LDS,
//            then the codes, from registers for the first kKept pieces of 2048, the others are read again
//   blocks:  a work-group has 2048 elements of a row; 16 neighbouring lanes have a block, amax by DPP
//
// scale = amax / fp8_max, 1 where that is 0; codes = x / scale by true division, saturated, rounded to nearest even. A row or
// block with a NaN or an infinity has the scale NaN and codes 0. Bytes per element of e bytes: e read, 1 written.
#include "hipforge/device/element.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/vector.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f32, f16 or bf16"
#endif

namespace {

using Input = HF_ELEMENT(HF_INPUT);
using hf::dev::larger;

constexpr int kThreads = 256, kChunk = 8, kPiece = kThreads * kChunk, kKept = 3;
constexpr int kBlock = 128, kBlockLanes = kBlock / kChunk;
constexpr uint32_t kInfinityBits = 0x7F800000, kHalfSmallest = 0x00400000;  // 2^-127
constexpr float kLimit = static_cast<float>(hf::dev::kMxE4m3.largest);

struct Arguments {
  const Input* x;
  uint8_t* out;
  void* scales;
  uint32_t k, pieces;  // of a row
  bool vector_in, vector_out, e8m0;
};

typedef hf::dev::Vector<Input, kChunk> Chunk __attribute__((aligned(16)));

__device__ inline Chunk load_chunk(const Arguments& a, uint64_t row, uint32_t at) {
  const Input* from = a.x + row * a.k + at;
  if (a.vector_in && at < a.k) return *reinterpret_cast<const Chunk*>(from);
  Chunk chunk = {};
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (at + i < a.k) chunk[i] = from[i];
  return chunk;
}

__device__ inline uint32_t largest_of(Chunk chunk) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) amax = larger(amax, hf::dev::magnitude_bits(static_cast<float>(chunk[i])));
  return amax;
}

__device__ inline float scale_of(uint32_t amax) {
  if (amax >= kInfinityBits) return __builtin_nanf("");
  const float scale = __builtin_bit_cast(float, amax) / kLimit;
  return scale == 0.f ? 1.f : scale;
}

// The e8m0 byte of the least power of two that is not below `scale`, which becomes it.
__device__ inline uint8_t rounded_up(float& scale) {
  if (scale != scale) return hf::kE8m0Nan;
  const uint32_t bits = __builtin_bit_cast(uint32_t, scale);
  const uint32_t byte = bits <= kHalfSmallest ? 0 : (bits + 0x7FFFFF) >> 23;
  scale = __builtin_bit_cast(float, byte == 0 ? kHalfSmallest : byte << 23);
  return static_cast<uint8_t>(byte);
}

__device__ inline void store_chunk(const Arguments& a, uint64_t row, uint32_t at, Chunk chunk, float scale) {
  if (at >= a.k) return;
  float scaled[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) scaled[i] = scale == scale ? static_cast<float>(chunk[i]) / scale : 0.f;
  const hf::dev::u32x2 codes = hf::dev::encode_e4m3x8(scaled, kLimit);
  uint8_t* to = a.out + row * a.k + at;
  if (a.vector_out) {
    *reinterpret_cast<hf::dev::u32x2*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (at + i < a.k) to[i] = static_cast<uint8_t>(codes[i / 4] >> 8 * (i % 4));
}

__global__ __launch_bounds__(kThreads) void quantize_rows(Arguments a) {
  constexpr int kWaves = kThreads / hf::dev::kWaveSize;
  __shared__ uint32_t of_wave[kWaves];
  const uint64_t row = blockIdx.x;
  const uint32_t first = threadIdx.x * kChunk;
  Chunk kept[kKept];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i] = load_chunk(a, row, first + i * kPiece);
#pragma unroll
  for (int i = 0; i < kKept; ++i) amax = larger(amax, largest_of(kept[i]));
  for (uint32_t at = first + kKept * kPiece; at < a.k; at += kPiece) amax = larger(amax, largest_of(load_chunk(a, row, at)));
  amax = hf::dev::lanes_combined<hf::dev::kWaveSize>(amax, larger);
  if (threadIdx.x % hf::dev::kWaveSize == 0) of_wave[threadIdx.x / hf::dev::kWaveSize] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWaves; ++i) amax = larger(amax, of_wave[i]);
  const float scale = scale_of(amax);
  if (threadIdx.x == 0) static_cast<float*>(a.scales)[row] = scale;
#pragma unroll
  for (int i = 0; i < kKept; ++i) store_chunk(a, row, first + i * kPiece, kept[i], scale);
  for (uint32_t at = first + kKept * kPiece; at < a.k; at += kPiece) store_chunk(a, row, at, load_chunk(a, row, at), scale);
}

__global__ __launch_bounds__(kThreads) void quantize_blocks(Arguments a) {
  const uint32_t row = blockIdx.x / a.pieces, at = blockIdx.x % a.pieces * kPiece + threadIdx.x * kChunk;
  const Chunk chunk = load_chunk(a, row, at);
  float scale = scale_of(hf::dev::lanes_combined<kBlockLanes>(largest_of(chunk), larger));
  const uint64_t block = uint64_t{row} * ((a.k + kBlock - 1) / kBlock) + at / kBlock;
  const bool writes = threadIdx.x % kBlockLanes == 0 && at < a.k;
  if (a.e8m0) {
    const uint8_t byte = rounded_up(scale);
    if (writes) static_cast<uint8_t*>(a.scales)[block] = byte;
  } else if (writes) {
    static_cast<float*>(a.scales)[block] = scale;
  }
  store_chunk(a, row, at, chunk, scale);
}

Arguments checked(const hf::Tensor& out, const hf::Tensor& scales, const hf::Tensor& x) {
  HF_CHECK_ARCH(x, HF_ARCHS);
  HF_CHECK(x.dtype() == hf::dev::dtype_of<Input>, "x has another dtype than this variant was built for");
  HF_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) > 0, "x must be contiguous [rows, K] with K at least 1; got ", x);
  HF_CHECK(x.size(1) < INT64_C(1) << 31, "K must be less than 2^31; got ", x.size(1));
  const bool fnuz = hf::has_fnuz(hf::arch_of(x.device_index()).text);
  hf::check_operand(out, "out", hf::e4m3_of(fnuz), {x.size(0), x.size(1)}, hf::kOfDevice);
  const bool whole = x.size(1) % kChunk == 0;
  return {.x = x.data<const Input>(),
          .out = static_cast<uint8_t*>(out.data()),
          .scales = scales.data(),
          .k = static_cast<uint32_t>(x.size(1)),
          .pieces = static_cast<uint32_t>((x.size(1) + kPiece - 1) / kPiece),
          .vector_in = whole && hf::aligned_to(x.data(), 16),
          .vector_out = whole && hf::aligned_to(out.data(), 8),
          .e8m0 = scales.dtype() == HF_U8 || scales.dtype() == HF_E8M0FNU};
}

}  // namespace

/// out [rows, K] in the architecture's e4m3, scale_out f32 [rows] for x [rows, K].
void fp8_quant_rows_out(hf::Tensor out, hf::Tensor scale_out, hf::Tensor x, hipStream_t stream) {
  const Arguments arguments = checked(out, scale_out, x);
  hf::check_operand(scale_out, "scale_out", HF_F32, {x.size(0)});
  if (x.size(0) == 0) return;
  hf::launch(quantize_rows, {dim3(static_cast<uint32_t>(x.size(0))), dim3(kThreads), 0, stream}, arguments);
}
HF_EXPORT(fp8_quant_rows_out);

/// out likewise, scale_out f32 or e8m0 (or uint8) [rows, ceil(K / 128)].
void fp8_quant_blocks_out(hf::Tensor out, hf::Tensor scale_out, hf::Tensor x, hipStream_t stream) {
  const Arguments arguments = checked(out, scale_out, x);
  const int64_t blocks = (x.size(1) + kBlock - 1) / kBlock, groups = x.size(0) * arguments.pieces;
  hf::check_operand(scale_out, "scale_out", arguments.e8m0 ? hf::kE8m0 : hf::Dtypes(HF_F32), {x.size(0), blocks});
  HF_CHECK(groups < INT64_C(1) << 31, "x must have fewer than 2^31 pieces of 2048 elements of a row; got ", groups);
  if (groups == 0) return;
  hf::launch(quantize_blocks, {dim3(static_cast<uint32_t>(groups)), dim3(kThreads), 0, stream}, arguments);
}
HF_EXPORT(fp8_quant_blocks_out);
