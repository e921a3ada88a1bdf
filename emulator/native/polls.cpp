// Which reads are polls? Those that read one address repeatedly until its value changes.
//
// Machine code does not mark volatile and atomic loads, but their place shows them: the compiler would have hoisted an
// ordinary load out of a loop that has no stores and barriers and does not change the load's address. The load stayed
// because another wave is expected to change the word. Compilers peel the first iteration of such a loop, so the same
// load directly before it is a poll too. FLAT, GLOBAL and buffer loads do carry a mark: sc0 or sc1 where they are
// atomic, both where they are volatile or atomic at system scope. Volatile accesses order nothing, so a load with both
// bits counts as a signal only if its value can end a loop, or if a buffer_inv that makes it an acquire follows; any
// other one is data.
#include <algorithm>
#include <bitset>

#include "exec.h"
#include "usage.h"

namespace hfemu {
namespace {

constexpr uint32_t kLongestLoop = 64, kPeeledDistance = 16;
constexpr uint32_t kLongestVolatileLoop = 4096;  // the mark makes a load in a longer loop recognisable, too
constexpr uint32_t kAcquireDistance = 4;         // from a load to the buffer_inv of its acquire: a wait and little else
constexpr uint32_t kScc = kRegisters;
using Registers = std::bitset<kRegisters + 1>;

bool jumps(Op op) {
  switch (op) {
    case Op::s_branch: case Op::s_cbranch_scc0: case Op::s_cbranch_scc1: case Op::s_cbranch_vccz:
    case Op::s_cbranch_vccnz: case Op::s_cbranch_execz: case Op::s_cbranch_execnz: return true;
    default: return false;
  }
}

bool is_move(Op op) { return op == Op::s_mov_b32 || op == Op::s_mov_b64 || op == Op::s_movk_i32; }

bool saves_exec(Op op) {
  switch (op) {
    case Op::s_and_saveexec_b64: case Op::s_or_saveexec_b64: case Op::s_xor_saveexec_b64: case Op::s_andn2_saveexec_b64:
    case Op::s_orn2_saveexec_b64: case Op::s_nand_saveexec_b64: case Op::s_nor_saveexec_b64: case Op::s_xnor_saveexec_b64:
    case Op::s_andn1_saveexec_b64: case Op::s_orn1_saveexec_b64: return true;
    default: return false;
  }
}

class PollFinder {
 public:
  PollFinder(const Program& program, UsageTable& table) : code_(program.code), table_(table) {}

  void find() {
    for (uint32_t i = 0; i < code_.size(); ++i) {
      const Inst& inst = *code_[i].inst;
      if (!is_load(i) || (!inst.sc0 && !inst.sc1)) continue;
      if (marked(i) && !acquires(i)) table_.uses[i].volatile_data = true;
      else if (inst.format == Format::FLAT) table_.uses[i].polls = table_.polls = true;
    }
    find_volatile_polls();
    for (uint32_t last = 0; last < code_.size(); ++last)
      if (jumps(code_[last].inst->op) && code_[last].target <= last && last - code_[last].target < kLongestLoop)
        look_at(code_[last].target, last);
  }

