// CUDA's half precision under HIP's header name.
#pragma once
#include <cuda_bf16.h>
