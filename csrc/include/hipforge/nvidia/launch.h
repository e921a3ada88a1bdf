// How every entry launches a kernel: hf::launch(kernel, {grid, threads, lds, stream}, arguments...).
#pragma once

#include "hipforge/module.h"

namespace hf {

/// Where and how large a launch is.
struct Launch {
  dim3 grid, block;  // in blocks; in threads of one
  uint32_t lds;      // dynamic shared memory, bytes
  hipStream_t stream;
  uint32_t cluster = 1;  // blocks of a cluster, along x
  // The kernel may start before its predecessor in the stream has ended. Every block of it waits (griddepcontrol.wait)
  // before it touches what earlier work writes; what it reads ahead of that, the caller has promised not to write.
  bool programmatic = false;
};

/// The smaller of two counts.
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
struct SameType { using type = T; };

/// Launches a kernel, its arguments converted to its parameters; raises LaunchError where CUDA refuses the launch.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), const Launch& at, typename SameType<Parameters>::type... arguments) {
  constexpr uint32_t kWithoutAsking = 48 * 1024, kPortableCluster = 8;
  const void* const function = reinterpret_cast<const void*>(kernel);
  if (at.lds > kWithoutAsking)
    HF_HIP(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(at.lds)));
  if (at.cluster == 1 && !at.programmatic) {
    kernel<<<at.grid, at.block, at.lds, at.stream>>>(arguments...);
    HF_HIP(hipGetLastError());
    return;
  }
  if (at.cluster > kPortableCluster)
    HF_HIP(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {at.grid, at.block, at.lds, at.stream, attributes, 0};
  if (at.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {at.cluster, 1, 1};
  }
  if (at.programmatic) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  void* addresses[] = {&arguments...};
  HF_HIP(cudaLaunchKernelExC(&config, function, addresses));
}

}  // namespace hf
