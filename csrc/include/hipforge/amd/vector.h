// Short vectors of 32-bit registers and the scalar types that HIP's own headers may lack (hip_bf16.h, hip_fp8.h).
#pragma once

#include <cstdint>

#include "hipforge/amd/hip.h"

namespace hf::dev {

using f16 = _Float16;
using bf16 = __bf16;

template <class T, int kCount>
using Vector = T __attribute__((ext_vector_type(kCount)));

/// Sums and products of bf16 vectors have no instructions.
constexpr bool kBf16Arithmetic = false;

using f32x2 = float __attribute__((ext_vector_type(2)));
using f32x4 = float __attribute__((ext_vector_type(4)));
using u32x2 = uint32_t __attribute__((ext_vector_type(2)));
using u32x4 = uint32_t __attribute__((ext_vector_type(4)));
using i32x4 = int32_t __attribute__((ext_vector_type(4)));
using i32x8 = int32_t __attribute__((ext_vector_type(8)));
using bf16x2 = __bf16 __attribute__((ext_vector_type(2)));
using bf16x4 = __bf16 __attribute__((ext_vector_type(4)));
using bf16x8 = __bf16 __attribute__((ext_vector_type(8)));
using f16x8 = _Float16 __attribute__((ext_vector_type(8)));

// Rows of 8k bytes start at multiples of 8 only; the hardware stores 16 bytes at any such address.
typedef u32x4 u32x4_at8 __attribute__((aligned(8)));

/// Each element converted, to nearest even.
template <class To, class From>
__device__ inline To converted(From from) { return __builtin_convertvector(from, To); }

/// The nearest half, a NaN as the quiet one without payload: its bits are a result.
__device__ inline f16 stored_half(float value) { return static_cast<f16>(value); }

/// All elements `value`.
template <class V, class T>
__device__ inline V splat(T value) { return V(value); }

/// (v1, v0, v3, v2, ...) of eight, (v0, v0, v1, v1, ...) of four.
template <class V>
__device__ inline V pairs_swapped(V v) { return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6); }
template <class V>
__device__ inline auto each_twice(V v) { return __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3); }

/// The bytes of two words that a selector names, from its lowest byte up: 0 to 3 are those of `low`, 4 to 7 of `high`.
template <uint32_t kSelector>
__device__ inline uint32_t chosen_bytes(uint32_t high, uint32_t low) { return __builtin_amdgcn_perm(high, low, kSelector); }

/// 16 bytes to an address that is a multiple of 8.
__device__ inline void store_at8(void* to, u32x4 words) { *static_cast<u32x4_at8*>(to) = words; }

}  // namespace hf::dev
