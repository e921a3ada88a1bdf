// How host code of a module reports errors: HF_CHECK(condition, "text ", value, ...) throws, and the entry turns the
// throw into an error kind and message. No <sstream>, no <string>: messages are written into a fixed buffer.
#pragma once

#include "hipforge/host/abi.h"

namespace hf __attribute__((visibility("hidden"))) {

inline const char* dtype_name(int32_t dtype) {
  static const char* const names[] = {"unknown", "bool",     "uint8",         "int8",
                                      "int16",   "int32",    "int64",         "float16",
                                      "bfloat16", "float32", "float64",       "float8_e4m3fn",
                                      "float8_e4m3fnuz",     "float8_e5m2",   "float8_e5m2fnuz",
                                      "float8_e8m0fnu",        "float4_e2m1fn_x2"};
  const int32_t known = static_cast<int32_t>(sizeof(names) / sizeof(names[0]));
  return dtype >= 0 && dtype < known ? names[dtype] : names[0];
}

// Bounded text: what does not fit is cut, never written past the end.
struct TextBuffer {
  char* at;
  char* last;  // place of the terminating zero at the latest

  TextBuffer(char* buffer, unsigned long bytes) : at(buffer), last(buffer + bytes - 1) { *at = 0; }

  void add(const char* text) {
    while (*text && at < last) *at++ = *text++;
    *at = 0;
  }
  void add(long long value) {
    char digits[24];
    __builtin_snprintf(digits, sizeof(digits), "%lld", value);
    add(digits);
  }
  void add(unsigned long long value) {
    char digits[24];
    __builtin_snprintf(digits, sizeof(digits), "%llu", value);
    add(digits);
  }
  void add(double value) {
    char digits[40];
    __builtin_snprintf(digits, sizeof(digits), "%.9g", value);
    add(digits);
  }
  void add(const hf_tensor& tensor) {  // as in "uint8 [4, 128]"
    add(dtype_name(tensor.dtype));
    add(" [");
    for (int32_t i = 0; i < tensor.ndim; ++i) {
      if (i) add(", ");
      add(static_cast<long long>(tensor.shape[i]));
    }
    add("]");
  }
};

// One piece of a message. A tagged value instead of a template per combination of types: compile time stays flat.
class Part {
 public:
  Part(const char* text) : kind_(kText) { value_.text = text ? text : "(null)"; }
  Part(bool value) : kind_(kText) { value_.text = value ? "true" : "false"; }
  Part(int value) : kind_(kSigned) { value_.integer = value; }
  Part(long value) : kind_(kSigned) { value_.integer = value; }
  Part(long long value) : kind_(kSigned) { value_.integer = value; }
  Part(unsigned value) : kind_(kUnsigned) { value_.natural = value; }
  Part(unsigned long value) : kind_(kUnsigned) { value_.natural = value; }
  Part(unsigned long long value) : kind_(kUnsigned) { value_.natural = value; }
  Part(double value) : kind_(kReal) { value_.real = value; }
  Part(hf_dtype dtype) : kind_(kText) { value_.text = dtype_name(dtype); }
  Part(const hf_tensor& tensor) : kind_(kTensor) { value_.tensor = &tensor; }

  void write(TextBuffer& out) const {
    switch (kind_) {
      case kText: out.add(value_.text); break;
      case kSigned: out.add(value_.integer); break;
      case kUnsigned: out.add(value_.natural); break;
      case kReal: out.add(value_.real); break;
      case kTensor: out.add(*value_.tensor); break;
    }
  }

 private:
  enum Kind { kText, kSigned, kUnsigned, kReal, kTensor } kind_;
  union {
    const char* text;
    long long integer;
    unsigned long long natural;
    double real;
    const hf_tensor* tensor;
  } value_;
};

// What a refused call throws; HF_EXPORT's entry catches it.
struct Failure {
  hf_error_kind kind;
  char message[HF_ERROR_MESSAGE_BYTES];
};

[[noreturn]] inline void fail(hf_error_kind kind, const Part* parts, int count) {
  Failure failure;
  failure.kind = kind;
  TextBuffer out(failure.message, sizeof(failure.message));
  for (int i = 0; i < count; ++i) parts[i].write(out);
  throw failure;
}

#if defined(__clang__)
#define HF_NOT_OPTIMISED __attribute__((cold, noinline, optnone))
#else
#define HF_NOT_OPTIMISED __attribute__((cold, noinline))
#endif

// A function of its own, not optimised: otherwise most of a module's host code would be messages that are put together inline.
template <class... T>
[[noreturn]] HF_NOT_OPTIMISED void fail_with(hf_error_kind kind, T... values) {
  const Part parts[] = {values...};
  fail(kind, parts, static_cast<int>(sizeof...(T)));
}

}  // namespace hf

// Raises an exception of `kind` whose message is the concatenation of the parts.
#define HF_FAIL(kind, ...) ::hf::fail_with(kind, __VA_ARGS__)

// Raises GuardError unless `condition` holds. Say what was wrong, the value seen and what is accepted:
//   HF_CHECK(K % 32 == 0, "K must be a multiple of 32 (1x32 MX scale block); got ", K);
#define HF_CHECK(condition, ...)                                             \
  do {                                                                       \
    if (__builtin_expect(!(condition), 0)) HF_FAIL(HF_ERROR_GUARD, __VA_ARGS__); \
  } while (0)
