// Machine code -> Inst, from the bits and the table of isa.inc, without LLVM or a subprocess.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inst.h"

namespace hfemu {

// Decodes the instruction at `code`, of which `avail` bytes may be read. `pc` is copied into `out`. False: the bytes
// are not an instruction of `arch`, or run past `avail`; `out` is then undefined.
bool decode(const uint8_t* code, size_t avail, uint64_t pc, Arch arch, Inst& out);

// The mnemonic without encoding suffix; "invalid" for Op::invalid.
const char* op_name(Op op);

}  // namespace hfemu
