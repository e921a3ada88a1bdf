// Sums of parts that the waves of a work-group hold in registers, in a fixed order through LDS.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"

namespace hf::dev {

/// Leaves what a wave holds in LDS, for all waves of the work-group to read.
template <int kTiles>
__device__ __forceinline__ void leave_part(f32x4* sums, const f32x4 (&acc)[kTiles], uint32_t part, uint32_t lane) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) sums[(part * kTiles + t) * kWaveSize + lane] = acc[t];
  __syncthreads();
}

/// The sum of tile t over the parts, in their order; all are loaded before the first is waited for.
template <int kParts, int kTiles>
__device__ __forceinline__ f32x4 sum_of_tile(const f32x4* sums, uint32_t t, uint32_t lane) {
  f32x4 loaded[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) loaded[i] = sums[(i * kTiles + t) * kWaveSize + lane];
#pragma unroll
  for (int i = 1; i < kParts; ++i) loaded[0] += loaded[i];
  return loaded[0];
}

/// A wave's tiles of add_parts for a known number of parts.
template <int kParts, int kTiles, class Store>
__device__ __forceinline__ void add_known_parts(const f32x4* sums, uint32_t part, uint32_t lane, Store store) {
  for (uint32_t t = part; t < kTiles; t += kParts) store(t, sum_of_tile<kParts, kTiles>(sums, t, lane));
}

/// Adds what the waves of `parts` hold, in their order, through LDS, and calls store(t, sum) for every tile t in one of
/// them. `part` and the results are those of the calling wave; all waves of the work-group call it.
template <int kTiles, class Store>
__device__ __forceinline__ void add_parts(f32x4* sums, const f32x4 (&acc)[kTiles], uint32_t part, uint32_t parts,
                                          uint32_t lane, Store store) {
  if (parts == 1) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) store(t, acc[t]);
    return;
  }
  leave_part(sums, acc, part, lane);
  // A wave adds up one tile, or several where there are fewer waves.
  if (parts == 2) return add_known_parts<2, kTiles>(sums, part, lane, store);
  if (parts == 4) return add_known_parts<4, kTiles>(sums, part, lane, store);
  if (parts == 8) return add_known_parts<8, kTiles>(sums, part, lane, store);
  for (uint32_t t = part; t < kTiles; t += parts) {
    f32x4 total = sums[t * kWaveSize + lane];
    for (uint32_t i = 1; i < parts; ++i) total += sums[(i * kTiles + t) * kWaveSize + lane];
    store(t, total);
  }
}

}  // namespace hf::dev
