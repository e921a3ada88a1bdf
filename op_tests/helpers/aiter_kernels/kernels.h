// What the binding calls; sources with kernels include no torch header.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>

hipError_t launch_silu_and_mul(void* out, const void* input, int tokens, int d, hipStream_t stream);
hipError_t launch_rms_norm(
    void* out, const void* input, const void* weight, float epsilon, int tokens, int hidden, hipStream_t stream);
hipError_t launch_static_per_tensor_quant(
    void* out, const void* input, const void* scale, int64_t count, hipStream_t stream);
