// The stages around a lane operation: source modifiers, DPP, SDWA, output modifiers, EXEC; and the op table itself.
#include "exec.h"

#include <algorithm>

#if defined(__F16C__) || defined(__AVX512F__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "float_rules.h"
#include "formats.h"

namespace hfemu {

float half_to_float(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  return static_cast<float>(decode(f16_format, bits));
#endif
}

uint16_t float_to_half(float x) {
#ifdef __F16C__
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  return static_cast<uint16_t>(encode(f16_format, x));
#endif
}

uint16_t double_to_half(double x) { return static_cast<uint16_t>(encode(f16_format, x)); }

uint16_t double_to_half(double x, const Mode& mode) {
  static constexpr Rounding rounding[] = {Rounding::nearest_even, Rounding::up, Rounding::down, Rounding::toward_zero};
  const bool saturate = mode.fp16_ovfl && std::isfinite(x);  // a true infinity stays infinite
  return static_cast<uint16_t>(encode(f16_format, x, saturate, rounding[mode.round64]));
}

OpEntry& OpTable::lane(Op op, OpClass op_class, LaneKernel kernel, int sources, LaneType result, LaneType a, LaneType b,
                       LaneType c) {
  OpEntry& e = entry(op);
  e.kernel = kernel;
  e.sources = static_cast<uint8_t>(sources);
  e.op_class = op_class;
  e.rounding = rounding_of(result);
  const LaneType types[4] = {result, a, b, c};
  std::copy_n(types, 4, e.types);
  return e;
}

OpEntry& OpTable::special(Op op, OpClass op_class, Handler handler) {
  OpEntry& e = entry(op);
  e.handler = handler;
  e.op_class = op_class;
  return e;
}

const OpTable& op_table() {
  static const OpTable* table = [] {
    auto* t = new OpTable();
    register_salu(*t);
    register_control(*t);
    register_mode(*t);
    register_valu_int(*t);
    register_valu_float(*t);
    register_valu_half(*t);
    register_compare(*t);
    register_lane_ops(*t);
    register_packed(*t);
    register_convert(*t);
    register_matrix(*t);
    register_scalar_memory(*t);
    register_global(*t);
    register_buffer(*t);
    register_lds(*t);
    register_atomics(*t);
    register_lds_atomics(*t);
    register_buffer_format(*t);
    return t;
  }();
  return *table;
}

uint32_t special_value(const Wave& w, uint16_t special, bool high) {
  switch (static_cast<Special>(special)) {
    case Special::shared_base: return high ? kSharedApertureHigh : 0;
    case Special::shared_limit: return high ? kSharedApertureHigh : 0xFFFFFFFF;
    case Special::private_base: return high ? kPrivateApertureHigh : 0;
    case Special::private_limit: return high ? kPrivateApertureHigh : 0xFFFFFFFF;
    case Special::vccz: return !high && w.s64(kVcc) == 0;
    case Special::execz: return !high && w.exec() == 0;
    case Special::scc: return !high && w.scc != 0;
    default: return 0;
  }
}

uint64_t scalar_source(const Wave& w, const Source& s) {
  switch (s.kind) {
    case SourceKind::sgpr: return s.dwords == 2 ? w.s64(s.reg) : w.s[s.reg];
    case SourceKind::constant: return s.row[0] | uint64_t{s.row[kLanes]} << 32;
    case SourceKind::special: {
      // A 32-bit read of an aperture gives its high dword, as SALU code expects of src_*_base.
      const auto sp = static_cast<Special>(s.reg);
      const bool aperture = sp <= Special::private_limit;
      if (s.dwords != 2) return special_value(w, s.reg, aperture);
      return special_value(w, s.reg, false) | uint64_t{special_value(w, s.reg, true)} << 32;
    }
    default: return 0;
  }
}

uint64_t pack_mask(const uint32_t* bytes) {
#ifdef __SSE2__
  const auto* p = reinterpret_cast<const __m128i*>(bytes);
  uint64_t m = 0;
  for (int i = 0; i < 4; ++i) m |= uint64_t(uint32_t(_mm_movemask_epi8(_mm_loadu_si128(p + i)))) << (16 * i);
  return m;
#else
  const auto* p = reinterpret_cast<const uint8_t*>(bytes);
  uint64_t m = 0;
  for (int l = 0; l < kLanes; ++l) m |= uint64_t(p[l] & 1) << l;
  return m;
#endif
}

void merge_row(uint32_t* d, const uint32_t* x, uint64_t mask) {
#ifdef __AVX512F__
  for (int i = 0; i < 4; ++i)
    _mm512_mask_storeu_epi32(d + 16 * i, static_cast<__mmask16>(mask >> (16 * i)), _mm512_loadu_si512(x + 16 * i));
#else
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = static_cast<uint32_t>(mask >> (16 * i));
#pragma GCC ivdep
    for (uint32_t k = 0; k < 16; ++k) {
      // Not a conditional of x and d: for AVX2, GCC 12 turns some lanes after an unset bit into 0.
      const uint32_t take = 0u - (bits >> k & 1);
      d[16 * i + k] = (x[16 * i + k] & take) | (d[16 * i + k] & ~take);
    }
  }
#endif
}

