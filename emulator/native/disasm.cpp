#include "disasm.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "disasm_immediates.h"
#include "inline_constants.h"
#include "isa.h"

namespace hfemu {
namespace {

using isa::Encoding;

const char* const kSelect[] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"};
const char* const kUnused[] = {"UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"};
const char* const kSpecial[] = {"src_shared_base", "src_shared_limit", "src_private_base", "src_private_limit",
                                "src_pops_exiting_wave_id", "src_vccz", "src_execz", "src_scc", "src_lds_direct",
                                "null"};

// The text of `value` if it is one of the inline floating-point constants of `type`.
const char* inline_float_text(uint64_t value, ConstType type) {
  for (const InlineFloat& f : kInlineFloats) {
    switch (type) {
      case ConstType::f64:
      case ConstType::i64:
        if (value == f.f64) return f.f32 == 0x3e22f983 ? "0.15915494309189532" : f.text;
        break;
      case ConstType::f16:
      case ConstType::pk_f16:
        if (value == f.f16) return f.text;
        break;
      case ConstType::bf16:
      case ConstType::pk_bf16:
        if (value == f.bf16) return f.text;
        break;
      case ConstType::i16: return nullptr;
      default:
        if (static_cast<uint32_t>(value) == f.f32) return f.text;
    }
  }
  return nullptr;
}

int64_t as_signed(uint64_t value, ConstType type) {
  switch (type) {
    case ConstType::i64:
    case ConstType::f64: return static_cast<int64_t>(value);
    case ConstType::i16:
    case ConstType::f16:
    case ConstType::bf16: return static_cast<int16_t>(value);
    default: return static_cast<int32_t>(value);
  }
}

class Printer {
 public:
  explicit Printer(const Inst& inst) : inst_(inst), row_(isa::row(inst.op)) {}

  std::string run() {
    if (inst_.op == Op::invalid) return "<invalid>";
    out_ = row_.name;
    suffix();
    switch (inst_.format) {
      case Format::SOP1:
      case Format::SOP2: list({&inst_.dst, &inst_.src[0], &inst_.src[1]}); break;
      case Format::SOPC: sopc(); break;
      case Format::SOPK: sopk(); break;
      case Format::SOPP: immediate(); break;
      case Format::SMEM: smem(); break;
      case Format::VOP1:
      case Format::VOP2:
      case Format::VOPC: vop_short(); break;
      case Format::VOP3: vop3(); break;
      case Format::VOP3P: vop3p(); break;
      case Format::MAI: mai(); break;
      case Format::DS: ds(); break;
      case Format::FLAT:
      case Format::GLOBAL:
      case Format::SCRATCH: flat(); break;
      case Format::MUBUF: mubuf(); break;
    }
    return out_;
  }

 private:
  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    char buffer[160];
    va_list args;
    va_start(args, format);
    std::vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    out_ += buffer;
  }

  void separate() {
    out_ += first_ ? " " : ", ";
    first_ = false;
  }

  void suffix() {
    const bool has_e64 = row_.encoding == Encoding::VOP1 || row_.encoding == Encoding::VOP2 ||
                         row_.encoding == Encoding::VOPC;
    if (!has_e64 || row_.has(isa::e32_only) || (row_.encoding == Encoding::VOP1 && row_.dst.dwords == 0)) return;
    out_ += inst_.format == Format::VOP3 ? "_e64" : inst_.sdwa ? "_sdwa" : inst_.dpp ? "_dpp" : "_e32";
  }

  // --- operands -------------------------------------------------------------------------------------------------

  static std::string scalar_name(unsigned reg, unsigned dwords) {
    static const struct { unsigned reg; const char* name; } kPairs[] = {
        {102, "flat_scratch"}, {104, "xnack_mask"}, {106, "vcc"}, {126, "exec"}};
    char buffer[32];
    for (const auto& pair : kPairs) {
      if (reg == pair.reg && dwords == 2) return pair.name;
      if (reg == pair.reg && dwords == 1) return std::string(pair.name) + "_lo";
      if (reg == pair.reg + 1 && dwords == 1) return std::string(pair.name) + "_hi";
    }
    if (reg == 124) return "m0";
    const char* prefix = reg >= 108 ? "ttmp" : "s";
    if (reg >= 108) reg -= 108;
    if (dwords == 1) {
      std::snprintf(buffer, sizeof buffer, "%s%u", prefix, reg);
    } else {
      std::snprintf(buffer, sizeof buffer, "%s[%u:%u]", prefix, reg, reg + dwords - 1);
    }
    return buffer;
  }

