#include "decode.h"

#include <cstring>
#include <initializer_list>

#include "inline_constants.h"
#include "isa.h"

namespace hfemu {
namespace {

using isa::Encoding;
using isa::Row;
using isa::Type;

constexpr unsigned kVcc = 106;
constexpr unsigned kSdwa = 249, kDpp = 250, kLiteral = 255, kVgpr = 256;
constexpr unsigned kScaledPrefix = 0xD3AC;

constexpr uint32_t bits(uint32_t word, unsigned high, unsigned low) {
  return (word >> low) & ((1ull << (high - low + 1)) - 1);
}
constexpr bool bit(uint32_t word, unsigned n) { return ((word >> n) & 1) != 0; }
constexpr int32_t sign_extend(uint32_t value, unsigned width) {
  uint32_t sign = 1u << (width - 1);
  return static_cast<int32_t>((value ^ sign) - sign);
}

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

bool is_float(ConstType t) {
  return t == ConstType::f16 || t == ConstType::f32 || t == ConstType::f64 || t == ConstType::bf16 ||
         t == ConstType::pk_f16 || t == ConstType::pk_bf16 || t == ConstType::pk_f32;
}

// Neg and abs exist for floating-point operands of at most 64 bits; matrix operands have none.
bool takes_modifiers(const Type& t) { return is_float(t.constant) && t.dwords <= 2; }

class Decoder {
 public:
  Decoder(const uint8_t* code, size_t avail, Arch arch, Inst& out)
      : code_(code), avail_(avail), arch_(arch), inst_(out) {}