namespace {

// The lane a DPP control reads for `lane`, or -1 when it lies outside the row or wave.
int dpp_source_lane(uint32_t ctrl, int lane) {
  const int row = lane & ~15, in_row = lane & 15, n = static_cast<int>(ctrl & 15);
  if (ctrl < 0x100) return (lane & ~3) | static_cast<int>(ctrl >> (2 * (lane & 3)) & 3);
  switch (ctrl & 0x1F0) {
    case 0x100: return in_row + n < 16 ? lane + n : -1;
    case 0x110: return in_row - n >= 0 ? lane - n : -1;
    case 0x120: return row | ((in_row - n) & 15);
    case 0x150: return row | n;
    default: break;
  }
  switch (ctrl) {
    case 0x130: return lane + 1 < kLanes ? lane + 1 : -1;
    case 0x134: return (lane + 1) & 63;
    case 0x138: return lane - 1;
    case 0x13C: return (lane - 1) & 63;
    case 0x140: return row | (15 - in_row);
    case 0x141: return (lane & ~7) | (7 - (lane & 7));
    case 0x142: return lane >= 16 ? row - 1 : -1;
    case 0x143: return lane >= 32 ? 31 : -1;
    default: return -1;
  }
}

int rows_of(LaneType type) { return type == LaneType::b64 || type == LaneType::f64 ? 2 : 1; }

uint32_t clamp_f32(uint32_t bits, bool dx10) {
  const float x = std::bit_cast<float>(bits);
  if (x != x) return dx10 ? 0 : bits;
  return x > 1.0f ? 0x3F800000u : x > 0.0f ? bits : 0u;
}

uint16_t clamp_f16(uint16_t bits, bool dx10) {
  const uint16_t magnitude = bits & 0x7FFF;
  if (magnitude > 0x7C00) return dx10 ? 0 : bits;
  return bits & 0x8000 ? 0 : magnitude > 0x3C00 ? 0x3C00 : bits;
}

constexpr float kOmodFactor[4] = {1.0f, 2.0f, 4.0f, 0.5f};

// Output modifiers scale, flush denormals and turn -0 into +0.
template <class F>
F scaled_output(F x, uint8_t omod) {
  const F r = flushed(x * F(kOmodFactor[omod]));
  return r == 0 ? F(0) : r;
}
uint16_t scaled_output_f16(uint16_t bits, uint8_t omod, const Mode& mode) {
  const uint16_t r = double_to_half(static_cast<double>(half_to_float(bits)) * static_cast<double>(kOmodFactor[omod]), mode);
  return r & 0x7C00 ? r : 0;
}

void output_modifiers(const Wave& w, const Inst& inst, LaneType type, uint32_t* r) {
  const bool dx10 = w.mode.dx10_clamp;
  // omod is ignored while the mode keeps output denormals, and in IEEE mode.
  const bool omod32 = inst.omod && !(w.mode.denorm32 & 2) && !w.mode.ieee;
  const bool omod64 = inst.omod && !(w.mode.denorm64 & 2) && !w.mode.ieee;
  for (int l = 0; l < kLanes; ++l) {
    switch (type) {
      case LaneType::f32:
        if (omod32) r[l] = as_bits(scaled_output(std::bit_cast<float>(r[l]), inst.omod));
        if (inst.clamp) r[l] = clamp_f32(r[l], dx10);
        break;
      case LaneType::f16:
        if (omod64) r[l] = scaled_output_f16(static_cast<uint16_t>(r[l]), inst.omod, w.mode);
        if (inst.clamp) r[l] = clamp_f16(static_cast<uint16_t>(r[l]), dx10);
        break;
      case LaneType::pkf16:
        if (inst.clamp)
          r[l] = clamp_f16(static_cast<uint16_t>(r[l]), dx10) |
                 uint32_t{clamp_f16(static_cast<uint16_t>(r[l] >> 16), dx10)} << 16;
        break;
      case LaneType::f64: {
        double x = lane_load<double>(r, l);
        if (omod64) x = scaled_output(x, inst.omod);
        if (inst.clamp) x = x != x ? (dx10 ? 0.0 : x) : x > 1.0 ? 1.0 : x > 0.0 ? x : 0.0;
        lane_store(r, l, x);
        break;
      }
      default: break;
    }
  }
}

}  // namespace

