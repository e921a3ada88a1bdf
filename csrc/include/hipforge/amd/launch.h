// How every entry launches a kernel: hf::launch(kernel, {grid, threads, lds, stream}, arguments...).
#pragma once

#include "hipforge/module.h"

namespace hf {

/// Where and how large a launch is.
struct Launch {
  dim3 grid, block;  // in work-groups; in work-items of one
  uint32_t lds;      // dynamic, bytes
  hipStream_t stream;
};

template <class T>
struct SameType { using type = T; };

/// Launches a kernel, its arguments converted to its parameters; raises LaunchError where HIP refuses the launch.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), const Launch& at, typename SameType<Parameters>::type... arguments) {
  kernel<<<at.grid, at.block, at.lds, at.stream>>>(arguments...);
  HF_HIP(hipGetLastError());
}

}  // namespace hf
