// HIP's older bfloat16 type for nvcc: the one of csrc/hip_headers, with CUDA's conversions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

static inline __host__ __device__ unsigned short hip_bf16_bits_of_(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
static inline __host__ __device__ unsigned short hip_bf16_truncated_(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rz(value));
}
static inline __host__ __device__ float hip_bf16_float_of_(unsigned short bits) {
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

#include "../../../../../hip_headers/hip/hip_bfloat16.h"
