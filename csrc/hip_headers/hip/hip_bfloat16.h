// The older bfloat16 type of HIP where no ROCm is installed: the documented interface of hip/hip_bfloat16.h.
// hip/hip_bf16.h has the newer one. Conversions round to nearest even unless they are told to truncate.
#pragma once

#include <hip/hip_bf16.h>

struct hip_bfloat16 {
  unsigned short data;

  enum truncate_t { truncate };

  hip_bfloat16() = default;
  explicit __host__ __device__ hip_bfloat16(float value) : data(hip_bf16_bits_of_(value)) {}
  explicit __host__ __device__ hip_bfloat16(float value, truncate_t) : data(hip_bf16_truncated_(value)) {}

  __host__ __device__ operator float() const { return hip_bf16_float_of_(data); }
  __host__ __device__ hip_bfloat16& operator=(float value) { data = hip_bf16_bits_of_(value); return *this; }
  explicit __host__ __device__ operator bool() const { return (data & 0x7fffu) != 0; }

  static __host__ __device__ hip_bfloat16 round_to_bfloat16(float value) { return hip_bfloat16(value); }
  static __host__ __device__ hip_bfloat16 round_to_bfloat16(float value, truncate_t mode) {
    return hip_bfloat16(value, mode);
  }
};
static_assert(sizeof(hip_bfloat16) == 2, "hip_bfloat16 must be two bytes, as in memory of tensors");

#define HIP_BFLOAT16_ARITHMETIC_(op)                                                             \
  static inline __host__ __device__ hip_bfloat16 operator op(hip_bfloat16 a, hip_bfloat16 b) {   \
    return hip_bfloat16(float(a) op float(b));                                                   \
  }                                                                                              \
  static inline __host__ __device__ hip_bfloat16& operator op##=(hip_bfloat16& a, hip_bfloat16 b) { return a = a op b; }
HIP_BFLOAT16_ARITHMETIC_(+)
HIP_BFLOAT16_ARITHMETIC_(-)
HIP_BFLOAT16_ARITHMETIC_(*)
HIP_BFLOAT16_ARITHMETIC_(/)
#undef HIP_BFLOAT16_ARITHMETIC_

#define HIP_BFLOAT16_COMPARE_(op) \
  static inline __host__ __device__ bool operator op(hip_bfloat16 a, hip_bfloat16 b) { return float(a) op float(b); }
HIP_BFLOAT16_COMPARE_(==)
HIP_BFLOAT16_COMPARE_(!=)
HIP_BFLOAT16_COMPARE_(<)
HIP_BFLOAT16_COMPARE_(<=)
HIP_BFLOAT16_COMPARE_(>)
HIP_BFLOAT16_COMPARE_(>=)
#undef HIP_BFLOAT16_COMPARE_

static inline __host__ __device__ hip_bfloat16 operator-(hip_bfloat16 a) {
  a.data = static_cast<unsigned short>(a.data ^ 0x8000u);
  return a;
}
static inline __host__ __device__ hip_bfloat16 operator+(hip_bfloat16 a) { return a; }
