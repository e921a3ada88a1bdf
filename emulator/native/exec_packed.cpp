// Packed arithmetic: pairs of f32 in two registers, pairs of 16-bit values in one; dot products and fma_mix.
#include <algorithm>
#include <limits>

#include "exec.h"
#include "float_rules.h"
#include "formats.h"
#include "half_rules.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using i32 = int32_t;
using u16 = uint16_t;
using i16 = int16_t;
using i64 = int64_t;
using u64 = uint64_t;

// --- f32 pairs --------------------------------------------------------------------------------------------------------

inline float clamped(float x, bool dx10) {
  return x > 1.0f ? 1.0f : x > 0.0f ? x : x != x && !dx10 ? x : 0.0f;
}

// The row one half of a packed f32 operation reads: op_sel picks the register for the low half, op_sel_hi for the high.
inline const u32* half_row(const Wave& w, const ExecInst& in, int index, bool high, RowBuffer& buffer) {
  const Source& s = in.src[index];
  const Operand& o = in.inst->src[index];
  const bool second = high ? o.op_sel_hi : o.op_sel;
  const bool neg = high ? o.neg_hi : o.neg;
  const u32* row;
  if (s.kind == SourceKind::vgpr) {
    row = w.v[s.reg + second];
  } else {
    // Scalars are pairs, constants the same in both halves.
    const u64 x = scalar_source(w, s);
    splat(buffer.x, static_cast<u32>(s.kind != SourceKind::constant && second ? x >> 32 : x));
    row = buffer.x;
  }
  if (!neg) [[likely]] return row;
  for (int l = 0; l < kLanes; ++l) buffer.x[l] = row[l] ^ 0x80000000;
  return buffer.x;
}

template <class F>
void packed_f32(Wave& w, const ExecInst& in) {
  using T = lane_traits<F>;
  RowBuffer x, y, z, fx, fy, fz, out;
  const u64 exec = w.exec();
  u32* d = w.v[in.dst];
  const bool flush_in = !(w.mode.denorm32 & 1), flush_out = !(w.mode.denorm32 & 2);
  for (int h = 0; h < 2; ++h) {
    const u32* a = half_row(w, in, 0, h, x);
    const u32* b = half_row(w, in, 1, h, y);
    const u32* c = nullptr;
    if constexpr (T::sources == 3) c = half_row(w, in, 2, h, z);
    if (flush_in) [[unlikely]] {
      a = flush_denormals(a, LaneType::f32, fx);
      b = flush_denormals(b, LaneType::f32, fy);
      if constexpr (T::sources == 3) c = flush_denormals(c, LaneType::f32, fz);
    }
    arithmetic_loop<F>(out.x + h * kLanes, a, b, c, w.mode);
  }
  if (flush_out || in.inst->clamp) [[unlikely]] {
    for (int l = 0; l < 2 * kLanes; ++l) {
      const float r = flush_out ? flushed(std::bit_cast<float>(out.x[l])) : std::bit_cast<float>(out.x[l]);
      out.x[l] = in.inst->clamp ? as_bits(clamped(r, w.mode.dx10_clamp)) : as_bits(r);
    }
  }
  if (exec == kAllLanes) std::memcpy(d, out.x, sizeof out.x);
  else write_rows(w, in.dst, out.x, 2, exec);
}

void packed_mov(Wave& w, const ExecInst& in) {
  if (in.inst->clamp) unsupported(w, in, "clamp on a move");
  RowBuffer x, y, out;
  const u32* a = half_row(w, in, 0, false, x);
  std::memcpy(out.x, a, sizeof(Row));
  // The high half takes its register from the second source's op_sel, not from op_sel_hi.
  const u32* b = half_row(w, in, 1, false, y);
  std::memcpy(out.x + kLanes, b, sizeof(Row));
  write_rows(w, in.dst, out.x, 2, w.exec());
}

// --- 16-bit pairs -----------------------------------------------------------------------------------------------------

// IEEE 754-2019: a NaN wins.
inline Half half_extreme(Half a, Half b, bool maximum) {
  for (const Half x : {a, b})
    if (half_nan(x)) return quiet_half(x);
  return maximum ? min_max_half<true>(a, b, false) : min_max_half<false>(a, b, false);
}

