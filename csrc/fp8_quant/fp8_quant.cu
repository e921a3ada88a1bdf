// Tensor-wise FP8 quantisation on the device, no host sync: amax, then scale and cast, optionally with a transposed copy.
//
//   amax      x, flat:  | block 0 | block 1 | ... grid-stride ... |   lane: 16 bytes a step; wave, block, then one
//                                                                     atomic max on the bits of |x| per work-group
//   cast      x, flat:  | 16 elements per lane |                      scale = limit / max(amax, 1e-12) in double
//   transpose x[R, C] in 64 x 64 tiles:
//
//        c0        c0+64          thread t: row t/4, 16 columns from 16 (t%4): loads, casts, stores x8 (16 bytes),
//     r0 +-----------+            leaves its 16 bytes in LDS; then column t/4, 16 rows from 16 (t%4): stores x8T
//        |  64 x 64  |            LDS rows are 17 dwords apart, so that a wave's column reads fall on different banks
//  r0+64 +-----------+
//
// Bytes per element of e bytes: amax e, cast e + 1, cast with transpose e + 2. Memory is the bound of all three.
// The largest |x| is found by comparing bits as unsigned integers, which order like floats; the bits of a NaN are above
// those of infinity, so a NaN wins and turns every output into NaN, as torch's amax does.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/host/operand.h"
#include "hipforge/device/element.h"
#include "hipforge/device/fp8_encode.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/module.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f32, f16 or bf16"
#endif

namespace {

using Input = HF_ELEMENT(HF_INPUT);
constexpr hf_dtype kInputDtype = hf::dev::dtype_of<Input>;

constexpr int kThreads = 256;
constexpr int kPerLane = 16;  // elements a lane converts at once: one 16-byte store
constexpr int kTile = 64;
constexpr int kTilePitch = kTile / 4 + 1;  // dwords
constexpr int kMaxBlocks = 2048;           // grid-stride beyond: 8 work-groups a CU on the largest device

static_assert(kThreads * kPerLane == kTile * kTile, "a work-group converts one tile at once");

using Format = hf::dev::Fp8Format;

constexpr float kMaxE4m3 = hf::dev::kFnuz ? 240.0f : 448.0f;
constexpr float kMaxE5m2 = 57344.0f;
constexpr double kAmaxFloor = 1e-12;

template <Format kFormat>
constexpr float kLimit = kFormat == Format::e4m3 ? kMaxE4m3 : kMaxE5m2;

constexpr int kVector = 16 / sizeof(Input);
using InputVector = hf::dev::Vector<Input, kVector>;

using hf::dev::larger;
using hf::dev::magnitude_bits;

__global__ __launch_bounds__(kThreads) void amax_kernel(const Input* x, int64_t count, bool vector, uint32_t* amax) {
  __shared__ uint32_t of_wave[kThreads / hf::dev::kWaveSize];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  uint32_t best = 0;
  const int64_t vectors = vector ? count / kVector : 0;
  for (int64_t i = first; i < vectors; i += stride) {
    const InputVector values = reinterpret_cast<const InputVector*>(x)[i];
#pragma unroll
    for (int j = 0; j < kVector; ++j) best = larger(best, magnitude_bits(static_cast<float>(values[j])));
  }
  for (int64_t i = vectors * kVector + first; i < count; i += stride)
    best = larger(best, magnitude_bits(static_cast<float>(x[i])));
  best = hf::dev::lanes_combined<hf::dev::kWaveSize>(best, larger);
  if (threadIdx.x % hf::dev::kWaveSize == 0) of_wave[threadIdx.x / hf::dev::kWaveSize] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kThreads / hf::dev::kWaveSize; ++i) best = larger(best, of_wave[i]);
    hf::dev::atomic_largest(amax, best);
  }
}

// What torch computes as (limit / amax.double().clamp(min=1e-12)).float(), NaN included.
template <Format kFormat>
__device__ inline float scale_of(const uint32_t* amax) {
  double largest = __builtin_bit_cast(float, *amax);
  if (largest < kAmaxFloor) largest = kAmaxFloor;
  return static_cast<float>(kLimit<kFormat> / largest);
}

