// Branches, calls, waits, barriers, mode registers and the VGPR indexing mode.
#include "exec.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

void no_operation(Wave&, const ExecInst&) {}
void end_program(Wave& w, const ExecInst&) { w.state = WaveState::ended; }
void barrier(Wave& w, const ExecInst&) { w.state = WaveState::barrier; }
void sleep(Wave& w, const ExecInst&) { w.state = WaveState::sleeping; }

template <class F>
void branch(Wave& w, const ExecInst& in) {
  if (F{}(w)) w.pc = in.target;
}

u64 pc_address(const Wave& w, u32 index) { return w.launch->program->host_pc(index); }

void jump(Wave& w, const ExecInst& in, u64 address) {
  const u32 index = w.launch->program->index_at(address);
  if (index == Program::kNoIndex)
    fault(w, in, FaultKind::unsupported,
          format("jump to 0x%llx, which is not an instruction of this code object", static_cast<unsigned long long>(address)));
  w.pc = index;
}

void getpc(Wave& w, const ExecInst& in) { w.set_s64(in.dst, pc_address(w, w.pc)); }
void setpc(Wave& w, const ExecInst& in) { jump(w, in, scalar_source(w, in.src[0])); }
void swappc(Wave& w, const ExecInst& in) {
  const u64 to = scalar_source(w, in.src[0]);
  w.set_s64(in.dst, pc_address(w, w.pc));
  jump(w, in, to);
}
void call(Wave& w, const ExecInst& in) {
  w.set_s64(in.dst, pc_address(w, w.pc));
  w.pc = in.target;
}

void trap(Wave& w, const ExecInst& in) {
  fault(w, in, FaultKind::unsupported, format("the kernel trapped (s_trap %d)", in.inst->simm));
}

// hwreg(id, offset, size) of s_getreg and s_setreg.
struct HardwareRegister {
  u32 id, offset, mask;
  explicit HardwareRegister(int32_t simm)
      : id(static_cast<u32>(simm) & 63), offset(static_cast<u32>(simm) >> 6 & 31),
        mask(static_cast<u32>((u64{1} << ((static_cast<u32>(simm) >> 11 & 31) + 1)) - 1)) {}
};
constexpr u32 kRegMode = 1, kRegStatus = 2, kRegHwId = 4, kRegXccId = 20;

u32 read_mode(const Mode& m) {
  return m.round32 | m.round64 << 2 | m.denorm32 << 4 | m.denorm64 << 6 | u32{m.dx10_clamp} << 8 | u32{m.ieee} << 9 |
         u32{m.fp16_ovfl} << 23;
}

void getreg(Wave& w, const ExecInst& in) {
  const HardwareRegister r(in.inst->simm);
  u32 value = 0;
  switch (r.id) {
    case kRegMode: value = read_mode(w.mode); break;
    case kRegStatus: value = w.scc & 1; break;
    case kRegHwId: case kRegXccId: value = 0; break;  // every work-group runs on the same place
    default: unsupported(w, in, format("hardware register %u", r.id));
  }
  w.s[in.dst] = value >> r.offset & r.mask;
}

void setreg(Wave& w, const ExecInst& in) {
  const HardwareRegister r(in.inst->simm);
  if (r.id != kRegMode) unsupported(w, in, format("writing hardware register %u", r.id));
  const u32 value = static_cast<u32>(scalar_source(w, in.src[0]));
  const u32 bits = (read_mode(w.mode) & ~(r.mask << r.offset)) | (value & r.mask) << r.offset;
  set_mode(w, bits & 0x3FF, bits >> 23 & 1);
  w.state = WaveState::sleeping;  // the host's rounding and denormal state follows at the next turn
}

// s_set_gpr_idx_*: M0 holds the index (7:0) and which operands it moves (15:12).
void index_on(Wave& w, const ExecInst& in) {
  const u32 index = static_cast<u32>(scalar_source(w, in.src[0])) & 0xFF;
  w.s[kM0] = (w.s[kM0] & 0xFFFF0F00) | index | (static_cast<u32>(in.inst->simm) & 15) << 12;
  w.state = WaveState::indexing;
}
void index_off(Wave& w, const ExecInst&) { w.state = WaveState::running; }
void index_set(Wave& w, const ExecInst& in) {
  w.s[kM0] = (w.s[kM0] & ~0xFFu) | (static_cast<u32>(scalar_source(w, in.src[0])) & 0xFF);
}
void index_mode(Wave& w, const ExecInst& in) {
  w.s[kM0] = (w.s[kM0] & 0xFFFF0FFF) | (static_cast<u32>(in.inst->simm) & 15) << 12;
}

}  // namespace

