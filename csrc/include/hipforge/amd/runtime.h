// How hipforge/module.h reads the HIP runtime: the stream's type, element types, and the architecture of a device.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/host/export.h"

struct __half;  // of hip_fp16.h, hip_bf16.h and hip_bfloat16.h, which a module includes itself
struct __hip_bfloat16;
struct hip_bfloat16;

/// What kernels over hipforge/device/ are built for.
#define HF_ARCHS "gfx950", "gfx942"

namespace hf __attribute__((visibility("hidden"))) {

template <> struct HoldsElement<_Float16> : HoldsDtype<HF_F16> {};
template <> struct HoldsElement<__bf16> : HoldsDtype<HF_BF16> {};
template <> struct HoldsElement<__half> : HoldsDtype<HF_F16> {};
template <> struct HoldsElement<__hip_bfloat16> : HoldsDtype<HF_BF16> {};
template <> struct HoldsElement<hip_bfloat16> : HoldsDtype<HF_BF16> {};

using StreamStruct = ihipStream_t;

#if !defined(HF_DEVICE_PASS)

/// Writes the name of device `device`, gcnArchName up to its ':', as in "gfx950"; returns the runtime's error.
inline hipError_t write_arch(int device, char* text, int bytes) {
  hipDeviceProp_t properties;
  const hipError_t status = hipGetDeviceProperties(&properties, device);
  if (status != hipSuccess) return status;
  for (int i = 0; i + 1 < bytes && properties.gcnArchName[i] && properties.gcnArchName[i] != ':'; ++i)
    text[i] = properties.gcnArchName[i];
  return status;
}

#endif

/// Whether an architecture's fp8 is fnuz; the most LDS that a work-group can have.
inline bool has_fnuz(const char* arch) { return __builtin_strcmp(arch, "gfx942") == 0; }
inline int64_t group_memory(const char* arch) { return (has_fnuz(arch) ? 64 : 160) * 1024; }

/// What messages say a device's fp8 formats are.
inline const char* fp8_rule(bool fnuz) {
  return fnuz ? "float8_e4m3fnuz or float8_e5m2fnuz on gfx942" : "float8_e4m3fn or float8_e5m2 on gfx950";
}

}  // namespace hf
