// The second launch of a split-K GEMM: adds the splits in their order, so that results do not depend on timing.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/amd/vector.h"
#include "hipforge/module.h"

namespace hf::dev {

constexpr int kReduceThreads = 256;
constexpr int kReducePerThread = 4;

/// out[i] = bf16(partials[0, i] + partials[1, i] + ... [+ bias[i % n]]) for i < count, in that order; bias null for none.
/// Grid: ceil(count / (kReduceThreads kReducePerThread)).
template <int kSplits>
__global__ __launch_bounds__(kReduceThreads) void reduce_splits(bf16* out, const float* partials, uint64_t count,
                                                               const bf16* bias, uint32_t n) {
  // Slices and outputs are aligned to their elements only.
  using Four = f32x4 __attribute__((aligned(4)));
  using FourOut = bf16x4 __attribute__((aligned(2)));
  const uint64_t first = (uint64_t{blockIdx.x} * kReduceThreads + threadIdx.x) * kReducePerThread;
  if (first + kReducePerThread <= count) {
    f32x4 slices[kSplits];
#pragma unroll
    for (int s = 0; s < kSplits; ++s) slices[s] = *reinterpret_cast<const Four*>(partials + s * count + first);
    f32x4 sum = slices[0];
#pragma unroll
    for (int s = 1; s < kSplits; ++s) sum += slices[s];
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kReducePerThread; ++i) sum[i] += static_cast<float>(bias[(first + i) % n]);
    }
    *reinterpret_cast<FourOut*>(out + first) = __builtin_convertvector(sum, bf16x4);
    return;
  }
  for (uint64_t i = first; i < count; ++i) {
    float sum = partials[i];
    for (int s = 1; s < kSplits; ++s) sum += partials[s * count + i];
    if (bias != nullptr) sum += static_cast<float>(bias[i % n]);
    out[i] = static_cast<bf16>(sum);
  }
}

}  // namespace hf::dev

namespace hf {

/// Adds `k_splits` (2, 4 or 8) slices of `count` partial sums into `out`, and to each row of n outputs the bias if there is one.
inline void launch_reduce_splits(dev::bf16* out, const float* partials, int64_t count, int64_t k_splits,
                                 hipStream_t stream, const dev::bf16* bias = nullptr, int64_t n = 1) {
  const uint32_t blocks = ceil_div(count, dev::kReduceThreads * dev::kReducePerThread);
  const auto elements = static_cast<uint64_t>(count);
  const auto columns = static_cast<uint32_t>(n);
  const auto kernel = k_splits == 2 ? dev::reduce_splits<2> : k_splits == 4 ? dev::reduce_splits<4> : dev::reduce_splits<8>;
  hf::launch(kernel, {blocks, dev::kReduceThreads, 0, stream}, out, partials, elements, bias, columns);
}

}  // namespace hf
