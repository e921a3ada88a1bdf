// Half precision for HIP sources where no ROCm is installed: the documented interface of hip/hip_fp16.h, in the parts
// that ordinary kernels use. A ROCm installation has its own file, which is then found instead of this one.
//
// __half and __half2 hold _Float16 values. Conversions round to nearest even. Products and sums of __half are rounded
// once; the functions of higher mathematics (hexp, hlog ...) are computed in float32 and rounded once more.
#pragma once

#include <hip/hip_runtime.h>

#define HIP_FP16_HD_ static inline __host__ __device__
#define HIP_FP16_D_ static inline __device__

typedef _Float16 hip_half2_storage_ __attribute__((ext_vector_type(2)));

struct __half_raw {
  union {
    _Float16 data;
    unsigned short x;
  };
};

struct __half2_raw {
  union {
    hip_half2_storage_ data;
    struct {
      __half_raw x, y;
    };
  };
};

struct __half {
  union {
    _Float16 data;
    unsigned short __x;
  };

  __half() = default;
  __host__ __device__ __half(_Float16 value) : data(value) {}
  __host__ __device__ __half(const __half_raw& raw) : data(raw.data) {}
  __host__ __device__ __half(float value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(double value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(int value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(unsigned value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(long value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(unsigned long value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(long long value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ __half(unsigned long long value) : data(static_cast<_Float16>(value)) {}

  __host__ __device__ operator _Float16() const { return data; }
  __host__ __device__ operator float() const { return static_cast<float>(data); }
  __host__ __device__ operator __half_raw() const {
    __half_raw raw;
    raw.data = data;
    return raw;
  }
  __host__ __device__ explicit operator bool() const { return data != _Float16(0); }

  __host__ __device__ __half& operator+=(__half b) { data += b.data; return *this; }
  __host__ __device__ __half& operator-=(__half b) { data -= b.data; return *this; }
  __host__ __device__ __half& operator*=(__half b) { data *= b.data; return *this; }
  __host__ __device__ __half& operator/=(__half b) { data /= b.data; return *this; }
  __host__ __device__ __half operator-() const { return __half(static_cast<_Float16>(-data)); }
  __host__ __device__ __half operator+() const { return *this; }
};
static_assert(sizeof(__half) == 2, "__half must be two bytes, as in memory of tensors");

struct __half2 {
  union {
    hip_half2_storage_ data;
    struct {
      __half x, y;
    };
  };

  __half2() = default;  // trivial, so that unions may have it
  __host__ __device__ __half2(hip_half2_storage_ value) : data(value) {}
  __host__ __device__ __half2(__half a, __half b) : data{a.data, b.data} {}
  __host__ __device__ __half2(const __half2_raw& raw) : data(raw.data) {}
  __host__ __device__ __half2& operator+=(__half2 b) { data += b.data; return *this; }
  __host__ __device__ __half2& operator-=(__half2 b) { data -= b.data; return *this; }
  __host__ __device__ __half2& operator*=(__half2 b) { data *= b.data; return *this; }
  __host__ __device__ __half2& operator/=(__half2 b) { data /= b.data; return *this; }
};
static_assert(sizeof(__half2) == 4, "__half2 must be four bytes");

typedef __half half;
typedef __half2 half2;

#define HIP_FP16_OPERATOR_(op)                                                                  \
  HIP_FP16_HD_ __half operator op(__half a, __half b) { return __half(static_cast<_Float16>(a.data op b.data)); } \
  HIP_FP16_HD_ __half2 operator op(__half2 a, __half2 b) { return __half2(a.data op b.data); }
HIP_FP16_OPERATOR_(+)
HIP_FP16_OPERATOR_(-)
HIP_FP16_OPERATOR_(*)
HIP_FP16_OPERATOR_(/)
#undef HIP_FP16_OPERATOR_

#define HIP_FP16_COMPARE_(op, name)                                                     \
  HIP_FP16_HD_ bool operator op(__half a, __half b) { return a.data op b.data; }        \
  HIP_FP16_HD_ bool name(__half a, __half b) { return a.data op b.data; }               \
  HIP_FP16_HD_ __half2 name##2(__half2 a, __half2 b) {                                  \
    return __half2(__half(a.x.data op b.x.data ? 1.0f : 0.0f), __half(a.y.data op b.y.data ? 1.0f : 0.0f)); \
  }
HIP_FP16_COMPARE_(==, __heq)
HIP_FP16_COMPARE_(!=, __hne)
HIP_FP16_COMPARE_(<, __hlt)
HIP_FP16_COMPARE_(<=, __hle)
HIP_FP16_COMPARE_(>, __hgt)
HIP_FP16_COMPARE_(>=, __hge)
#undef HIP_FP16_COMPARE_

// conversions
HIP_FP16_HD_ __half __float2half(float a) { return __half(a); }
HIP_FP16_HD_ __half __float2half_rn(float a) { return __half(a); }
HIP_FP16_D_ __half __float2half_rz(float a) { return __half(__ocml_cvtrtz_f16_f32(a)); }
HIP_FP16_D_ __half __float2half_rd(float a) { return __half(__ocml_cvtrtn_f16_f32(a)); }
HIP_FP16_D_ __half __float2half_ru(float a) { return __half(__ocml_cvtrtp_f16_f32(a)); }
HIP_FP16_HD_ __half __double2half(double a) { return __half(a); }
HIP_FP16_HD_ float __half2float(__half a) { return static_cast<float>(a.data); }
HIP_FP16_HD_ __half2 __half2half2(__half a) { return __half2(a, a); }
HIP_FP16_HD_ __half2 __float2half2_rn(float a) { return __half2(__half(a), __half(a)); }
HIP_FP16_HD_ __half2 __floats2half2_rn(float a, float b) { return __half2(__half(a), __half(b)); }
HIP_FP16_HD_ __half2 __float22half2_rn(float2 a) { return __half2(__half(a.x), __half(a.y)); }
HIP_FP16_HD_ float2 __half22float2(__half2 a) { return make_float2(__half2float(a.x), __half2float(a.y)); }
HIP_FP16_HD_ __half2 __halves2half2(__half a, __half b) { return __half2(a, b); }
HIP_FP16_HD_ __half2 make_half2(__half a, __half b) { return __half2(a, b); }
HIP_FP16_HD_ __half __low2half(__half2 a) { return a.x; }
HIP_FP16_HD_ __half __high2half(__half2 a) { return a.y; }
HIP_FP16_HD_ float __low2float(__half2 a) { return __half2float(a.x); }
HIP_FP16_HD_ float __high2float(__half2 a) { return __half2float(a.y); }
HIP_FP16_HD_ __half2 __low2half2(__half2 a) { return __half2(a.x, a.x); }
HIP_FP16_HD_ __half2 __high2half2(__half2 a) { return __half2(a.y, a.y); }
HIP_FP16_HD_ __half2 __lows2half2(__half2 a, __half2 b) { return __half2(a.x, b.x); }
HIP_FP16_HD_ __half2 __highs2half2(__half2 a, __half2 b) { return __half2(a.y, b.y); }
HIP_FP16_HD_ __half2 __lowhigh2highlow(__half2 a) { return __half2(a.y, a.x); }
HIP_FP16_HD_ __half __int2half_rn(int a) { return __half(a); }
HIP_FP16_HD_ __half __uint2half_rn(unsigned a) { return __half(a); }
HIP_FP16_HD_ __half __short2half_rn(short a) { return __half(static_cast<int>(a)); }
HIP_FP16_HD_ __half __ushort2half_rn(unsigned short a) { return __half(static_cast<int>(a)); }
HIP_FP16_HD_ int __half2int_rz(__half a) { return static_cast<int>(a.data); }
HIP_FP16_HD_ unsigned __half2uint_rz(__half a) { return static_cast<unsigned>(a.data); }
HIP_FP16_D_ int __half2int_rn(__half a) { return static_cast<int>(rintf(__half2float(a))); }
HIP_FP16_D_ int __half2int_rd(__half a) { return static_cast<int>(floorf(__half2float(a))); }
HIP_FP16_D_ int __half2int_ru(__half a) { return static_cast<int>(ceilf(__half2float(a))); }
HIP_FP16_HD_ unsigned short __half_as_ushort(__half a) { return a.__x; }
HIP_FP16_HD_ short __half_as_short(__half a) { return static_cast<short>(a.__x); }
HIP_FP16_HD_ __half __ushort_as_half(unsigned short bits) {
  __half a;
  a.__x = bits;
  return a;
}
HIP_FP16_HD_ __half __short_as_half(short bits) { return __ushort_as_half(static_cast<unsigned short>(bits)); }

// arithmetic
HIP_FP16_HD_ __half __hadd(__half a, __half b) { return a + b; }
HIP_FP16_HD_ __half __hsub(__half a, __half b) { return a - b; }
HIP_FP16_HD_ __half __hmul(__half a, __half b) { return a * b; }
HIP_FP16_HD_ __half __hdiv(__half a, __half b) { return a / b; }
HIP_FP16_HD_ __half __hneg(__half a) { return -a; }
HIP_FP16_HD_ __half __habs(__half a) { return __ushort_as_half(a.__x & 0x7fffu); }
HIP_FP16_D_ __half __hfma(__half a, __half b, __half c) {
  return __half(__builtin_elementwise_fma(a.data, b.data, c.data));
}
HIP_FP16_D_ __half __hfma_relu(__half a, __half b, __half c) {
  const __half sum = __hfma(a, b, c);
  return sum.data < _Float16(0) ? __half(_Float16(0)) : sum;
}
HIP_FP16_HD_ bool __hisnan(__half a) { return (a.__x & 0x7fffu) > 0x7c00u; }
HIP_FP16_HD_ int __hisinf(__half a) { return (a.__x & 0x7fffu) != 0x7c00u ? 0 : (a.__x >> 15) ? -1 : 1; }
// The other operand where one is NaN, as fmaxf and fminf.
HIP_FP16_HD_ __half __hmax(__half a, __half b) { return __hisnan(a) ? b : __hisnan(b) || a.data > b.data ? a : b; }
HIP_FP16_HD_ __half __hmin(__half a, __half b) { return __hisnan(a) ? b : __hisnan(b) || a.data < b.data ? a : b; }

HIP_FP16_HD_ __half2 __hadd2(__half2 a, __half2 b) { return a + b; }
HIP_FP16_HD_ __half2 __hsub2(__half2 a, __half2 b) { return a - b; }
HIP_FP16_HD_ __half2 __hmul2(__half2 a, __half2 b) { return a * b; }
HIP_FP16_HD_ __half2 __h2div(__half2 a, __half2 b) { return a / b; }
HIP_FP16_HD_ __half2 __hneg2(__half2 a) { return __half2(-a.data); }
HIP_FP16_HD_ __half2 __habs2(__half2 a) { return __half2(__habs(a.x), __habs(a.y)); }
HIP_FP16_HD_ __half2 __hmax2(__half2 a, __half2 b) { return __half2(__hmax(a.x, b.x), __hmax(a.y, b.y)); }
HIP_FP16_HD_ __half2 __hmin2(__half2 a, __half2 b) { return __half2(__hmin(a.x, b.x), __hmin(a.y, b.y)); }
HIP_FP16_D_ __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __half2(__builtin_elementwise_fma(a.data, b.data, c.data));
}

// mathematics
#define HIP_FP16_MATH_(name, function)                                                \
  HIP_FP16_D_ __half name(__half a) { return __half(function(__half2float(a))); }     \
  HIP_FP16_D_ __half2 h2##name##_(__half2 a) { return __half2(name(a.x), name(a.y)); }
HIP_FP16_MATH_(hexp, expf)
HIP_FP16_MATH_(hexp2, exp2f)
HIP_FP16_MATH_(hexp10, exp10f)
HIP_FP16_MATH_(hlog, logf)
HIP_FP16_MATH_(hlog2, log2f)
HIP_FP16_MATH_(hlog10, log10f)
HIP_FP16_MATH_(hsqrt, sqrtf)
HIP_FP16_MATH_(hrsqrt, rsqrtf)
HIP_FP16_MATH_(hsin, sinf)
HIP_FP16_MATH_(hcos, cosf)
HIP_FP16_MATH_(hfloor, floorf)
HIP_FP16_MATH_(hceil, ceilf)
HIP_FP16_MATH_(htrunc, truncf)
HIP_FP16_MATH_(hrint, rintf)
#undef HIP_FP16_MATH_
HIP_FP16_D_ __half hrcp(__half a) { return __half(1.0f / __half2float(a)); }
HIP_FP16_D_ __half2 h2exp(__half2 a) { return h2hexp_(a); }
HIP_FP16_D_ __half2 h2exp2(__half2 a) { return h2hexp2_(a); }
HIP_FP16_D_ __half2 h2log(__half2 a) { return h2hlog_(a); }
HIP_FP16_D_ __half2 h2log2(__half2 a) { return h2hlog2_(a); }
HIP_FP16_D_ __half2 h2sqrt(__half2 a) { return h2hsqrt_(a); }
HIP_FP16_D_ __half2 h2rsqrt(__half2 a) { return h2hrsqrt_(a); }
HIP_FP16_D_ __half2 h2rcp(__half2 a) { return __half2(hrcp(a.x), hrcp(a.y)); }

#undef HIP_FP16_HD_
#undef HIP_FP16_D_