// Sixteen values as bytes.
template <Format kFormat>
__device__ inline hf::dev::u32x4 convert(const float (&values)[kPerLane], float scale) {
  hf::dev::u32x4 packed;
#pragma unroll
  for (int dword = 0; dword < 4; ++dword) {
    float scaled[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = values[4 * dword + i] * scale;
    packed[dword] = hf::dev::encode_fp8x4<kFormat>(scaled, kLimit<kFormat>);
  }
  return packed;
}

// `valid` elements from `x` (the rest 0), by 16-byte loads where all sixteen are there and aligned.
__device__ inline void load(const Input* x, int valid, bool vector, float (&values)[kPerLane]) {
  if (vector && valid == kPerLane) {
#pragma unroll
    for (int i = 0; i < kPerLane / kVector; ++i) {
      const InputVector part = reinterpret_cast<const InputVector*>(x)[i];
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[i * kVector + j] = static_cast<float>(part[j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] = i < valid ? static_cast<float>(x[i]) : 0.0f;
}

__device__ inline void store(uint8_t* out, int valid, bool vector, hf::dev::u32x4 packed) {
  if (vector && valid == kPerLane) {
    *reinterpret_cast<hf::dev::u32x4*>(out) = packed;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (i < valid) out[i] = static_cast<uint8_t>(packed[i / 4] >> (8 * (i % 4)));
}

__device__ inline int clamp_count(int64_t left) {
  return static_cast<int>(left < 0 ? 0 : left > kPerLane ? kPerLane : left);
}

template <Format kFormat>
__global__ __launch_bounds__(kThreads) void cast_kernel(const Input* x, int64_t count, bool vector,
                                                        const uint32_t* amax, uint8_t* out, float* inv_scale) {
  const float scale = scale_of<kFormat>(amax);
  if (blockIdx.x == 0 && threadIdx.x == 0) *inv_scale = 1.0f / scale;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kPerLane;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPerLane; at < count; at += stride) {
    const int valid = clamp_count(count - at);
    float values[kPerLane];
    load(x + at, valid, vector, values);
    store(out + at, valid, vector, convert<kFormat>(values, scale));
  }
}

template <Format kFormat>
__global__ __launch_bounds__(kThreads) void cast_transpose_kernel(const Input* x, int64_t rows, int64_t cols,
                                                                  bool vector, bool vector_t, const uint32_t* amax,
                                                                  uint8_t* out, uint8_t* out_t, float* inv_scale) {
  __shared__ uint32_t tile[kTile * kTilePitch];
  const float scale = scale_of<kFormat>(amax);
  if (blockIdx.x == 0 && threadIdx.x == 0) *inv_scale = 1.0f / scale;
  const int line = threadIdx.x / (kTile / kPerLane);
  const int piece = threadIdx.x % (kTile / kPerLane);
  const int64_t tiles_c = (cols + kTile - 1) / kTile;
  const int64_t tiles = tiles_c * ((rows + kTile - 1) / kTile);
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t r0 = index / tiles_c * kTile, c0 = index % tiles_c * kTile;
    {
      const int64_t row = r0 + line, col = c0 + piece * kPerLane;
      const int valid = row < rows ? clamp_count(cols - col) : 0;
      float values[kPerLane];
      load(x + (valid ? row * cols + col : 0), valid, vector, values);
      const hf::dev::u32x4 packed = convert<kFormat>(values, scale);
      store(out + row * cols + col, valid, vector, packed);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[line * kTilePitch + piece * 4 + i] = packed[i];
    }
    __syncthreads();
    {
      const int64_t col = c0 + line, row = r0 + piece * kPerLane;
      const int valid = col < cols ? clamp_count(rows - row) : 0;
      hf::dev::u32x4 packed = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const uint32_t word = tile[(piece * kPerLane + i) * kTilePitch + line / 4];
        packed[i / 4] |= (word >> (8 * (line % 4)) & 0xFFu) << (8 * (i % 4));
      }
      store(out_t + col * rows + row, valid, vector_t, packed);
    }
    __syncthreads();
  }
}

int blocks_for(int64_t work) {
  return static_cast<int>(work < 1 ? 1 : work > kMaxBlocks ? kMaxBlocks : work);
}

struct Call {
  const Input* x;
  int64_t rows, cols, count;
  uint8_t* out;
  uint8_t* out_t;
  float* inv_scale;
  uint32_t* amax;
  hipStream_t stream;
};

template <Format kFormat>
void launch(const Call& call) {
  HF_HIP(hipMemsetAsync(call.amax, 0, sizeof(uint32_t), call.stream));
  const bool vector_in = hf::aligned_to(call.x, 16);
  if (call.count) {
    const int64_t per_block = static_cast<int64_t>(kThreads) * kVector;
    hf::launch(amax_kernel, {blocks_for((call.count + per_block - 1) / per_block), kThreads, 0, call.stream}, call.x,
               call.count, vector_in, call.amax);
  }
  if (call.out_t) {
    // Rows start aligned only if a row is a whole number of 16-byte pieces.
    const bool vector = vector_in && hf::aligned_to(call.out, 16) && call.cols % kPerLane == 0;
    const bool vector_t = hf::aligned_to(call.out_t, 16) && call.rows % kPerLane == 0;
    const int64_t tiles = ((call.rows + kTile - 1) / kTile) * ((call.cols + kTile - 1) / kTile);
    hf::launch(cast_transpose_kernel<kFormat>, {blocks_for(tiles), kThreads, 0, call.stream}, call.x, call.rows, call.cols,
               vector, vector_t, call.amax, call.out, call.out_t, call.inv_scale);
  } else {
    const int64_t per_block = static_cast<int64_t>(kThreads) * kPerLane;
    hf::launch(cast_kernel<kFormat>, {blocks_for((call.count + per_block - 1) / per_block), kThreads, 0, call.stream},
               call.x, call.count, vector_in && hf::aligned_to(call.out, 16), call.amax, call.out, call.inv_scale);
  }
}

}  // namespace

void fp8_quant_tensorwise_out(hf::Tensor out, hf::OptionalTensor out_t, hf::Tensor inv_scale, hf::Tensor workspace,
                              hf::Tensor x, hipStream_t stream) {
  HF_CHECK_ARCH(x, HF_ARCHS);
  const bool fnuz = hf::has_fnuz(x);
  hf::check_numbers(x, "x", kInputDtype);
  HF_CHECK(out.is_contiguous() && out.numel() == x.numel(), "out must be contiguous with as many elements as x (",
           x.numel(), "); got ", out.numel());
  const bool e4m3 = out.dtype() == hf::e4m3_of(fnuz);
  HF_CHECK(e4m3 || out.dtype() == (fnuz ? HF_E5M2FNUZ : HF_E5M2), "out must be ", hf::fp8_rule(fnuz),
           ": the device converts to no other 8-bit format");
  hf::check_one(inv_scale, "inv_scale", HF_F32);
  hf::check_one(workspace, "workspace", HF_I32);
  Call call{x.data<const Input>(),      0, 0, x.numel(), out.data<uint8_t>(), nullptr,
            inv_scale.data<float>(), workspace.data<uint32_t>(), stream};
  if (out_t) {
    HF_CHECK(x.dim() == 2, "x must be [R, C] for a transposed copy; got ", x.dim(), " dimensions");
    call.rows = x.size(0);
    call.cols = x.size(1);
    hf::check_operand(*out_t, "out_t", out.dtype(), {call.cols, call.rows}, ", of out's dtype");
    call.out_t = out_t.data<uint8_t>();
  }
  // The scale is read and written between the passes over x.
  hf::check_not_in_place({inv_scale, "inv_scale"}, {{x, "x"}});
  if (e4m3) {
    launch<Format::e4m3>(call);
  } else {
    launch<Format::e5m2>(call);
  }
}
HF_EXPORT(fp8_quant_tensorwise_out);
