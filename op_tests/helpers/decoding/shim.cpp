// The decoder as a C interface: lengths, texts, and the fields of an Inst that its text does not show.
#include <cstdio>

#include "decode.h"
#include "disasm.h"

using namespace hfemu;
extern "C" int disassemble_one(const uint8_t* code, size_t bytes, int arch, char* text, size_t capacity) {
  Inst inst;
  if (!decode(code, bytes, 0, static_cast<Arch>(arch), inst)) return 0;
  std::snprintf(text, capacity, "%s", disassemble(inst).c_str());
  return inst.bytes;
}
extern "C" uint64_t source_constant(const uint8_t* code, size_t bytes, int arch, int index) {
  Inst inst;
  const bool known = decode(code, bytes, 0, static_cast<Arch>(arch), inst);
  return known && inst.src[index].kind == OperandKind::imm ? inst.src[index].imm : 1234567;
}
static int put(char* text, size_t capacity, const Operand& o) {
  return std::snprintf(text, capacity, "%c%d+%d ", " svaix"[static_cast<int>(o.kind)], o.reg, o.dwords);
}
// Operands by name, with registers and widths, in the order dst dst2 src0.. vaddr saddr vdata vdata2 srsrc soffset.
extern "C" void operands(const uint8_t* code, size_t bytes, int arch, char* text, size_t capacity) {
  Inst i;
  text[0] = 0;
  if (!decode(code, bytes, 0, static_cast<Arch>(arch), i)) return;
  const struct { const char* name; const Operand* operand; } named[] = {
      {"dst", &i.dst}, {"dst2", &i.dst2}, {"src0", &i.src[0]}, {"src1", &i.src[1]}, {"src2", &i.src[2]},
      {"vaddr", &i.vaddr}, {"saddr", &i.saddr}, {"vdata", &i.vdata}, {"vdata2", &i.vdata2}, {"srsrc", &i.srsrc},
      {"soffset", &i.soffset}, {"scale_a", &i.scale_a}, {"scale_b", &i.scale_b}};
  size_t at = 0;
  for (const auto& n : named) {
    if (n.operand->kind == OperandKind::none) continue;
    at += std::snprintf(text + at, capacity - at, "%s=", n.name);
    at += put(text + at, capacity - at, *n.operand);
  }
}