void set_mode(Wave& w, u32 float_mode, bool fp16_ovfl) {
  Mode& m = w.mode;
  m.round32 = float_mode & 3;
  m.round64 = float_mode >> 2 & 3;
  m.denorm32 = float_mode >> 4 & 3;
  m.denorm64 = float_mode >> 6 & 3;
  m.dx10_clamp = float_mode >> 8 & 1;
  m.ieee = float_mode >> 9 & 1;
  m.fp16_ovfl = fp16_ovfl;
}

void step_indexed(Wave& w) {
  const ExecInst& in = w.code[w.pc++];
  if (in.op_class != OpClass::valu && in.op_class != OpClass::valu_trans) {
    in.fn(w, in);
    return;
  }
  ExecInst moved = in;
  const u32 index = w.s[kM0] & 0xFF, which = w.s[kM0] >> 12 & 15;
  const auto shift = [&](uint16_t& reg, u32 width) {
    const u32 limit = reg < kAcc ? kAcc : kVgprs;
    if (reg + index + width > limit)
      fault(w, in, FaultKind::unsupported, format("indexed register v%u lies outside the register file", reg + index));
    reg = static_cast<uint16_t>(reg + index);
  };
  for (u32 i = 0; i < 3; ++i)
    if ((which >> i & 1) && moved.src[i].kind == SourceKind::vgpr) shift(moved.src[i].reg, moved.src[i].dwords);
  if ((which & 8) && moved.dst_is_vgpr) shift(moved.dst, moved.dst_dwords);
  moved.fn(w, moved);
}

void register_control(OpTable& t) {
  using C = OpClass;
  for (const Op op : {Op::s_nop, Op::s_sethalt, Op::s_setprio, Op::s_icache_inv, Op::s_incperflevel, Op::s_decperflevel,
                      Op::s_ttracedata, Op::s_wakeup, Op::v_nop, Op::v_clrexcp})
    t.special(op, C::other, &no_operation);
  t.special(Op::s_waitcnt, C::waitcnt, &no_operation);
  t.special(Op::s_sleep, C::other, &sleep);
  t.special(Op::s_endpgm, C::branch, &end_program);
  t.special(Op::s_barrier, C::barrier, &barrier);
  t.special(Op::s_branch, C::branch, &branch<decltype([](const Wave&) { return true; })>);
  t.special(Op::s_cbranch_scc0, C::branch, &branch<decltype([](const Wave& w) { return !w.scc; })>);
  t.special(Op::s_cbranch_scc1, C::branch, &branch<decltype([](const Wave& w) { return w.scc != 0; })>);
  t.special(Op::s_cbranch_vccz, C::branch, &branch<decltype([](const Wave& w) { return w.s64(kVcc) == 0; })>);
  t.special(Op::s_cbranch_vccnz, C::branch, &branch<decltype([](const Wave& w) { return w.s64(kVcc) != 0; })>);
  t.special(Op::s_cbranch_execz, C::branch, &branch<decltype([](const Wave& w) { return w.exec() == 0; })>);
  t.special(Op::s_cbranch_execnz, C::branch, &branch<decltype([](const Wave& w) { return w.exec() != 0; })>);
  // The debugger's conditions are never met.
  for (const Op op : {Op::s_cbranch_cdbgsys, Op::s_cbranch_cdbguser, Op::s_cbranch_cdbgsys_or_user,
                      Op::s_cbranch_cdbgsys_and_user})
    t.special(op, C::branch, &no_operation);
  t.special(Op::s_getpc_b64, C::salu, &getpc);
  t.special(Op::s_setpc_b64, C::branch, &setpc);
  t.special(Op::s_swappc_b64, C::branch, &swappc);
  t.special(Op::s_call_b64, C::branch, &call);
  t.special(Op::s_trap, C::other, &trap);
  t.special(Op::s_getreg_b32, C::salu, &getreg);
  t.special(Op::s_setreg_b32, C::salu, &setreg);
  t.special(Op::s_setreg_imm32_b32, C::salu, &setreg);
  t.special(Op::s_set_gpr_idx_on, C::salu, &index_on);
  t.special(Op::s_set_gpr_idx_off, C::salu, &index_off);
  t.special(Op::s_set_gpr_idx_idx, C::salu, &index_set);
  t.special(Op::s_set_gpr_idx_mode, C::salu, &index_mode);
}

}  // namespace hfemu
