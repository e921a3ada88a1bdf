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

// A piece of a message as one function takes it, whatever its type: one function per combination of types was a third of a
// module's host code.
union Value {
  constexpr Value(const char* value) : text(value) {}
  constexpr Value(long long value) : integer(value) {}
  constexpr Value(unsigned long long value) : natural(value) {}
  constexpr Value(double value) : real(value) {}
  constexpr Value(const hf_tensor* value) : tensor(value) {}
  const char* text;
  long long integer;
  unsigned long long natural;
  double real;
  const hf_tensor* tensor;
};

// What a message says of an argument: a value, and which member of the union it is.
template <char kLetter>
struct Said {
  static constexpr char letter = kLetter;
  Value value;
};
inline Said<'s'> said(const char* text) { return {text}; }
inline Said<'s'> said(bool value) { return {value ? "true" : "false"}; }
inline Said<'i'> said(int value) { return {static_cast<long long>(value)}; }
inline Said<'i'> said(long value) { return {static_cast<long long>(value)}; }
inline Said<'i'> said(long long value) { return {value}; }
inline Said<'u'> said(unsigned value) { return {static_cast<unsigned long long>(value)}; }
inline Said<'u'> said(unsigned long value) { return {static_cast<unsigned long long>(value)}; }
inline Said<'u'> said(unsigned long long value) { return {value}; }
inline Said<'d'> said(double value) { return {value}; }
inline Said<'s'> said(hf_dtype dtype) { return {dtype_name(dtype)}; }
inline Said<'T'> said(const hf_tensor* tensor) { return {tensor}; }

// What a refused call throws; HF_EXPORT's entry catches it.
struct Failure {
  hf_error_kind kind;
  char message[HF_ERROR_MESSAGE_BYTES];
};

#if defined(__clang__)
#define HF_NOT_OPTIMISED __attribute__((cold, noinline, optnone))
#else
#define HF_NOT_OPTIMISED __attribute__((cold, noinline))
#endif

template <char... kLetter>
struct Letters {
  static constexpr char text[] = {kLetter..., '\0'};
};
template <char... kLetter>
constexpr char Letters<kLetter...>::text[];

#if defined(HF_DEVICE_PASS)  // which checks host code but compiles none

template <class... T>
[[noreturn]] void fail_with(hf_error_kind kind, T... values);

#else

// `letters` has one for each of `values`: an array, not C's "...", because clang 22 merges the pushes of two such calls and
// then unwinds wrongly from them.
[[noreturn]] inline HF_NOT_OPTIMISED void fail(hf_error_kind kind, const char* letters, const Value* values) {
  Failure failure;
  failure.kind = kind;
  TextBuffer out(failure.message, sizeof(failure.message));
  for (; *letters; ++letters, ++values) {
    switch (*letters) {
      case 's': out.add(values->text ? values->text : "(null)"); break;
      case 'i': out.add(values->integer); break;
      case 'u': out.add(values->natural); break;
      case 'd': out.add(values->real); break;
      case 'T': out.add(*values->tensor); break;
    }
  }
  throw failure;
}

template <class... T>
[[noreturn]] __attribute__((always_inline)) inline void fail_with(hf_error_kind kind, T... values) {
  const Value all[] = {said(values).value...};
  fail(kind, Letters<decltype(said(values))::letter...>::text, all);
}

#endif

}  // namespace hf

// Raises an exception of `kind` whose message is the concatenation of the parts.
#define HF_FAIL(kind, ...) ::hf::fail_with(kind, __VA_ARGS__)

// Raises GuardError unless `condition` holds. Say what was wrong, the value seen and what is accepted:
//   HF_CHECK(K % 32 == 0, "K must be a multiple of 32 (1x32 MX scale block); got ", K);
#define HF_CHECK(condition, ...)                                             \
  do {                                                                       \
    if (__builtin_expect(!(condition), 0)) HF_FAIL(HF_ERROR_GUARD, __VA_ARGS__); \
  } while (0)
