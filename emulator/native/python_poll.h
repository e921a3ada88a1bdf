// Ctrl-C and other Python signal handlers during a launch: hfemu_poll_python and hfemu_restore_exception of api.h.
#pragma once

#include <cstdint>

namespace hfemu {

int32_t poll_python();
int32_t restore_exception();
// After a launch directly from Python: takes a signal handler's exception off the thread, so that the foreign-function
// call returns cleanly and restore_exception raises it.
void stash_exception();

}  // namespace hfemu
