// silu(gate) * up with the parameters of clamped SwiGLU, then fp8 by one static scale, or MX-FP8 with an e8m0 scale per
// 32 elements; or, in the module with HF_DYNAMIC, fp8 with a scale per row or per 128 elements that is chosen here (fp8_scale.h).
// gate_up [rows, 2d] holds gate in columns [0, d) and up in [d, 2d), or, interleaved, gate in the even and
// up in the odd columns.
//
//   the result flat, in chunks of 8:  | work-group 0: 2 T chunks | work-group 1 | ... |
//   thread t of a work-group of T:    chunk t and chunk t + T, in whatever rows they lie
//
//   T is 256, or 64 where work-groups of 256 would leave compute units idle
//
//   halves        chunk c of row r reads chunk c of the row's gate and of its up
//   interleaved   chunk c reads chunks 2c and 2c + 1 of gate_up: neighbouring lanes share cache lines, and 8 byte
//                 permutations a chunk part gate from up
//
// With HF_DYNAMIC a work-group has a row, thread t of T its chunks t, t + T, ... For a scale per row the first two of them stay in
// registers, others are computed once more; 128 elements are the chunks of 16 lanes (128 threads on the scalar path).
//
// All in fp32, without rounding in between: g = min(gate, limit), u = clamp(up, -limit, limit) (both keep a NaN), then
// y = g / (1 + 2^(-g alpha log2 e)) * (u + beta); q = y / scale. Lane pairs exchange chunks before the store
// (fp8_encode.h): every access moves 16 bytes, but for the e8m0 bytes, 16 neighbouring ones a wave. An MX block is 4
// neighbouring chunks, held by the 4 lanes of a quad (32 lanes on the scalar path).
// Bytes per result: 4 read, 1 written; memory is the bound. `next_buffer` is zeroed in the same launch.
// -inf / inf makes g = -inf a NaN, as the formula says; g = +inf saturates, unless u is 0, which gives NaN.
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/fp8_scale.h"
#include "hipforge/device/fused_fp8_guards.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/swiglu.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f16 or bf16"
#endif

namespace {

using Half = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Half>;

constexpr int kManyThreads = 256, kFewThreads = 64;
constexpr int64_t kFewChunks = 64 * 1024;  // up to so many, work-groups of kFewThreads
constexpr int kPerThread = 2;  // chunks: two make the 16 bytes that a lane stores
constexpr int kChunk = 8;      // elements per 16-byte load

struct Arguments {
  uint16_t* next_buffer;
  int64_t next_count;
  float fp8_max;
  bool e8m0;
  hf::Activation activation;
};

template <int kWidth>
using Vector = hf::dev::Vector<Half, kWidth>;

// The even elements of the 16 that a and b hold into a, the odd ones into b, in order.
__device__ inline void part_pairs(Vector<kChunk>& a, Vector<kChunk>& b) {
  constexpr uint32_t kLowHalves = 0x05040100, kHighHalves = 0x07060302;
  const auto first = __builtin_bit_cast(hf::dev::u32x4, a), second = __builtin_bit_cast(hf::dev::u32x4, b);
  const uint32_t pairs[] = {first[0], first[1], first[2], first[3], second[0], second[1], second[2], second[3]};
  hf::dev::u32x4 even, odd;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = hf::dev::chosen_bytes<kLowHalves>(pairs[2 * i + 1], pairs[2 * i]);
    odd[i] = hf::dev::chosen_bytes<kHighHalves>(pairs[2 * i + 1], pairs[2 * i]);
  }
  a = __builtin_bit_cast(Vector<kChunk>, even);
  b = __builtin_bit_cast(Vector<kChunk>, odd);
}

