// Which bits of a scalar result are defined. Compilers keep lane masks in SGPRs whose bits outside EXEC were never
// written, and let logical operations remove them: 0 & undefined is 0.
#include "checkers.h"
#include "exec.h"

namespace hfemu {
namespace {

struct Bits {
  uint64_t value, defined;
};

Bits operator~(Bits a) { return {~a.value, a.defined}; }
Bits operator&(Bits a, Bits b) {
  return {a.value & b.value, (a.defined & b.defined) | (a.defined & ~a.value) | (b.defined & ~b.value)};
}
Bits operator|(Bits a, Bits b) { return ~(~a & ~b); }
Bits operator^(Bits a, Bits b) { return {a.value ^ b.value, a.defined & b.defined}; }

Bits operand(const Wave& w, const Source& s) {
  Bits b{scalar_source(w, s), kAllLanes};
  if (s.kind == SourceKind::sgpr) {
    const uint32_t* defined = w.shadow->sdefined;
    b.defined = defined[s.reg] | (s.dwords == 2 ? uint64_t{defined[s.reg + 1]} : ~uint32_t{0}) << 32;
  }
  return b;
}

}  // namespace

ScalarResult scalar_result(const Wave& w, const ExecInst& in) {
  const Bits a = operand(w, in.src[0]), b = operand(w, in.src[1]);
  const Bits exec{w.exec(), kAllLanes};
  const auto to = [](Bits result) { return ScalarResult{true, false, result.defined}; };
  const auto to_exec = [](Bits result) { return ScalarResult{true, true, result.defined}; };
  switch (in.inst->op) {
    case Op::s_mov_b32: case Op::s_mov_b64: return to(a);
    case Op::s_cselect_b32: case Op::s_cselect_b64: return to(w.scc ? a : b);
    case Op::s_not_b32: case Op::s_not_b64: return to(~a);
    case Op::s_and_b32: case Op::s_and_b64: return to(a & b);
    case Op::s_or_b32: case Op::s_or_b64: return to(a | b);
    case Op::s_xor_b32: case Op::s_xor_b64: return to(a ^ b);
    case Op::s_andn2_b32: case Op::s_andn2_b64: return to(a & ~b);
    case Op::s_orn2_b32: case Op::s_orn2_b64: return to(a | ~b);
    case Op::s_nand_b32: case Op::s_nand_b64: return to(~(a & b));
    case Op::s_nor_b32: case Op::s_nor_b64: return to(~(a | b));
    case Op::s_xnor_b32: case Op::s_xnor_b64: return to(~(a ^ b));
    case Op::s_and_saveexec_b64: return to_exec(a & exec);
    case Op::s_or_saveexec_b64: return to_exec(a | exec);
    case Op::s_xor_saveexec_b64: return to_exec(a ^ exec);
    case Op::s_andn2_saveexec_b64: return to_exec(a & ~exec);
    case Op::s_orn2_saveexec_b64: return to_exec(a | ~exec);
    case Op::s_nand_saveexec_b64: return to_exec(~(a & exec));
    case Op::s_nor_saveexec_b64: return to_exec(~(a | exec));
    case Op::s_xnor_saveexec_b64: return to_exec(~(a ^ exec));
    case Op::s_andn1_saveexec_b64: return to_exec(~a & exec);
    case Op::s_orn1_saveexec_b64: return to_exec(~a | exec);
    default: return {};
  }
}

}  // namespace hfemu