DppPlan plan_dpp(const Inst& inst) {
  DppPlan p;
  for (int l = 0; l < kLanes; ++l) {
    const int from = dpp_source_lane(inst.dpp_ctrl, l);
    p.from[l] = static_cast<uint8_t>(from < 0 ? l : from);
    p.inside |= uint64_t{from >= 0} << l;
    p.enabled |= uint64_t{(inst.row_mask >> (l / 16) & 1) && (inst.bank_mask >> (l / 4 % 4) & 1)} << l;
  }
  return p;
}

namespace {

// Lanes whose source lane exists and is active.
uint64_t dpp_valid(const DppPlan& p, uint64_t exec) {
  if (exec == kAllLanes) return p.inside;
  uint64_t valid = 0;
  for (int l = 0; l < kLanes; ++l) valid |= (exec >> p.from[l] & 1) << l;
  return valid & p.inside;
}

// A source's bits as shifts and masks that are the same in every lane.
struct BitField {
  uint32_t left = 0, right = 0, keep = ~0u, flip = 0;
  bool sign = false;
};

void move_bits(uint32_t* to, const uint32_t* from, const BitField& f) {
  if (f.sign) {
    for (int l = 0; l < kLanes; ++l)
      to[l] = (static_cast<uint32_t>(static_cast<int32_t>(from[l] << f.left) >> f.right) & f.keep) ^ f.flip;
  } else {
    for (int l = 0; l < kLanes; ++l) to[l] = ((from[l] << f.left >> f.right) & f.keep) ^ f.flip;
  }
}

BitField field_of(const Operand& o, LaneType type, bool sdwa) {
  BitField f;
  const bool sixteen = type == LaneType::b16 || type == LaneType::f16;
  if (sdwa && o.select != Select::dword) {
    const uint32_t sel = static_cast<uint32_t>(o.select), width = sel < 4 ? 8 : 16;
    const uint32_t low = sel < 4 ? 8 * sel : 16 * (sel - 4);
    f.left = 32 - width - low;
    f.right = 32 - width;
    f.sign = o.sext;
  } else if (sixteen && o.op_sel) {
    f.right = 16;
  }
  const uint32_t sign_bit = sixteen ? 0x8000 : 0x80000000;
  if (o.abs) f.keep = ~sign_bit;
  if (o.neg) f.flip = sign_bit;
  return f;
}

}  // namespace

