// MODE and the other hardware registers, VGPR indexing and VSKIP, and the careful loop that implements them.
//
// Facts (CDNA3 and CDNA4 ISA documents, "Mode register", "Denormalized and Rounding Modes", "VGPR Indexing"; LLVM's
// FPDPRounding and ReadsModeReg flags say which field an instruction obeys):
//   - A result's type picks its rounding field: f32 results round by FP_ROUND[1:0], f64 and f16 ones by FP_ROUND[3:2].
//     So conversions round by their result, and LLVM sets the f16/f64 field for v_cvt_f16_f32 and v_fma_mixlo. The one
//     exception is v_cvt_f32_f64, whose rounding LLVM's fptrunc_round sets in the f64 field too.
//   - Each source's and each result's type picks its denormal field, with a bit for inputs and one for outputs.
//   - v_exp, v_log, v_rcp, v_rsq and v_sqrt of f32 flush denormals whatever MODE says; the floating-point v_dot2 flush
//     them and round to nearest; v_cmp_class and moves see the bits as they are.
//   - 8-, 6- and 4-bit conversions round to nearest or stochastically. Matrix instructions: see matrix.h.
// Assumptions, where the documents are silent: a result is tiny after rounding (so 0x007FFFFF and a half rounds up to
// the smallest normal and is not flushed); the approximations (v_rcp_f64, v_exp_f16, ...) round to nearest; arithmetic
// makes NaNs quiet in either IEEE mode, which decides for minimum, maximum and median only. Exceptions are neither
// recorded nor taken: enabling one, and reading TRAPSTS, faults.
#include "disasm_immediates.h"
#include "exec.h"
#include "host_mode.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// hwreg(id, offset, size) of s_getreg and s_setreg.
struct HardwareRegister {
  u32 id, offset, mask;
  explicit HardwareRegister(int32_t simm)
      : id(static_cast<u32>(simm) & 63), offset(static_cast<u32>(simm) >> 6 & 31),
        mask(static_cast<u32>((u64{1} << ((static_cast<u32>(simm) >> 11 & 31) + 1)) - 1)) {}
};
constexpr u32 kRegMode = 1, kRegStatus = 2, kRegHwId = 4, kRegXccId = 20;

u32 status_register(const Wave& w) {
  const bool in_group = w.wg != nullptr && w.wg->waves > 1;
  const bool scratch = w.launch != nullptr && w.launch->private_bytes != 0;
  constexpr u32 trap_enabled = 1u << 6, valid = 1u << 16;  // the runtime always installs a trap handler
  return (w.scc & 1) | u32{w.priority} << 3 | trap_enabled | u32{w.exec() == 0} << 9 | u32{w.s64(kVcc) == 0} << 10 |
         u32{in_group} << 11 | valid | u32{scratch} << 28;
}

void getreg(Wave& w, const ExecInst& in) {
  const HardwareRegister r(in.inst->simm);
  u32 value = 0;
  switch (r.id) {
    case kRegMode: value = mode_register(w); break;
    case kRegStatus: value = status_register(w); break;
    // Every work-group runs on the first compute unit, its waves spread over four SIMDs.
    case kRegHwId: value = (w.index / 4 & 15) | (w.index & 3) << 4; break;
    case kRegXccId: value = 0; break;
    default: unsupported(w, in, "reading " + hwreg_text(static_cast<u32>(in.inst->simm) & 0xFFFF));
  }
  w.s[in.dst] = value >> r.offset & r.mask;
}

void setreg(Wave& w, const ExecInst& in) {
  const HardwareRegister r(in.inst->simm);
  if (r.id != kRegMode) unsupported(w, in, "writing " + hwreg_text(static_cast<u32>(in.inst->simm) & 0xFFFF));
  const u32 value = static_cast<u32>(scalar_source(w, in.src[0]));
  const u32 bits = (mode_register(w) & ~(r.mask << r.offset)) | (value & r.mask) << r.offset;
  if (const char* field = unmodelled_mode(bits)) unsupported(w, in, format("MODE.%s set (MODE = 0x%08x)", field, bits));
  set_mode_register(w, bits);
}

