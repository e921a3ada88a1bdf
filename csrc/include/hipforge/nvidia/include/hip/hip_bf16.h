// CUDA's bfloat16 under HIP's header name.
#pragma once
#include <cuda_bf16.h>

using __hip_bfloat16 = __nv_bfloat16;
using __hip_bfloat162 = __nv_bfloat162;
