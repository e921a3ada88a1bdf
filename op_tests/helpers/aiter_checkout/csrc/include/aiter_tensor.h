// A stand-in for the header of the user's own aiter: the names and the layout that aiter's modules rely on.
#pragma once
#include <hip/hip_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#define AITER_C_ITFS extern "C" __attribute__((visibility("default")))

typedef enum {
  AITER_DTYPE_fp8, AITER_DTYPE_fp8_e8m0, AITER_DTYPE_fp16, AITER_DTYPE_bf16, AITER_DTYPE_fp32, AITER_DTYPE_i4x2,
  AITER_DTYPE_fp4x2, AITER_DTYPE_u32, AITER_DTYPE_i32, AITER_DTYPE_i16, AITER_DTYPE_i8, AITER_DTYPE_u8,
  AITER_DTYPE_i64, AITER_DTYPE_u64,
} AiterDtype;

struct aiter_tensor_t {
  void* ptr;
  size_t numel_;
  int ndim;
  int64_t shape[8];
  int64_t strides[8];
  AiterDtype dtype_;
  int device_id;
};

namespace aiter_detail {
inline thread_local bool g_aiter_can_throw = false;

// Throws where a caller has asked for it and ends the process elsewhere, as aiter's check does.
[[noreturn]] inline void check_fail(const char* text) {
  std::cerr << text << std::endl;
  if (g_aiter_can_throw) throw std::runtime_error(text);
  std::abort();
}

// Ends the process wherever it is called.
[[noreturn, gnu::noinline]] inline void fatal(const char* text) {
  std::cerr << text << std::endl;
  std::abort();
}
}  // namespace aiter_detail

#define AITER_CHECK(condition, text) \
  do { if (!(condition)) aiter_detail::check_fail(text); } while (0)

namespace aiter {
inline hipStream_t& current_stream() {
  thread_local hipStream_t stream = nullptr;
  return stream;
}
}  // namespace aiter
