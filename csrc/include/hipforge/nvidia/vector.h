// Short vectors and 16-bit floats. nvcc has neither clang's vector types nor _Float16 on the device, so these are small
// structs with the same operators; a vector of 16 bytes is loaded and stored by one instruction.
#pragma once

#include <cstdint>

#include "hipforge/nvidia/hip.h"

namespace hf::dev {

struct bf16 {
  uint16_t bits;

  bf16() = default;
  __device__ explicit bf16(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ explicit operator float() const { return __uint_as_float(uint32_t{bits} << 16); }
};

struct f16 {
  uint16_t bits;

  f16() = default;
  __device__ explicit f16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ explicit operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

// A sum or product of two halves in fp32, rounded to half, is the correctly rounded one: 24 >= 2 * 11 + 2 bits.
__device__ inline f16 operator+(f16 a, f16 b) { return f16(static_cast<float>(a) + static_cast<float>(b)); }
__device__ inline f16 operator*(f16 a, f16 b) { return f16(static_cast<float>(a) * static_cast<float>(b)); }
// Of two bf16 too: 24 >= 2 * 8 + 2.
__device__ inline bf16 operator+(bf16 a, bf16 b) { return bf16(static_cast<float>(a) + static_cast<float>(b)); }
__device__ inline bf16 operator*(bf16 a, bf16 b) { return bf16(static_cast<float>(a) * static_cast<float>(b)); }

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T elements[kCount];

  __device__ T& operator[](int i) { return elements[i]; }
  __device__ const T& operator[](int i) const { return elements[i]; }
};

#define HF_VECTOR_OPERATOR_(op)                                                                      \
  template <class T, int kCount>                                                                     \
  __device__ inline Vector<T, kCount> operator op(Vector<T, kCount> a, const Vector<T, kCount>& b) { \
    _Pragma("unroll") for (int i = 0; i < kCount; ++i) a[i] = a[i] op b[i];                          \
    return a;                                                                                        \
  }                                                                                                  \
  template <class T, int kCount>                                                                     \
  __device__ inline Vector<T, kCount> operator op(Vector<T, kCount> a, T b) {                        \
    _Pragma("unroll") for (int i = 0; i < kCount; ++i) a[i] = a[i] op b;                             \
    return a;                                                                                        \
  }                                                                                                  \
  template <class T, int kCount>                                                                     \
  __device__ inline Vector<T, kCount> operator op(T a, Vector<T, kCount> b) {                        \
    _Pragma("unroll") for (int i = 0; i < kCount; ++i) b[i] = a op b[i];                             \
    return b;                                                                                        \
  }
HF_VECTOR_OPERATOR_(+)
HF_VECTOR_OPERATOR_(-)
HF_VECTOR_OPERATOR_(*)
HF_VECTOR_OPERATOR_(/)
#undef HF_VECTOR_OPERATOR_

using f32x2 = Vector<float, 2>;
using f32x4 = Vector<float, 4>;
using u32x2 = Vector<uint32_t, 2>;
using u32x4 = Vector<uint32_t, 4>;

/// Sums and products of bf16 vectors are instructions here, each rounded once.
constexpr bool kBf16Arithmetic = true;

namespace detail {
template <class T>
__device__ inline uint32_t pair_of(const T* elements) {
  uint32_t pair;
  __builtin_memcpy(&pair, elements, sizeof(pair));
  return pair;
}

__device__ inline uint32_t rounded_pair(bf16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline uint32_t rounded_pair(f16, float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <class To, class T, int kCount>
struct Converted;
template <class U, class T, int kCount>
struct Converted<Vector<U, kCount>, T, kCount> {
  __device__ static Vector<U, kCount> of(const Vector<T, kCount>& from) {
    Vector<U, kCount> to;
    if constexpr (kCount % 2 == 0 && sizeof(U) == 2 && __is_same(T, float)) {  // two by one instruction
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint32_t pair = rounded_pair(U{}, from[i], from[i + 1]);
        __builtin_memcpy(to.elements + i, &pair, sizeof(pair));
      }
    } else if constexpr (kCount % 2 == 0 && __is_same(T, bf16) && __is_same(U, float)) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const uint32_t pair = pair_of(from.elements + i);
        to[i] = __uint_as_float(pair << 16);
        to[i + 1] = __uint_as_float(pair & 0xFFFF0000u);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = static_cast<U>(from[i]);
    }
    return to;
  }
};
template <class T, int kCount>
struct Converted<Vector<T, kCount>, T, kCount> {
  __device__ static Vector<T, kCount> of(const Vector<T, kCount>& from) { return from; }
};
}  // namespace detail

// Two elements of 16 bits by one instruction.
#define HF_PAIR_OPERATOR_(op, name, Half, type)                                                     \
  template <int kCount>                                                                             \
  __device__ inline Vector<Half, kCount> operator op(Vector<Half, kCount> a, const Vector<Half, kCount>& b) { \
    if constexpr (kCount % 2 == 0) {                                                                \
      _Pragma("unroll") for (int i = 0; i < kCount; i += 2) {                                       \
        uint32_t pair;                                                                              \
        asm(name "." type "x2 %0, %1, %2;"                                                          \
            : "=r"(pair) : "r"(detail::pair_of(a.elements + i)), "r"(detail::pair_of(b.elements + i))); \
        __builtin_memcpy(a.elements + i, &pair, sizeof(pair));                                      \
      }                                                                                             \
    } else {                                                                                        \
      _Pragma("unroll") for (int i = 0; i < kCount; ++i) a[i] = a[i] op b[i];                       \
    }                                                                                               \
    return a;                                                                                       \
  }
HF_PAIR_OPERATOR_(+, "add.rn", f16, "f16")
HF_PAIR_OPERATOR_(*, "mul.rn", f16, "f16")
HF_PAIR_OPERATOR_(+, "add.rn", bf16, "bf16")
HF_PAIR_OPERATOR_(*, "mul.rn", bf16, "bf16")
#undef HF_PAIR_OPERATOR_

/// Each element converted, to nearest even.
template <class To, class T, int kCount>
__device__ inline To converted(const Vector<T, kCount>& from) { return detail::Converted<To, T, kCount>::of(from); }

/// The nearest half, a NaN as the quiet one without payload: its bits are a result.
__device__ inline f16 stored_half(float value) {
  f16 half(value);
  if (value != value) half.bits = 0x7E00;
  return half;
}

/// All elements `value`.
template <class V, class T>
__device__ inline V splat(T value) {
  V all;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(T)); ++i) all[i] = value;
  return all;
}

