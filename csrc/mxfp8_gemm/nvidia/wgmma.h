// wgmma on sm_90: 64 rows of A by N of B, from the 128-byte swizzle of tma.h. Products are started, not awaited.
#pragma once

#include "tma.h"

namespace hf {

__device__ __forceinline__ void order_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most GROUPS of the groups of products that this warp committed are under way.
template <int GROUPS>
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory"); }
/// The same; sums that are read afterwards are not moved ahead of it.
template <int GROUPS, int COUNT>
__device__ __forceinline__ void wait_products(float (&sums)[COUNT]) {
  wait_products<GROUPS>();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

/// What a product reads of lines of 128 bytes in the 128-byte swizzle: groups of 8 lines are 1,024 bytes apart. 16 bytes further in
/// each line are 1 more.
__device__ __forceinline__ uint64_t tile_at(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// The registers of N / 2 sums in an instruction's text, and as its operands.
#define HF_TEXT_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HF_TEXT_64 HF_TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HF_TEXT_128 HF_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HF_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HF_SUMS_32(i) HF_SUMS_8(i), HF_SUMS_8(i + 8)
#define HF_SUMS_64(i) HF_SUMS_32(i), HF_SUMS_32(i + 16)
#define HF_SUMS_128(i) HF_SUMS_64(i), HF_SUMS_64(i + 32)

/// d = A B^T on e4m3 for 32 k, both in shared memory, added to d where `more`. d is named as an operand too, so that a product takes the registers of the last
/// one and starts when its sums have been read.
template <int N>
struct CodeProduct;

#define HF_PRODUCTS(N, A, B, C)                                                                                             \
  template <>                                                                                                              \
  struct CodeProduct<N> {                                                                                                  \
    static __device__ __forceinline__ void start(float (&d)[N / 2], uint64_t a, uint64_t b, int more = 0) {                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {"        \
                   HF_TEXT_##N "}, %" #A ", %" #B ", p, 1, 1;}"                                                            \
                   : HF_SUMS_##N(0) : "l"(a), "l"(b), "r"(more));                                                                     \
    }                                                                                                                      \
  };
HF_PRODUCTS(32, 16, 17, 18)
HF_PRODUCTS(64, 32, 33, 34)
HF_PRODUCTS(128, 64, 65, 66)
#undef HF_PRODUCTS

}  // namespace hf
