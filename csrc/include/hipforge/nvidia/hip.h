// The language and the runtime's C API that kernels and guards use, for nvcc.
#pragma once

#include <hip/hip_runtime.h>