template <class T, class W> inline T saturated(W x) {
  return static_cast<T>(std::clamp<W>(x, W{std::numeric_limits<T>::min()}, W{std::numeric_limits<T>::max()}));
}

using H2 = Packed<Half>;
using U2 = Packed<u16>;
using I2 = Packed<i16>;

#define LANE(name, ...) t.lane(Op::name, [] __VA_ARGS__)
#define PAIR2(name, P, T, expr)                                             \
  t.lane(Op::name, [](P a, P b) {                                           \
    const auto one = [](T x, T y) { return static_cast<T>(expr); };         \
    return P{one(a.lo, b.lo), one(a.hi, b.hi)};                             \
  })
#define PAIR2_SATURATE(name, P, T, expr)                                    \
  t.saturate(Op::name, [](P a, P b) {                                       \
    const auto one = [](T x, T y) { return static_cast<T>(expr); };         \
    return P{one(a.lo, b.lo), one(a.hi, b.hi)};                             \
  })

void sixteen_bit_pairs(OpTable& t) {
  PAIR2(v_pk_add_i16, I2, i16, i32{x} + y);
  PAIR2_SATURATE(v_pk_add_i16, I2, i16, saturated<i16>(i32{x} + y));
  PAIR2(v_pk_sub_i16, I2, i16, i32{x} - y);
  PAIR2_SATURATE(v_pk_sub_i16, I2, i16, saturated<i16>(i32{x} - y));
  PAIR2(v_pk_add_u16, U2, u16, u32{x} + y);
  PAIR2_SATURATE(v_pk_add_u16, U2, u16, saturated<u16>(i32{x} + y));
  PAIR2(v_pk_sub_u16, U2, u16, u32{x} - y);
  PAIR2_SATURATE(v_pk_sub_u16, U2, u16, saturated<u16>(i32{x} - y));
  PAIR2(v_pk_mul_lo_u16, U2, u16, u32{x} * y);
  PAIR2(v_pk_lshlrev_b16, U2, u16, u32{y} << (x & 15));
  PAIR2(v_pk_lshrrev_b16, U2, u16, y >> (x & 15));
  PAIR2(v_pk_ashrrev_i16, I2, i16, y >> (x & 15));
  PAIR2(v_pk_max_i16, I2, i16, x > y ? x : y);
  PAIR2(v_pk_min_i16, I2, i16, x < y ? x : y);
  PAIR2(v_pk_max_u16, U2, u16, x > y ? x : y);
  PAIR2(v_pk_min_u16, U2, u16, x < y ? x : y);
  LANE(v_pk_mad_i16, (I2 a, I2 b, I2 c) {
    return I2{static_cast<i16>(i32{a.lo} * b.lo + c.lo), static_cast<i16>(i32{a.hi} * b.hi + c.hi)};
  });
  t.saturate(Op::v_pk_mad_i16, [](I2 a, I2 b, I2 c) {
    return I2{saturated<i16>(i64{a.lo} * b.lo + c.lo), saturated<i16>(i64{a.hi} * b.hi + c.hi)};
  });
  LANE(v_pk_mad_u16, (U2 a, U2 b, U2 c) {
    return U2{static_cast<u16>(u32{a.lo} * b.lo + c.lo), static_cast<u16>(u32{a.hi} * b.hi + c.hi)};
  });
  t.saturate(Op::v_pk_mad_u16, [](U2 a, U2 b, U2 c) {
    return U2{saturated<u16>(i64{a.lo} * b.lo + c.lo), saturated<u16>(i64{a.hi} * b.hi + c.hi)};
  });
}

#define HALF_PAIR2(name, expr)                                              \
  t.lane(Op::name, [](H2 a, H2 b, const Mode& m) {                          \
    const auto one = [&](Half x, Half y) { return expr; };                  \
    return H2{one(a.lo, b.lo), one(a.hi, b.hi)};                            \
  })