// s_set_gpr_idx_*: M0 holds the index (7:0) and which operands it moves (15:12).
void index_on(Wave& w, const ExecInst& in) {
  const u32 index = static_cast<u32>(scalar_source(w, in.src[0])) & 0xFF;
  w.s[kM0] = (w.s[kM0] & 0xFFFF0F00) | index | (static_cast<u32>(in.inst->simm) & 15) << 12;
  w.indexing = true;
  w.state = w.awake();
}
void index_off(Wave& w, const ExecInst&) {
  w.indexing = false;
  w.state = w.awake();
}
void index_set(Wave& w, const ExecInst& in) {
  w.s[kM0] = (w.s[kM0] & ~0xFFu) | (static_cast<u32>(scalar_source(w, in.src[0])) & 0xFF);
}
void index_mode(Wave& w, const ExecInst& in) {
  w.s[kM0] = (w.s[kM0] & 0xFFFF0FFF) | (static_cast<u32>(in.inst->simm) & 15) << 12;
}

void set_vskip(Wave& w, const ExecInst& in) {
  const u32 bit = static_cast<u32>(scalar_source(w, in.src[1])) & 31;
  w.mode.vskip = static_cast<u32>(scalar_source(w, in.src[0])) >> bit & 1;
  w.state = w.awake();
}

bool is_valu(const ExecInst& in) {
  return in.op_class == OpClass::valu || in.op_class == OpClass::valu_trans || in.op_class == OpClass::mfma;
}

// `in` with its vector registers moved by M0: bit 12 + i moves source i, bit 15 the destination, which for an
// accumulating operation is the third source too.
ExecInst indexed(const Wave& w, const ExecInst& in) {
  ExecInst moved = in;
  const u32 index = w.s[kM0] & 0xFF, which = w.s[kM0] >> 12 & 15;
  const auto shift = [&](uint16_t& reg, u32 width) {
    const u32 limit = reg < kAcc ? kAcc : kVgprs;
    if (reg + index + width > limit)
      fault(w, in, FaultKind::unsupported, format("indexed register v%u lies outside the register file", reg + index));
    if (w.shadow != nullptr && w.launch->options.check_uninit && reg < kAcc) {
      const u32 granted = ((w.launch->kernel->rsrc1 & 63) + 1) * 8;
      if (reg + index + width > granted)
        report(w, in, FaultKind::uninitialised,
               format("v%u, moved by the index %u, is beyond the %u registers that the kernel descriptor asks for",
                      reg + index + width - 1, index, granted));
    }
    reg = static_cast<uint16_t>(reg + index);
  };
  for (u32 i = 0; i < 3; ++i) {
    const u32 bit = in.accumulates && i == 2 ? 3 : i;
    if ((which >> bit & 1) && moved.src[i].kind == SourceKind::vgpr) shift(moved.src[i].reg, moved.src[i].dwords);
  }
  if ((which & 8) && moved.dst_is_vgpr) shift(moved.dst, moved.dst_dwords);
  return moved;
}

void execute(Wave& w, const ExecInst& in) {
  if (w.mode.plain_arithmetic()) {
    in.fn(w, in);
    return;
  }
  w.thread->host->round(in.rounding == HostRounding::single ? w.mode.round32
                        : in.rounding == HostRounding::wide ? w.mode.round64
                                                            : 0);
  (in.careful != nullptr ? in.careful : in.fn)(w, in);
}

}  // namespace

u32 mode_register(const Wave& w) {
  const Mode& m = w.mode;
  return m.round32 | m.round64 << 2 | m.denorm32 << 4 | m.denorm64 << 6 | u32{m.dx10_clamp} << 8 | u32{m.ieee} << 9 |
         u32{m.fp16_ovfl} << 23 | u32{m.disable_perf} << 26 | u32{w.indexing} << 27 | u32{m.vskip} << 28 |
         u32{m.csp} << 29;
}

