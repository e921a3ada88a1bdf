// Inst -> text in the spelling of llvm-objdump, for faults, traces and listings.
#pragma once

#include <string>

#include "inst.h"

namespace hfemu {

// Mnemonic and operands, no address. Branches print their raw 16-bit immediate as llvm-objdump does.
std::string disassemble(const Inst& inst);

}  // namespace hfemu
