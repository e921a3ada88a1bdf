#include "isa.h"

#include <array>
#include <cstddef>

namespace hfemu::isa {
namespace {

constexpr Row alu(Op op, Encoding encoding, uint16_t opcode, const char* name, Type dst, Type src0, Type src1,
                  Type src2, uint64_t flags) {
  return Row{op, encoding, opcode, dst, {src0, src1, src2}, flags, name};
}

// One helper per encoding gives its rows their short argument lists.
constexpr Row sop1(Op op, uint16_t opcode, const char* name, Type dst, Type src0 = none) {
  return alu(op, Encoding::SOP1, opcode, name, dst, src0, none, none, 0);
}
constexpr Row sop2(Op op, uint16_t opcode, const char* name, Type dst, Type src0, Type src1) {
  return alu(op, Encoding::SOP2, opcode, name, dst, src0, src1, none, 0);
}
constexpr Row sopc(Op op, uint16_t opcode, const char* name, Type src0, Type src1, uint64_t flags = 0) {
  return alu(op, Encoding::SOPC, opcode, name, none, src0, src1, none, flags);
}
constexpr Row sopk(Op op, uint16_t opcode, const char* name, Type dst, Type src0, uint64_t flags) {
  return alu(op, Encoding::SOPK, opcode, name, dst, src0, none, none, flags);
}
constexpr Row sopp(Op op, uint16_t opcode, const char* name, uint64_t flags) {
  return alu(op, Encoding::SOPP, opcode, name, none, none, none, none, flags);
}
constexpr Row vop1(Op op, uint16_t opcode, const char* name, Type dst, Type src0 = none, uint64_t flags = 0) {
  return alu(op, Encoding::VOP1, opcode, name, dst, src0, none, none, flags);
}
constexpr Row vop2(Op op, uint16_t opcode, const char* name, Type dst, Type src0, Type src1, uint64_t flags = 0) {
  return alu(op, Encoding::VOP2, opcode, name, dst, src0, src1, none, flags);
}
constexpr Row vopc(Op op, uint16_t opcode, const char* name, Type src0, Type src1, uint64_t flags = 0) {
  return alu(op, Encoding::VOPC, opcode, name, b64, src0, src1, none, flags);
}
constexpr Row vop3(Op op, uint16_t opcode, const char* name, Type dst, Type src0, Type src1, Type src2 = none,
                   uint64_t flags = 0) {
  return alu(op, Encoding::VOP3, opcode, name, dst, src0, src1, src2, flags);
}
constexpr Row vop3p(Op op, uint16_t opcode, const char* name, Type dst, Type src0, Type src1, Type src2 = none,
                    uint64_t flags = 0) {
  return alu(op, Encoding::VOP3P, opcode, name, dst, src0, src1, src2, flags);
}
constexpr Row mai(Op op, uint16_t opcode, const char* name, Type d, Type a, Type b, Type c, uint64_t flags = 0) {
  return alu(op, Encoding::MAI, opcode, name, d, a, b, c, flags);
}
constexpr Row smem(Op op, uint16_t opcode, const char* name, Type dst, Type base = none, Type data = none,
                   uint64_t flags = 0) {
  return alu(op, Encoding::SMEM, opcode, name, dst, base, data, none, flags);
}
constexpr Row ds(Op op, uint16_t opcode, const char* name, Type dst, Type addr = none, Type data0 = none,
                 Type data1 = none, uint64_t flags = 0) {
  return alu(op, Encoding::DS, opcode, name, dst, addr, data0, data1, flags);
}
constexpr Row vmem(Op op, Encoding encoding, uint16_t opcode, const char* name, Type dst, Type data = none,
                   uint64_t flags = 0) {
  return alu(op, encoding, opcode, name, dst, none, data, none, flags);
}

constexpr Row kRows[] = {
    Row{},
#define HFEMU_SOP1(opcode, name, ...) sop1(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_SOP2(opcode, name, ...) sop2(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_SOPC(opcode, name, ...) sopc(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_SOPK(opcode, name, ...) sopk(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_SOPP(opcode, name, ...) sopp(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_SMEM(opcode, name, ...) smem(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_VOP1(opcode, name, ...) vop1(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_VOP2(opcode, name, ...) vop2(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_VOPC(opcode, name, ...) vopc(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_VOP3(opcode, name, ...) vop3(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_VOP3P(opcode, name, ...) vop3p(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_MAI(opcode, name, ...) mai(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_DS(opcode, name, ...) ds(Op::name, opcode, #name, __VA_ARGS__),
#define HFEMU_FLAT(opcode, name, ...) vmem(Op::name, Encoding::FLAT, opcode, #name, __VA_ARGS__),
#define HFEMU_GLOBAL(opcode, name, ...) vmem(Op::name, Encoding::GLOBAL, opcode, #name, __VA_ARGS__),
#define HFEMU_SCRATCH(opcode, name, ...) vmem(Op::name, Encoding::SCRATCH, opcode, #name, __VA_ARGS__),
#define HFEMU_MUBUF(opcode, name, ...) vmem(Op::name, Encoding::MUBUF, opcode, #name, __VA_ARGS__),
#include "isa.inc"
#undef HFEMU_SOP1
#undef HFEMU_SOP2
#undef HFEMU_SOPC
#undef HFEMU_SOPK
#undef HFEMU_SOPP
#undef HFEMU_SMEM
#undef HFEMU_VOP1
#undef HFEMU_VOP2
#undef HFEMU_VOPC
#undef HFEMU_VOP3
#undef HFEMU_VOP3P
#undef HFEMU_MAI
#undef HFEMU_DS
#undef HFEMU_FLAT
#undef HFEMU_GLOBAL
#undef HFEMU_SCRATCH
#undef HFEMU_MUBUF
};

constexpr size_t kCount = static_cast<size_t>(Op::count);
static_assert(sizeof(kRows) / sizeof(kRows[0]) == kCount, "the enumerators and the rows come from the same table");

constexpr size_t kEncodings = static_cast<size_t>(Encoding::MUBUF) + 1;
constexpr unsigned kMaxOpcode = 1024;

using Index = std::array<std::array<uint16_t, kMaxOpcode>, kEncodings>;

void enter(Index& index, Encoding encoding, unsigned opcode, size_t row) {
  index[static_cast<size_t>(encoding)][opcode] = static_cast<uint16_t>(row);
}

Index build_index() {
  Index index{};
  for (size_t i = 1; i < kCount; ++i) {
    const Row& r = kRows[i];
    if (r.has(scaled_prefix)) continue;  // shares its opcode; the decoder finds it by its prefix
    enter(index, r.encoding, r.opcode, i);
    if (r.has(e32_only)) continue;
    if (r.encoding == Encoding::VOPC) enter(index, Encoding::VOP3, r.opcode, i);
    if (r.encoding == Encoding::VOP2) enter(index, Encoding::VOP3, 0x100u + r.opcode, i);
    if (r.encoding == Encoding::VOP1) enter(index, Encoding::VOP3, 0x140u + r.opcode, i);
  }
  return index;
}

}  // namespace

const Row& row(Op op) {
  size_t i = static_cast<size_t>(op);
  return kRows[i < kCount ? i : 0];
}

const Row* find(Encoding encoding, unsigned opcode, Arch arch) {
  static const Index index = build_index();
  if (opcode >= kMaxOpcode) return nullptr;
  size_t i = index[static_cast<size_t>(encoding)][opcode];
  if (i == 0) return nullptr;
  const Row& r = kRows[i];
  if (r.has(arch == Arch::gfx942 ? gfx950_only : gfx942_only)) return nullptr;
  return &r;
}

}  // namespace hfemu::isa
