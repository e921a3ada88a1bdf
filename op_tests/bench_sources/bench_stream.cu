// Reads bytes in whole cache lines and computes nothing: what the model of time gives to reading alone.
//
//   waves:   0         1         2      ...  last      0         1     ...
//           [16 KiB]  [16 KiB]  [16 KiB]    [16 KiB]  [16 KiB]  ...            pieces in turn, or
//           [a wave's share ...][the next wave's share ...]                    one share for each
//
// A load is 1 KiB, eight lines, and 16 of them are under way before the first is waited for. The result is never stored, but
// the compiler cannot know that.
#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"
#include "hipforge/module.h"

constexpr uint32_t kLoad = 1024, kLoads = 16, kMaxWaves = 8;
constexpr int64_t kMaxBytes = int64_t{1} << 31;

#if defined(__gfx950__) || defined(__gfx942__)
__device__ inline uint32_t share_begin(uint32_t loads, uint32_t wave, uint32_t waves) {
  return static_cast<uint32_t>(uint64_t{loads} * wave / waves);
}
#endif

__global__ __launch_bounds__(kMaxWaves * 64) void bench_stream(
    [[maybe_unused]] const uint8_t* data, [[maybe_unused]] uint32_t loads, [[maybe_unused]] uint32_t waves,
    [[maybe_unused]] bool in_turn, [[maybe_unused]] uint32_t* out) {
#if defined(__gfx950__) || defined(__gfx942__)
  using namespace hf;
  const uint32_t lane = threadIdx.x % dev::kWaveSize;
  const uint32_t wave = blockIdx.x * waves + dev::uniform(threadIdx.x / dev::kWaveSize), all = gridDim.x * waves;
  const uint32_t begin = in_turn ? wave * kLoads : share_begin(loads, wave, all);
  const uint32_t end = in_turn ? loads : share_begin(loads, wave + 1, all), stride = in_turn ? all * kLoads : kLoads;
  const dev::Buffer buffer = dev::make_buffer(data, end * kLoad);  // past a wave's share nothing is read
  dev::u32x4 any = {};
  for (uint32_t at = begin; at < end; at += stride) {
    dev::u32x4 loaded[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) loaded[i] = dev::load_b128(buffer, lane * sizeof(dev::u32x4), (at + i) * kLoad);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) any |= loaded[i];
  }
  if ((any[0] & any[1] & any[2] & any[3]) == 0x5EED5EED) *out = any[0];
#endif
}

/// Reads `data`, a multiple of 1024 bytes of zeros, by `groups` work-groups of `waves` waves.
void bench_stream_out(hf::Tensor out, hf::Tensor data, int64_t groups, int64_t waves, bool in_turn, hipStream_t stream) {
  HF_CHECK_ARCH(data, "gfx950", "gfx942");
  HF_CHECK(data.is_contiguous() && data.numel() % kLoad == 0 && data.numel() < kMaxBytes,
           "data must be contiguous, a multiple of 1024 bytes below 2^31; got ", data);
  HF_CHECK(waves >= 1 && waves <= kMaxWaves, "waves must be between 1 and ", kMaxWaves, "; got ", waves);
  bench_stream<<<static_cast<uint32_t>(groups), static_cast<uint32_t>(waves) * hf::dev::kWaveSize, 0, stream>>>(
      data.data<uint8_t>(), static_cast<uint32_t>(data.numel() / kLoad), static_cast<uint32_t>(waves), in_turn,
      out.data<uint32_t>());
  HF_HIP(hipGetLastError());
}
HF_EXPORT(bench_stream_out);
