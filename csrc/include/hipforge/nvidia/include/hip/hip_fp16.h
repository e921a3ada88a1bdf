// CUDA's half precision under HIP's header name.
#pragma once
#include <cuda_fp16.h>
