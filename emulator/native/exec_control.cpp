// Branches, calls, waits, barriers, messages.
#include "exec.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

void end_program(Wave& w, const ExecInst&) { w.state = WaveState::ended; }
void barrier(Wave& w, const ExecInst&) { w.state = WaveState::barrier; }
void sleep(Wave& w, const ExecInst&) { w.state = WaveState::sleeping; }
void set_priority(Wave& w, const ExecInst& in) { w.priority = in.inst->simm & 3; }

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

// --- fork and join ----------------------------------------------------------------------------------------------------
// A divergent fork runs the smaller half first and leaves {PC, EXEC} of the other half on a stack in SGPRs, four for
// each of MODE.CSP's entries; EXEC in the lower two is an assumption (the ISA documents show both orders).
constexpr u32 kMaxForks = 6;

void fork(Wave& w, const ExecInst& in, u64 target) {
  const u64 exec = w.exec(), mask = scalar_source(w, in.src[0]), pass = mask & exec, fail = ~mask & exec;
  const auto go = [&] { jump(w, in, target); };
  if (pass == exec) return go();
  if (fail == exec) return;
  if (w.mode.csp >= kMaxForks)
    fault(w, in, FaultKind::unsupported, format("more than %u nested divergent forks", kMaxForks));
  const bool fail_first = std::popcount(fail) < std::popcount(pass);
  const u32 entry = 4u * w.mode.csp++;
  w.set_s64(entry, fail_first ? pass : fail);
  w.set_s64(entry + 2, fail_first ? target : pc_address(w, w.pc));
  w.set_s64(kExec, fail_first ? fail : pass);
  if (!fail_first) go();
}
void fork_register(Wave& w, const ExecInst& in) { fork(w, in, scalar_source(w, in.src[1])); }
void fork_immediate(Wave& w, const ExecInst& in) { fork(w, in, pc_address(w, in.target)); }
void join(Wave& w, const ExecInst& in) {
  if (w.mode.csp == (scalar_source(w, in.src[0]) & 0xFFFFFFFF)) return;
  if (w.mode.csp == 0) fault(w, in, FaultKind::unsupported, "a join without a fork: MODE.CSP is 0");
  const u32 entry = 4u * --w.mode.csp;
  const u64 exec = w.s64(entry), to = w.s64(entry + 2);
  w.set_s64(kExec, exec);
  jump(w, in, to);
}

// --- what reaches outside the wave ------------------------------------------------------------------------------------
void send_message(Wave& w, const ExecInst& in) {
  // An interrupt would wake a host thread that waits for a signal in memory. No thread waits here, and the memory is
  // written anyway.
  constexpr int interrupt = 1;
  if ((in.inst->simm & 15) != interrupt)
    unsupported(w, in, "this message: a compute wave has no use for it, and nobody would answer");
}
void set_halt(Wave& w, const ExecInst& in) {
  if (in.inst->simm & 1) unsupported(w, in, "halting the wave: no debugger would resume it");
}
void set_kill(Wave& w, const ExecInst& in) {
  if (in.inst->simm & 1) unsupported(w, in, "setting the wave's KILL bit");
}

void trap(Wave& w, const ExecInst& in) {
  fault(w, in, FaultKind::unsupported, format("the kernel trapped (s_trap %d)", in.inst->simm));
}

}  // namespace

void register_control(OpTable& t) {
  using C = OpClass;
  for (const Op op : {Op::s_nop, Op::s_icache_inv, Op::s_incperflevel, Op::s_decperflevel,
                      Op::s_ttracedata, Op::s_wakeup, Op::v_nop, Op::v_clrexcp})
    t.special(op, C::other, &no_operation);
  t.special(Op::s_waitcnt, C::waitcnt, &no_operation);
  t.special(Op::s_sleep, C::other, &sleep);
  t.special(Op::s_setprio, C::other, &set_priority);
  t.special(Op::s_endpgm, C::branch, &end_program);
  t.special(Op::s_barrier, C::barrier, &barrier);
  t.special(Op::s_branch, C::branch, &branch<decltype([](const Wave&) { return true; })>);
  t.special(Op::s_cbranch_scc0, C::branch, &branch<decltype([](const Wave& w) { return !w.scc; })>);
  t.special(Op::s_cbranch_scc1, C::branch, &branch<decltype([](const Wave& w) { return w.scc != 0; })>);
  t.special(Op::s_cbranch_vccz, C::branch, &branch<decltype([](const Wave& w) { return w.s64(kVcc) == 0; })>);
  t.special(Op::s_cbranch_vccnz, C::branch, &branch<decltype([](const Wave& w) { return w.s64(kVcc) != 0; })>);
  t.special(Op::s_cbranch_execz, C::branch, &branch<decltype([](const Wave& w) { return w.exec() == 0; })>);
  t.special(Op::s_cbranch_execnz, C::branch, &branch<decltype([](const Wave& w) { return w.exec() != 0; })>);
  // Conditions set by a debugger are never true.
  for (const Op op : {Op::s_cbranch_cdbgsys, Op::s_cbranch_cdbguser, Op::s_cbranch_cdbgsys_or_user,
                      Op::s_cbranch_cdbgsys_and_user})
    t.special(op, C::branch, &no_operation);
  t.special(Op::s_getpc_b64, C::salu, &getpc);
  t.special(Op::s_setpc_b64, C::branch, &setpc);
  t.special(Op::s_swappc_b64, C::branch, &swappc);
  t.special(Op::s_call_b64, C::branch, &call);
  t.special(Op::s_cbranch_g_fork, C::branch, &fork_register);
  t.special(Op::s_cbranch_i_fork, C::branch, &fork_immediate);
  t.special(Op::s_cbranch_join, C::branch, &join);
  t.special(Op::s_sendmsg, C::other, &send_message);
  t.special(Op::s_sethalt, C::other, &set_halt);
  t.special(Op::s_setkill, C::other, &set_kill);
  t.special(Op::s_trap, C::other, &trap);
}

}  // namespace hfemu