// `count` chunks of the result, `chunks_of_row` in a row of it: d / kWidth. `scale` is one float, or for MX null;
// `block_scales` is null without MX. What is not in the structure is in SGPRs when a wave starts (kernel-argument preload);
// the structure is loaded meanwhile; the two of its members that are needed first stand in front of it too.
template <int kWidth, bool kMx, int kThreads>
__global__ __launch_bounds__(kThreads) void swiglu_kernel(
    const Half* __restrict__ gate_up, uint32_t count, uint32_t chunks_of_row, const float* __restrict__ scale,
    uint8_t* __restrict__ out, uint8_t* __restrict__ block_scales, uint16_t* next_buffer, bool interleaved,
    const Arguments arguments) {
  using V = Vector<kWidth>;
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  const V* chunks = reinterpret_cast<const V*>(gate_up);
  const float static_scale = kMx ? 1.f : *scale;
  const uint32_t first = blockIdx.x * (kThreads * kPerThread) + threadIdx.x;
  V gate[kPerThread] = {}, up[kPerThread] = {};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t at = first + i * kThreads;
    if (at >= count) continue;
    int64_t gate_at, up_at;
    if (interleaved) {
      gate_at = 2 * static_cast<int64_t>(at);
      up_at = gate_at + 1;
    } else {
      // Row r of the result starts r * chunks_of_row chunks in, its gate twice as far.
      gate_at = static_cast<int64_t>(at / chunks_of_row) * chunks_of_row + at;
      up_at = gate_at + chunks_of_row;
    }
    gate[i] = chunks[gate_at];
    up[i] = chunks[up_at];
  }
  hf::dev::wave_values_loaded_here(arguments.fp8_max, arguments.activation.power, arguments.activation.beta,
                                  arguments.activation.limit);
  hf::dev::zero_fill(next_buffer, arguments.next_count,
                     static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                     static_cast<int64_t>(gridDim.x) * kThreads);
  const float inverse = hf::dev::inverse_scale(static_scale);  // behind all loads, so that none waits for it
  float values[kPerThread][kWidth];
  if constexpr (kWidth == kChunk) {
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) part_pairs(gate[i], up[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    using Floats = hf::dev::Vector<float, kWidth>;
    const Floats g = hf::dev::converted<Floats>(gate[i]), u = hf::dev::converted<Floats>(up[i]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[i][j] = hf::dev::swiglu(g[j], u[j], arguments.activation) * inverse;
  }
  uint32_t bytes[kPerThread] = {};
  if constexpr (kMx) {
    constexpr uint32_t kLanes = hf::kMxBlock / kWidth;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      uint32_t amax = 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) amax = hf::dev::larger(amax, hf::dev::magnitude_bits(values[i][j]));
      bytes[i] = hf::dev::e4m3_block_scale(hf::dev::largest_of_lanes<kLanes>(amax));
      const uint32_t at = first + i * kThreads;
      if (at < count && at % kLanes == 0) block_scales[at / kLanes] = static_cast<uint8_t>(bytes[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[i][j] *= hf::dev::e8m0_inverse(bytes[i]);
    }
  }
  if constexpr (kWidth == kChunk) {
    hf::dev::u32x2 codes[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      codes[i] = kMx ? hf::dev::encode_mx_e4m3x8(values[i], bytes[i])
                     : hf::dev::encode_e4m3x8(values[i], arguments.fp8_max);
    hf::dev::store_chunk_pairs(out, count, first, kThreads, codes[0], codes[1]);
  } else {
    static_assert(kWidth == 1 || kWidth == kChunk);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t at = first + i * kThreads;
      if (at >= count) continue;
      out[at] = kMx ? hf::dev::encode_mx_e4m3(values[i][0], bytes[i])
                    : hf::dev::encode_e4m3(values[i][0], arguments.fp8_max);
    }
  }
}

constexpr int kMaxWaves = 16;

// A row for each work-group of `threads`, with a scale for it or, kBlocks, for each 128 of its elements.
template <int kWidth, bool kBlocks>
__global__ __launch_bounds__(kMaxWaves * hf::dev::kWaveSize) void swiglu_dynamic_kernel(
    const Half* __restrict__ gate_up, uint32_t chunks_of_row, uint32_t threads, uint8_t* __restrict__ out,
    uint8_t* __restrict__ scales, uint16_t* next_buffer, bool interleaved, const Arguments arguments) {
  using V = Vector<kWidth>;
  using Floats = hf::dev::Vector<float, kWidth>;
  constexpr uint32_t kLanes = hf::dev::kFp8Block / kWidth;
  const uint64_t row = blockIdx.x;
  const V* const chunks = reinterpret_cast<const V*>(gate_up) + 2 * row * chunks_of_row;
  uint8_t* const out_row = out + row * chunks_of_row * kWidth;
  // Zeros past the row.
  const auto values_of = [&](uint32_t at) {
    V gate = {}, up = {};
    if (at < chunks_of_row) {
      gate = chunks[interleaved ? 2 * at : at];
      up = chunks[interleaved ? 2 * at + 1 : at + chunks_of_row];
    }
    if constexpr (kWidth == kChunk) {
      if (interleaved) part_pairs(gate, up);
    }
    const Floats g = hf::dev::converted<Floats>(gate), u = hf::dev::converted<Floats>(up);
    Floats values;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = hf::dev::swiglu(g[j], u[j], arguments.activation);
    return values;
  };
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  hf::dev::zero_fill(next_buffer, arguments.next_count, static_cast<int64_t>(row) * threads + threadIdx.x,
                     static_cast<int64_t>(gridDim.x) * threads);
  Floats kept[kPerThread];
  float scale = 1.f;
  if constexpr (!kBlocks) {
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      kept[i] = values_of(threadIdx.x + i * threads);
      amax = hf::dev::larger(amax, hf::dev::largest_magnitude<kWidth>(kept[i]));
    }
    for (uint32_t at = threadIdx.x + kPerThread * threads; at < chunks_of_row; at += threads)
      amax = hf::dev::larger(amax, hf::dev::largest_magnitude<kWidth>(values_of(at)));
    scale = hf::dev::fp8_scale(hf::dev::largest_of_threads<0, kMaxWaves>(amax, threads));
    if (threadIdx.x == 0) reinterpret_cast<float*>(scales)[row] = scale;
  } else {
    scales += row * ((chunks_of_row + kLanes - 1) / kLanes) * (arguments.e8m0 ? 1 : sizeof(float));
  }
  for (uint32_t base = 0; base < chunks_of_row; base += kPerThread * threads) {
    hf::dev::u32x2 codes[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t at = base + threadIdx.x + i * threads;
      const Floats values = !kBlocks && base == 0 ? kept[i] : values_of(at);
      if constexpr (kBlocks) {
        uint32_t amax = hf::dev::largest_magnitude<kWidth>(values);
        if constexpr (kWidth == 1)
          amax = hf::dev::largest_of_threads<kLanes, kMaxWaves>(amax, threads);
        else
          amax = hf::dev::lanes_combined<kLanes>(amax, hf::dev::larger);
        scale = hf::dev::stored_scale(scales, at / kLanes, hf::dev::fp8_scale(amax), arguments.e8m0,
                                      at < chunks_of_row && at % kLanes == 0);
      }
      float scaled[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) scaled[j] = hf::dev::over_scale(values[j], scale);
      if constexpr (kWidth == kChunk)
        codes[i] = hf::dev::encode_e4m3x8(scaled, hf::dev::kE4m3Limit);
      else if (at < chunks_of_row)
        out_row[at] = hf::dev::encode_e4m3(scaled[0], hf::dev::kE4m3Limit);
    }
    if constexpr (kWidth == kChunk)
      hf::dev::store_chunk_pairs(out_row, chunks_of_row, base + threadIdx.x, threads, codes[0], codes[1]);
  }
}

