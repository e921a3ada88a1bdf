// One instruction on registers that the caller passes, for the tests of operations.
#include "decode.h"
#include "dispatch.h"
#include "exec.h"
#include "host_mode.h"
#include "prepare.h"

namespace hfemu {

extern "C" __attribute__((visibility("default"))) const char* hfemu_exec_one(
    const uint8_t* code, uint64_t bytes, int32_t arch, uint32_t mode, uint32_t* sgprs, uint32_t* vgprs, uint32_t* scc,
    uint8_t* lds, uint32_t lds_bytes, uint32_t private_bytes) {
  thread_local std::string error;
  LoadedCode text;
  text.arch = arch == 942 ? Arch::gfx942 : Arch::gfx950;
  text.base = code;
  text.text_end = bytes;
  const Program& program = program_of(text);
  Launch launch;
  launch.program = &program;
  launch.options.check_memory = false;
  launch.private_bytes = private_bytes;
  Workgroup group;
  group.lds = lds;
  group.lds_bytes = lds_bytes;
  ThreadState thread;
  auto w = std::make_unique<Wave>();
  w->code = program.code.data();
  w->wg = &group;
  w->thread = &thread;
  w->launch = &launch;
  std::vector<uint8_t> scratch(size_t{private_bytes} * kLanes);  // zeroed for every call
  w->scratch = scratch.data();
  std::memcpy(w->v, vgprs, sizeof w->v);
  std::memcpy(w->s, sgprs, sizeof w->s);
  w->scc = *scc;
  w->mode.fnuz = text.arch == Arch::gfx942;
  set_mode_register(*w, mode);
  HostFloat host;
  thread.host = &host;
  try {
    // All instructions in the bytes are executed, so that s_set_gpr_idx_on and the like can affect the next one.
    while (w->pc + 1 < program.code.size() && w->state <= WaveState::sleeping) {
      if (w->state == WaveState::sleeping) w->state = w->awake();
      if (w->state == WaveState::careful) {
        step_careful(*w);
        continue;
      }
      const ExecInst& in = program.code[w->pc++];
      in.fn(*w, in);
    }
  } catch (const FaultError& fault) {
    error = fault.fault.text;
    return error.c_str();
  }
  std::memcpy(vgprs, w->v, sizeof w->v);
  std::memcpy(sgprs, w->s, sizeof w->s);
  *scc = w->scc;
  return nullptr;
}

}  // namespace hfemu