void half_pairs(OpTable& t) {
  HALF_PAIR2(v_pk_add_f16, half_result(m, wide(x) + wide(y), x, y));
  HALF_PAIR2(v_pk_mul_f16, half_result(m, wide(x) * wide(y), x, y));
  HALF_PAIR2(v_pk_min_f16, min_max_half<false>(x, y, m.ieee));
  HALF_PAIR2(v_pk_max_f16, min_max_half<true>(x, y, m.ieee));
  LANE(v_pk_fma_f16, (H2 a, H2 b, H2 c, const Mode& m) {
    return H2{fma_half(m, a.lo, b.lo, c.lo), fma_half(m, a.hi, b.hi, c.hi)};
  });
  LANE(v_pk_fmac_f16, (H2 a, H2 b, H2 c, const Mode& m) {
    return H2{fma_half(m, a.lo, b.lo, c.lo), fma_half(m, a.hi, b.hi, c.hi)};
  }).accumulates = true;
  LANE(v_pk_minimum3_f16, (H2 a, H2 b, H2 c) {
    return H2{half_extreme(half_extreme(a.lo, b.lo, false), c.lo, false),
              half_extreme(half_extreme(a.hi, b.hi, false), c.hi, false)};
  });
  LANE(v_pk_maximum3_f16, (H2 a, H2 b, H2 c) {
    return H2{half_extreme(half_extreme(a.lo, b.lo, true), c.lo, true),
              half_extreme(half_extreme(a.hi, b.hi, true), c.hi, true)};
  });
}

// --- dot products -----------------------------------------------------------------------------------------------------

template <int bits, bool is_signed>
inline i64 dot_integers(u32 a, u32 b) {
  i64 sum = 0;
  for (int i = 0; i < 32; i += bits) {
    const u32 x = a << (32 - bits - i), y = b << (32 - bits - i);
    sum += is_signed ? i64{static_cast<i32>(x) >> (32 - bits)} * (static_cast<i32>(y) >> (32 - bits))
                     : i64{x >> (32 - bits)} * (y >> (32 - bits));
  }
  return sum;
}

// The floating-point dot products round to nearest and flush denormals, in and out, whatever MODE says (ISA,
// "Denormalized and Rounding Modes").
inline double dot_value(Half x) { return x.bits & 0x7C00 ? wide(x) : wide(Half(x.bits & 0x8000)); }
inline double dot_value(u16 bf16) { return flushed(std::bit_cast<float>(u32{bf16} << 16)); }
template <class P>
inline float dot_pair(P a, P b, float c) {
  return flushed(static_cast<float>(dot_value(a.lo) * dot_value(b.lo) + dot_value(a.hi) * dot_value(b.hi) + flushed(c)));
}

#define DOT(name, bits, is_signed, T)                                                                             \
  t.lane(Op::name, [](u32 a, u32 b, T c) { return static_cast<u32>(dot_integers<bits, is_signed>(a, b) + c); }); \
  t.saturate(Op::name, [](u32 a, u32 b, T c) { return saturated<T>(dot_integers<bits, is_signed>(a, b) + c); })

void dots(OpTable& t) {
  DOT(v_dot4_i32_i8, 8, true, i32);
  DOT(v_dot4_u32_u8, 8, false, u32);
  DOT(v_dot8_i32_i4, 4, true, i32);
  DOT(v_dot8_u32_u4, 4, false, u32);
  DOT(v_dot4c_i32_i8, 8, true, i32);
  DOT(v_dot8c_i32_i4, 4, true, i32);
  t.entry(Op::v_dot4c_i32_i8).accumulates = true;
  t.entry(Op::v_dot8c_i32_i4).accumulates = true;
  LANE(v_dot2_i32_i16, (I2 a, I2 b, u32 c) { return static_cast<u32>(i64{a.lo} * b.lo + i64{a.hi} * b.hi) + c; });
  t.saturate(Op::v_dot2_i32_i16, [](I2 a, I2 b, i32 c) { return saturated<i32>(i64{a.lo} * b.lo + i64{a.hi} * b.hi + c); });
  LANE(v_dot2_u32_u16, (U2 a, U2 b, u32 c) { return static_cast<u32>(u64{a.lo} * b.lo + u64{a.hi} * b.hi) + c; });
  t.saturate(Op::v_dot2_u32_u16, [](U2 a, U2 b, u32 c) { return saturated<u32>(i64{a.lo} * b.lo + i64{a.hi} * b.hi + c); });
  LANE(v_dot2c_i32_i16, (I2 a, I2 b, u32 c) {
    return static_cast<u32>(i64{a.lo} * b.lo + i64{a.hi} * b.hi) + c;
  }).accumulates = true;
#define FLOAT_DOT(name, P)                                                            \
  t.lane(Op::name, [](P a, P b, float c) { return dot_pair(a, b, c); });              \
  t.entry(Op::name).rounding = HostRounding::nearest;                                 \
  t.entry(Op::name).keeps_denormals = true
  FLOAT_DOT(v_dot2_f32_f16, H2);
  FLOAT_DOT(v_dot2c_f32_f16, H2);
  FLOAT_DOT(v_dot2_f32_bf16, U2);
  FLOAT_DOT(v_dot2c_f32_bf16, U2);
  t.entry(Op::v_dot2c_f32_f16).accumulates = true;
  t.entry(Op::v_dot2c_f32_bf16).accumulates = true;
}