  static std::string immediate_text(const Operand& o) {
    char buffer[40];
    const int64_t value = as_signed(o.imm, o.type);
    const char* text = inline_float_text(o.imm, o.type);
    bool small = value >= -16 && value <= 64;
    if (o.literal) {
      uint64_t shown = o.imm;
      if (o.type == ConstType::f64) {  // decided by the value, not by the encoding
        if (shown == 0) return "0";
        if (text != nullptr) return text;
        shown >>= 32;
      }
      if (o.type == ConstType::i64) {  // shown as encoded
        shown = static_cast<uint32_t>(shown);
        small = shown <= 64;
      }
      if (o.type == ConstType::i16) {
        small = static_cast<int32_t>(shown) >= -16 && static_cast<int32_t>(shown) <= 64;
        text = inline_float_text(shown, ConstType::f32);
      }
      const bool half = o.type == ConstType::i16 || o.type == ConstType::f16;
      const bool inlinable = small || text != nullptr;
      if (half && !inlinable) shown &= 0xffff;
      const char* format = inlinable ? "lit(0x%llx)" : "0x%llx";
      std::snprintf(buffer, sizeof buffer, format, static_cast<unsigned long long>(shown));
      return buffer;
    }
    if (small) {
      std::snprintf(buffer, sizeof buffer, "%lld", static_cast<long long>(value));
      return buffer;
    }
    if (o.type == ConstType::i16) {
      std::snprintf(buffer, sizeof buffer, "0x%x", static_cast<uint16_t>(o.imm));
      return buffer;
    }
    return text != nullptr ? text : "<constant>";
  }

  static std::string text(const Operand& o) {
    char buffer[40];
    switch (o.kind) {
      case OperandKind::none: return "off";
      case OperandKind::sgpr: return scalar_name(o.reg, o.dwords);
      case OperandKind::special: return kSpecial[o.reg];
      case OperandKind::imm: return immediate_text(o);
      case OperandKind::vgpr:
      case OperandKind::agpr: break;
    }
    const char file = o.kind == OperandKind::agpr ? 'a' : 'v';
    if (o.dwords == 1) {
      std::snprintf(buffer, sizeof buffer, "%c%u", file, o.reg);
    } else {
      std::snprintf(buffer, sizeof buffer, "%c[%u:%u]", file, o.reg, o.reg + o.dwords - 1u);
    }
    return buffer;
  }

  void operand(const Operand& o) {
    separate();
    out_ += text(o);
  }

  void modified(const Operand& o) {
    separate();
    std::string t = text(o);
    if (o.sext) t = "sext(" + t + ")";
    if (o.abs) t = "|" + t + "|";
    if (o.neg) t = o.kind == OperandKind::imm && !o.abs ? "neg(" + t + ")" : "-" + t;
    out_ += t;
  }

  void list(std::initializer_list<const Operand*> operands) {
    for (const Operand* o : operands) {
      if (o->kind != OperandKind::none) operand(*o);
    }
  }

  void flag(bool set, const char* text) {
    if (set) out_ += text;
  }

  // --- scalar ---------------------------------------------------------------------------------------------------

  void sopc() {
    list({&inst_.src[0], &inst_.src[1]});
    if (row_.has(isa::imm_gpr_idx)) {
      separate();
      out_ += gpr_idx_text(static_cast<uint16_t>(inst_.simm));
    }
  }

  void sopk() {
    if (row_.has(isa::imm_hwreg) && row_.dst.dwords == 0) {
      immediate();
      Operand value = inst_.src[0];
      value.literal = value.literal && immediate_text(value).compare(0, 4, "lit(") != 0;  // printed as if inline
      operand(value);
      return;
    }
    list({&inst_.dst, &inst_.src[0]});
    immediate();
  }

  void immediate() {
    const unsigned value = static_cast<uint16_t>(inst_.simm);
    if (row_.has(isa::imm_none) || (row_.has(isa::imm_optional) && value == 0)) return;
    separate();
    if (row_.has(isa::imm_hex)) {
      add("0x%x", value);
    } else if (row_.has(isa::imm_hwreg)) {
      out_ += hwreg_text(value);
    } else if (row_.has(isa::imm_waitcnt)) {
      out_ += waitcnt_text(value);
    } else if (row_.has(isa::imm_message)) {
      out_ += message_text(value);
    } else if (row_.has(isa::imm_gpr_idx)) {
      out_ += gpr_idx_text(static_cast<uint16_t>(inst_.simm));
    } else if (row_.has(isa::imm_branch | isa::imm_optional) || value <= 64) {
      add("%u", value);
    } else {
      add("0x%x", value);
    }
  }