/// (v1, v0, v3, v2, ...).
template <class T, int kCount>
__device__ inline Vector<T, kCount> pairs_swapped(const Vector<T, kCount>& v) {
  Vector<T, kCount> swapped;
#pragma unroll
  for (int i = 0; i < kCount; ++i) swapped[i] = v[i ^ 1];
  return swapped;
}

/// (v0, v0, v1, v1, ...).
template <class T, int kCount>
__device__ inline Vector<T, 2 * kCount> each_twice(const Vector<T, kCount>& v) {
  Vector<T, 2 * kCount> twice;
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) twice[i] = v[i / 2];
  return twice;
}

/// The bytes of two words that a selector names, from its lowest byte up: 0 to 3 are those of `low`, 4 to 7 of `high`.
template <uint32_t kSelector>
__device__ inline uint32_t chosen_bytes(uint32_t high, uint32_t low) {
  constexpr uint32_t kNibbles = (kSelector & 7) | (kSelector >> 4 & 0x70) | (kSelector >> 8 & 0x700) | (kSelector >> 12 & 0x7000);
  return __byte_perm(low, high, kNibbles);
}

/// 16 bytes to an address that is a multiple of 8.
__device__ inline void store_at8(void* to, const u32x4& words) {
  auto* halves = static_cast<u32x2*>(to);
  halves[0] = u32x2{words[0], words[1]};
  halves[1] = u32x2{words[2], words[3]};
}

}  // namespace hf::dev
