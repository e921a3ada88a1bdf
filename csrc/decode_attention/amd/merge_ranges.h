// The end of a work-group whose waves had different keys: adds up their statistics and sums through LDS, in a fixed order.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "work.h"
#include "query.h"

namespace hf::decode_attention {

/// Adds up the ranges of a work-group in range 0, (0 + 2) + (1 + 3), and sets each row's sums. `parts` waves share a range;
/// every wave calls it.
template <class AnyWave>
__device__ void merge_ranges(AnyWave& wave, uint32_t parts, uint32_t ranges, uint32_t range, uint32_t part, uint8_t* lds,
                             float& total, float& shifted) {
  const uint32_t lane = dev::lane_index();
  total = column_sum(wave.total[0] + wave.total[1]);
  shifted = column_sum(wave.shifted[0] + wave.shifted[1]);
  if (ranges == 1) return;
  using Statistics = dev::f32x4;
  auto* statistics = reinterpret_cast<Statistics*>(lds) + lane % kBlockM;
  __syncthreads();  // the slots are read
  if (part == 0 && lane < kBlockM) statistics[range * kBlockM] = Statistics{wave.maximum, total, shifted, 0.f};
  __syncthreads();
  float largest = -__builtin_inff();
  for (uint32_t i = 0; i < ranges; ++i) largest = __builtin_fmaxf(largest, statistics[i * kBlockM][0]);
  const float base = largest == -__builtin_inff() ? 0.f : largest;
  const float keep = __builtin_amdgcn_exp2f(wave.maximum - base);
  wave.maximum = largest;
  total = shifted = 0.f;
  for (uint32_t i = 0; i < ranges; ++i) {
    const Statistics one = statistics[i * kBlockM];
    const float weight = __builtin_amdgcn_exp2f(one[0] - base);
    total += weight * one[1];
    shifted += weight * one[2];
  }
  constexpr int kCount = sizeof(wave.acc) / sizeof(dev::f32x4);
#pragma unroll
  for (int j = 0; j < kCount; ++j) wave.acc[j] *= keep;
  for (uint32_t half = ranges / 2; half > 0; half /= 2) {
    __syncthreads();  // statistics, and the sums of the step before, are read
    auto* sums = reinterpret_cast<dev::f32x4*>(lds) + (range % half * parts + part) * kCount * dev::kWaveSize + lane;
    if (range >= half && range < 2 * half)
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j * dev::kWaveSize] = wave.acc[j];
    __syncthreads();
    if (range < half)
#pragma unroll
      for (int j = 0; j < kCount; ++j) wave.acc[j] += sums[j * dev::kWaveSize];
  }
}

}  // namespace hf::decode_attention