  unsigned data_dwords() const { return row_.dst.dwords + row_.src[1].dwords; }

  void smem() {
    if (row_.has(isa::imm_hex)) {
      separate();
      add(inst_.simm <= 64 ? "%d" : "0x%x", inst_.simm);
    }
    const Operand& data = inst_.vdata.kind != OperandKind::none ? inst_.vdata : inst_.dst;
    list({&data, &inst_.saddr, &inst_.srsrc});
    if (row_.src[0].dwords != 0) {
      separate();
      const bool reg = inst_.soffset.kind != OperandKind::none;
      if (reg) out_ += text(inst_.soffset);
      const char* sign = inst_.offset < 0 ? "-" : "";
      const long long magnitude = inst_.offset < 0 ? -inst_.offset : inst_.offset;
      if (!reg) add("%s0x%llx", sign, magnitude);
      if (reg && inst_.offset != 0) add(" offset:%s0x%llx", sign, magnitude);
    }
    flag(inst_.sc0 && row_.src[0].dwords != 0 && data_dwords() != 0, " glc");
  }

  // --- vector ---------------------------------------------------------------------------------------------------

  // Explicit sources: without the accumulator that the encoding does not name.
  unsigned printed_sources() const { return inst_.num_src - (row_.has(isa::reads_dst) ? 1 : 0); }

  void vop_short() {
    list({&inst_.dst, &inst_.dst2});
    for (unsigned i = 0; i < printed_sources(); ++i) {
      if (row_.has(isa::literal_mul) ? i == 1 : row_.has(isa::literal_add) && i == 2) {
        separate();
        add("0x%x", static_cast<unsigned>(inst_.src[i].imm));
      } else {
        modified(inst_.src[i]);
      }
    }
    if (inst_.sdwa) sdwa();
    if (inst_.dpp) dpp();
  }

  void sdwa() {
    output_modifiers();
    const bool has_select = row_.encoding != Encoding::VOPC && !row_.has(isa::no_dst_sel);
    if (has_select) {
      add(" dst_sel:%s dst_unused:%s", kSelect[static_cast<int>(inst_.dst_select)],
          kUnused[static_cast<int>(inst_.dst_unused)]);
    }
    add(" src0_sel:%s", kSelect[static_cast<int>(inst_.src[0].select)]);
    if (row_.encoding != Encoding::VOP1) add(" src1_sel:%s", kSelect[static_cast<int>(inst_.src[1].select)]);
  }

  void dpp() {
    out_ += " " + dpp_text(inst_.dpp_ctrl);
    add(" row_mask:0x%x bank_mask:0x%x", inst_.row_mask, inst_.bank_mask);
    flag(inst_.bound_ctrl, " bound_ctrl:1");
  }

  void output_modifiers() {
    static const char* const kOmod[] = {"", " mul:2", " mul:4", " div:2"};
    flag(inst_.clamp, " clamp");
    out_ += kOmod[inst_.omod & 3];
  }

  void vop3() {
    list({&inst_.dst, &inst_.dst2});
    const unsigned n = printed_sources();
    for (unsigned i = 0; i < n; ++i) modified(inst_.src[i]);
    if (inst_.bitop3 != 0) add(inst_.bitop3 <= 10 ? " bitop3:%u" : " bitop3:0x%x", inst_.bitop3);
    if (row_.has(isa::op_sel)) {
      bool any = inst_.dst_op_sel;
      for (const Operand& o : inst_.src) any |= o.op_sel;
      if (any) {
        out_ += " op_sel:[";
        const unsigned count = row_.has(isa::dst_byte) ? 3 : n;
        for (unsigned i = 0; i < count; ++i) add("%u,", inst_.src[i].op_sel);
        add("%u]", inst_.dst_op_sel);
      }
    }
    if (row_.has(isa::fetch_control)) {
      flag(inst_.bound_ctrl, " bound_ctrl:1");
      flag(inst_.fetch_inactive, " fi:1");
    }
    output_modifiers();
  }

  void bit_list(const char* name, unsigned count, bool (*get)(const Operand&)) {
    add(" %s:[", name);
    for (unsigned i = 0; i < count; ++i) add(i == 0 ? "%u" : ",%u", get(inst_.src[i]));
    out_ += "]";
  }

