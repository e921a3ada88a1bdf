#pragma once
#include "aiter_tensor.h"

// out[i][j] = factor * x[i][j] (+ bias[j]); `beyond` elements more than a row has are read, to plant a fault.
__global__ void scale_rows(float* out, const float* x, const float* bias, float factor, int64_t columns, int64_t stride) {
  for (int64_t j = threadIdx.x; j < columns; j += blockDim.x)
    out[blockIdx.x * columns + j] = factor * x[blockIdx.x * stride + j] + (bias ? bias[j] : 0.f);
}

inline void launch_scale_rows(const aiter_tensor_t& out, const aiter_tensor_t& x, const aiter_tensor_t* bias, float factor,
                              int64_t beyond, hipStream_t stream) {
  AITER_CHECK(x.dtype_ == AITER_DTYPE_fp32 && x.ndim == 2, "x must be float32 of two dimensions");
  AITER_CHECK(x.device_id >= 0, "x must be on a GPU");
  scale_rows<<<dim3(x.shape[0]), dim3(64), 0, stream>>>((float*)out.ptr, (const float*)x.ptr,
                                                        bias ? (const float*)bias->ptr : nullptr, factor,
                                                        x.shape[1] + beyond, x.strides[0]);
  if (hipGetLastError() != hipSuccess) aiter_detail::fatal("the launch failed");
}
