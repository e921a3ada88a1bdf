// bfloat16 for HIP sources where no ROCm is installed: of hip/hip_bf16.h what ordinary kernels use, and only names that
// HIP 7.2 has too. A ROCm installation has its own file, which is then found instead of this one.
//
// Arithmetic is done in float32 and rounded once, to nearest even; a NaN stays one.
#pragma once

#include <hip/hip_runtime.h>

#define HIP_BF16_HD_ static inline __host__ __device__
#define HIP_BF16_D_ static inline __device__

HIP_BF16_HD_ unsigned short hip_bf16_bits_of_(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>(bits >> 16 | 0x40u);
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
HIP_BF16_HD_ unsigned short hip_bf16_truncated_(float value) {
  return value != value ? hip_bf16_bits_of_(value) : static_cast<unsigned short>(__builtin_bit_cast(unsigned, value) >> 16);
}
HIP_BF16_HD_ float hip_bf16_float_of_(unsigned short bits) {
  return __builtin_bit_cast(float, static_cast<unsigned>(bits) << 16);
}

struct __hip_bfloat16_raw {
  unsigned short x;
};

struct __hip_bfloat16 {
  unsigned short __x;

  __hip_bfloat16() = default;
  __host__ __device__ __hip_bfloat16(const __hip_bfloat16_raw& raw) : __x(raw.x) {}
  __host__ __device__ __hip_bfloat16(float value) : __x(hip_bf16_bits_of_(value)) {}
  __host__ __device__ __hip_bfloat16(double value) : __x(hip_bf16_bits_of_(static_cast<float>(value))) {}
  __host__ __device__ __hip_bfloat16(int value) : __x(hip_bf16_bits_of_(static_cast<float>(value))) {}
  __host__ __device__ __hip_bfloat16(unsigned value) : __x(hip_bf16_bits_of_(static_cast<float>(value))) {}
  __host__ __device__ operator float() const { return hip_bf16_float_of_(__x); }
  __host__ __device__ operator __hip_bfloat16_raw() const { return {__x}; }
  __host__ __device__ explicit operator bool() const { return (__x & 0x7fffu) != 0; }
};
static_assert(sizeof(__hip_bfloat16) == 2, "__hip_bfloat16 must be two bytes, as in memory of tensors");

struct __hip_bfloat162_raw {
  unsigned short x, y;
};

struct alignas(4) __hip_bfloat162 {
  __hip_bfloat16 x, y;

  __hip_bfloat162() = default;
  __host__ __device__ __hip_bfloat162(__hip_bfloat16 a, __hip_bfloat16 b) : x(a), y(b) {}
  __host__ __device__ __hip_bfloat162(const __hip_bfloat162_raw& raw) {
    x.__x = raw.x;
    y.__x = raw.y;
  }
};
static_assert(sizeof(__hip_bfloat162) == 4, "__hip_bfloat162 must be four bytes");

// conversions
HIP_BF16_HD_ __hip_bfloat16 __float2bfloat16(float a) { return __hip_bfloat16(a); }
HIP_BF16_HD_ __hip_bfloat16 __double2bfloat16(double a) { return __hip_bfloat16(a); }
HIP_BF16_HD_ __hip_bfloat16 __int2bfloat16_rn(int a) { return __hip_bfloat16(a); }
HIP_BF16_HD_ float __bfloat162float(__hip_bfloat16 a) { return hip_bf16_float_of_(a.__x); }
HIP_BF16_HD_ __hip_bfloat162 __bfloat162bfloat162(__hip_bfloat16 a) { return {a, a}; }
HIP_BF16_HD_ __hip_bfloat162 __halves2bfloat162(__hip_bfloat16 a, __hip_bfloat16 b) { return {a, b}; }
HIP_BF16_HD_ __hip_bfloat162 make_bfloat162(__hip_bfloat16 a, __hip_bfloat16 b) { return {a, b}; }
HIP_BF16_HD_ __hip_bfloat162 __float22bfloat162_rn(float2 a) { return {__hip_bfloat16(a.x), __hip_bfloat16(a.y)}; }
HIP_BF16_HD_ float2 __bfloat1622float2(__hip_bfloat162 a) {
  return make_float2(__bfloat162float(a.x), __bfloat162float(a.y));
}
HIP_BF16_HD_ __hip_bfloat16 __low2bfloat16(__hip_bfloat162 a) { return a.x; }
HIP_BF16_HD_ __hip_bfloat16 __high2bfloat16(__hip_bfloat162 a) { return a.y; }
HIP_BF16_HD_ float __low2float(__hip_bfloat162 a) { return __bfloat162float(a.x); }
HIP_BF16_HD_ float __high2float(__hip_bfloat162 a) { return __bfloat162float(a.y); }
HIP_BF16_HD_ __hip_bfloat162 __low2bfloat162(__hip_bfloat162 a) { return {a.x, a.x}; }
HIP_BF16_HD_ __hip_bfloat162 __high2bfloat162(__hip_bfloat162 a) { return {a.y, a.y}; }
HIP_BF16_HD_ __hip_bfloat162 __lowhigh2highlow(__hip_bfloat162 a) { return {a.y, a.x}; }
HIP_BF16_HD_ unsigned short __bfloat16_as_ushort(__hip_bfloat16 a) { return a.__x; }
HIP_BF16_HD_ short __bfloat16_as_short(__hip_bfloat16 a) { return static_cast<short>(a.__x); }
HIP_BF16_HD_ __hip_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __hip_bfloat16 a;
  a.__x = bits;
  return a;
}
HIP_BF16_HD_ __hip_bfloat16 __short_as_bfloat16(short bits) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