// --- fma_mix ----------------------------------------------------------------------------------------------------------

enum class MixResult : uint8_t { f32, low_half, high_half };

// The NaN that a NaN result is: the first source that is one, made quiet, or the positive default.
inline float first_nan(const float (&x)[3]) {
  for (const float source : x)
    if (source != source) return quieted(source);
  return from_bits<float>(0x7FC00000);
}

template <MixResult kind>
void fma_mix(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const u32* rows[3];
  for (int i = 0; i < 3; ++i) rows[i] = source_row(w, in.src[i], buffers[i]);
  const Inst& inst = *in.inst;
  const Mode& m = w.mode;
  const u32* d = w.v[in.dst];
  for (int l = 0; l < kLanes; ++l) {
    float x[3];
    for (int i = 0; i < 3; ++i) {
      const Operand& o = inst.src[i];
      const u32 bits = rows[i][l];
      if (o.op_sel_hi) {
        const Half h(static_cast<u16>(o.op_sel ? bits >> 16 : bits));
        x[i] = (m.denorm64 & 1) || (h.bits & 0x7C00) ? h.value() : Half(h.bits & 0x8000).value();
      } else {
        x[i] = m.denorm32 & 1 ? std::bit_cast<float>(bits) : flushed(std::bit_cast<float>(bits));
      }
      if (o.abs || o.neg_hi) x[i] = std::fabs(x[i]);
      if (o.neg) x[i] = -x[i];
    }
    if (kind == MixResult::f32) {
      float r = __builtin_fmaf(x[0], x[1], x[2]);
      if (r != r) r = first_nan(x);
      if (!(m.denorm32 & 2)) r = flushed(r);
      out.x[l] = as_bits(inst.clamp ? clamped(r, m.dx10_clamp) : r);
      continue;
    }
    // The f16 result is rounded once from the exact sum, not from the f32 one, and then clamped.
    const double exact = sticky_fma(x[0], x[1], x[2]);
    Half h = rounded_half(exact == exact ? exact : static_cast<double>(first_nan(x)), m);
    if (!(m.denorm64 & 2) && !(h.bits & 0x7C00)) h.bits &= 0x8000;
    if (inst.clamp) h = half_nan(h) ? (m.dx10_clamp ? Half(0) : h) : Half::from(clamped(h.value(), true));
    out.x[l] = kind == MixResult::low_half ? (d[l] & 0xFFFF0000) | h.bits : (d[l] & 0xFFFF) | u32{h.bits} << 16;
  }
  write_rows(w, in.dst, out.x, 1, w.exec());
}

}  // namespace

#define PACKED_F32(name, ...) \
  t.special(Op::name, OpClass::valu, &packed_f32<decltype([] __VA_ARGS__)>).rounding = HostRounding::single

void register_packed(OpTable& t) {
  PACKED_F32(v_pk_fma_f32, (float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  PACKED_F32(v_pk_mul_f32, (float a, float b) { return a * b; });
  PACKED_F32(v_pk_add_f32, (float a, float b) { return a + b; });
  t.special(Op::v_pk_mov_b32, OpClass::valu, &packed_mov);
  t.special(Op::v_fma_mix_f32, OpClass::valu, &fma_mix<MixResult::f32>).rounding = HostRounding::single;
  t.special(Op::v_fma_mixlo_f16, OpClass::valu, &fma_mix<MixResult::low_half>);
  t.special(Op::v_fma_mixhi_f16, OpClass::valu, &fma_mix<MixResult::high_half>);
  sixteen_bit_pairs(t);
  half_pairs(t);
  dots(t);
}

}  // namespace hfemu
