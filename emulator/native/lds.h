#pragma once

#include "core.h"

namespace hfemu {

// LDS byte addresses of the lanes; inactive lanes repeat the first active one's.
void lds_addresses(const Wave& w, const ExecInst& in, int64_t offset, uint64_t exec, uint32_t* a);

}  // namespace hfemu
