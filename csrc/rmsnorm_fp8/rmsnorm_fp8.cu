// RMS norm of a row, or of the sum that residual += input leaves, times weight; then fp8 by one static scale, or MX-FP8
// with an e8m0 scale per 32 elements, or the 16-bit result itself; or, in the module with HF_DYNAMIC, fp8 with a scale per row
// or per 128 elements that is chosen here (fp8_scale.h).
//
//   one work-group per row; thread t of T owns chunks t, t + T, t + 2T, ... of 8 elements
//
//   input row    | c0 | c1 | ... |   pass 1: r = input (+ residual, 16-bit, stored to residual), kept in LDS;
//   residual row | c0 | c1 | ... |           sum of squares in fp32: lane, wave, then one number per wave in LDS
//   q row        | c0 | c1 | ... |   pass 2: y = r * rsqrt(mean + eps), y *= weight (both 16-bit), q = y / scale;
//                                            with a weight offset y = r * rsqrt(mean + eps) * (offset + weight) in fp32
//
// An MX block is 4 neighbouring chunks, held by the 4 lanes of a quad (32 lanes on the scalar path); 128 elements are those of
// 16 lanes (128 threads). A scale per row takes a pass over y for its largest element, which computes y once more.
// A thread meets its own chunks in both passes: its first two, all of a row of up to 16,384 elements, stay in registers, and
// their weights are asked for with the row. Others are kept in LDS, which needs no barrier; a row that does not fit is read
// back from residual, or input. Lane pairs exchange chunks before the store (fp8_encode.h): every access moves 16 bytes,
// but for the e8m0 bytes, 16 neighbouring ones a wave.
// Bytes per element: 2 read, 1 written, and 2 + 2 more with a residual; weight comes once from memory and then from L2.
// Memory is the bound. `also_out` gets y beside a quantised result (a router reads it), 2 bytes more. `next_buffer`, what
// the following kernel accumulates into, is zeroed here, which saves its own launch.
// Absent operands are null pointers, the same for all waves: these branches cost scalar instructions only.
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/fp8_scale.h"
#include "hipforge/device/fused_fp8_guards.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "hipforge/device/math.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"
#include "row.h"