// arithmetic: both operands as float32, one rounding
#define HIP_BF16_ARITHMETIC_(op, name)                                                                              \
  HIP_BF16_HD_ __hip_bfloat16 operator op(__hip_bfloat16 a, __hip_bfloat16 b) {                                     \
    return __hip_bfloat16(__bfloat162float(a) op __bfloat162float(b));                                              \
  }                                                                                                                 \
  HIP_BF16_HD_ __hip_bfloat16& operator op##=(__hip_bfloat16& a, __hip_bfloat16 b) { return a = a op b; }           \
  HIP_BF16_HD_ __hip_bfloat162 operator op(__hip_bfloat162 a, __hip_bfloat162 b) { return {a.x op b.x, a.y op b.y}; } \
  HIP_BF16_HD_ __hip_bfloat16 name(__hip_bfloat16 a, __hip_bfloat16 b) { return a op b; }
HIP_BF16_ARITHMETIC_(+, __hadd)
HIP_BF16_ARITHMETIC_(-, __hsub)
HIP_BF16_ARITHMETIC_(*, __hmul)
HIP_BF16_ARITHMETIC_(/, __hdiv)
#undef HIP_BF16_ARITHMETIC_
HIP_BF16_HD_ __hip_bfloat162 __hadd2(__hip_bfloat162 a, __hip_bfloat162 b) { return a + b; }
HIP_BF16_HD_ __hip_bfloat162 __hsub2(__hip_bfloat162 a, __hip_bfloat162 b) { return a - b; }
HIP_BF16_HD_ __hip_bfloat162 __hmul2(__hip_bfloat162 a, __hip_bfloat162 b) { return a * b; }
HIP_BF16_HD_ __hip_bfloat162 __h2div(__hip_bfloat162 a, __hip_bfloat162 b) { return a / b; }
HIP_BF16_HD_ __hip_bfloat16 __hneg(__hip_bfloat16 a) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(a.__x ^ 0x8000u));
}
HIP_BF16_HD_ __hip_bfloat16 __habs(__hip_bfloat16 a) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(a.__x & 0x7fffu));
}
HIP_BF16_D_ __hip_bfloat16 __hfma(__hip_bfloat16 a, __hip_bfloat16 b, __hip_bfloat16 c) {
  return __hip_bfloat16(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
HIP_BF16_D_ __hip_bfloat162 __hfma2(__hip_bfloat162 a, __hip_bfloat162 b, __hip_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

#define HIP_BF16_COMPARE_(op, name)                                                                       \
  HIP_BF16_HD_ bool operator op(__hip_bfloat16 a, __hip_bfloat16 b) {                                     \
    return __bfloat162float(a) op __bfloat162float(b);                                                    \
  }                                                                                                       \
  HIP_BF16_HD_ bool name(__hip_bfloat16 a, __hip_bfloat16 b) { return a op b; }
HIP_BF16_COMPARE_(==, __heq)
HIP_BF16_COMPARE_(!=, __hne)
HIP_BF16_COMPARE_(<, __hlt)
HIP_BF16_COMPARE_(<=, __hle)
HIP_BF16_COMPARE_(>, __hgt)
HIP_BF16_COMPARE_(>=, __hge)
#undef HIP_BF16_COMPARE_
HIP_BF16_HD_ bool __hisnan(__hip_bfloat16 a) { return (a.__x & 0x7fffu) > 0x7f80u; }
HIP_BF16_HD_ int __hisinf(__hip_bfloat16 a) { return (a.__x & 0x7fffu) != 0x7f80u ? 0 : (a.__x >> 15) ? -1 : 1; }
// The other operand where one is NaN, as fmaxf and fminf.
HIP_BF16_HD_ __hip_bfloat16 __hmax(__hip_bfloat16 a, __hip_bfloat16 b) {
  return __hisnan(a) ? b : __hisnan(b) || a > b ? a : b;
}
HIP_BF16_HD_ __hip_bfloat16 __hmin(__hip_bfloat16 a, __hip_bfloat16 b) {
  return __hisnan(a) ? b : __hisnan(b) || a < b ? a : b;
}
HIP_BF16_HD_ __hip_bfloat162 __hmax2(__hip_bfloat162 a, __hip_bfloat162 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
HIP_BF16_HD_ __hip_bfloat162 __hmin2(__hip_bfloat162 a, __hip_bfloat162 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }

// mathematics
#define HIP_BF16_MATH_(name, function) \
  HIP_BF16_D_ __hip_bfloat16 name(__hip_bfloat16 a) { return __hip_bfloat16(function(__bfloat162float(a))); }
HIP_BF16_MATH_(hexp, expf)
HIP_BF16_MATH_(hexp2, exp2f)
HIP_BF16_MATH_(hlog, logf)
HIP_BF16_MATH_(hlog2, log2f)
HIP_BF16_MATH_(hlog10, log10f)
HIP_BF16_MATH_(hsqrt, sqrtf)
HIP_BF16_MATH_(hrsqrt, rsqrtf)
HIP_BF16_MATH_(hsin, sinf)
HIP_BF16_MATH_(hcos, cosf)
HIP_BF16_MATH_(hfloor, floorf)
HIP_BF16_MATH_(hceil, ceilf)
HIP_BF16_MATH_(htrunc, truncf)
HIP_BF16_MATH_(hrint, rintf)
#undef HIP_BF16_MATH_
HIP_BF16_D_ __hip_bfloat16 hrcp(__hip_bfloat16 a) { return __hip_bfloat16(1.0f / __bfloat162float(a)); }
HIP_BF16_D_ __hip_bfloat162 h2rcp(__hip_bfloat162 a) { return {hrcp(a.x), hrcp(a.y)}; }

#undef HIP_BF16_HD_
#undef HIP_BF16_D_
