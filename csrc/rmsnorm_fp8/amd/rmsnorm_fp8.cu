// RMS norm of a row, or of the sum that residual += input leaves, times weight; then fp8 by one static scale, or MX-FP8
// with an e8m0 scale per 32 elements, or the 16-bit result itself.
//
//   one work-group per row; thread t of T owns chunks t, t + T, t + 2T, ... of 8 elements
//
//   input row    | c0 | c1 | ... |   pass 1: r = input (+ residual, 16-bit, stored to residual), kept in LDS;
//   residual row | c0 | c1 | ... |           sum of squares in fp32: lane, wave, then one number per wave in LDS
//   q row        | c0 | c1 | ... |   pass 2: y = r * rsqrt(mean + eps), y *= weight (both 16-bit), q = y / scale;
//                                            with a weight offset y = r * rsqrt(mean + eps) * (offset + weight) in fp32
//
// An MX block is 4 neighbouring chunks, held by the 4 lanes of a quad (32 lanes on the scalar path).
// A thread meets its own chunks in both passes, so the row in LDS needs no barrier; a row that does not fit is read
// back from residual, or input. Lane pairs exchange chunks before the store (fp8_encode.h): every access moves 16 bytes,
// but for the e8m0 bytes, 16 neighbouring ones a wave.
// Bytes per element: 2 read, 1 written, and 2 + 2 more with a residual; weight comes once from memory and then from L2.
// Memory is the bound. `also_out` gets y beside a quantised result (a router reads it), 2 bytes more. `next_buffer`, what
// the following kernel accumulates into, is zeroed here, which saves its own launch.
// Absent operands are null pointers, the same for all waves: these branches cost scalar instructions only.
#include "hipforge/amd/fp8_encode.h"
#include "hipforge/amd/fused_fp8_guards.h"
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "hipforge/amd/math.h"
#include "hipforge/amd/mx_encode.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f16 or bf16"
#endif

namespace {

struct input_f16 { using type = _Float16; };
struct input_bf16 { using type = hf::dev::bf16; };

#define HF_JOIN_(a, b) a##b
#define HF_JOIN(a, b) HF_JOIN_(a, b)
using Half = HF_JOIN(input_, HF_INPUT)::type;
constexpr bool kIsF16 = __is_same(Half, _Float16);
constexpr hf_dtype kInputDtype = kIsF16 ? HF_F16 : HF_BF16;

constexpr int kMaxThreads = 1024;
constexpr int kMaxWaves = kMaxThreads / hf::dev::kWaveSize;
constexpr int kChunk = 8;  // elements per 16-byte access

enum class Output { half, fp8, mx };

struct Arguments {
  const Half* input;
  const Half* weight;
  const float* scale;
  void* out;
  uint8_t* block_scales;
  Half* also_out;
  uint16_t* next_buffer;
  int64_t next_count;
  int64_t cols;
  float epsilon;
  float fp8_max;
  float weight_offset;
};

template <int kWidth>
using Vector = Half __attribute__((ext_vector_type(kWidth)));
template <int kWidth>
using Floats = float __attribute__((ext_vector_type(kWidth)));

// 16-bit arithmetic: each operation rounds once to 16 bits. bf16 has no instructions; an fp32 sum of two bf16 is
// rounded again, as torch does, and a product is exact in fp32.
template <int kWidth>
__device__ inline Vector<kWidth> add(Vector<kWidth> a, Vector<kWidth> b) {
  if constexpr (kIsF16) return a + b;
  Vector<kWidth> sum;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = static_cast<Half>(static_cast<float>(a[i]) + static_cast<float>(b[i]));
  return sum;
}

template <int kWidth>
__device__ inline Vector<kWidth> multiply(Vector<kWidth> a, Vector<kWidth> b) {
  if constexpr (kIsF16) return a * b;
  Vector<kWidth> product;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) product[i] = static_cast<Half>(static_cast<float>(a[i]) * static_cast<float>(b[i]));
  return product;
}

template <int kWidth>
__device__ inline Vector<kWidth> round_product(Floats<kWidth> product) {
  if constexpr (kIsF16) product = hf::dev::before_rounding_to_half(product);
  return __builtin_convertvector(product, Vector<kWidth>);
}

template <int kWidth>
__device__ inline Vector<kWidth> normalise(Vector<kWidth> r, float factor, Vector<kWidth> weight, float offset) {
  const Floats<kWidth> n = __builtin_convertvector(r, Floats<kWidth>) * factor;
  if (offset != 0.f) return round_product<kWidth>(n * (offset + __builtin_convertvector(weight, Floats<kWidth>)));
  return multiply<kWidth>(round_product<kWidth>(n), weight);
}

