// The text of a fault: reason, place, and the instructions around it.
#include <cstdarg>
#include <cstdio>

#include "core.h"
#include "decode.h"
#include "disasm.h"

namespace hfemu {

std::string format(const char* text, ...) {
  va_list args, again;
  va_start(args, text);
  va_copy(again, args);
  const int n = std::vsnprintf(nullptr, 0, text, args);
  std::string s(static_cast<size_t>(n), '\0');
  std::vsnprintf(s.data(), static_cast<size_t>(n) + 1, text, again);
  va_end(args);
  va_end(again);
  return s;
}

std::string instruction_text(const Inst& inst, const uint8_t* bytes) {
  if (inst.op != Op::invalid) return disassemble(inst);
  if (bytes == nullptr) return "<invalid>";
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return format("<invalid: 0x%08x>", word);
}

std::string listing_around(const Program& p, uint32_t index, uint32_t before, uint32_t after) {
  std::string s;
  const uint32_t count = static_cast<uint32_t>(p.insts.size()) - 1;
  const uint32_t first = index > before ? index - before : 0;
  for (uint32_t i = first; i < count && i <= index + after; ++i) {
    const Inst& inst = p.insts[i];
    s += format("  %s 0x%06llx: %s\n", i == index ? "-->" : "   ", static_cast<unsigned long long>(inst.pc),
                instruction_text(inst, reinterpret_cast<const uint8_t*>(p.base + inst.pc)).c_str());
  }
  return s;
}

void fault(const Wave& w, const ExecInst& in, FaultKind kind, const std::string& reason, int lane) {
  FaultError error;
  error.fault.kind = kind;
  std::string& text = error.fault.text;
  text = reason + "\n";
  const Launch* launch = w.launch;
  if (launch != nullptr && launch->kernel != nullptr)
    text += format("  kernel %s, pc 0x%llx: ", launch->kernel->name.c_str(), static_cast<unsigned long long>(in.inst->pc));
  else
    text += "  ";
  text += instruction_text(*in.inst, nullptr) + "\n";
  if (launch != nullptr && launch->program != nullptr)
    if (const std::string source = launch->program->source(*in.inst); !source.empty()) text += "  source " + source + "\n";
  if (w.wg != nullptr && launch != nullptr && launch->kernel != nullptr) {
    text += format("  work-group (%u, %u, %u), wave %u", w.wg->id[0], w.wg->id[1], w.wg->id[2], w.index);
    if (lane >= 0) text += format(", lane %d (work-item %u)", lane, w.index * kLanes + static_cast<uint32_t>(lane));
    text += "\n";
  }
  if (launch != nullptr && launch->program != nullptr && !launch->program->code.empty() &&
      in.inst >= launch->program->insts.data() &&
      in.inst < launch->program->insts.data() + launch->program->insts.size()) {
    text += listing_around(*launch->program, static_cast<uint32_t>(in.inst - launch->program->insts.data()), 4, 3);
  }
  throw error;
}

void report(const Wave& w, const ExecInst& in, FaultKind kind, const std::string& reason, int lane) {
  Launch& launch = *w.launch;
  if (launch.options.max_reports <= 1) fault(w, in, kind, reason, lane);
  const std::lock_guard lock(launch.reports_mutex);
  for (const auto& [inst, known] : launch.reports)
    if (inst == in.inst && known.kind == kind) return;
  try {
    fault(w, in, kind, reason, lane);
  } catch (const FaultError& e) {
    launch.reports.emplace_back(in.inst, e.fault);
    if (launch.reports.size() >= launch.options.max_reports) throw;
  }
}

void unsupported(const Wave& w, const ExecInst& in, const std::string& what) {
  fault(w, in, FaultKind::unsupported, "the emulator does not support this: " + what);
}

}  // namespace hfemu
