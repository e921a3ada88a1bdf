// The instructions of decode attention's stream: copies, products, conversions, exchanges between lanes and blocks.
#pragma once

#include "stream_layout.h"

namespace hf::decode_attention {

/// Every thread of the cluster's blocks meets the others. The runtime's own functions are called without
/// cooperative_groups.h, which has three times the text of everything else and a third of the compile time.
__device__ __forceinline__ void meet_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
/// Where block `block` of the cluster has what this one has at `address`, in shared memory.
template <typename T>
__device__ __forceinline__ T* in_block(T* address, uint32_t block) {
  return static_cast<T*>(__cluster_map_shared_rank(address, block));
}

__device__ __forceinline__ void copy_word_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from),
               "r"(bytes));
}

/// d += a b, 16 x 16 by 16 x 8 with float32 sums.
template <class Element>
__device__ __forceinline__ void add_product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, dev::f16>) {
    multiply_add(d, a, b0, b1);
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two floats as a pair of elements, the first one in the low half.
template <class Element>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<Element, dev::f16>) {
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  }
  return pair;
}

/// 0xFFFF for each half of a pair that is infinite or NaN.
template <class Element>
__device__ __forceinline__ uint32_t specials(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, dev::f16> ? 0x7C00 : 0x7F80;
  return ((pair & kExponent) == kExponent ? 0xFFFF : 0) | ((pair >> 16 & kExponent) == kExponent ? 0xFFFF0000 : 0);
}

/// Loads that stay where they are written.
__device__ __forceinline__ uint2 loaded_now(const uint2* from) {
  uint2 value;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
}
__device__ __forceinline__ uint32_t loaded_now(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
__device__ __forceinline__ float loaded_now(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

/// kCount neighbouring words, by loads as wide as their place allows.
template <int kCount>
__device__ __forceinline__ void words_of(const uint32_t* from, uint32_t (&to)[kCount]) {
  constexpr int kWidth = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kCount; i += kWidth) {
    if constexpr (kWidth == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    } else if constexpr (kWidth == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from + i);
      to[i] = two.x, to[i + 1] = two.y;
    } else {
      to[i] = from[i];
    }
  }
}

/// Nibbles kOdd and kOdd + 4 of a word as elements code * scale + shift, rounded once.
template <int kOdd>
__device__ __forceinline__ uint32_t elements_of(uint32_t word, uint32_t factors, uint32_t shifts) {
  constexpr uint32_t kBias = 0x64006400;  // 1024, whose last bit is 1; a nibble at bit 4 is 16 code
  const uint32_t raised = (word & (0x000F000Fu << 4 * kOdd)) | kBias;
  uint32_t codes, elements;
  if constexpr (kOdd == 0) {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(codes) : "r"(raised), "r"(kBias));
  } else {
    constexpr uint32_t kSixteenth = 0x2C002C00, kLess = 0xD400D400;  // 1 / 16, -64
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(codes) : "r"(raised), "r"(kSixteenth), "r"(kLess));
  }
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(elements) : "r"(codes), "r"(factors), "r"(shifts));
  return elements;
}

/// The larger, or the sum, over the eight lanes that share two rows.
__device__ __forceinline__ float largest_of_row(float value) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
__device__ __forceinline__ float sum_of_row(float value) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

/// A matrix of 8 x 8 halves, of which lane 4 g + t has columns 2 t and 2 t + 1 of row g, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

/// The scale and the shift in a row's word.
__device__ __forceinline__ float2 scale_and_shift(uint32_t word) {
  dev::f16 scale, shift;
  scale.bits = static_cast<uint16_t>(word), shift.bits = static_cast<uint16_t>(word >> 16);
  return make_float2(static_cast<float>(scale), static_cast<float>(shift));
}

/// What a row's sums go with; maximum is what weights 2^(score - maximum) were taken from.
struct __align__(16) Statistics {
  float maximum, total, shifted, scale;  // scale: of V, where it has one for all keys
};

}  // namespace hf::decode_attention
