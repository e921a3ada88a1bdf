// silu_and_mul: out[t, i] = silu(input[t, i]) * input[t, d + i]; one work-group per token.
#include <hip/hip_bf16.h>
#include <hip/hip_runtime.h>

#include "kernels.h"

namespace {
__global__ void silu_and_mul_kernel(__hip_bfloat16* out, const __hip_bfloat16* input, int d) {
  const __hip_bfloat16* row = input + int64_t(blockIdx.x) * 2 * d;
  for (int i = threadIdx.x; i < d; i += blockDim.x) {
    const float x = __bfloat162float(row[i]), y = __bfloat162float(row[d + i]);
    out[int64_t(blockIdx.x) * d + i] = __float2bfloat16(x / (1.0f + expf(-x)) * y);
  }
}
}  // namespace

hipError_t launch_silu_and_mul(void* out, const void* input, int tokens, int d, hipStream_t stream) {
  silu_and_mul_kernel<<<tokens, 256, 0, stream>>>(
      static_cast<__hip_bfloat16*>(out), static_cast<const __hip_bfloat16*>(input), d);
  return hipGetLastError();
}
