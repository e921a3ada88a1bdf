// Operands, the scalar formats, and the conditions on every instruction.
#include <cstring>
#include <initializer_list>

#include "decoder.h"
#include "inline_constants.h"

namespace hfemu {
namespace {

using isa::Type;

uint64_t inline_float(unsigned i, ConstType type) {
  const InlineFloat& f = kInlineFloats[i];
  switch (type) {
    case ConstType::i16:
    case ConstType::f16:
    case ConstType::pk_f16: return f.f16;
    case ConstType::bf16:
    case ConstType::pk_bf16: return f.bf16;
    case ConstType::i64:
    case ConstType::f64: return f.f64;
    case ConstType::pk_f32: return f.f32 * 0x100000001ull;
    default: return f.f32;
  }
}

uint64_t inline_int(int64_t value, ConstType type) {
  switch (type) {
    case ConstType::i64:
    case ConstType::f64: return static_cast<uint64_t>(value);
    case ConstType::pk_f32: return static_cast<uint32_t>(value) * 0x100000001ull;
    case ConstType::i16:
    case ConstType::f16:
    case ConstType::bf16: return static_cast<uint16_t>(value);
    default: return static_cast<uint32_t>(value);
  }
}

uint64_t widen_literal(uint32_t value, const Type& type) {
  switch (type.constant) {
    case ConstType::f64: return static_cast<uint64_t>(value) << 32;
    case ConstType::i64: return type.sign_extend ? static_cast<uint64_t>(static_cast<int32_t>(value)) : value;
    case ConstType::pk_f32: return value * 0x100000001ull;
    default: return value;
  }
}

Operand make(OperandKind kind, unsigned reg, const Type& type) {
  Operand o;
  o.kind = kind;
  o.reg = static_cast<uint16_t>(reg);
  o.dwords = type.dwords;
  o.type = type.constant;
  return o;
}

Operand make_imm(uint64_t value, const Type& type, bool literal) {
  Operand o = make(OperandKind::imm, 0, type);
  o.imm = value;
  o.literal = literal;
  return o;
}

}  // namespace

bool Decoder::run() {
  if (!word(0, w0_)) return false;
  uint32_t top9 = w0_ >> 23;
  if (!bit(w0_, 31)) {
    uint32_t top7 = w0_ >> 25;
    if (top7 == 0x3f) return vop1();
    if (top7 == 0x3e) return vopc();
    return vop2();
  }
  if (top9 == 0x17d) return sop1();
  if (top9 == 0x17e) return sopc();
  if (top9 == 0x17f) return sopp();
  if (w0_ >> 28 == 0xb) return sopk();
  if (w0_ >> 30 == 2) return sop2();
  if (!word(1, w1_)) return false;
  inst_.bytes = 8;
  if (top9 == 0x1a7) return vop3p();
  switch (w0_ >> 26) {
    case 0x30: return smem();
    case 0x34: return vop3();
    case 0x36: return ds();
    case 0x37: return flat();
    case 0x38: return mubuf();
    default: return false;
  }
}

bool Decoder::word(unsigned index, uint32_t& out) const {
  if (avail_ < (index + 1) * 4) return false;
  std::memcpy(&out, code_ + index * 4, 4);
  return true;
}

bool Decoder::select(Encoding encoding, Format format, unsigned opcode) {
  row_ = isa::find(encoding, opcode, arch_);
  if (row_ == nullptr) return false;
  inst_.op = row_->op;
  inst_.format = format;
  return true;
}

// Operand codes 0..511 shared by scalar and vector sources.
bool Decoder::source(unsigned field, const Type& type, Operand& out) {
  if (type.dwords == 0) return true;
  if (field >= kVgpr) {
    out = make(OperandKind::vgpr, field - kVgpr, type);
    return true;
  }
  if (field <= 124 || field == 126 || field == 127) {
    out = make(OperandKind::sgpr, field, type);
    return true;
  }
  if (field >= 128 && field <= 208) {
    int64_t value = field <= 192 ? static_cast<int64_t>(field) - 128 : 192 - static_cast<int64_t>(field);
    out = make_imm(inline_int(value, type.constant), type, false);
    return true;
  }
  if (field >= 240 && field <= 248) {
    out = make_imm(inline_float(field - 240, type.constant), type, false);
    return true;
  }
  if (field == kLiteral) return literal(type, out);
  return special(field, type, out);
}

bool Decoder::special(unsigned field, const Type& type, Operand& out) const {
  Special s;
  switch (field) {
    case 235: s = Special::shared_base; break;
    case 236: s = Special::shared_limit; break;
    case 237: s = Special::private_base; break;
    case 238: s = Special::private_limit; break;
    case 239: s = Special::pops_exiting; break;
    case 251: s = Special::vccz; break;
    case 252: s = Special::execz; break;
    case 253: s = Special::scc; break;
    case 254: s = Special::lds_direct; break;
    default: return false;
  }
  out = make(OperandKind::special, static_cast<unsigned>(s), type);
  return true;
}

// The trailing dword of a 4-byte encoding; two operands may share it. 8-byte encodings have none.
bool Decoder::literal(const Type& type, Operand& out) {
  if (inst_.bytes == 4) {
    if (!word(1, literal_)) return false;
    inst_.bytes = 8;
    has_literal_ = true;
  } else if (!has_literal_) {
    return false;
  }
  out = make_imm(widen_literal(literal_, type), type, true);
  return true;
}

Operand Decoder::sgpr(unsigned reg, const Type& type) {
  return type.dwords == 0 ? Operand{} : make(OperandKind::sgpr, reg, type);
}

Operand Decoder::vgpr(unsigned reg, const Type& type, bool acc) {
  return type.dwords == 0 ? Operand{} : make(acc ? OperandKind::agpr : OperandKind::vgpr, reg, type);
}

bool Decoder::add_source(unsigned field, const Type& type) {
  if (type.dwords == 0) return true;
  return source(field, type, inst_.src[inst_.num_src++]);
}

void Decoder::add_source(const Operand& o) { inst_.src[inst_.num_src++] = o; }

bool Decoder::sop1() {
  if (!select(Encoding::SOP1, Format::SOP1, bits(w0_, 15, 8))) return false;
  inst_.dst = sgpr(bits(w0_, 22, 16), row_->dst);
  return add_source(bits(w0_, 7, 0), row_->src[0]);
}

bool Decoder::sop2() {
  if (!select(Encoding::SOP2, Format::SOP2, bits(w0_, 29, 23))) return false;
  inst_.dst = sgpr(bits(w0_, 22, 16), row_->dst);
  return add_source(bits(w0_, 7, 0), row_->src[0]) && add_source(bits(w0_, 15, 8), row_->src[1]);
}

bool Decoder::sopc() {
  if (!select(Encoding::SOPC, Format::SOPC, bits(w0_, 22, 16))) return false;
  if (!add_source(bits(w0_, 7, 0), row_->src[0])) return false;
  if (row_->has(isa::imm_gpr_idx)) {  // the second field is the mode itself
    inst_.simm = static_cast<int32_t>(bits(w0_, 15, 8));
    return true;
  }
  return add_source(bits(w0_, 15, 8), row_->src[1]);
}

bool Decoder::sopk() {
  if (!select(Encoding::SOPK, Format::SOPK, bits(w0_, 27, 23))) return false;
  inst_.simm = sign_extend(bits(w0_, 15, 0), 16);
  if (row_->has(isa::literal_mul)) return add_source(kLiteral, row_->src[0]);
  inst_.dst = sgpr(bits(w0_, 22, 16), row_->dst);
  return add_source(bits(w0_, 22, 16), row_->src[0]);
}

bool Decoder::sopp() {
  if (!select(Encoding::SOPP, Format::SOPP, bits(w0_, 22, 16))) return false;
  inst_.simm = sign_extend(bits(w0_, 15, 0), 16);
  return true;
}

namespace {

// Registers outside the files would be out of bounds in the executor; scalar tuples are aligned; 125 is not a register.
bool in_file(const Operand& o) {
  const unsigned end = o.reg + o.dwords;
  const unsigned alignment = o.dwords == 1 ? 1 : o.dwords == 2 ? 2 : 4;
  switch (o.kind) {
    case OperandKind::sgpr: return end <= 128 && o.reg % alignment == 0 && (end <= 125 || o.reg > 125);
    case OperandKind::vgpr:
    case OperandKind::agpr: return end <= 256;
    default: return true;
  }
}

bool registers_exist(const Inst& i) {
  for (const Operand* o : {&i.dst, &i.dst2, &i.src[0], &i.src[1], &i.src[2], &i.src[3], &i.vaddr, &i.saddr, &i.vdata,
                           &i.srsrc, &i.soffset, &i.vdata2, &i.scale_a, &i.scale_b}) {
    if (!in_file(*o)) return false;
  }
  return true;
}

}  // namespace

bool decode(const uint8_t* code, size_t avail, uint64_t pc, Arch arch, Inst& out) {
  out = Inst{};
  out.pc = pc;
  return Decoder(code, avail, arch, out).run() && registers_exist(out);
}

const char* op_name(Op op) {
  const char* name = isa::row(op).name;
  return *name != '\0' ? name : "invalid";
}

}  // namespace hfemu
