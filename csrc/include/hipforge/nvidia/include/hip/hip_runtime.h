// <hip/hip_runtime.h> for nvcc: HIP's names mean CUDA's, as in HIP's own headers for NVIDIA, so that a plain HIP source is
// built for both vendors. CUDA has the language itself (threadIdx, __syncthreads, __shfl_*_sync, atomics, <<< >>>).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

using hipStream_t = cudaStream_t;
using hipEvent_t = cudaEvent_t;
using hipError_t = cudaError_t;
using hipDeviceProp_t = cudaDeviceProp;
using hipMemcpyKind = cudaMemcpyKind;
constexpr hipError_t hipSuccess = cudaSuccess;
constexpr hipMemcpyKind hipMemcpyHostToDevice = cudaMemcpyHostToDevice, hipMemcpyDeviceToHost = cudaMemcpyDeviceToHost,
                        hipMemcpyDeviceToDevice = cudaMemcpyDeviceToDevice, hipMemcpyDefault = cudaMemcpyDefault;

#define hipGetDevice cudaGetDevice
#define hipSetDevice cudaSetDevice
#define hipGetDeviceCount cudaGetDeviceCount
#define hipGetDeviceProperties cudaGetDeviceProperties
#define hipGetLastError cudaGetLastError
#define hipPeekAtLastError cudaPeekAtLastError
#define hipGetErrorName cudaGetErrorName
#define hipGetErrorString cudaGetErrorString
#define hipMemsetAsync cudaMemsetAsync
#define hipMemcpyAsync cudaMemcpyAsync
#define hipMemcpy cudaMemcpy
#define hipMalloc cudaMalloc
#define hipFree cudaFree
#define hipDeviceSynchronize cudaDeviceSynchronize
#define hipStreamSynchronize cudaStreamSynchronize
#define hipEventCreate cudaEventCreate
#define hipEventRecord cudaEventRecord
#define hipEventSynchronize cudaEventSynchronize
#define hipEventElapsedTime cudaEventElapsedTime
#define hipEventDestroy cudaEventDestroy
#define hipFuncSetAttribute cudaFuncSetAttribute
#define hipFuncAttributeMaxDynamicSharedMemorySize cudaFuncAttributeMaxDynamicSharedMemorySize
#define hipLaunchKernelGGL(kernel, grid, block, shared, stream, ...) kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)

// HIP's exchange between lanes, which has no mask: the lanes that are active take part.
#define HF_SHUFFLE_(name, Lane)                                                 \
  template <class T>                                                            \
  __device__ inline T name(T value, Lane lane, int width = 32) {                \
    return name##_sync(__activemask(), value, lane, width);                     \
  }
HF_SHUFFLE_(__shfl, int)
HF_SHUFFLE_(__shfl_up, unsigned)
HF_SHUFFLE_(__shfl_down, unsigned)
HF_SHUFFLE_(__shfl_xor, int)
#undef HF_SHUFFLE_