namespace {

// From so many rows on, work-groups of half the waves: more rows are in flight where registers leave room for one large group.
constexpr int64_t kManyRows = hf::dev::kWaveSize == 32 ? 512 : INT64_MAX;

// The kernel takes these one by one, in this order: those up to `next_buffer` are in SGPRs when a wave starts (kernel-argument
// preload), the others are loaded meanwhile.
struct Arguments {
  const Half* input;
  Half* residual;
  const float* scale;
  int64_t cols;
  const Half* weight;
  uint32_t threads;  // of a work-group
  float epsilon;
  uint16_t* next_buffer;
  int64_t next_count;
  void* out;
  uint8_t* block_scales;  // of Output::rows and blocks any scales
  Half* also_out;
  float fp8_max;
  float weight_offset;
  bool e8m0;                  // Output::blocks
  bool programmatic = false;  // of the launch; the kernel does not take it
};

// y over its row's scale or, with Output::blocks, that of its block, which is stored here. All threads call it; `here`: has a chunk.
template <Output kOutput, int kWidth>
__device__ inline void scale_dynamically(Vector<kWidth> y, bool here, float scale, uint8_t* scales, int64_t chunk, bool e8m0,
                                         float (&result)[kWidth]) {
  if constexpr (kOutput == Output::blocks) {
    constexpr int kLanes = hf::dev::kFp8Block / kWidth;
    uint32_t amax = here ? hf::dev::largest_magnitude<kWidth>(y) : 0;
    if constexpr (kWidth == 1)
      amax = hf::dev::largest_of_threads<kLanes, kMaxWaves>(amax, 0);
    else
      amax = hf::dev::lanes_combined<kLanes>(amax, hf::dev::larger);
    scale = hf::dev::stored_scale(scales, chunk / kLanes, hf::dev::fp8_scale(amax), e8m0, here && chunk % kLanes == 0);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result[i] = hf::dev::over_scale(static_cast<float>(y[i]), scale);
}

template <Output kOutput, int kWidth, bool kCached>
__global__ __launch_bounds__(kMaxThreads) void rmsnorm_kernel(
    const Half* input_rows, Half* __restrict__ residual, const float* static_scale, int64_t cols, const Half* weights,
    uint32_t group_threads, float epsilon, uint16_t* next_buffer, int64_t next_count, void* out_rows,
    uint8_t* block_scale_rows, Half* also_out, float fp8_max, float weight_offset, bool e8m0) {
  const Arguments arguments{input_rows,  residual,   static_scale, cols,             weights,  group_threads, epsilon,
                            next_buffer, next_count, out_rows,     block_scale_rows, also_out, fp8_max,       weight_offset, e8m0};
  extern __shared__ __attribute__((aligned(16))) char lds[];
  using V = Vector<kWidth>;
  const int64_t row = blockIdx.x;
  const int64_t threads = arguments.threads, thread = threadIdx.x;
  const int64_t count = arguments.cols / kWidth;
  const V* input = reinterpret_cast<const V*>(arguments.input + row * arguments.cols);
  const V* weight = reinterpret_cast<const V*>(arguments.weight);
  V* kept = residual ? reinterpret_cast<V*>(residual + row * arguments.cols) : nullptr;
  V* also = arguments.also_out ? reinterpret_cast<V*>(arguments.also_out + row * arguments.cols) : nullptr;
  V* cached = reinterpret_cast<V*>(lds);

  float squares = 0.f;
  const auto load_pair = [&](const V* from, int64_t base) {
    Pair<kWidth> pair = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (base + half * threads < count) pair.chunk[half] = from[base + half * threads];
    return pair;
  };
  // Pass 1 of a pair of chunks, the first `at`: r, summed up and stored.
  const auto sum_pair = [&](int64_t at) {
    Pair<kWidth> r = load_pair(input, at);
    if (kept) {
      const Pair<kWidth> b = load_pair(kept, at);
#pragma unroll
      for (int half = 0; half < 2; ++half) r.chunk[half] = add<kWidth>(r.chunk[half], b.chunk[half]);
    }
    Floats<kWidth> x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) x[half] = hf::dev::converted<Floats<kWidth>>(r.chunk[half]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) squares = __builtin_fmaf(x[half][i], x[half][i], squares);
    if (kept) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (at + half * threads < count) kept[at + half * threads] = r.chunk[half];
    }
    return r;
  };
  const Pair<kWidth> first_weights = load_pair(weight, thread);
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  // Ahead of every store, so that it is a scalar load.
  const float scale = kOutput == Output::fp8 ? *arguments.scale : 1.f;
  const Pair<kWidth> first = sum_pair(thread);
  for (int64_t at = thread + 2 * threads; at < count; at += 2 * threads) {
    const Pair<kWidth> r = sum_pair(at);
    if constexpr (kCached) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (at + half * threads < count) cached[at + half * threads] = r.chunk[half];
    }
  }
  hf::dev::wave_values_loaded_here(arguments.out, arguments.block_scales, arguments.also_out, arguments.fp8_max,
                                   arguments.weight_offset);
  hf::dev::zero_fill(arguments.next_buffer, arguments.next_count, row * threads + thread, gridDim.x * threads);
  const float mean = group_sum(squares, arguments.threads) / static_cast<float>(arguments.cols);
  const float factor = hf::dev::reciprocal_root(mean + arguments.epsilon);

  uint8_t* out = static_cast<uint8_t*>(arguments.out) + row * arguments.cols * (kOutput == Output::half ? sizeof(Half) : 1);
  const V* values = kCached ? cached : kept ? kept : input;
  const float inverse = hf::dev::inverse_scale(scale);
  uint8_t* block_scales = arguments.block_scales;
  float row_scale = 1.f;
  if constexpr (kOutput == Output::mx) block_scales += row * (arguments.cols / hf::kMxBlock);
  if constexpr (kOutput == Output::blocks)
    block_scales += row * ((arguments.cols + hf::dev::kFp8Block - 1) / hf::dev::kFp8Block) * (e8m0 ? 1 : sizeof(float));
  if constexpr (kOutput == Output::rows) {
    uint32_t amax = 0;
    const auto look_at_pair = [&](int64_t at, const Pair<kWidth>& pair, const Pair<kWidth>& weights_here) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (at + half * threads >= count) continue;
        const V y = normalise<kWidth>(pair.chunk[half], factor, weights_here.chunk[half], arguments.weight_offset);
        amax = hf::dev::larger(amax, hf::dev::largest_magnitude<kWidth>(y));
      }
    };
    look_at_pair(thread, first, first_weights);
    for (int64_t at = thread + 2 * threads; at < count; at += 2 * threads)
      look_at_pair(at, load_pair(values, at), load_pair(weight, at));
    row_scale = hf::dev::fp8_scale(hf::dev::largest_of_threads<0, kMaxWaves>(amax, arguments.threads));
    if (thread == 0) reinterpret_cast<float*>(block_scales)[row] = row_scale;
  }
  // Pass 2 of a pair.
  const auto finish_pair = [&](int64_t first_at, const Pair<kWidth>& values, const Pair<kWidth>& weights_here) {
    hf::dev::u32x2 codes[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = first_at + half * threads;
      if constexpr (is_dynamic(kOutput)) {
        const bool here = at < count;
        V y = {};
        if (here) y = normalise<kWidth>(values.chunk[half], factor, weights_here.chunk[half], arguments.weight_offset);
        if (here && also) also[at] = y;
        float scaled_y[kWidth];
        scale_dynamically<kOutput, kWidth>(y, here, row_scale, block_scales, at, e8m0, scaled_y);
        if constexpr (kWidth == kChunk)
          codes[half] = hf::dev::encode_e4m3x8(scaled_y, hf::dev::kE4m3Limit);
        else if (here)
          out[at] = hf::dev::encode_e4m3(scaled_y[0], hf::dev::kE4m3Limit);
        continue;
      }
      if (at >= count) continue;
      const V y = normalise<kWidth>(values.chunk[half], factor, weights_here.chunk[half], arguments.weight_offset);
      if constexpr (kOutput == Output::half) {
        reinterpret_cast<V*>(out)[at] = y;
        continue;
      }
      if (also) also[at] = y;
      float scaled_y[kWidth];
      const uint32_t byte = scale_chunk<kOutput, kWidth>(y, inverse, block_scales, at, scaled_y);
      if constexpr (kWidth == 1) {
        out[at] = kOutput == Output::mx ? hf::dev::encode_mx_e4m3(scaled_y[0], byte)
                                        : hf::dev::encode_e4m3(scaled_y[0], arguments.fp8_max);
      } else {
        codes[half] = kOutput == Output::mx ? hf::dev::encode_mx_e4m3x8(scaled_y, byte)
                                            : hf::dev::encode_e4m3x8(scaled_y, arguments.fp8_max);
      }
    }
    if constexpr (kOutput != Output::half && kWidth == kChunk)
      hf::dev::store_chunk_pairs(out, count, first_at, threads, codes[0], codes[1]);
  };
  finish_pair(thread, first, first_weights);
  for (int64_t base = 2 * threads; base < count; base += 2 * threads)
    finish_pair(base + thread, load_pair(values, base + thread), load_pair(weight, base + thread));
}

