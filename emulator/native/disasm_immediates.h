// The operands with a syntax of their own in LLVM: s_waitcnt, hwreg, sendmsg, swizzles, DPP controls.
#pragma once

#include <string>

namespace hfemu {

std::string waitcnt_text(unsigned simm16);
std::string hwreg_text(unsigned simm16);
std::string message_text(unsigned simm16);
std::string gpr_idx_text(unsigned mode);
std::string swizzle_text(unsigned offset);
std::string dpp_text(unsigned control);

}  // namespace hfemu