 private:
  struct Span {
    const uint16_t* at;
    uint32_t count;
    const uint16_t* begin() const { return at; }
    const uint16_t* end() const { return at + count; }
  };
  Span reads(uint32_t i) const {
    const RegisterUse& u = table_.uses[i];
    return {&table_.registers[u.first], uint32_t{u.addresses} + u.reads};
  }
  Span writes(uint32_t i) const {
    const RegisterUse& u = table_.uses[i];
    return {&table_.registers[u.first + u.addresses + u.reads], u.writes};
  }
  bool may_poll(uint32_t i) const {
    const Inst& inst = *code_[i].inst;
    const RegisterUse& u = table_.uses[i];
    if (inst.format != Format::DS && inst.format != Format::FLAT) return false;
    return u.writes != 0 && u.flow != Flow::across;
  }
  bool is_load(uint32_t i) const {
    const Inst& inst = *code_[i].inst;
    if (inst.format != Format::FLAT && inst.format != Format::GLOBAL && inst.format != Format::MUBUF) return false;
    return inst.vdata.kind == OperandKind::none && table_.uses[i].writes != 0 && !inst.lds;
  }
  bool marked(uint32_t i) const { return is_load(i) && code_[i].inst->sc0 && code_[i].inst->sc1; }
  bool acquires(uint32_t i) const {
    for (uint32_t k = i + 1; k <= i + kAcquireDistance && k < code_.size(); ++k) {
      if (code_[k].inst->op == Op::buffer_inv) return true;
      if (code_[k].op_class == OpClass::branch) return false;
    }
    return false;
  }
  void find_volatile_polls() {
    for (uint32_t i = 0; i < code_.size(); ++i) {
      if (!table_.uses[i].volatile_data) continue;
      for (uint32_t last = i; last < code_.size() && last - i < kLongestVolatileLoop; ++last) {
        if (!jumps(code_[last].inst->op) || code_[last].target > i || last - code_[last].target >= kLongestVolatileLoop)
          continue;
        if (!decides(i, code_[last].target, last)) continue;
        is_signal(i);
        find_peeled(i, code_[last].target, last);
        break;
      }
    }
  }
  void is_signal(uint32_t i) {
    table_.uses[i].volatile_data = false;
    if (code_[i].inst->format == Format::DS || code_[i].inst->format == Format::FLAT)
      table_.uses[i].polls = table_.polls = true;
  }
  // Stores and barriers, and exits of the loop that are not followed here.
  bool spoils(uint32_t i) const {
    const ExecInst& in = code_[i];
    switch (in.op_class) {
      case OpClass::barrier: case OpClass::vmem_store: return true;
      case OpClass::branch: return !jumps(in.inst->op) && in.inst->op != Op::s_endpgm;
      case OpClass::lds: case OpClass::atomic: case OpClass::smem: case OpClass::vmem_load:
        return writes(i).count == 0 || in.inst->lds;
      default: return in.inst->op == Op::invalid;
    }
  }

  void look_at(uint32_t first, uint32_t last) {
    bool any = false;
    for (uint32_t i = first; i <= last; ++i) {
      if (spoils(i)) return;
      any |= may_poll(i);
    }
    if (!any) return;
    const Registers changing = changed_in(first, last);
    for (uint32_t i = first; i <= last; ++i) {
      const bool modifies = may_poll(i) && code_[i].inst->vdata.kind != OperandKind::none;
      if (code_[i].op_class == OpClass::atomic && !modifies) return;  // a global atomic
      bool constant = true;
      for (const uint16_t r : reads(i)) constant &= !changing[r];
      if (modifies && !constant) return;
      if (!may_poll(i) || !constant || !decides(i, first, last)) continue;
      is_signal(i);
      find_peeled(i, first, last);
    }
  }

  // Registers whose value may differ between turns: all that is written there, less what is made of constants only.
  Registers changed_in(uint32_t first, uint32_t last) const {
    Registers changing;
    for (uint32_t i = first; i <= last; ++i)
      for (const uint16_t r : writes(i)) changing.set(r);
    for (bool again = true; again;) {
      again = false;
      for (uint32_t i = first; i <= last; ++i) {
        for (const uint16_t r : writes(i)) {
          if (!changing[r] || !constant_in(r, first, last, changing)) continue;
          changing.reset(r);
          again = true;
        }
      }
    }
    return changing;
  }
  bool constant_in(uint16_t reg, uint32_t first, uint32_t last, const Registers& changing) const {
    for (uint32_t i = first; i <= last; ++i) {
      const Span written = writes(i);
      if (std::find(written.begin(), written.end(), reg) == written.end()) continue;
      const Inst& inst = *code_[i].inst;
      const RegisterUse& u = table_.uses[i];
      if (!is_move(inst.op) && (u.flow != Flow::lanes || u.partial || u.writes != code_[i].dst_dwords)) return false;
      for (const uint16_t r : reads(i))
        if (changing[r]) return false;
    }
    return true;
  }