// LDS of one work-group that a row may take: all of it but what the waves leave there.
int64_t cache_bytes(int64_t group_memory, int numbers) { return group_memory - numbers * kMaxWaves * INT64_C(4); }

template <Output kOutput, int kWidth>
void launch_rows(const Arguments& a, int64_t rows, int64_t group_memory, hipStream_t stream) {
  const int64_t count = a.cols / kWidth;
  // With blocks on the scalar path whole blocks of threads.
  constexpr int64_t kShare = kOutput == Output::blocks && kWidth == 1 ? hf::dev::kFp8Block : hf::dev::kWaveSize;
  const int64_t waves = (count + kShare - 1) / kShare * (kShare / hf::dev::kWaveSize);
  const int64_t most = rows < kManyRows ? kMaxWaves : kMaxWaves / 2;
  const uint32_t threads = static_cast<uint32_t>(waves < most ? waves : most) * hf::dev::kWaveSize;
  const int64_t row_bytes = a.cols * static_cast<int64_t>(sizeof(Half));
  const bool cached = row_bytes <= cache_bytes(group_memory, is_dynamic(kOutput) ? 2 : 1);
  const auto kernel = cached ? rmsnorm_kernel<kOutput, kWidth, true> : rmsnorm_kernel<kOutput, kWidth, false>;
  hf::Launch at{static_cast<uint32_t>(rows), threads, cached ? static_cast<uint32_t>(row_bytes) : 0, stream};
  hf::may_start_early(at, a.programmatic);
  hf::launch(kernel, at, a.input, a.residual, a.scale, a.cols, a.weight, threads, a.epsilon, a.next_buffer, a.next_count, a.out,
             a.block_scales, a.also_out, a.fp8_max, a.weight_offset, a.e8m0);
}

