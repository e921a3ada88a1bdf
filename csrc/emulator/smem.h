#pragma once

#include "core.h"

namespace hfemu {

// Base, immediate and register offset of a scalar access; the low two bits are dropped.
uint64_t scalar_address(const Wave& w, const ExecInst& in);

}  // namespace hfemu
