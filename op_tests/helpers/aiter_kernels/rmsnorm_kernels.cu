// rms_norm: out = input / sqrt(mean(input^2) + epsilon) * weight, in half precision; one work-group per token.
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#include "kernels.h"

namespace {
constexpr int BLOCK = 256;

__global__ void rms_norm_kernel(half* out, const half* input, const half* weight, float epsilon, int hidden) {
  __shared__ float sums[BLOCK];
  const half* row = input + int64_t(blockIdx.x) * hidden;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += BLOCK) {
    const float x = __half2float(row[i]);
    sum += x * x;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int step = BLOCK / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    __syncthreads();
  }
  const float scale = rsqrtf(sums[0] / hidden + epsilon);
  for (int i = threadIdx.x; i < hidden; i += BLOCK) {
    const float y = __half2float(row[i]) * scale * __half2float(weight[i]);
    out[int64_t(blockIdx.x) * hidden + i] = __float2half(y);
  }
}
}  // namespace

hipError_t launch_rms_norm(
    void* out, const void* input, const void* weight, float epsilon, int tokens, int hidden, hipStream_t stream) {
  rms_norm_kernel<<<tokens, BLOCK, 0, stream>>>(
      static_cast<half*>(out), static_cast<const half*>(input), static_cast<const half*>(weight), epsilon, hidden);
  return hipGetLastError();
}
