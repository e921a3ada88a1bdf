// CPython is looked up at run time, never linked.
#include "python_poll.h"

#include <dlfcn.h>

#include "dispatch.h"
#include "runtime.h"

namespace hfemu {
namespace {

struct Python {
  int (*is_initialized)();
  int (*gil_ensure)();
  void (*gil_release)(int);
  int (*check_signals)();
  void* (*occurred)();
  void (*fetch)(void**, void**, void**);
  void (*restore)(void*, void*, void*);
  bool complete = false;
};

template <class F>
bool resolve(F* function, const char* name) {
  *function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  return *function != nullptr;
}

const Python& python() {
  static const Python found = [] {
    Python p{};
    p.complete = resolve(&p.is_initialized, "Py_IsInitialized") && resolve(&p.gil_ensure, "PyGILState_Ensure") &&
                 resolve(&p.gil_release, "PyGILState_Release") && resolve(&p.check_signals, "PyErr_CheckSignals") &&
                 resolve(&p.occurred, "PyErr_Occurred") && resolve(&p.fetch, "PyErr_Fetch") &&
                 resolve(&p.restore, "PyErr_Restore");
    return p;
  }();
  return found;
}

// An exception that a handler raised during hfemu_launch, held until the caller has the GIL again.
thread_local struct {
  void *type = nullptr, *value = nullptr, *traceback = nullptr;
} stashed;

thread_local bool raised = false;

bool poll_signals() {
  const Python& p = python();
  if (!p.is_initialized()) return false;
  const int state = p.gil_ensure();
  raised = p.occurred() != nullptr || p.check_signals() != 0;
  p.gil_release(state);
  return raised;
}

}  // namespace

void stash_exception() {
  if (!raised) return;
  raised = false;
  const Python& p = python();
  const int state = p.gil_ensure();
  p.fetch(&stashed.type, &stashed.value, &stashed.traceback);
  p.gil_release(state);
}

int32_t poll_python() {
  if (!python().complete) return 1;
  set_poll(poll_signals);
  return 0;
}

int32_t restore_exception() {
  if (!stashed.type) return 0;
  python().restore(stashed.type, stashed.value, stashed.traceback);
  stashed = {};
  return 1;
}

}  // namespace hfemu