using hf::fused_fp8::Format;

// The tensors of a call besides its scales, and what both entries check of them.
struct Operands {
  hf::Tensor out;
  hf::OptionalTensor residual, next_buffer, also_out;
  hf::Tensor input, weight;
};

// Everything but the scales is filled in.
Arguments checked(const Operands& given, double epsilon, double weight_offset, hf_dtype out_dtype, const char* why_out) {
  const hf::Tensor input = given.input, weight = given.weight, out = given.out;
  hf::check_operand(input, "input", kInputDtype, {"rows", "cols"});
  const int64_t rows = input.size(0), cols = input.size(1);
  HF_CHECK(cols >= 1, "input must have at least one column; got ", input);
  HF_CHECK(rows < INT64_C(1) << 31, "input must have fewer than 2^31 rows, one work-group each; got ", rows);
  hf::check_operand(weight, "weight", kInputDtype, {cols}, ", of input's dtype");
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  Arguments arguments{};
  hf::check_operand(out, "out", out_dtype, {rows, cols}, why_out);
  hf::check_not_in_place({out, "out"}, {{input, "input"}});
  const auto check_written = [&](const hf::OptionalTensor& written, const char* name) {
    if (!written) return;
    hf::check_operand(*written, name, kInputDtype, {rows, cols}, ", input's shape and dtype");
    hf::check_not_in_place({*written, name}, {{input, "input"}});
  };
  check_written(given.residual, "residual");
  check_written(given.also_out, "also_out");
  const hf::fused_fp8::NextBuffer next(given.next_buffer, rows);
  if (given.next_buffer) hf::check_not_in_place({*given.next_buffer, "next_buffer"}, {{input, "input"}});
  arguments.input = input.data<const Half>();
  arguments.residual = given.residual.data<Half>();
  arguments.weight = weight.data<const Half>();
  arguments.out = out.data();
  arguments.also_out = given.also_out.data<Half>();
  arguments.cols = cols;
  arguments.epsilon = static_cast<float>(epsilon);
  arguments.weight_offset = static_cast<float>(weight_offset);
  arguments.next_buffer = next.data;
  arguments.next_count = next.count;
  return arguments;
}

