// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 in tiles on sm_90, for any M. wgmma_tile.h has the tile.
//
// Bytes moved: (M N / kColumns + M N / kRows) K (1 + 1/32) from L2, 2 M N written. Bound: 2 multiplications in float32 for
// each sum of 32 products, 1/16 of the fp8 rate.
#pragma once

#include "hipforge/device/vector.h"
#include "wgmma_tile.h"

namespace hf::wgmma_tiles {

struct Problem {
  dev::bf16* out;
  const uint8_t *x, *xs, *w, *ws;
  const dev::bf16* bias;
  int m, n, k;
};

/// Rows of X from m0 on, then rows of W from n0 on.
template <class L>
struct Dense {
  const Problem& p;
  int m0, n0;

  __device__ __forceinline__ Line payload(int line) const {
    const bool of_x = line < L::kRows;
    const int row = of_x ? m0 + line : n0 + line - L::kRows;
    const bool there = row < (of_x ? p.m : p.n);
    return {(of_x ? p.x : p.w) + (there ? size_t(row) * p.k : 0), there};
  }
  __device__ __forceinline__ const uint8_t* scales(int line) const {
    const bool of_x = line < L::kRows;
    const int row = of_x ? min(m0 + line, p.m - 1) : min(n0 + line - L::kRows, p.n - 1);
    return (of_x ? p.xs : p.ws) + size_t(row) * (p.k / kBlock);
  }
};

template <class L>
__global__ void __launch_bounds__(L::kThreads, 1) wgmma_tiles(const Problem p) {
  extern __shared__ uint8_t unaligned[];
  const Place<L> place;
  const Dense<L> lines{p, static_cast<int>(blockIdx.x) * L::kRows, static_cast<int>(blockIdx.y) * L::kColumns};
  let_next_start();
  wait_for_predecessor();
  float sums[L::kWidth / 2];
  multiply_tile<L>(lines, p.k, p.k % kStep == 0, unaligned, place, sums);
#pragma unroll
  for (int i = 0; i < L::kWidth / 2; ++i) {
    const int row = lines.m0 + place.row(i), column = lines.n0 + place.group_n * L::kWidth + place.column(i);
    if (row < p.m && column < p.n)
      p.out[size_t(row) * p.n + column] = static_cast<dev::bf16>(sums[i] + (p.bias ? static_cast<float>(p.bias[column]) : 0.f));
  }
}

}  // namespace hf::wgmma_tiles
