#pragma once

#include "core.h"

namespace hfemu {

bool trace_applies(const TraceRequest& trace, const Launch& launch);
// One line to the sink: PC, instruction, EXEC, and the registers it names as the lane sees them afterwards.
void trace_instruction(const Wave& w, const ExecInst& in, uint64_t exec, const TraceRequest& trace);

}  // namespace hfemu
