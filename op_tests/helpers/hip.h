// The part of HIP that kernels of tests use, in place of hip/hip_runtime.h, which takes nine tenths of their build time.
#pragma once
#include "hipforge/amd/hip.h"

#define __constant__ __attribute__((constant))
#define __managed__ __attribute__((managed))

__device__ inline int atomicAdd(int* at, int value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned value) {
  __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return expected;
}
__device__ inline void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
__device__ inline void __threadfence_block() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"); }
