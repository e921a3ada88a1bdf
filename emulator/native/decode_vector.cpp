// VOP1, VOP2, VOPC with their SDWA and DPP forms, VOP3, VOP3P and the matrix instructions.
#include "decoder.h"

namespace hfemu {
namespace {

using isa::Type;

bool is_float(ConstType t) {
  return t == ConstType::f16 || t == ConstType::f32 || t == ConstType::f64 || t == ConstType::bf16 ||
         t == ConstType::pk_f16 || t == ConstType::pk_bf16 || t == ConstType::pk_f32;
}

// Neg and abs exist for floating-point operands of at most 64 bits; matrix operands have none.
bool takes_modifiers(const Type& t) { return is_float(t.constant) && t.dwords <= 2; }

}  // namespace

bool Decoder::vop1() {
  if (!select(Encoding::VOP1, Format::VOP1, bits(w0_, 16, 9))) return false;
  vector_destination(bits(w0_, 24, 17));
  if (!first_source()) return false;
  if (row_->has(isa::accvgpr_src)) {
    if (inst_.src[0].kind != OperandKind::vgpr) return false;
    inst_.src[0].kind = OperandKind::agpr;
  }
  return true;
}

bool Decoder::vop2() {
  if (!select(Encoding::VOP2, Format::VOP2, bits(w0_, 30, 25))) return false;
  vector_destination(bits(w0_, 24, 17));
  second_source_field_ = bits(w0_, 16, 9);
  if (!first_source()) return false;
  Operand literal_operand;
  if (row_->has(isa::literal_mul | isa::literal_add) && !literal(row_->src[1], literal_operand)) return false;
  if (row_->has(isa::literal_mul)) add_source(literal_operand);
  if (!extended_) add_source(vgpr(second_source_field_, row_->src[1]));
  if (row_->has(isa::literal_add)) add_source(literal_operand);
  implicit_operands();
  return true;
}

bool Decoder::vopc() {
  if (!select(Encoding::VOPC, Format::VOPC, bits(w0_, 24, 17))) return false;
  inst_.dst = sgpr(kVcc, isa::b64);
  second_source_field_ = bits(w0_, 16, 9);
  if (!first_source()) return false;
  if (!extended_) add_source(vgpr(second_source_field_, row_->src[1]));
  return true;
}

void Decoder::vector_destination(unsigned reg) {
  inst_.dst = row_->has(isa::sgpr_dst) ? sgpr(reg, row_->dst) : vgpr(reg, row_->dst, row_->has(isa::accvgpr_dst));
}

// Carry, mask and accumulator operands that the short encodings do not name.
void Decoder::implicit_operands() {
  if (row_->has(isa::carry_out)) inst_.dst2 = sgpr(kVcc, isa::b64);
  if (row_->has(isa::carry_in)) add_source(sgpr(kVcc, isa::b64));
  if (row_->has(isa::reads_dst)) add_source(inst_.dst);
}

// src0 of VOP1, VOP2 and VOPC, with the SDWA or DPP dword (which also holds src1's modifiers) if there is one.
bool Decoder::first_source() {
  const unsigned field = bits(w0_, 8, 0);
  if (row_->src[0].dwords == 0) return field != kSdwa && field != kDpp;  // v_nop
  if (field != kSdwa && field != kDpp) return add_source(field, row_->src[0]);
  if (row_->has(isa::e32_only) || !word(1, w1_)) return false;
  inst_.bytes = 8;
  extended_ = true;
  return field == kSdwa ? sdwa() : dpp();
}

bool Decoder::has_second_source() const { return row_->encoding != Encoding::VOP1; }

bool Decoder::sdwa() {
  inst_.sdwa = true;
  const unsigned selects[3] = {bits(w1_, 18, 16), bits(w1_, 26, 24), bits(w1_, 10, 8)};
  for (unsigned s : selects) {
    if (s > 6) return false;
  }
  if (row_->encoding == Encoding::VOPC) {
    if (bit(w1_, 15)) inst_.dst.reg = static_cast<uint16_t>(bits(w1_, 14, 8));
  } else {
    inst_.dst_select = static_cast<Select>(selects[2]);
    if (bits(w1_, 12, 11) > 2) return false;
    inst_.dst_unused = static_cast<DstUnused>(bits(w1_, 12, 11));
    inst_.clamp = bit(w1_, 13);
    inst_.omod = static_cast<uint8_t>(bits(w1_, 15, 14));
  }
  if (!sdwa_source(bits(w1_, 7, 0) | (bit(w1_, 23) ? 0 : kVgpr), row_->src[0], selects[0], bits(w1_, 22, 19))) {
    return false;
  }
  if (!has_second_source()) return true;
  unsigned second = second_source_field_ | (bit(w1_, 31) ? 0 : kVgpr);
  if (!sdwa_source(second, row_->src[1], selects[1], bits(w1_, 30, 27))) return false;
  return true;
}

bool Decoder::sdwa_source(unsigned field, const Type& type, unsigned selected, unsigned modifiers) {
  if (field == kLiteral || !add_source(field, type)) return false;
  Operand& o = inst_.src[inst_.num_src - 1];
  o.select = static_cast<Select>(selected);
  o.sext = (modifiers & 1) != 0;
  const bool floating = takes_modifiers(type) && type.constant != ConstType::pk_f16;
  o.neg = floating && (modifiers & 2) != 0;
  o.abs = floating && (modifiers & 4) != 0;
  return true;
}

// 64-bit operands can only be broadcast within a row.
bool Decoder::dpp_control_exists(unsigned c, bool wide) {
  const bool row_newbcast = c >= 0x150 && c < 0x160;
  if (wide) return row_newbcast;
  const bool row_shift = c > 0x100 && c < 0x130 && (c & 15) != 0;
  const bool wave_shift = c == 0x130 || c == 0x134 || c == 0x138 || c == 0x13c;
  return c < 0x100 || row_shift || wave_shift || (c >= 0x140 && c <= 0x143) || row_newbcast;
}

bool Decoder::dpp() {
  inst_.dpp = true;
  inst_.dpp_ctrl = static_cast<uint16_t>(bits(w1_, 16, 8));
  if (!dpp_control_exists(inst_.dpp_ctrl, row_->dst.dwords == 2 || row_->src[0].dwords == 2)) return false;
  inst_.bound_ctrl = bit(w1_, 19);
  inst_.bank_mask = static_cast<uint8_t>(bits(w1_, 27, 24));
  inst_.row_mask = static_cast<uint8_t>(bits(w1_, 31, 28));
  add_source(vgpr(bits(w1_, 7, 0), row_->src[0]));
  if (has_second_source()) add_source(vgpr(second_source_field_, row_->src[1]));
  for (unsigned i = 0; i < inst_.num_src; ++i) {
    if (!takes_modifiers(row_->src[i])) continue;
    inst_.src[i].neg = bit(w1_, 20 + 2 * i);
    inst_.src[i].abs = bit(w1_, 21 + 2 * i);
  }
  return true;
}

bool Decoder::vop3() {
  if (!select(Encoding::VOP3, Format::VOP3, bits(w0_, 25, 16))) return false;
  if (row_->encoding == Encoding::VOPC) {
    inst_.dst = sgpr(bits(w0_, 7, 0), row_->dst);
  } else {
    vector_destination(bits(w0_, 7, 0));
  }
  const unsigned fields[3] = {bits(w1_, 8, 0), bits(w1_, 17, 9), bits(w1_, 26, 18)};
  for (unsigned i = 0; i < 3; ++i) {
    if (!add_source(fields[i], row_->src[i])) return false;
  }
  if (row_->has(isa::carry_in) && (fields[2] >= kVgpr || !add_source(fields[2], isa::b64))) return false;
  if (row_->has(isa::reads_dst)) add_source(inst_.dst);
  if (row_->has(isa::bitop)) {
    inst_.bitop3 = static_cast<uint8_t>(bits(w1_, 28, 27) << 6 | bits(w0_, 10, 8) << 3 | bits(w1_, 31, 29));
  } else {
    inst_.omod = static_cast<uint8_t>(bits(w1_, 28, 27));
    for (unsigned i = 0; i < 3; ++i) {
      if (!takes_modifiers(row_->src[i])) continue;
      inst_.src[i].neg = bit(w1_, 29 + i);
      inst_.src[i].abs = bit(w0_, 8 + i) && !row_->has(isa::carry_out);
    }
  }
  inst_.clamp = bit(w0_, 15);
  if (row_->has(isa::carry_out)) {
    inst_.dst2 = sgpr(bits(w0_, 14, 8), isa::b64);
  } else if (row_->has(isa::fetch_control)) {
    inst_.fetch_inactive = bit(w0_, 11);
    inst_.bound_ctrl = bit(w0_, 12);
  } else if (row_->has(isa::op_sel)) {
    for (unsigned i = 0; i < 3; ++i) inst_.src[i].op_sel = bit(w0_, 11 + i);
    inst_.dst_op_sel = bit(w0_, 14);
  }
  return true;
}

bool Decoder::vop3p() {
  if (w0_ >> 16 == kScaledPrefix) return scaled_mfma();
  const unsigned opcode = bits(w0_, 22, 16);
  row_ = isa::find(Encoding::MAI, opcode, arch_);
  if (row_ != nullptr) return mai();
  if (!select(Encoding::VOP3P, Format::VOP3P, opcode)) return false;
  vector_destination(bits(w0_, 7, 0));
  for (unsigned i = 0; i < 3; ++i) {
    if (row_->src[i].dwords == 0) continue;
    Type type = row_->src[i];
    const bool hi = i == 2 ? bit(w0_, 14) : bit(w1_, 27 + i);
    if (row_->has(isa::mix) && hi) type = isa::f16;  // op_sel_hi makes the source an f16
    if (!add_source(bits(w1_, 8 + 9 * i, 9 * i), type)) return false;
    Operand& o = inst_.src[i];
    o.neg = bit(w1_, 29 + i);
    (row_->has(isa::mix) ? o.abs : o.neg_hi) = bit(w0_, 8 + i);
    o.op_sel = bit(w0_, 11 + i);
    o.op_sel_hi = hi;
  }
  inst_.clamp = bit(w0_, 15);
  return true;
}

// The prefix (scale registers and their byte selects) and the MFMA form one 16-byte instruction.
bool Decoder::scaled_mfma() {
  uint32_t prefix0 = w0_, prefix1 = w1_;
  if (!word(2, w0_) || !word(3, w1_) || bits(w0_, 31, 23) != 0x1a7) return false;
  const Row* plain = isa::find(Encoding::MAI, bits(w0_, 22, 16), arch_);
  if (plain == nullptr || !plain->has(isa::f8f6f4)) return false;
  row_ = &isa::row(static_cast<Op>(static_cast<unsigned>(plain->op) + 1));  // the scaled row follows the plain one
  inst_.bytes = 16;
  inst_.scaled = true;
  if (!source(bits(prefix1, 8, 0), isa::b32, inst_.scale_a)) return false;
  if (!source(bits(prefix1, 17, 9), isa::b32, inst_.scale_b)) return false;
  inst_.scale_sel_a = static_cast<uint8_t>(bit(prefix0, 11) | bit(prefix1, 27) << 1);
  inst_.scale_sel_b = static_cast<uint8_t>(bit(prefix0, 12) | bit(prefix1, 28) << 1);
  return mai();
}

// A and B of the f8f6f4 instructions: 32 values of 8, 6 or 4 bits.
isa::Type Decoder::f8f6f4_type(unsigned format) {
  return format <= 1 ? isa::b256 : format <= 3 ? isa::b192 : isa::b128;
}

bool Decoder::mai() {
  inst_.op = row_->op;
  inst_.format = Format::MAI;
  const bool acc_cd = bit(w0_, 15);
  inst_.cbsz = static_cast<uint8_t>(bits(w0_, 10, 8));
  inst_.blgp = static_cast<uint8_t>(bits(w1_, 31, 29));
  if (row_->has(isa::f8f6f4) && (inst_.cbsz > 4 || inst_.blgp > 4)) return false;  // formats 0..4
  const unsigned abid = bits(w0_, 14, 11);
  if (row_->has(isa::f8f6f4)) {
    if (abid != (inst_.scaled ? 1u : 0u)) return false;  // abid[0] says that a scale prefix precedes
  } else {
    inst_.abid = static_cast<uint8_t>(abid);
  }
  inst_.dst = vgpr(bits(w0_, 7, 0), row_->dst, acc_cd || row_->has(isa::accvgpr_dst));
  if (row_->has(isa::accvgpr_src | isa::accvgpr_dst)) {
    inst_.cbsz = inst_.blgp = inst_.abid = 0;
    if (row_->has(isa::accvgpr_dst)) return add_source(bits(w1_, 8, 0), row_->src[0]);
    inst_.dst.kind = OperandKind::vgpr;
    add_source(vgpr(bits(w1_, 7, 0), row_->src[0], true));
    return bits(w1_, 8, 8) == 1;
  }
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned field = bits(w1_, 8 + 9 * i, 9 * i);
    if (field < kVgpr) return false;
    Type type = row_->src[i];
    if (row_->has(isa::f8f6f4)) type = f8f6f4_type(i == 0 ? inst_.cbsz : inst_.blgp);
    add_source(vgpr(field - kVgpr, type, bit(w1_, 27 + i)));
  }
  const unsigned c = bits(w1_, 26, 18);
  if (c == kLiteral || !add_source(c, row_->src[2])) return false;
  Operand& o = inst_.src[2];
  if (o.kind != OperandKind::vgpr && (o.kind != OperandKind::imm || row_->has(isa::sparse))) return false;
  if (o.kind == OperandKind::vgpr && acc_cd && !row_->has(isa::sparse)) o.kind = OperandKind::agpr;
  return true;
}

}  // namespace hfemu