// The sum over the work-group, in all its threads; the order is fixed.
__device__ inline float group_sum(float value) {
  __shared__ float of_wave[kMaxWaves];
  value = hf::dev::column_combined(hf::dev::row_sum(value), [](float x, float y) { return x + y; });
  if (threadIdx.x % hf::dev::kWaveSize == 0) of_wave[threadIdx.x / hf::dev::kWaveSize] = value;
  __syncthreads();
  float total = 0.f;
  for (uint32_t i = 0; i < blockDim.x / hf::dev::kWaveSize; ++i) total += of_wave[i];
  return total;
}

// y over its scale: the static one, whose inverse is given, or that of the chunk's block, which is stored here and returned.
template <Output kOutput, int kWidth>
__device__ inline uint32_t scale_chunk(Vector<kWidth> y, float inverse, uint8_t* block_scales, int64_t chunk,
                                       float (&result)[kWidth]) {
  uint32_t byte = 0;
  if constexpr (kOutput == Output::mx) {
    constexpr int kLanes = hf::kMxBlock / kWidth;
    uint32_t amax = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) amax = hf::dev::larger(amax, hf::dev::magnitude_bits(static_cast<float>(y[i])));
    byte = hf::dev::e4m3_block_scale(hf::dev::largest_of_lanes<kLanes>(amax));
    if (chunk % kLanes == 0) block_scales[chunk / kLanes] = static_cast<uint8_t>(byte);
    inverse = hf::dev::e8m0_inverse(byte);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result[i] = static_cast<float>(y[i]) * inverse;
  return byte;
}

template <Output kOutput, int kWidth, bool kCached>
__global__ __launch_bounds__(kMaxThreads) void rmsnorm_kernel(const Arguments arguments, Half* __restrict__ residual) {
  extern __shared__ __attribute__((aligned(16))) char lds[];
  using V = Vector<kWidth>;
  const int64_t row = blockIdx.x;
  const int64_t threads = blockDim.x, thread = threadIdx.x;
  const int64_t count = arguments.cols / kWidth;
  const V* input = reinterpret_cast<const V*>(arguments.input + row * arguments.cols);
  const V* weight = reinterpret_cast<const V*>(arguments.weight);
  V* kept = residual ? reinterpret_cast<V*>(residual + row * arguments.cols) : nullptr;
  V* also = arguments.also_out ? reinterpret_cast<V*>(arguments.also_out + row * arguments.cols) : nullptr;
  V* cached = reinterpret_cast<V*>(lds);

  // Ahead of every store, so that it is a scalar load.
  const float scale = kOutput == Output::fp8 ? *arguments.scale : 1.f;
  float squares = 0.f;
  for (int64_t at = thread; at < count; at += 2 * threads) {
    const bool two = at + threads < count;
    V r0 = input[at], r1 = {};
    if (two) r1 = input[at + threads];
    if (kept) {
      const V b0 = kept[at];
      V b1 = {};
      if (two) b1 = kept[at + threads];
      r0 = add<kWidth>(r0, b0), r1 = add<kWidth>(r1, b1);
      kept[at] = r0;
      if (two) kept[at + threads] = r1;
    }
    if constexpr (kCached) {
      cached[at] = r0;
      if (two) cached[at + threads] = r1;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float x0 = static_cast<float>(r0[i]), x1 = static_cast<float>(r1[i]);
      squares = __builtin_fmaf(x0, x0, squares);
      squares = __builtin_fmaf(x1, x1, squares);
    }
  }
  hf::dev::zero_fill(arguments.next_buffer, arguments.next_count, row * threads + thread, gridDim.x * threads);
  const float mean = group_sum(squares) / static_cast<float>(arguments.cols);
  const float factor = hf::dev::reciprocal_root(mean + arguments.epsilon);

  const V* values = kCached ? cached : kept ? kept : input;
  if constexpr (kOutput == Output::half) {
    V* out = static_cast<V*>(arguments.out) + row * count;
    for (int64_t at = thread; at < count; at += threads)
      out[at] = normalise<kWidth>(values[at], factor, weight[at], arguments.weight_offset);
    return;
  }
  uint8_t* out = static_cast<uint8_t*>(arguments.out) + row * arguments.cols;
  uint8_t* block_scales = arguments.block_scales + row * (arguments.cols / hf::kMxBlock);
  const float inverse = hf::dev::inverse_scale(scale);
  if constexpr (kWidth == 1) {
    for (int64_t at = thread; at < count; at += threads) {
      float scaled_y[1];
      const V y = normalise<1>(values[at], factor, weight[at], arguments.weight_offset);
      if (also) also[at] = y;
      const uint32_t byte = scale_chunk<kOutput, 1>(y, inverse, block_scales, at, scaled_y);
      out[at] = kOutput == Output::mx ? hf::dev::encode_mx_e4m3(scaled_y[0], byte)
                                      : hf::dev::encode_e4m3(scaled_y[0], arguments.fp8_max);
    }
  } else {
    for (int64_t base = 0; base < count; base += 2 * threads) {
      hf::dev::u32x2 codes[2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = base + half * threads + thread;
        if (at >= count) continue;
        float scaled_y[kChunk];
        const V y = normalise<kChunk>(values[at], factor, weight[at], arguments.weight_offset);
        if (also) also[at] = y;
        const uint32_t byte = scale_chunk<kOutput, kChunk>(y, inverse, block_scales, at, scaled_y);
        codes[half] = kOutput == Output::mx ? hf::dev::encode_mx_e4m3x8(scaled_y, byte)
                                            : hf::dev::encode_e4m3x8(scaled_y, arguments.fp8_max);
      }
      hf::dev::store_chunk_pairs(out, count, base + thread, threads, codes[0], codes[1]);
    }
  }
}

