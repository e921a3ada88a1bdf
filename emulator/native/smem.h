#pragma once

#include "core.h"

namespace hfemu {

// Base, immediate and register offset of a scalar access; the low two bits are dropped.
uint64_t scalar_address(const Wave& w, const ExecInst& in);
// What s_buffer_* reads of a descriptor: the range in bytes, and the access's offset in it without its low two bits.
struct ScalarBuffer {
  uint64_t base = 0, size = 0, offset = 0;
};
ScalarBuffer scalar_buffer(const Wave& w, const ExecInst& in);

}  // namespace hfemu
