#include <hip/hip_runtime.h>

#include "hipforge/device/launch.h"
#include "hipforge/module.h"

__global__ void scale_rows(float* out, const float* x, const float* bias, float factor, int64_t columns, int64_t stride) {
  for (int64_t j = threadIdx.x; j < columns; j += blockDim.x)
    out[blockIdx.x * columns + j] = factor * x[blockIdx.x * stride + j] + (bias ? bias[j] : 0.f);
}

// The arguments in the order that the stub has: the output is the third.
void scale(double factor, hf::Tensor x, hf::Tensor out, hf::OptionalTensor bias, hipStream_t stream) {
  HF_CHECK(x.dim() == 2, "x must be [M, N]; got ", x.dim(), " dimensions");
  hf::launch(scale_rows, {dim3(x.size(0)), dim3(64), 0, stream}, out.data<float>(), x.data<float>(),
             bias.data<float>(), float(factor), x.size(1), x.stride(0));
}
HF_EXPORT(scale);