// LDS of one work-group that a row may take: all of it but the sums of the waves.
int64_t cache_bytes(bool gfx942) {
  constexpr int64_t kOfWaves = kMaxWaves * sizeof(float);
  return (gfx942 ? 64 : 160) * 1024 - kOfWaves;
}

template <Output kOutput, int kWidth>
void launch_rows(const Arguments& arguments, Half* residual, int64_t rows, bool gfx942, hipStream_t stream) {
  const int64_t count = arguments.cols / kWidth;
  const int64_t waves = (count + hf::dev::kWaveSize - 1) / hf::dev::kWaveSize;
  const int threads = static_cast<int>(waves < kMaxWaves ? waves : kMaxWaves) * hf::dev::kWaveSize;
  const int64_t row_bytes = arguments.cols * static_cast<int64_t>(sizeof(Half));
  const dim3 grid(static_cast<uint32_t>(rows));
  if (row_bytes <= cache_bytes(gfx942)) {
    rmsnorm_kernel<kOutput, kWidth, true>
        <<<grid, threads, static_cast<uint32_t>(row_bytes), stream>>>(arguments, residual);
  } else {
    rmsnorm_kernel<kOutput, kWidth, false><<<grid, threads, 0, stream>>>(arguments, residual);
  }
  HF_HIP(hipGetLastError());
}

using hf::fused_fp8::Format;

// The tensors of a call besides its scales, and what both entries check of them.
struct Operands {
  hf::Tensor out;
  hf::OptionalTensor residual, next_buffer, also_out;
  hf::Tensor input, weight;

  void check_apart(hf::Tensor written, const char* name) const {
    hf::check_apart({written, name}, {{input, "input"}, {weight, "weight"}});
  }
};