  void vop3p() {
    operand(inst_.dst);
    const unsigned n = inst_.num_src;
    const bool mix = row_.has(isa::mix);
    for (unsigned i = 0; i < n; ++i) mix ? modified(inst_.src[i]) : operand(inst_.src[i]);
    auto any = [&](bool (*get)(const Operand&), bool expected) {
      for (unsigned i = 0; i < n; ++i) {
        if (get(inst_.src[i]) != expected) return true;
      }
      return false;
    };
    auto op_sel = [](const Operand& o) { return o.op_sel; };
    auto op_sel_hi = [](const Operand& o) { return o.op_sel_hi; };
    auto neg = [](const Operand& o) { return o.neg; };
    auto neg_hi = [](const Operand& o) { return o.neg_hi; };
    if (!row_.has(isa::no_op_sel)) {
      if (any(op_sel, false)) bit_list("op_sel", n, op_sel);
      if (any(op_sel_hi, !mix)) bit_list("op_sel_hi", n, op_sel_hi);
    }
    if (!mix) {
      if (any(neg, false)) bit_list("neg_lo", n, neg);
      if (any(neg_hi, false)) bit_list("neg_hi", n, neg_hi);
    }
    output_modifiers();
  }

  void mai() {
    list({&inst_.dst, &inst_.src[0], &inst_.src[1], &inst_.src[2]});
    if (inst_.scaled) {
      list({&inst_.scale_a, &inst_.scale_b});
      const unsigned a = inst_.scale_sel_a, b = inst_.scale_sel_b;
      if ((a & 1) != 0 || (b & 1) != 0) add(" op_sel:[%u,%u,0]", a & 1, b & 1);
      add(" op_sel_hi:[%u,%u,0]", a >> 1, b >> 1);
    }
    if (inst_.cbsz != 0) add(" cbsz:%u", inst_.cbsz);
    if (inst_.abid != 0) add(" abid:%u", inst_.abid);
    if (inst_.blgp == 0) return;
    if (row_.dst.constant == ConstType::f64) {  // the same bits negate A, B and C
      add(" neg:[%u,%u,%u]", inst_.blgp & 1, inst_.blgp >> 1 & 1, inst_.blgp >> 2);
    } else {
      add(" blgp:%u", inst_.blgp);
    }
  }

  // --- memory ---------------------------------------------------------------------------------------------------

  void ds() {
    list({&inst_.dst, &inst_.vaddr, &inst_.vdata, &inst_.vdata2});
    if (row_.has(isa::two_offsets)) {
      if (inst_.offset != 0) add(" offset0:%d", static_cast<int>(inst_.offset));
      if (inst_.offset1 != 0) add(" offset1:%d", inst_.offset1);
    } else if (inst_.op == Op::ds_swizzle_b32) {
      if (inst_.offset != 0) out_ += " offset:" + swizzle_text(static_cast<unsigned>(inst_.offset));
    } else if (inst_.offset != 0) {
      add(" offset:%d", static_cast<int>(inst_.offset));
    }
    flag(row_.has(isa::gws), " gds");
  }

  void cache_policy() {
    flag(inst_.sc0, " sc0");
    flag(inst_.nt, " nt");
    flag(inst_.sc1, " sc1");
  }

  void flat() {
    if (inst_.dst.kind != OperandKind::none) operand(inst_.dst);
    operand(inst_.vaddr);
    if (inst_.vdata.kind != OperandKind::none) operand(inst_.vdata);
    if (inst_.format != Format::FLAT) operand(inst_.saddr);
    if (inst_.offset != 0) add(" offset:%d", static_cast<int>(inst_.offset));
    cache_policy();
  }

  void mubuf() {
    if (!row_.has(isa::imm_none)) {
      const Operand& data = inst_.vdata.kind != OperandKind::none ? inst_.vdata : inst_.dst;
      if (data.kind != OperandKind::none) operand(data);
      operand(inst_.vaddr);
      list({&inst_.srsrc, &inst_.soffset});
    }
    flag(inst_.idxen, " idxen");
    flag(inst_.offen, " offen");
    if (inst_.offset != 0) add(" offset:%d", static_cast<int>(inst_.offset));
    if (row_.has(isa::imm_none)) {
      flag(inst_.sc0, " sc0");
      flag(inst_.sc1, " sc1");
      return;
    }
    cache_policy();
    flag(inst_.lds, " lds");
  }

  const Inst& inst_;
  const isa::Row& row_;
  std::string out_;
  bool first_ = true;
};

}  // namespace

std::string disassemble(const Inst& inst) { return Printer(inst).run(); }

}  // namespace hfemu
