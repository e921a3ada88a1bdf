// How hipforge/module.h reads the CUDA runtime: the stream's type, element types, and the architecture of a device.
#pragma once

#include "hipforge/host/export.h"
#include "hipforge/nvidia/vector.h"

struct __half;  // of hip_fp16.h and hip_bf16.h, which a module includes itself
struct __nv_bfloat16;

/// What kernels over hipforge/device/ are built for.
#define HF_ARCHS "sm_90"

struct hip_bfloat16;  // of <hip/hip_bfloat16.h>

namespace hf __attribute__((visibility("hidden"))) {

template <> struct HoldsElement<dev::f16> : HoldsDtype<HF_F16> {};
template <> struct HoldsElement<dev::bf16> : HoldsDtype<HF_BF16> {};
template <> struct HoldsElement<__half> : HoldsDtype<HF_F16> {};
template <> struct HoldsElement<__nv_bfloat16> : HoldsDtype<HF_BF16> {};
template <> struct HoldsElement<hip_bfloat16> : HoldsDtype<HF_BF16> {};

using StreamStruct = CUstream_st;

/// Writes the name of device `device`, as in "sm_90"; returns the runtime's error.
inline hipError_t write_arch(int device, char* text, int bytes) {
  int major = 0, minor = 0;
  hipError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == hipSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  __builtin_snprintf(text, static_cast<size_t>(bytes), "sm_%d%d", major, minor);
  return status;
}

/// Whether an architecture's fp8 is fnuz; the most shared memory that a work-group can have.
inline bool has_fnuz(const char*) { return false; }
inline int64_t group_memory(const char*) { return 227 * 1024; }

/// What messages say a device's fp8 formats are.
inline const char* fp8_rule(bool) { return "float8_e4m3fn or float8_e5m2 on sm_90"; }

}  // namespace hf
