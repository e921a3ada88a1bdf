// Packed arithmetic: pairs of f32 in two registers, pairs of 16-bit values in one; dot products and fma_mix.
#include <algorithm>
#include <limits>

#include "exec.h"
#include "float_rules.h"
#include "formats.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using i32 = int32_t;
using u16 = uint16_t;
using i16 = int16_t;
using i64 = int64_t;
using u64 = uint64_t;

// --- f32 pairs --------------------------------------------------------------------------------------------------------

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
  RowBuffer x, y, z, out;
  const u64 exec = w.exec();
  u32* d = w.v[in.dst];
  for (int h = 0; h < 2; ++h) {
    const u32* a = half_row(w, in, 0, h, x);
    const u32* b = half_row(w, in, 1, h, y);
    const u32* c = nullptr;
    if constexpr (T::sources == 3) c = half_row(w, in, 2, h, z);
    arithmetic_loop<F>(out.x + h * kLanes, a, b, c, w.mode);
  }
  if (in.inst->clamp) [[unlikely]] {
    for (int l = 0; l < 2 * kLanes; ++l) {
      const float r = std::bit_cast<float>(out.x[l]);
      out.x[l] = r > 1.0f ? 0x3F800000 : r > 0.0f ? out.x[l] : r != r && !w.mode.dx10_clamp ? out.x[l] : 0;
    }
  }
  if (exec == kAllLanes) std::memcpy(d, out.x, sizeof out.x);
  else write_rows(w, in.dst, out.x, 2, exec);
}

void packed_mov(Wave& w, const ExecInst& in) {
  RowBuffer x, y, out;
  const u32* a = half_row(w, in, 0, false, x);
  std::memcpy(out.x, a, sizeof(Row));
  // The high half takes its register from the second source's op_sel, not from op_sel_hi.
  const u32* b = half_row(w, in, 1, false, y);
  std::memcpy(out.x + kLanes, b, sizeof(Row));
  write_rows(w, in.dst, out.x, 2, w.exec());
}

// --- 16-bit pairs -----------------------------------------------------------------------------------------------------