const uint32_t* stage_source(const Wave& w, const ExecInst& in, int index, LaneType type, RowBuffer& buffer) {
  const Inst& inst = *in.inst;
  const uint32_t* row = source_row(w, in.src[index], buffer);
  if (index >= inst.num_src) return row;  // the accumulator: no modifiers
  const Operand& o = inst.src[index];
  const int rows = rows_of(type);
  if (in.dpp != nullptr && index == 0) {
    const DppPlan& p = *in.dpp;
    const uint64_t valid = dpp_valid(p, w.exec());
    RowBuffer moved;
    for (int r = 0; r < rows; ++r) {
      uint32_t* to = moved.x + r * kLanes;
      for (int l = 0; l < kLanes; ++l) to[l] = row[r * kLanes + p.from[l]];
      if (valid != kAllLanes)
        for (int l = 0; l < kLanes; ++l) to[l] = (valid >> l & 1) ? to[l] : 0;
    }
    std::memcpy(buffer.x, moved.x, sizeof(uint32_t) * kLanes * static_cast<size_t>(rows));
    row = buffer.x;
  }
  if (type == LaneType::pk16 || type == LaneType::pkf16) {
    // Only VOP3P has an op_sel_hi field; the accumulating dot products and v_pk_fmac always take the high half.
    const bool high = o.op_sel_hi || inst.format != Format::VOP3P;
    if (!o.op_sel && high && !o.neg && !o.neg_hi) return row;
    const uint32_t low_shift = o.op_sel ? 16 : 0, high_shift = high ? 16 : 0;
    const uint32_t flip = (o.neg ? 0x8000u : 0) | (o.neg_hi ? 0x80000000u : 0);
    for (int l = 0; l < kLanes; ++l)
      buffer.x[l] = ((row[l] >> low_shift & 0xFFFF) | row[l] >> high_shift << 16) ^ flip;
    return buffer.x;
  }
  const bool selects = inst.sdwa && o.select != Select::dword;
  const bool sixteen = type == LaneType::b16 || type == LaneType::f16;
  if (!selects && !o.neg && !o.abs && !(sixteen && o.op_sel)) return row;
  if (rows == 2) {
    if (row != buffer.x) std::memcpy(buffer.x, row, sizeof(Row));
    move_bits(buffer.x + kLanes, row + kLanes, field_of(o, type, false));
    return buffer.x;
  }
  move_bits(buffer.x, row, field_of(o, type, inst.sdwa));
  return buffer.x;
}

uint64_t dpp_write_mask(const Wave& w, const ExecInst& in) {
  if (in.dpp == nullptr) return kAllLanes;
  return in.dpp->enabled & (in.inst->bound_ctrl ? kAllLanes : dpp_valid(*in.dpp, w.exec()));
}

void write_mask(Wave& w, const ExecInst& in, const uint32_t* bytes) {
  const uint64_t mask = pack_mask(bytes) & w.exec();
  w.set_s64(in.dst, mask);
  if (in.writes_exec) w.set_s64(kExec, mask);
}

void write_result(Wave& w, const ExecInst& in, LaneType type, uint32_t* rows, bool preserves_high) {
  const Inst& inst = *in.inst;
  const bool is_float = type == LaneType::f16 || type == LaneType::f32 || type == LaneType::f64 || type == LaneType::pkf16;
  // For a lane operation on integers the saturating kernel is chosen already.
  if (inst.clamp && !is_float && in.kernel == nullptr) unsupported(w, in, "clamp on this operation");
  if (inst.clamp || inst.omod) output_modifiers(w, inst, type, rows);
  uint32_t* d = w.v[in.dst];
  if (inst.sdwa && inst.dst_select != Select::dword) {
    const int sel = static_cast<int>(inst.dst_select);
    const int shift = sel < 4 ? 8 * sel : sel == static_cast<int>(Select::word1) ? 16 : 0;
    const int width = sel < 4 ? 8 : 16;
    const uint32_t field = ((1u << width) - 1) << shift;
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t part = rows[l] << shift & field;
      if (inst.dst_unused == DstUnused::preserve) {
        rows[l] = (d[l] & ~field) | part;
      } else if (inst.dst_unused == DstUnused::sext) {
        const bool negative = rows[l] >> (width - 1) & 1;
        rows[l] = part | (negative ? static_cast<uint32_t>(~uint64_t{0} << (shift + width)) : 0);
      } else {
        rows[l] = part;
      }
    }
  } else if ((type == LaneType::b16 || type == LaneType::f16) && !inst.sdwa) {
    if (inst.dst_op_sel) {
      for (int l = 0; l < kLanes; ++l) rows[l] = (d[l] & 0xFFFF) | rows[l] << 16;
    } else if (preserves_high) {
      for (int l = 0; l < kLanes; ++l) rows[l] = (d[l] & 0xFFFF0000) | (rows[l] & 0xFFFF);
    }
  }
  write_rows(w, in.dst, rows, rows_of(type), w.exec() & dpp_write_mask(w, in));
}

}  // namespace hfemu
