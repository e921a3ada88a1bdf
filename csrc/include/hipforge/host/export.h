// HF_EXPORT(function): makes a host function callable over the C ABI. The signature string and the conversion of the
// arguments come from the function's own type, so they cannot drift apart.
#pragma once

#include "hipforge/host/tensor.h"

#if defined(HF_DEVICE_PASS)  // the host's pass compiles the entries
#define HF_EXPORT_AS(name, function) static_assert(true, "HF_EXPORT ends with a semicolon")
#else

#include "hipforge/host/tvm_ffi.h"

#include <typeinfo>  // std::exception, the base of its bad_cast; <exception> costs ten times the compile time

#define HF_API __attribute__((visibility("default")))

namespace hf __attribute__((visibility("hidden"))) {

struct Cursor {
  const hf_arg* next;
  void* stream;
};

template <class T>
struct Argument {
  static_assert(sizeof(T) == 0,
                "HF_EXPORT: parameters are hf::Tensor, hf::OptionalTensor, int64_t, double, bool or const char*, "
                "and the runtime's stream as the last one");
};
template <>
struct Argument<Tensor> {
  static constexpr char letter = 'T';
  static Tensor take(Cursor& c) { return Tensor((c.next++)->value.tensor); }
};
template <>
struct Argument<OptionalTensor> {
  static constexpr char letter = 't';
  static OptionalTensor take(Cursor& c) {
    const hf_arg* arg = c.next++;
    return arg->kind == HF_KIND_NONE ? OptionalTensor() : OptionalTensor(arg->value.tensor);
  }
};
template <>
struct Argument<int64_t> {
  static constexpr char letter = 'i';
  static int64_t take(Cursor& c) { return (c.next++)->value.i; }
};
template <>
struct Argument<double> {
  static constexpr char letter = 'd';
  static double take(Cursor& c) { return (c.next++)->value.f; }
};
template <>
struct Argument<bool> {
  static constexpr char letter = 'b';
  static bool take(Cursor& c) { return (c.next++)->value.i != 0; }
};
template <>
struct Argument<const char*> {
  static constexpr char letter = 's';
  static const char* take(Cursor& c) { return (c.next++)->value.s; }
};
// The stream, which is not an argument of the caller: its letter ends the signature string. A runtime's header makes
// its own type of stream one: template <> struct Argument<the_stream*> : Stream<the_stream> {};
template <class T>
struct Stream {
  static constexpr char letter = '\0';
  static T* take(Cursor& c) { return static_cast<T*>(c.stream); }
};
template <>
struct Argument<void*> : Stream<void> {};
template <class T>
struct Argument<const T&> : Argument<T> {};

template <class... A>
constexpr int letters_before_stream() {
  constexpr char letters[] = {Argument<A>::letter..., '\0'};
  int count = 0;
  while (letters[count]) ++count;
  return count;
}

template <class F>
struct Entry;

template <class... A>
struct Entry<void (*)(A...)> {
  static constexpr char signature[] = {Argument<A>::letter..., '\0'};

  static constexpr int kArity = letters_before_stream<A...>();
  static_assert(kArity + 1 >= static_cast<int>(sizeof...(A)), "HF_EXPORT: the stream must be the last parameter");

  // Elements of a braced list are evaluated left to right; the arguments of a plain call need not be.
  struct Invocation {
    Invocation(void (*fn)(A...), A... args) { fn(args...); }
  };

  static int run(void (*fn)(A...), hf_call* call) noexcept {
    TextBuffer error(call->error, sizeof(call->error));
    try {
      HF_CHECK(call->num_args == kArity, "the entry takes ", static_cast<int>(kArity), " arguments; got ", call->num_args);
      Cursor cursor{call->args, call->stream};
      (void)cursor;
      Invocation{fn, Argument<A>::take(cursor)...};
      return call->error_kind = HF_OK;
    } catch (const Failure& failure) {
      error.add(failure.message);
      return call->error_kind = failure.kind;
    } catch (const std::exception& other) {
      error.add("C++ exception: ");
      error.add(other.what());
    } catch (...) {
      error.add("a C++ exception of an unknown type");
    }
    return call->error_kind = HF_ERROR_OTHER;
  }
};
template <class... A>
constexpr char Entry<void (*)(A...)>::signature[];

}  // namespace hf

#define HF_HOST_CONSTANT_(declaration, value) \
  extern "C" HF_API __attribute__((weak)) declaration; \
  declaration = value

HF_HOST_CONSTANT_(const uint32_t hf_abi_version, HF_ABI_VERSION);

// Exports `function`, void(args..., stream), as the entry `name`.
#define HF_EXPORT_AS(name, function)                                                            \
  HF_HOST_CONSTANT_(const char* hf_signature_##name, ::hf::Entry<decltype(&function)>::signature); \
  extern "C" HF_API int hf_entry_##name(hf_call* call) {                                        \
    return ::hf::Entry<decltype(&function)>::run(&function, call);                              \
  }                                                                                             \
  extern "C" HF_API int __tvm_ffi_##name(void*, const ::hf::tvm_ffi::Any* given, int32_t count, ::hf::tvm_ffi::Any*) { \
    return ::hf::tvm_ffi::call(&hf_entry_##name, ::hf::Entry<decltype(&function)>::signature, given, count); \
  }                                                                                             \
  static_assert(true, "HF_EXPORT ends with a semicolon")

#endif

#define HF_EXPORT(function) HF_EXPORT_AS(function, function)