  bool run() {
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

 private:
  bool word(unsigned index, uint32_t& out) const {
    if (avail_ < (index + 1) * 4) return false;
    std::memcpy(&out, code_ + index * 4, 4);
    return true;
  }

  bool select(Encoding encoding, Format format, unsigned opcode) {
    row_ = isa::find(encoding, opcode, arch_);
    if (row_ == nullptr) return false;
    inst_.op = row_->op;
    inst_.format = format;
    return true;
  }

  // Operand codes 0..511 shared by scalar and vector sources.
  bool source(unsigned field, const Type& type, Operand& out) {
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

  bool special(unsigned field, const Type& type, Operand& out) const {
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
  bool literal(const Type& type, Operand& out) {
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

  static Operand sgpr(unsigned reg, const Type& type) {
    return type.dwords == 0 ? Operand{} : make(OperandKind::sgpr, reg, type);
  }
  static Operand vgpr(unsigned reg, const Type& type, bool acc = false) {
    return type.dwords == 0 ? Operand{} : make(acc ? OperandKind::agpr : OperandKind::vgpr, reg, type);
  }

  bool add_source(unsigned field, const Type& type) {
    if (type.dwords == 0) return true;
    return source(field, type, inst_.src[inst_.num_src++]);
  }
  void add_source(const Operand& o) { inst_.src[inst_.num_src++] = o; }

  // --- scalar ---------------------------------------------------------------------------------------------------

  bool sop1() {
    if (!select(Encoding::SOP1, Format::SOP1, bits(w0_, 15, 8))) return false;
    inst_.dst = sgpr(bits(w0_, 22, 16), row_->dst);
    return add_source(bits(w0_, 7, 0), row_->src[0]);
  }

  bool sop2() {
    if (!select(Encoding::SOP2, Format::SOP2, bits(w0_, 29, 23))) return false;
    inst_.dst = sgpr(bits(w0_, 22, 16), row_->dst);
    return add_source(bits(w0_, 7, 0), row_->src[0]) && add_source(bits(w0_, 15, 8), row_->src[1]);
  }

  bool sopc() {
    if (!select(Encoding::SOPC, Format::SOPC, bits(w0_, 22, 16))) return false;
    if (!add_source(bits(w0_, 7, 0), row_->src[0])) return false;
    if (row_->has(isa::imm_gpr_idx)) {  // the second field is the mode itself
      inst_.simm = static_cast<int32_t>(bits(w0_, 15, 8));
      return true;
    }
    return add_source(bits(w0_, 15, 8), row_->src[1]);
  }

  bool sopk() {
    if (!select(Encoding::SOPK, Format::SOPK, bits(w0_, 27, 23))) return false;
    inst_.simm = sign_extend(bits(w0_, 15, 0), 16);
    if (row_->has(isa::literal_mul)) return add_source(kLiteral, row_->src[0]);
    inst_.dst = sgpr(bits(w0_, 22, 16), row_->dst);
    return add_source(bits(w0_, 22, 16), row_->src[0]);
  }

  bool sopp() {
    if (!select(Encoding::SOPP, Format::SOPP, bits(w0_, 22, 16))) return false;
    inst_.simm = sign_extend(bits(w0_, 15, 0), 16);
    return true;
  }

  bool smem() {
    if (!select(Encoding::SMEM, Format::SMEM, bits(w0_, 25, 18))) return false;
    const unsigned data = bits(w0_, 12, 6);
    inst_.sc0 = bit(w0_, 16);
    if (!row_->has(isa::atomic) || inst_.sc0) inst_.dst = sgpr(data, row_->dst);
    inst_.vdata = sgpr(data, row_->src[1]);
    if (row_->has(isa::imm_hex)) inst_.simm = static_cast<int32_t>(data);
    if (row_->src[0].dwords == 0) return true;
    Operand base = sgpr(bits(w0_, 5, 0) * 2, row_->src[0]);
    (row_->has(isa::buffer) ? inst_.srsrc : inst_.saddr) = base;
    // imm: the offset field counts; soffset_en: so does the register; neither: offset[6:0] names a register.
    const bool imm = bit(w0_, 17), soffset = bit(w0_, 14);
    if (imm) inst_.offset = sign_extend(bits(w1_, 20, 0), 21);
    if (soffset) return source(bits(w1_, 31, 25), isa::b32, inst_.soffset);
    if (!imm) return source(bits(w1_, 6, 0), isa::b32, inst_.soffset);
    return true;
  }

  // --- vector ---------------------------------------------------------------------------------------------------

  bool vop1() {
    if (!select(Encoding::VOP1, Format::VOP1, bits(w0_, 16, 9))) return false;
    vector_destination(bits(w0_, 24, 17));
    if (!first_source()) return false;
    if (row_->has(isa::accvgpr_src)) {
      if (inst_.src[0].kind != OperandKind::vgpr) return false;
      inst_.src[0].kind = OperandKind::agpr;
    }
    return true;
  }

  bool vop2() {
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

  bool vopc() {
    if (!select(Encoding::VOPC, Format::VOPC, bits(w0_, 24, 17))) return false;
    inst_.dst = make(OperandKind::sgpr, kVcc, isa::b64);
    second_source_field_ = bits(w0_, 16, 9);
    if (!first_source()) return false;
    if (!extended_) add_source(vgpr(second_source_field_, row_->src[1]));
    return true;
  }

  void vector_destination(unsigned reg) {
    inst_.dst = row_->has(isa::sgpr_dst) ? sgpr(reg, row_->dst) : vgpr(reg, row_->dst, row_->has(isa::accvgpr_dst));
  }

  // Carry, mask and accumulator operands that the short encodings do not name.
  void implicit_operands() {
    if (row_->has(isa::carry_out)) inst_.dst2 = make(OperandKind::sgpr, kVcc, isa::b64);
    if (row_->has(isa::carry_in)) add_source(make(OperandKind::sgpr, kVcc, isa::b64));
    if (row_->has(isa::reads_dst)) add_source(inst_.dst);
  }

  // src0 of VOP1, VOP2 and VOPC, with the SDWA or DPP dword (which also holds src1's modifiers) if there is one.
  bool first_source() {
    const unsigned field = bits(w0_, 8, 0);
    if (row_->src[0].dwords == 0) return field != kSdwa && field != kDpp;  // v_nop
    if (field != kSdwa && field != kDpp) return add_source(field, row_->src[0]);
    if (row_->has(isa::e32_only) || !word(1, w1_)) return false;
    inst_.bytes = 8;
    extended_ = true;
    return field == kSdwa ? sdwa() : dpp();
  }

  bool has_second_source() const { return row_->encoding != Encoding::VOP1; }

  bool sdwa() {
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

  bool sdwa_source(unsigned field, const Type& type, unsigned selected, unsigned modifiers) {
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
  static bool dpp_control_exists(unsigned c, bool wide) {
    const bool row_newbcast = c >= 0x150 && c < 0x160;
    if (wide) return row_newbcast;
    const bool row_shift = c > 0x100 && c < 0x130 && (c & 15) != 0;
    const bool wave_shift = c == 0x130 || c == 0x134 || c == 0x138 || c == 0x13c;
    return c < 0x100 || row_shift || wave_shift || (c >= 0x140 && c <= 0x143) || row_newbcast;
  }

  bool dpp() {
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

  bool vop3() {
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

  bool vop3p() {
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

  // --- matrix ---------------------------------------------------------------------------------------------------

  // The prefix (scale registers and their byte selects) and the MFMA form one 16-byte instruction.
  bool scaled_mfma() {
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
  static Type f8f6f4_type(unsigned format) {
    return format <= 1 ? isa::b256 : format <= 3 ? isa::b192 : isa::b128;
  }

  bool mai() {
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

  // --- memory ---------------------------------------------------------------------------------------------------

  bool ds() {
    if (!select(Encoding::DS, Format::DS, bits(w0_, 24, 17))) return false;
    const bool acc = bit(w0_, 25);
    inst_.gds = bit(w0_, 16);
    if (row_->has(isa::two_offsets)) {
      inst_.offset = bits(w0_, 7, 0);
      inst_.offset1 = static_cast<int32_t>(bits(w0_, 15, 8));
    } else {
      inst_.offset = bits(w0_, 15, 0);
    }
    inst_.vaddr = vgpr(bits(w1_, 7, 0), row_->src[0], acc && row_->has(isa::gws));
    inst_.vdata = vgpr(bits(w1_, 15, 8), row_->src[1], acc);
    inst_.vdata2 = vgpr(bits(w1_, 23, 16), row_->src[2], acc);
    inst_.dst = vgpr(bits(w1_, 31, 24), row_->dst, acc);
    return true;
  }

  bool flat() {
    constexpr Encoding kSegments[] = {Encoding::FLAT, Encoding::SCRATCH, Encoding::GLOBAL};
    constexpr Format kFormats[] = {Format::FLAT, Format::SCRATCH, Format::GLOBAL};
    const unsigned segment = bits(w0_, 15, 14);
    if (segment > 2 || !select(kSegments[segment], kFormats[segment], bits(w0_, 24, 18))) return false;
    const bool acc = bit(w1_, 23);
    inst_.sc0 = bit(w0_, 16);
    inst_.nt = bit(w0_, 17);
    inst_.sc1 = bit(w0_, 25);
    inst_.lds = row_->has(isa::to_lds);
    inst_.offset = segment == 0 ? static_cast<int64_t>(bits(w0_, 11, 0)) : sign_extend(bits(w0_, 12, 0), 13);
    const unsigned saddr = bits(w1_, 22, 16);
    const bool has_saddr = segment != 0 && saddr != 127;
    if (has_saddr && !source(saddr, segment == 1 ? isa::b32 : isa::b64, inst_.saddr)) return false;
    const bool scratch_vaddr = bit(w0_, 13);  // sve
    if (segment != 1 || scratch_vaddr) {
      inst_.vaddr = vgpr(bits(w1_, 7, 0), segment == 1 || has_saddr ? isa::b32 : isa::b64);
    }
    inst_.vdata = vgpr(bits(w1_, 15, 8), row_->src[1], acc);
    if (!row_->has(isa::atomic) || inst_.sc0) inst_.dst = vgpr(bits(w1_, 31, 24), row_->dst, acc);
    return true;
  }

  bool mubuf() {
    if (!select(Encoding::MUBUF, Format::MUBUF, bits(w0_, 24, 18))) return false;
    inst_.sc0 = bit(w0_, 14);
    inst_.sc1 = bit(w0_, 15);
    inst_.nt = bit(w0_, 17);
    if (row_->has(isa::imm_none)) return true;  // buffer_inv, buffer_wbl2
    const bool acc = bit(w1_, 23);
    const unsigned data = bits(w1_, 15, 8);
    inst_.offset = bits(w0_, 11, 0);
    inst_.offen = bit(w0_, 12);
    inst_.idxen = bit(w0_, 13);
    inst_.lds = bit(w0_, 16);
    if (inst_.lds && row_->src[1].dwords != 0) return false;  // only loads write LDS
    const Type addr = inst_.offen && inst_.idxen ? isa::b64 : inst_.offen || inst_.idxen ? isa::b32 : isa::none;
    inst_.vaddr = vgpr(bits(w1_, 7, 0), addr);
    inst_.srsrc = sgpr(bits(w1_, 20, 16) * 4, isa::b128);
    inst_.vdata = vgpr(data, row_->src[1], acc);
    if (!inst_.lds && (!row_->has(isa::atomic) || inst_.sc0)) inst_.dst = vgpr(data, row_->dst, acc);
    const unsigned soffset = bits(w1_, 31, 24);
    return soffset != kLiteral && source(soffset, isa::b32, inst_.soffset);
  }

  const uint8_t* code_;
  size_t avail_;
  Arch arch_;
  Inst& inst_;
  const Row* row_ = nullptr;
  uint32_t w0_ = 0, w1_ = 0;
  uint32_t literal_ = 0;
  unsigned second_source_field_ = 0;
  bool has_literal_ = false;
  bool extended_ = false;  // SDWA or DPP
};

// Registers outside the files would be out of bounds in the executor; scalar tuples are aligned, and 125 is no register.
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
