// Functions of kernels that nvcc knows by name, as crt/device_functions.h and crt/math_functions.h declare them; a test reads both.
#pragma once

#include <crt/host_defines.h>

#define HF_BUILTIN_ extern __device__ __device_builtin__ __cudart_builtin__
extern "C" {
HF_BUILTIN_ void __syncthreads();
HF_BUILTIN_ void __threadfence_block();
HF_BUILTIN_ void __threadfence();
HF_BUILTIN_ void __threadfence_system();
HF_BUILTIN_ void __trap();
HF_BUILTIN_ float __int_as_float(int x);
HF_BUILTIN_ float __uint_as_float(unsigned int x);
HF_BUILTIN_ int __float_as_int(float x);
HF_BUILTIN_ unsigned int __float_as_uint(float x);
HF_BUILTIN_ int __double2hiint(double x);
HF_BUILTIN_ int __double2loint(double x);
HF_BUILTIN_ double __hiloint2double(int hi, int lo);
HF_BUILTIN_ unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int s);
HF_BUILTIN_ int __clz(int x);
HF_BUILTIN_ int __ffs(int x);
HF_BUILTIN_ int __popc(unsigned int x);
HF_BUILTIN_ int __clzll(long long int x);
HF_BUILTIN_ int __ffsll(long long int x);
HF_BUILTIN_ int __popcll(unsigned long long int x);
HF_BUILTIN_ unsigned int __brev(unsigned int x);
HF_BUILTIN_ unsigned int __umulhi(unsigned int x, unsigned int y);
HF_BUILTIN_ unsigned int __vmaxu2(unsigned int a, unsigned int b);
HF_BUILTIN_ unsigned int __vmaxu4(unsigned int a, unsigned int b);
HF_BUILTIN_ unsigned int __vcmpgtu4(unsigned int a, unsigned int b);
HF_BUILTIN_ unsigned int __vcmpltu4(unsigned int a, unsigned int b);
HF_BUILTIN_ float __fadd_rn(float x, float y);
HF_BUILTIN_ float __fmul_rn(float x, float y);
HF_BUILTIN_ float __fmaf_rn(float x, float y, float z);
HF_BUILTIN_ float __fdiv_rn(float x, float y);
HF_BUILTIN_ float __frcp_rn(float x);
HF_BUILTIN_ float __fsqrt_rn(float x);
HF_BUILTIN_ float __frsqrt_rn(float x);
HF_BUILTIN_ float __fdividef(float x, float y);
HF_BUILTIN_ float __expf(float x) noexcept;
}
#undef HF_BUILTIN_

// Of the C library on the host.
#define HF_BUILTIN_ extern __host__ __device__ __device_builtin__
extern "C" {
HF_BUILTIN_ float fabsf(float x) noexcept;
HF_BUILTIN_ float fminf(float x, float y) noexcept;
HF_BUILTIN_ float fmaxf(float x, float y) noexcept;
HF_BUILTIN_ float fmaf(float x, float y, float z) noexcept;
HF_BUILTIN_ float ldexpf(float x, int exponent) noexcept;
HF_BUILTIN_ float sqrtf(float x) noexcept;
HF_BUILTIN_ float expf(float x) noexcept;
HF_BUILTIN_ float floorf(float x) noexcept;
}
#undef HF_BUILTIN_

#define HF_BUILTIN_ extern __device__ __device_builtin__
extern "C" {
HF_BUILTIN_ unsigned int umin(unsigned int a, unsigned int b), umax(unsigned int a, unsigned int b);
HF_BUILTIN_ long long int llmin(long long int a, long long int b), llmax(long long int a, long long int b);
HF_BUILTIN_ unsigned long long int ullmin(unsigned long long int a, unsigned long long int b);
HF_BUILTIN_ unsigned long long int ullmax(unsigned long long int a, unsigned long long int b);
}
HF_BUILTIN_ int min(int a, int b);
HF_BUILTIN_ int max(int a, int b);
#undef HF_BUILTIN_