inline Half half_result(double r, Half a, Half b, Half c = Half(0)) {
  if (r == r) return Half::from(r);
  for (const Half x : {a, b, c})
    if ((x.bits & 0x7FFF) > 0x7C00) return Half(static_cast<u16>(x.bits | 0x200));
  return Half(0x7E00);
}
inline Half half_min_max(Half a, Half b, bool maximum, bool ieee) {
  const auto nan = [](Half x) { return (x.bits & 0x7FFF) > 0x7C00; };
  const auto signaling = [&](Half x) { return nan(x) && !(x.bits & 0x200); };
  if (ieee && signaling(a)) return Half(static_cast<u16>(a.bits | 0x200));
  if (ieee && signaling(b)) return Half(static_cast<u16>(b.bits | 0x200));
  if (nan(a)) return b;
  if (nan(b)) return a;
  if (a.value() == b.value()) return Half(maximum ? a.bits & b.bits : a.bits | b.bits);
  return (a.value() > b.value()) == maximum ? a : b;
}
// IEEE 754-2019: a NaN wins.
inline Half half_extreme(Half a, Half b, bool maximum) {
  for (const Half x : {a, b})
    if ((x.bits & 0x7FFF) > 0x7C00) return Half(static_cast<u16>(x.bits | 0x200));
  return half_min_max(a, b, maximum, false);
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

inline double wide(Half x) { return x.value(); }
inline Half fma_half(Half a, Half b, Half c) { return half_result(wide(a) * wide(b) + wide(c), a, b, c); }

void half_pairs(OpTable& t) {
  PAIR2(v_pk_add_f16, H2, Half, half_result(wide(x) + wide(y), x, y));
  PAIR2(v_pk_mul_f16, H2, Half, half_result(wide(x) * wide(y), x, y));
  LANE(v_pk_min_f16, (H2 a, H2 b, const Mode& m) {
    return H2{half_min_max(a.lo, b.lo, false, m.ieee), half_min_max(a.hi, b.hi, false, m.ieee)};
  });
  LANE(v_pk_max_f16, (H2 a, H2 b, const Mode& m) {
    return H2{half_min_max(a.lo, b.lo, true, m.ieee), half_min_max(a.hi, b.hi, true, m.ieee)};
  });
  LANE(v_pk_fma_f16, (H2 a, H2 b, H2 c) { return H2{fma_half(a.lo, b.lo, c.lo), fma_half(a.hi, b.hi, c.hi)}; });
  LANE(v_pk_fmac_f16, (H2 a, H2 b, H2 c) {
    return H2{fma_half(a.lo, b.lo, c.lo), fma_half(a.hi, b.hi, c.hi)};
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

inline float bf16_value(u32 bits) { return std::bit_cast<float>(bits << 16); }
inline float dot_half(H2 a, H2 b, float c) {
  return static_cast<float>(wide(a.lo) * wide(b.lo) + wide(a.hi) * wide(b.hi) + c);
}
inline float dot_bf16(U2 a, U2 b, float c) {
  return static_cast<float>(static_cast<double>(bf16_value(a.lo)) * bf16_value(b.lo) +
                            static_cast<double>(bf16_value(a.hi)) * bf16_value(b.hi) + c);
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
  LANE(v_dot2_f32_f16, (H2 a, H2 b, float c) { return dot_half(a, b, c); });
  LANE(v_dot2c_f32_f16, (H2 a, H2 b, float c) { return dot_half(a, b, c); }).accumulates = true;
  LANE(v_dot2_f32_bf16, (U2 a, U2 b, float c) { return dot_bf16(a, b, c); });
  LANE(v_dot2c_f32_bf16, (U2 a, U2 b, float c) { return dot_bf16(a, b, c); }).accumulates = true;
}

// --- fma_mix ----------------------------------------------------------------------------------------------------------

enum class MixResult : uint8_t { f32, low_half, high_half };

template <MixResult kind>
void fma_mix(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const u32* rows[3];
  for (int i = 0; i < 3; ++i) rows[i] = source_row(w, in.src[i], buffers[i]);
  const Inst& inst = *in.inst;
  const u32* d = w.v[in.dst];
  for (int l = 0; l < kLanes; ++l) {
    float x[3];
    for (int i = 0; i < 3; ++i) {
      const Operand& o = inst.src[i];
      const u32 bits = rows[i][l];
      x[i] = o.op_sel_hi ? half_to_float(static_cast<u16>(o.op_sel ? bits >> 16 : bits)) : std::bit_cast<float>(bits);
      if (o.abs || o.neg_hi) x[i] = std::fabs(x[i]);
      if (o.neg) x[i] = -x[i];
    }
    float r = __builtin_fmaf(x[0], x[1], x[2]);
    if (kind == MixResult::f32) {
      if (inst.clamp) r = r > 1.0f ? 1.0f : r > 0.0f ? r : 0.0f;
      out.x[l] = std::bit_cast<u32>(r);
      continue;
    }
    // The f16 result is rounded once from the exact sum, not from the f32 one.
    u32 h = static_cast<u16>(double_to_half(sticky_fma(x[0], x[1], x[2])));
    if (inst.clamp) h = r > 1.0f ? 0x3C00 : r > 0.0f ? h : 0;
    out.x[l] = kind == MixResult::low_half ? (d[l] & 0xFFFF0000) | h : (d[l] & 0xFFFF) | h << 16;
  }
  write_rows(w, in.dst, out.x, 1, w.exec());
}

}  // namespace

void register_packed(OpTable& t) {
  t.special(Op::v_pk_fma_f32, OpClass::valu,
            &packed_f32<decltype([](float a, float b, float c) { return __builtin_fmaf(a, b, c); })>);
  t.special(Op::v_pk_mul_f32, OpClass::valu, &packed_f32<decltype([](float a, float b) { return a * b; })>);
  t.special(Op::v_pk_add_f32, OpClass::valu, &packed_f32<decltype([](float a, float b) { return a + b; })>);
  t.special(Op::v_pk_mov_b32, OpClass::valu, &packed_mov);
  t.special(Op::v_fma_mix_f32, OpClass::valu, &fma_mix<MixResult::f32>);
  t.special(Op::v_fma_mixlo_f16, OpClass::valu, &fma_mix<MixResult::low_half>);
  t.special(Op::v_fma_mixhi_f16, OpClass::valu, &fma_mix<MixResult::high_half>);
  sixteen_bit_pairs(t);
  half_pairs(t);
  dots(t);
}

}  // namespace hfemu
