// The part of <cuda_runtime.h> that kernels use, which nvcc puts before every source of a module with "bare": true. Reading all
// of it takes most of a small kernel's build time: its mathematics and textures are a megabyte of text for each of five passes.
// Functions with a body come from CUDA's own headers, below; builtins.h declares those that nvcc knows by name.
#pragma once

#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__  // which crt/sm_80_rt.h asks for
#include <cuda_runtime_api.h>
#include <device_launch_parameters.h>
#include <stddef.h>
#include <vector_functions.h>

#include "builtins.h"

// What the code that nvcc makes of a launch calls.
extern "C" {
unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block = 1, size_t shared = 0, struct CUstream_st* stream = 0);
#if CUDART_VERSION >= 12010
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream);
#endif
}
#if CUDART_VERSION >= 12010
static inline cudaError_t __cudaLaunchKernel_helper(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                                    cudaStream_t stream) {
  return __cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
#endif

// min and max: of integers of one sign, or unsigned where one is. In kernels only; CUDA has them on the host too.
static inline __device__ float min(float a, float b) { return fminf(a, b); }
static inline __device__ float max(float a, float b) { return fmaxf(a, b); }
#define HF_LEAST_AND_MOST_(A, B, T, prefix, cast)                                                                         \
  static inline __device__ T min(A a, B b) { return static_cast<T>(prefix##min(static_cast<cast>(a), static_cast<cast>(b))); } \
  static inline __device__ T max(A a, B b) { return static_cast<T>(prefix##max(static_cast<cast>(a), static_cast<cast>(b))); }
HF_LEAST_AND_MOST_(unsigned int, unsigned int, unsigned int, u, unsigned int)
HF_LEAST_AND_MOST_(int, unsigned int, unsigned int, u, unsigned int)
HF_LEAST_AND_MOST_(unsigned int, int, unsigned int, u, unsigned int)
HF_LEAST_AND_MOST_(long, long, long, ll, long long)
HF_LEAST_AND_MOST_(unsigned long, unsigned long, unsigned long, ull, unsigned long long)
HF_LEAST_AND_MOST_(long, unsigned long, unsigned long, ull, unsigned long long)
HF_LEAST_AND_MOST_(unsigned long, long, unsigned long, ull, unsigned long long)
HF_LEAST_AND_MOST_(long long, long long, long long, ll, long long)
HF_LEAST_AND_MOST_(unsigned long long, unsigned long long, unsigned long long, ull, unsigned long long)
HF_LEAST_AND_MOST_(long long, unsigned long long, unsigned long long, ull, unsigned long long)
HF_LEAST_AND_MOST_(unsigned long long, long long, unsigned long long, ull, unsigned long long)
#undef HF_LEAST_AND_MOST_

#include <device_atomic_functions.h>
#include <sm_20_atomic_functions.h>
#include <sm_20_intrinsics.h>
#include <sm_30_intrinsics.h>
#include <sm_32_intrinsics.h>
#include <crt/sm_80_rt.h>
#include <crt/sm_90_rt.h>

#undef __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
