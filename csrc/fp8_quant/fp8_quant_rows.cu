// fp8 quantisation with an f32 scale for each row of x [rows, K], or one in f32 or e8m0 for each 128 elements of a row.
//
//   rows:    a work-group has a row: 2048 elements at a time, thread t the eight at 8 t; amax over the work-group through LDS,
//            then the codes, from registers for the first kKept pieces of 2048, the others are read again
//   blocks:  a work-group has 2048 elements of a row; 16 neighbouring lanes have a block, amax by DPP
//
// scale = amax / fp8_max, 1 where that is 0; codes = x / scale by true division, saturated, rounded to nearest even. A row or
// block with a NaN or an infinity has the scale NaN and codes 0. Bytes per element of e bytes: e read, 1 written.
#include "hipforge/device/element.h"
#include "hipforge/device/fp8_scale.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
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
constexpr int kBlock = hf::dev::kFp8Block, kBlockLanes = kBlock / kChunk;

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

__device__ inline uint32_t largest_of(Chunk chunk) { return hf::dev::largest_magnitude<kChunk>(chunk); }

__device__ inline void store_chunk(const Arguments& a, uint64_t row, uint32_t at, Chunk chunk, float scale) {
  if (at >= a.k) return;
  float scaled[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) scaled[i] = hf::dev::over_scale(static_cast<float>(chunk[i]), scale);
  const hf::dev::u32x2 codes = hf::dev::encode_e4m3x8(scaled, hf::dev::kE4m3Limit);
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
  const uint64_t row = blockIdx.x;
  const uint32_t first = threadIdx.x * kChunk;
  Chunk kept[kKept];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i] = load_chunk(a, row, first + i * kPiece);
#pragma unroll
  for (int i = 0; i < kKept; ++i) amax = larger(amax, largest_of(kept[i]));
  for (uint32_t at = first + kKept * kPiece; at < a.k; at += kPiece) amax = larger(amax, largest_of(load_chunk(a, row, at)));
  const float scale =
      hf::dev::fp8_scale(hf::dev::largest_of_threads<0, kThreads / hf::dev::kWaveSize>(amax, kThreads));
  if (threadIdx.x == 0) static_cast<float*>(a.scales)[row] = scale;
#pragma unroll
  for (int i = 0; i < kKept; ++i) store_chunk(a, row, first + i * kPiece, kept[i], scale);
  for (uint32_t at = first + kKept * kPiece; at < a.k; at += kPiece) store_chunk(a, row, at, load_chunk(a, row, at), scale);
}

__global__ __launch_bounds__(kThreads) void quantize_blocks(Arguments a) {
  const uint32_t row = blockIdx.x / a.pieces, at = blockIdx.x % a.pieces * kPiece + threadIdx.x * kChunk;
  const Chunk chunk = load_chunk(a, row, at);
  const uint32_t amax = hf::dev::lanes_combined<kBlockLanes>(largest_of(chunk), larger);
  const uint64_t block = uint64_t{row} * ((a.k + kBlock - 1) / kBlock) + at / kBlock;
  const bool writes = threadIdx.x % kBlockLanes == 0 && at < a.k;
  const float scale = hf::dev::stored_scale(a.scales, block, hf::dev::fp8_scale(amax), a.e8m0, writes);
  store_chunk(a, row, at, chunk, scale);
}

Arguments checked(const hf::Tensor& out, const hf::Tensor& scales, const hf::Tensor& x) {
  HF_CHECK_ARCH(x, HF_ARCHS);
  hf::check_operand(x, "x", hf::dev::dtype_of<Input>, {"rows", "K"});
  HF_CHECK(x.size(1) > 0 && x.size(1) < INT64_C(1) << 31, "K must be at least 1 and less than 2^31; got ", x.size(1));
  const bool fnuz = hf::has_fnuz(x);
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
