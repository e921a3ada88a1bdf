// Where a consumer of the skinny GEMM leaves its sums: a slice of the workspace, or D through packed fp16 atomics.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"

namespace hf::skinny {

using dev::f32x4;
using Half2 = _Float16 __attribute__((ext_vector_type(2)));

struct Sink {
  _Float16* out;
  float* slice;
  float scale;
  uint32_t m, n;

  __device__ void add_pair(uint64_t at, float first, float second) const {
    const Half2 pair = {static_cast<_Float16>(first * scale), static_cast<_Float16>(second * scale)};
    __builtin_amdgcn_global_atomic_fadd_v2f16(
        (__attribute__((address_space(1))) Half2*)(out + at), pair);  // NOLINT: address spaces need a C cast
  }

  /// Four neighbouring columns of one row; `column` is a multiple of 4.
  __device__ void put_columns(f32x4 sums, uint32_t row, uint32_t column) const {
    if (row >= m) return;
    const uint64_t at = uint64_t{row} * n + column;
    if (slice) {
      if (n % 4 == 0) {
        if (column < n) *reinterpret_cast<f32x4*>(slice + at) = sums;
        return;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (column + c < n) slice[at + c] = sums[c];
      return;
    }
    if (column < n) add_pair(at, sums[0], sums[1]);
    if (column + 2 < n) add_pair(at + 2, sums[2], sums[3]);
  }

  /// Rows `row` and `row` + 1 of one column; neighbouring lanes hold neighbouring columns.
  __device__ void put_rows(float first, float second, uint32_t row, uint32_t column, uint32_t lane) const {
    const uint64_t at = uint64_t{row} * n + column;
    if (slice) {
      if (column < n && row < m) slice[at] = first;
      if (column < n && row + 1 < m) slice[at + n] = second;
      return;
    }
    // The even lane takes the first row of both columns, the odd lane the second.
    const bool odd = lane & 1;
    constexpr int kSwapPairs = 1 | 0 << 2 | 3 << 4 | 2 << 6;
    const float other = __builtin_bit_cast(
        float, __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int32_t, odd ? first : second), kSwapPairs, 0xF, 0xF, true));
    if (column >= n || row + odd >= m) return;
    if (odd)
      add_pair(at + n - 1, other, second);
    else
      add_pair(at, first, other);
  }
};

constexpr int kReduceThreads = 256;
constexpr int kReducePerThread = 4;

/// out[i] = fp16([out[i] +] scale (partials[0, i] + partials[1, i] + ...)) for i < count, in that order, in fp32.
/// Grid: ceil(count / (kReduceThreads kReducePerThread)).
__global__ __launch_bounds__(kReduceThreads) inline void reduce_partials(_Float16* out, const float* partials,
                                                                         const float* scale, uint64_t count,
                                                                         uint32_t slices, bool accumulate) {
  // Slices and outputs are aligned to their elements only.
  using Four = f32x4 __attribute__((aligned(4)));
  using FourHalves = _Float16 __attribute__((ext_vector_type(4)));
  using FourOut = FourHalves __attribute__((aligned(2)));
  const uint64_t first = (uint64_t{blockIdx.x} * kReduceThreads + threadIdx.x) * kReducePerThread;
  if (first + kReducePerThread <= count) {
    f32x4 sum = *reinterpret_cast<const Four*>(partials + first);
    for (uint32_t s = 1; s < slices; ++s) sum += *reinterpret_cast<const Four*>(partials + s * count + first);
    sum *= *scale;
    auto* at = reinterpret_cast<FourOut*>(out + first);
    if (accumulate) sum += __builtin_convertvector(static_cast<FourHalves>(*at), f32x4);
    *at = __builtin_convertvector(sum, FourHalves);
    return;
  }
  for (uint64_t i = first; i < count; ++i) {
    float sum = partials[i];
    for (uint32_t s = 1; s < slices; ++s) sum += partials[s * count + i];
    sum *= *scale;
    out[i] = static_cast<_Float16>(accumulate ? static_cast<float>(out[i]) + sum : sum);
  }
}

}  // namespace hf::skinny