const char* unmodelled_mode(u32 bits) {
  if (bits >> 11 & 1) return "DEBUG";
  if (bits >> 12 & 0x1FF) return "EXCP_EN";
  return bits & 0x03600400 ? "(a reserved bit)" : nullptr;
}

void set_mode_register(Wave& w, u32 bits) {
  Mode& m = w.mode;
  m.round32 = bits & 3;
  m.round64 = bits >> 2 & 3;
  m.denorm32 = bits >> 4 & 3;
  m.denorm64 = bits >> 6 & 3;
  m.dx10_clamp = bits >> 8 & 1;
  m.ieee = bits >> 9 & 1;
  m.fp16_ovfl = bits >> 23 & 1;
  m.disable_perf = bits >> 26 & 1;
  w.indexing = bits >> 27 & 1;
  m.vskip = bits >> 28 & 1;
  m.csp = static_cast<uint8_t>(bits >> 29);
  w.state = w.awake();
}

bool skips(const Wave& w, const ExecInst& in) {
  if (!w.mode.vskip) return false;
  switch (in.inst->format) {
    case Format::SOP1: case Format::SOP2: case Format::SOPK: case Format::SOPC: case Format::SOPP: case Format::SMEM:
      return false;
    default: return true;
  }
}

void step_careful(Wave& w) {
  const ExecInst& in = w.code[w.pc++];
  if (skips(w, in)) return;
  if (w.indexing && is_valu(in)) execute(w, indexed(w, in));
  else execute(w, in);
}

const u32* flush_denormals(const u32* row, LaneType type, RowBuffer& buffer) {
  u32* to = buffer.x;
  switch (type) {
    case LaneType::f32:
      for (int l = 0; l < kLanes; ++l) to[l] = row[l] & ((row[l] & 0x7F800000) ? ~0u : 0x80000000);
      return to;
    case LaneType::f64:
      for (int l = 0; l < kLanes; ++l) {
        const bool small = !(row[l + kLanes] & 0x7FF00000);
        to[l] = small ? 0 : row[l];
        to[l + kLanes] = row[l + kLanes] & (small ? 0x80000000 : ~0u);
      }
      return to;
    case LaneType::f16:
    case LaneType::pkf16:
      for (int l = 0; l < kLanes; ++l)
        to[l] = row[l] & ((row[l] & 0x7C00) ? 0xFFFF : 0x8000) | row[l] & ((row[l] & 0x7C000000) ? 0xFFFF0000 : 0x80000000);
      return to;
    default: return row;
  }
}

void run_careful(Wave& w, const ExecInst& in) {
  const OpEntry& e = op_table().entry(in.inst->op);
  RowBuffer staged[3], flushed[3], out;
  const u32* rows[3] = {};
  for (int i = 0; i < e.sources; ++i) {
    const LaneType type = e.types[i + 1];
    rows[i] = stage_source(w, in, i, type, staged[i]);
    if (!e.keeps_denormals && !keeps_inputs(w.mode, type)) rows[i] = flush_denormals(rows[i], type, flushed[i]);
  }
  in.kernel(out.x, rows[0], rows[1], rows[2], w.mode);
  if (in.result == LaneType::mask) {
    write_mask(w, in, out.x);
    return;
  }
  if (!e.keeps_denormals && !keeps_outputs(w.mode, in.result)) flush_denormals(out.x, in.result, out);
  write_result(w, in, in.result, out.x, e.preserves_high);
}

void register_mode(OpTable& t) {
  using C = OpClass;
  t.special(Op::s_getreg_b32, C::salu, &getreg);
  t.special(Op::s_setreg_b32, C::salu, &setreg);
  t.special(Op::s_setreg_imm32_b32, C::salu, &setreg);
  t.special(Op::s_set_gpr_idx_on, C::salu, &index_on);
  t.special(Op::s_set_gpr_idx_off, C::salu, &index_off);
  t.special(Op::s_set_gpr_idx_idx, C::salu, &index_set);
  t.special(Op::s_set_gpr_idx_mode, C::salu, &index_mode);
  t.special(Op::s_setvskip, C::salu, &set_vskip);
}

}  // namespace hfemu
