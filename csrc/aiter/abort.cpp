// Linked into modules that end the process on an error: while a call from Python is under way, their abort() throws.
//
// The symbol is hidden, so that it replaces the C library's in this module alone. The function has a name of its own in
// C++, because the C library's header declares abort() as one that never throws.
#include <csignal>
#include <stdexcept>

extern "C" __attribute__((visibility("default"))) thread_local int hf_aiter_calls = 0;

extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void hf_aiter_abort() __asm__("abort");

void hf_aiter_abort() {
  if (hf_aiter_calls > 0)
    throw std::runtime_error("the module called abort(); it wrote the reason to the standard error");
  std::signal(SIGABRT, SIG_DFL);
  std::raise(SIGABRT);
  __builtin_trap();
}