template <Output kOutput>
void launch(const Arguments& arguments, const Operands& given, bool force_scalar, int64_t group_memory, hipStream_t stream) {
  const int64_t rows = given.input.size(0);
  if (rows == 0) return;
  bool vector = !force_scalar && arguments.cols % kChunk == 0;
  for (const void* pointer : {static_cast<const void*>(arguments.input), static_cast<const void*>(arguments.weight),
                              static_cast<const void*>(arguments.residual), static_cast<const void*>(arguments.out),
                              static_cast<const void*>(arguments.also_out)})
    vector = vector && hf::aligned_to(pointer, 16);  // null is
  vector ? launch_rows<kOutput, kChunk>(arguments, rows, group_memory, stream)
         : launch_rows<kOutput, 1>(arguments, rows, group_memory, stream);
}

}  // namespace

#if defined(HF_DYNAMIC)

/// scales: float32 [rows] for a scale per row; with `blocks` float32 or e8m0 [rows, ceil(cols / 128)].
void residual_rms_dynamic_out(hf::Tensor out, hf::Tensor scales, hf::OptionalTensor residual, hf::OptionalTensor next_buffer,
                              hf::OptionalTensor also_out, hf::Tensor input, hf::Tensor weight, double epsilon,
                              double weight_offset, bool blocks, bool force_scalar, bool programmatic, hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(input);
  const Operands given{out, residual, next_buffer, also_out, input, weight};
  Arguments arguments = checked(given, epsilon, weight_offset, format.dtype(), hf::kOfDevice);
  arguments.programmatic = programmatic;
  arguments.e8m0 = hf::fused_fp8::check_dynamic_scales(scales, out, blocks);
  arguments.block_scales = static_cast<uint8_t*>(scales.data());
  blocks ? launch<Output::blocks>(arguments, given, force_scalar, format.group_memory, stream)
         : launch<Output::rows>(arguments, given, force_scalar, format.group_memory, stream);
}
HF_EXPORT(residual_rms_dynamic_out);

#else

void residual_rms_out(hf::Tensor out, hf::OptionalTensor residual, hf::OptionalTensor next_buffer,
                      hf::OptionalTensor also_out, hf::Tensor input, hf::Tensor weight, hf::OptionalTensor scale,
                      double epsilon, double weight_offset, double fp8_max, bool force_scalar, bool programmatic,
                      hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(input);
  const Operands given{out, residual, next_buffer, also_out, input, weight};
  if (!scale) {
    HF_CHECK(!also_out, "also_out is the 16-bit copy of a quantised result; without a scale, out is that already");
    Arguments arguments = checked(given, epsilon, weight_offset, kInputDtype, ", of input's dtype where there is no scale");
    arguments.programmatic = programmatic;
    return launch<Output::half>(arguments, given, force_scalar, format.group_memory, stream);
  }
  Arguments arguments = checked(given, epsilon, weight_offset, format.dtype(), hf::kOfDevice);
  arguments.scale = hf::fused_fp8::scale_of(*scale);
  arguments.programmatic = programmatic;
  arguments.fp8_max = hf::fused_fp8::limit_of(fp8_max, format);
  launch<Output::fp8>(arguments, given, force_scalar, format.group_memory, stream);
}
HF_EXPORT(residual_rms_out);

void residual_rms_mxfp8_out(hf::Tensor out, hf::Tensor block_scales, hf::OptionalTensor residual,
                            hf::OptionalTensor next_buffer, hf::OptionalTensor also_out, hf::Tensor input,
                            hf::Tensor weight, double epsilon, double weight_offset, bool force_scalar, bool programmatic,
                            hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(input);
  const Operands given{out, residual, next_buffer, also_out, input, weight};
  Arguments arguments = checked(given, epsilon, weight_offset, format.dtype(), hf::kOfDevice);
  arguments.block_scales = hf::fused_fp8::block_scales_of(block_scales, out, hf::kMxBlock, "cols");
  arguments.programmatic = programmatic;
  launch<Output::mx>(arguments, given, force_scalar, format.group_memory, stream);
}
HF_EXPORT(residual_rms_mxfp8_out);

#endif
