#include "trace.h"

#include "disasm.h"

namespace hfemu {
namespace {

void add_operand(std::string& line, const Wave& w, const Operand& o, uint32_t lane) {
  const bool vector = o.kind == OperandKind::vgpr || o.kind == OperandKind::agpr;
  if (!vector && o.kind != OperandKind::sgpr) return;
  for (uint32_t i = 0; i < o.dwords && i < 4; ++i) {
    const uint32_t r = o.reg + i;
    if (vector)
      line += format(" %c%u=%08x", o.kind == OperandKind::agpr ? 'a' : 'v', r,
                     w.v[r + (o.kind == OperandKind::agpr ? kAcc : 0)][lane]);
    else if (r < 128)
      line += format(" s%u=%08x", r, w.s[r]);
  }
}

}  // namespace

bool trace_applies(const TraceRequest& trace, const Launch& launch) {
  return trace.kernel.empty() || launch.kernel->name.find(trace.kernel) != std::string::npos;
}

void trace_instruction(const Wave& w, const ExecInst& in, uint64_t exec, const TraceRequest& trace) {
  const Inst& i = *in.inst;
  std::string line = format("%06llx %-56s exec=%016llx scc=%u |", static_cast<unsigned long long>(i.pc),
                            instruction_text(i, nullptr).c_str(), static_cast<unsigned long long>(exec), w.scc);
  for (const Operand* o : {&i.dst, &i.dst2, &i.src[0], &i.src[1], &i.src[2], &i.vaddr, &i.saddr, &i.vdata, &i.vdata2,
                           &i.srsrc, &i.soffset})
    add_operand(line, w, *o, trace.lane & 63);
  trace.sink(line.c_str(), trace.context);
}

}  // namespace hfemu