  // Registers that depend on the value of instruction `from` are tainted; `moved` are those that a scalar move writes
  // although a branch depends on the value: the masks of structured control flow.
  bool depends(uint32_t i, const Registers& tainted) const {
    const ExecInst& in = code_[i];
    for (const uint16_t r : reads(i))
      if (tainted[r]) return true;
    if (saves_exec(in.inst->op) && tainted[kSgprBase + kExec]) return true;
    return in.op_class == OpClass::salu && !is_move(in.inst->op) && tainted[kScc];
  }
  bool branch_depends(uint32_t i, const Registers& tainted) const {
    switch (code_[i].inst->op) {
      case Op::s_cbranch_scc0: case Op::s_cbranch_scc1: return tainted[kScc];
      case Op::s_cbranch_vccz: case Op::s_cbranch_vccnz:
        return tainted[kSgprBase + kVcc] || tainted[kSgprBase + kVcc + 1];
      case Op::s_cbranch_execz: case Op::s_cbranch_execnz:
        return tainted[kSgprBase + kExec] || tainted[kSgprBase + kExec + 1];
      default: return false;
    }
  }
  Registers after(uint32_t i, uint32_t from, Registers tainted, const Registers& moved) const {
    const ExecInst& in = code_[i];
    const bool reached = i == from || depends(i, tainted);
    for (const uint16_t r : writes(i)) tainted.set(r, reached || (is_move(in.inst->op) && moved[r]));
    if (in.op_class == OpClass::salu && !is_move(in.inst->op)) tainted.set(kScc, reached);
    if (in.writes_exec || saves_exec(in.inst->op))
      for (const uint32_t r : {kExec, kExec + 1}) tainted.set(kSgprBase + r, reached);
    return tainted;
  }
  // Whether that value can end the loop.
  bool decides(uint32_t from, uint32_t first, uint32_t last) const {
    std::vector<Registers> before(last - first + 1);
    Registers moved;
    for (bool again = true; again;) {
      again = false;
      const auto reach = [&](uint32_t i, const Registers& tainted) {
        if (i < first || i > last) return;
        Registers& known = before[i - first];
        const Registers all = known | tainted;
        again |= all != known;
        known = all;
      };
      for (uint32_t i = first; i <= last; ++i) {
        const Registers& here = before[i - first];
        const Registers out = after(i, from, here, moved);
        const Op op = code_[i].inst->op;
        if (jumps(op)) reach(code_[i].target, out);
        if (op != Op::s_branch && op != Op::s_endpgm) reach(i + 1, out);
        if (!branch_depends(i, here)) continue;
        if (i == last || code_[i].target < first || code_[i].target > last) return true;
        again |= taint_moves(first, last, moved);
      }
    }
    return false;
  }
  bool taint_moves(uint32_t first, uint32_t last, Registers& moved) const {
    const Registers known = moved;
    for (uint32_t i = first; i <= last; ++i)
      if (is_move(code_[i].inst->op))
        for (const uint16_t r : writes(i)) moved.set(r);
    return moved != known;
  }

  bool same_read(uint32_t a, uint32_t b) const {
    const Inst &x = *code_[a].inst, &y = *code_[b].inst;
    if (x.op != y.op || x.offset != y.offset || x.offset1 != y.offset1) return false;
    if (marked(a) && marked(b)) return true;  // their address may have been computed again
    const Span r = reads(a), s = reads(b);
    return r.count == s.count && std::equal(r.begin(), r.end(), s.begin());
  }
  // The same read shortly before the loop, with a branch between that enters the loop or leaves it out.
  void find_peeled(uint32_t poll, uint32_t first, uint32_t last) {
    for (uint32_t i = first > 4 * kPeeledDistance ? first - 4 * kPeeledDistance : 0; i < first; ++i)
      if (same_read(i, poll) && leads_into(i, first, last)) is_signal(i);
  }
  bool leads_into(uint32_t read, uint32_t first, uint32_t last) const {
    bool branched = false;
    for (uint32_t i = read + 1; i <= read + kPeeledDistance && i < code_.size(); ++i) {
      if (i == first) return branched;
      if (spoils(i)) return false;
      for (const uint16_t r : writes(i)) {
        const Span used = reads(read);
        if (!marked(read) && std::find(used.begin(), used.end(), r) != used.end()) return false;
      }
      if (!jumps(code_[i].inst->op)) continue;
      if (code_[i].target >= first && code_[i].target <= last) return true;
      if (code_[i].inst->op == Op::s_branch) return false;
      branched = true;
    }
    return false;
  }

  const std::vector<ExecInst>& code_;
  UsageTable& table_;
};

}  // namespace

void find_polls(const Program& program, UsageTable& table) { PollFinder(program, table).find(); }

}  // namespace hfemu
