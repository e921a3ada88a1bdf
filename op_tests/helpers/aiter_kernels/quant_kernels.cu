// static_per_tensor_quant: out = clamp(round(input / scale), -127, 127) as int8.
#include <hip/hip_bfloat16.h>
#include <hip/hip_runtime.h>

#include "kernels.h"

namespace {
__global__ void static_per_tensor_quant_kernel(
    int8_t* out, const hip_bfloat16* input, const float* scale, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = static_cast<int8_t>(fminf(fmaxf(rintf(float(input[i]) / *scale), -127.0f), 127.0f));
}
}  // namespace

hipError_t launch_static_per_tensor_quant(
    void* out, const void* input, const void* scale, int64_t count, hipStream_t stream) {
  static_per_tensor_quant_kernel<<<(count + 255) / 256, 256, 0, stream>>>(
      static_cast<int8_t*>(out), static_cast<const hip_bfloat16*>(input), static_cast<const float*>(scale), count);
  return hipGetLastError();
}
