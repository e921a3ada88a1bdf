// The part of HIP that the kernels use. hip/hip_runtime.h and the header that clang puts before every HIP source take most of a
// small kernel's build time. A module with "bare": true is compiled without either (and without the device libraries) and uses
// this header instead; in any other module it includes hip/hip_runtime.h.
#pragma once

#if defined(__CLANG_HIP_RUNTIME_WRAPPER_INCLUDED__)
#include <hip/hip_runtime.h>
#else

#include <stdint.h>

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
// __launch_bounds__(most threads of a work-group) or (the same, least waves per SIMD), as HIP has them.
#define HF_BOUNDS_1_(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define HF_BOUNDS_2_(threads, waves) __attribute__((amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu(waves)))
#define HF_BOUNDS_(one, two, chosen, ...) chosen
#define __launch_bounds__(...) HF_BOUNDS_(__VA_ARGS__, HF_BOUNDS_2_, HF_BOUNDS_1_, )(__VA_ARGS__)

#if defined(HF_WHOLE_HIP_API) && !defined(__HIP_DEVICE_COMPILE__)
// That header's own guard: channel descriptors of textures bring HIP's vector types, most of what the API reads.
#define HIP_INCLUDE_HIP_AMD_DETAIL_CHANNEL_DESCRIPTOR_H
#include <hip/hip_runtime_api.h>
#else

// What guards and launches need of the runtime's C API, as hip/hip_runtime_api.h declares it; a test compares the two.
// Reading that header takes a fifth of a small module's host pass. A source that calls more of the runtime defines
// HF_WHOLE_HIP_API first, and calls it in host code outside the device pass.
struct dim3 {
  uint32_t x, y, z;
  constexpr dim3(uint32_t x_ = 1, uint32_t y_ = 1, uint32_t z_ = 1) : x(x_), y(y_), z(z_) {}
};
typedef struct ihipStream_t* hipStream_t;
enum hipError_t : uint32_t { hipSuccess = 0 };
// The name of the structure, like that of the function which fills it, carries the runtime's version.
struct hipDeviceProp_tR0600 {
  alignas(8) char before[1160];
  char gcnArchName[256];
  char after[56];
};
#define hipDeviceProp_t hipDeviceProp_tR0600
#define hipGetDeviceProperties hipGetDevicePropertiesR0600

extern "C" {
hipError_t hipGetDevice(int* device);
hipError_t hipSetDevice(int device);
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device);
hipError_t hipGetLastError();
const char* hipGetErrorName(hipError_t error);
const char* hipGetErrorString(hipError_t error);
hipError_t hipMemsetAsync(void* first, int value, __SIZE_TYPE__ bytes, hipStream_t stream = nullptr);
// The compiler calls these for <<< >>>.
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, __SIZE_TYPE__ lds = 0, hipStream_t stream = nullptr);
hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, __SIZE_TYPE__ lds = 0,
                           hipStream_t stream = nullptr);
}

#endif

// threadIdx.x and its like: reading a member calls the function that the property names.
#define HF_INDEX_(name, X, Y, Z)                                    \
  struct name {                                                     \
    __device__ static uint32_t get_x() { return X; }                \
    __device__ static uint32_t get_y() { return Y; }                \
    __device__ static uint32_t get_z() { return Z; }                \
    __declspec(property(get = get_x)) uint32_t x;                   \
    __declspec(property(get = get_y)) uint32_t y;                   \
    __declspec(property(get = get_z)) uint32_t z;                   \
  }
namespace hf::dev::detail {

// The implicit arguments of a kernel begin with the grid in work-groups, three words, and the work-group in work items,
// three half words (code objects of version 5 and later).
template <class T>
__device__ inline uint32_t implicit(int index) {
  using Implicit = const __attribute__((address_space(4))) T;
  return reinterpret_cast<Implicit*>((uintptr_t)__builtin_amdgcn_implicitarg_ptr())[index];
}
HF_INDEX_(ThreadIdx, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(), __builtin_amdgcn_workitem_id_z());
HF_INDEX_(BlockIdx, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), __builtin_amdgcn_workgroup_id_z());
HF_INDEX_(BlockDim, implicit<uint16_t>(6), implicit<uint16_t>(7), implicit<uint16_t>(8));
HF_INDEX_(GridDim, implicit<uint32_t>(0), implicit<uint32_t>(1), implicit<uint32_t>(2));

}  // namespace hf::dev::detail
#undef HF_INDEX_

extern const __device__ __attribute__((weak)) hf::dev::detail::ThreadIdx threadIdx;
extern const __device__ __attribute__((weak)) hf::dev::detail::BlockIdx blockIdx;
extern const __device__ __attribute__((weak)) hf::dev::detail::BlockDim blockDim;
extern const __device__ __attribute__((weak)) hf::dev::detail::GridDim gridDim;

/// A barrier of the work-group, before which all of its loads and stores take effect.
__device__ inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

template <class T>
__device__ constexpr T min(T a, T b) { return a < b ? a : b; }
template <class T>
__device__ constexpr T max(T a, T b) { return a > b ? a : b; }

#endif
