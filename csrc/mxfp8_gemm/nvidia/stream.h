// What sm_90's MX-FP8 kernels share: asynchronous copies, programmatic launches, conversions, products and rare scales.
#pragma once

#include "hipforge/device/hip.h"

namespace hf {

constexpr int kMostShared = 227 * 1024;  // bytes of shared memory that a block can have

/// Copies 16 bytes to shared memory, of which `bytes` are read and the rest are zeros.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
/// Asks for bytes, a multiple of 16 from one on, to come to L2; nothing waits for them.
__device__ __forceinline__ void ask_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
/// Copies 4 bytes, which other copies of the same 32 may find in L1, to an address in shared memory.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_word_async(void* to, const void* from) {
  copy_word_async(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from);
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
/// Waits until at most GROUPS of the groups that this thread committed are under way.
template <int GROUPS>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }

/// A value that is computed once and kept: the compiler would compute it again where it is used, in every step.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ const uint8_t* kept(const uint8_t* address) {
  asm volatile("" : "+l"(address));
  return address;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/// Shared memory by address; not moved past barriers.
template <class T>
__device__ __forceinline__ T load_shared(uint32_t address);
template <>
__device__ __forceinline__ uint32_t load_shared<uint32_t>(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
template <>
__device__ __forceinline__ uint2 load_shared<uint2>(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
template <>
__device__ __forceinline__ uint4 load_shared<uint4>(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
/// 1, 2 or 4 words side by side.
template <int COUNT>
__device__ __forceinline__ void load_words(uint32_t (&to)[COUNT], uint32_t address) {
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
  if constexpr (COUNT == 4) {
    const uint4 v = load_shared<uint4>(address);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (COUNT == 2) {
    const uint2 v = load_shared<uint2>(address);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = load_shared<uint32_t>(address);
  }
}
/// A launch after this one in the stream may start, where it was made as a programmatic one.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
/// Waits until the launch before this one has ended and its results are visible; returns at once in an ordinary launch.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Converts four e4m3 bytes to two pairs of f16.
__device__ __forceinline__ void halves_of(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high) : "r"(bytes));
}

/// d += a b, 16 x 16 by 16 x 8, f16 with float32 sums.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// sum 2^(a - 127) 2^(b - 127) for e8m0 bytes, right where a factor alone would overflow; NaN where a byte is 255.
__device__ __noinline__ float scaled(float sum, uint32_t a, uint32_t b) {
  if (a == 255 || b == 255) return __int_as_float(0x7fc00000);
  const int exponent = static_cast<int>(a + b) - 254, half = exponent >> 1;
  return sum * ldexpf(1.f, half) * ldexpf(1.f, exponent - half);
}

}  // namespace hf