using hf::fused_fp8::Format;

// The checks that both entries share; saturation at the format's largest value is filled in.
Arguments checked(hf::Tensor out, hf::OptionalTensor next_buffer, hf::Tensor gate_up, const hf::Activation& activation,
                  Format format) {
  hf::check_operand(gate_up, "gate_up", kInputDtype, {"rows", "2 d"});
  HF_CHECK(gate_up.size(1) >= 2 && gate_up.size(1) % 2 == 0, "gate_up must be [rows, 2 d] with d at least 1; got ", gate_up);
  const int64_t rows = gate_up.size(0), cols = gate_up.size(1) / 2;
  hf::check_operand(out, "out", format.dtype(), {rows, cols}, hf::kOfDevice);
  Arguments arguments{};
  arguments.fp8_max = static_cast<float>(format.largest());
  arguments.activation = activation;
  const hf::fused_fp8::NextBuffer next(next_buffer, rows);
  if (next_buffer) hf::check_not_in_place({*next_buffer, "next_buffer"}, {{gate_up, "gate_up"}});
  arguments.next_buffer = next.data;
  arguments.next_count = next.count;
  return arguments;
}

template <int kWidth, bool kMx, int kThreads>
void launch_threads(const Arguments& arguments, hf::Tensor out, hf::Tensor gate_up, const float* scale, uint8_t* block_scales,
                    bool programmatic, hipStream_t stream) {
  constexpr int kPerGroup = kThreads * kPerThread;
  const int64_t count = out.numel() / kWidth;
  HF_CHECK(count < (INT64_C(1) << 32) - kPerGroup, "out has ", count, kWidth == 1 ? " elements" : " pieces of 8",
           "; the kernel counts them in 32 bits", kWidth == 1 ? " on the path for unaligned data" : "");
  hf::Launch at{static_cast<uint32_t>((count + kPerGroup - 1) / kPerGroup), kThreads, 0, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(swiglu_kernel<kWidth, kMx, kThreads>, at, gate_up.data<const Half>(), static_cast<uint32_t>(count),
             static_cast<uint32_t>(out.size(1) / kWidth), scale,
             out.data<uint8_t>(), block_scales, arguments.next_buffer, arguments.activation.interleaved, arguments);
}

template <int kWidth, bool kMx, class... Rest>
void launch_width(const Arguments& arguments, hf::Tensor out, Rest... rest) {
  out.numel() / kWidth <= kFewChunks ? launch_threads<kWidth, kMx, kFewThreads>(arguments, out, rest...)
                                     : launch_threads<kWidth, kMx, kManyThreads>(arguments, out, rest...);
}

bool takes_vectors(const hf::Tensor& out, const hf::Tensor& gate_up, bool force_scalar) {
  return !force_scalar && out.size(1) % kChunk == 0 && hf::aligned_to(gate_up.data(), 16) && hf::aligned_to(out.data(), 16);
}

template <bool kMx>
void launch(const Arguments& arguments, hf::Tensor out, hf::Tensor gate_up, const float* scale, uint8_t* block_scales,
            bool force_scalar, bool programmatic, hipStream_t stream) {
  if (out.size(0) == 0) return;
  takes_vectors(out, gate_up, force_scalar)
      ? launch_width<kChunk, kMx>(arguments, out, gate_up, scale, block_scales, programmatic, stream)
      : launch_width<1, kMx>(arguments, out, gate_up, scale, block_scales, programmatic, stream);
}

template <int kWidth, bool kBlocks>
void launch_dynamic(const Arguments& arguments, hf::Tensor out, hf::Tensor scales, hf::Tensor gate_up, bool programmatic,
                    hipStream_t stream) {
  const int64_t rows = out.size(0), chunks = out.size(1) / kWidth;
  HF_CHECK(rows < INT64_C(1) << 31 && chunks < INT64_C(1) << 30,
           "gate_up must have fewer than 2^31 rows, one work-group each, and a row fewer than 2^30 pieces; got ", gate_up);
  constexpr int64_t kShare = kBlocks && kWidth == 1 ? hf::dev::kFp8Block : hf::dev::kWaveSize;
  constexpr int64_t kMost = kMaxWaves * hf::dev::kWaveSize;
  const int64_t needed = (chunks + kShare - 1) / kShare * kShare;
  const auto threads = static_cast<uint32_t>(needed < kMost ? needed : kMost);
  hf::Launch at{static_cast<uint32_t>(rows), threads, 0, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(swiglu_dynamic_kernel<kWidth, kBlocks>, at, gate_up.data<const Half>(), static_cast<uint32_t>(chunks),
             threads, out.data<uint8_t>(), static_cast<uint8_t*>(scales.data()), arguments.next_buffer, arguments.activation.interleaved, arguments);
}

template <bool kBlocks>
void launch_dynamic(const Arguments& arguments, hf::Tensor out, hf::Tensor scales, hf::Tensor gate_up, bool force_scalar,
                    bool programmatic, hipStream_t stream) {
  if (out.size(0) == 0) return;
  takes_vectors(out, gate_up, force_scalar)
      ? launch_dynamic<kChunk, kBlocks>(arguments, out, scales, gate_up, programmatic, stream)
      : launch_dynamic<1, kBlocks>(arguments, out, scales, gate_up, programmatic, stream);
}

}  // namespace

#if defined(HF_DYNAMIC)

/// scales: float32 [rows] for a scale per row; with `blocks` float32 or e8m0 [rows, ceil(d / 128)].
void swiglu_dynamic_out(hf::Tensor out, hf::Tensor scales, hf::OptionalTensor next_buffer, hf::Tensor gate_up, double alpha,
                        double beta, double limit, bool interleaved, bool blocks, bool force_scalar,
                        bool programmatic, hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(gate_up);
  const auto activation = hf::checked_activation(alpha, beta, limit, interleaved);
  Arguments arguments = checked(out, next_buffer, gate_up, activation, format);
  arguments.e8m0 = hf::fused_fp8::check_dynamic_scales(scales, out, blocks);
  blocks ? launch_dynamic<true>(arguments, out, scales, gate_up, force_scalar, programmatic, stream)
         : launch_dynamic<false>(arguments, out, scales, gate_up, force_scalar, programmatic, stream);
}
HF_EXPORT(swiglu_dynamic_out);

#else

void swiglu_fp8_out(hf::Tensor out, hf::OptionalTensor next_buffer, hf::Tensor gate_up, hf::Tensor scale,
                    double fp8_max, double alpha, double beta, double limit, bool interleaved, bool force_scalar,
                    bool programmatic, hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(gate_up);
  const auto activation = hf::checked_activation(alpha, beta, limit, interleaved);
  Arguments arguments = checked(out, next_buffer, gate_up, activation, format);
  const float* value = hf::fused_fp8::scale_of(scale);
  arguments.fp8_max = hf::fused_fp8::limit_of(fp8_max, format);
  launch<false>(arguments, out, gate_up, value, nullptr, force_scalar, programmatic, stream);
}
HF_EXPORT(swiglu_fp8_out);

void swiglu_mxfp8_out(hf::Tensor out, hf::Tensor block_scales, hf::OptionalTensor next_buffer, hf::Tensor gate_up,
                      double alpha, double beta, double limit, bool interleaved, bool force_scalar,
                      bool programmatic, hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(gate_up);
  const auto activation = hf::checked_activation(alpha, beta, limit, interleaved);
  const Arguments arguments = checked(out, next_buffer, gate_up, activation, format);
  uint8_t* scales = hf::fused_fp8::block_scales_of(block_scales, out, hf::kMxBlock, "d");
  launch<true>(arguments, out, gate_up, nullptr, scales, force_scalar, programmatic, stream);
}
HF_EXPORT(swiglu_mxfp8_out);

#endif