// Everything but the scales is filled in.
Arguments checked(const Operands& given, double epsilon, double weight_offset, hf_dtype out_dtype, const char* out_rule) {
  const hf::Tensor input = given.input, weight = given.weight, out = given.out;
  HF_CHECK(input.dtype() == kInputDtype, "input has another dtype than this variant was built for");
  HF_CHECK(input.dim() == 2 && input.is_contiguous(), "input must be contiguous [rows, cols]; got ", input);
  const int64_t rows = input.size(0), cols = input.size(1);
  HF_CHECK(cols >= 1, "input must have at least one column; got ", input);
  HF_CHECK(rows < INT64_C(1) << 31, "input must have fewer than 2^31 rows, one work-group each; got ", rows);
  HF_CHECK(weight.is_shape(cols) && weight.is_contiguous() && weight.dtype() == kInputDtype,
           "weight must be contiguous [", cols, "] of input's dtype; got ", weight);
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(__builtin_isfinite(weight_offset), "weight_offset must be finite; got ", weight_offset);
  Arguments arguments{};
  if (given.residual) {
    const hf::Tensor residual = *given.residual;
    HF_CHECK(residual.is_shape(rows, cols) && residual.is_contiguous() && residual.dtype() == kInputDtype,
             "residual must be contiguous with input's shape and dtype, ", input, "; got ", residual);
    given.check_apart(residual, "residual");
  }
  HF_CHECK(out.is_shape(rows, cols) && out.is_contiguous() && out.dtype() == out_dtype, "out must be contiguous [",
           rows, ", ", cols, "], ", out_rule, "; got ", out);
  given.check_apart(out, "out");
  if (given.residual) hf::check_apart({out, "out"}, {{*given.residual, "residual"}});
  if (given.also_out) {
    const hf::Tensor also_out = *given.also_out;
    HF_CHECK(also_out.is_shape(rows, cols) && also_out.is_contiguous() && also_out.dtype() == kInputDtype,
             "also_out must be contiguous with input's shape and dtype, ", input, "; got ", also_out);
    given.check_apart(also_out, "also_out");
    hf::check_apart({also_out, "also_out"}, {{out, "out"}});
    if (given.residual) hf::check_apart({also_out, "also_out"}, {{*given.residual, "residual"}});
  }
  const hf::fused_fp8::NextBuffer next(given.next_buffer, rows);
  if (given.next_buffer) {
    const hf::Named buffer{*given.next_buffer, "next_buffer"};
    given.check_apart(buffer.tensor, buffer.name);
    hf::check_apart(buffer, {{out, "out"}});
    if (given.residual) hf::check_apart(buffer, {{*given.residual, "residual"}});
    if (given.also_out) hf::check_apart(buffer, {{*given.also_out, "also_out"}});
  }
  arguments.input = input.data<const Half>();
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

// Refuses scales, which are read or written, inside what the kernel writes.
void check_scales_apart(const Operands& given, const hf::Named& scales) {
  hf::check_apart({given.out, "out"}, {scales});
  if (given.residual) hf::check_apart({*given.residual, "residual"}, {scales});
  if (given.also_out) hf::check_apart({*given.also_out, "also_out"}, {scales});
  if (given.next_buffer) hf::check_apart({*given.next_buffer, "next_buffer"}, {scales});
}

template <Output kOutput>
void launch(const Arguments& arguments, const Operands& given, bool force_scalar, bool gfx942, hipStream_t stream) {
  const int64_t rows = given.input.size(0);
  if (rows == 0) return;
  Half* kept = given.residual.data<Half>();
  bool vector = !force_scalar && arguments.cols % kChunk == 0;
  for (const void* pointer : {static_cast<const void*>(arguments.input), static_cast<const void*>(arguments.weight),
                              static_cast<const void*>(kept), static_cast<const void*>(arguments.out),
                              static_cast<const void*>(arguments.also_out)})
    vector = vector && hf::aligned_to(pointer, 16);  // null is
  vector ? launch_rows<kOutput, kChunk>(arguments, kept, rows, gfx942, stream)
         : launch_rows<kOutput, 1>(arguments, kept, rows, gfx942, stream);
}

}  // namespace

void residual_rms_out(hf::Tensor out, hf::OptionalTensor residual, hf::OptionalTensor next_buffer,
                      hf::OptionalTensor also_out, hf::Tensor input, hf::Tensor weight, hf::OptionalTensor scale,
                      double epsilon, double weight_offset, double fp8_max, bool force_scalar, hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(input);
  const Operands given{out, residual, next_buffer, also_out, input, weight};
  if (!scale) {
    HF_CHECK(!also_out, "also_out is the 16-bit copy of a quantised result; without a scale, out is that already");
    const Arguments arguments = checked(given, epsilon, weight_offset, kInputDtype,
                                        "of input's dtype where there is no scale");
    return launch<Output::half>(arguments, given, force_scalar, format.fnuz, stream);
  }
  Arguments arguments = checked(given, epsilon, weight_offset, format.dtype(), format.rule());
  arguments.scale = hf::fused_fp8::scale_of(*scale);
  check_scales_apart(given, {*scale, "scale"});
  arguments.fp8_max = hf::fused_fp8::limit_of(fp8_max, format);
  launch<Output::fp8>(arguments, given, force_scalar, format.fnuz, stream);
}
HF_EXPORT(residual_rms_out);

void residual_rms_mxfp8_out(hf::Tensor out, hf::Tensor block_scales, hf::OptionalTensor residual,
                            hf::OptionalTensor next_buffer, hf::OptionalTensor also_out, hf::Tensor input,
                            hf::Tensor weight, double epsilon, double weight_offset, bool force_scalar,
                            hipStream_t stream) {
  const Format format = hf::fused_fp8::format_of(input);
  const Operands given{out, residual, next_buffer, also_out, input, weight};
  Arguments arguments = checked(given, epsilon, weight_offset, format.dtype(), format.rule());
  arguments.block_scales = hf::fused_fp8::block_scales_of(block_scales, out, hf::kMxBlock, "cols");
  given.check_apart(block_scales, "block_scales");
  check_scales_apart(given, {block_scales, "block_scales"});
  launch<Output::mx>(arguments, given, force_scalar, format.fnuz, stream);
}
HF_EXPORT(residual_rms_mxfp8_out);
