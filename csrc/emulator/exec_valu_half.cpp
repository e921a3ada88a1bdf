// f16 vector arithmetic. Products and sums of halves are exact in double, so each result is rounded once.
#include "exec.h"
#include "float_rules.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using i16 = int16_t;
using u16 = uint16_t;

#define LANE(name, ...) t.lane(Op::name, [] __VA_ARGS__)

inline double wide(Half x) { return x.value(); }
inline bool half_nan(Half x) { return (x.bits & 0x7FFF) > 0x7C00; }
inline Half quiet_half(Half x) { return Half(static_cast<u16>(x.bits | 0x200)); }
constexpr u16 kHalfNan = 0x7E00;

// One rounding; a NaN is the first NaN source, or the positive default.
inline Half result(double r, Half a, Half b = Half(0), Half c = Half(0)) {
  if (r == r) return Half::from(r);
  return half_nan(a) ? quiet_half(a) : half_nan(b) ? quiet_half(b) : half_nan(c) ? quiet_half(c) : Half(kHalfNan);
}
inline Half fma_half(Half a, Half b, Half c) { return result(wide(a) * wide(b) + wide(c), a, b, c); }

template <bool maximum>
inline Half min_max_half(Half a, Half b, bool ieee) {
  const auto signaling = [](Half x) { return half_nan(x) && !(x.bits & 0x200); };
  if (ieee && signaling(a)) return quiet_half(a);
  if (ieee && signaling(b)) return quiet_half(b);
  if (half_nan(a)) return b;
  if (half_nan(b)) return a;
  const float x = a.value(), y = b.value();
  if (x == y) return Half(maximum ? a.bits & b.bits : a.bits | b.bits);
  return (maximum ? x > y : x < y) ? a : b;
}
inline Half median_half(Half a, Half b, Half c, bool ieee) {
  if (half_nan(a) || half_nan(b) || half_nan(c)) return min_max_half<false>(min_max_half<false>(a, b, ieee), c, ieee);
  const Half low = min_max_half<false>(a, b, ieee), high = min_max_half<true>(a, b, ieee);
  return min_max_half<true>(low, min_max_half<false>(high, c, ieee), ieee);
}

template <class T>
inline T half_to_int(Half a, double low, double high) {
  const double x = wide(a);
  return static_cast<T>(x != x ? 0.0 : x < low ? low : x > high ? high : std::trunc(x));
}

void arithmetic(OpTable& t) {
  LANE(v_add_f16, (Half a, Half b) { return result(wide(a) + wide(b), a, b); });
  LANE(v_sub_f16, (Half a, Half b) { return result(wide(a) - wide(b), a, b); });
  LANE(v_subrev_f16, (Half a, Half b) { return result(wide(b) - wide(a), a, b); });
  LANE(v_mul_f16, (Half a, Half b) { return result(wide(a) * wide(b), a, b); });
  t.lane(Op::v_fma_f16, [](Half a, Half b, Half c) { return fma_half(a, b, c); }).preserves_high = true;
  LANE(v_fma_legacy_f16, (Half a, Half b, Half c) { return fma_half(a, b, c); });
  // mac and mad round the product first.
  LANE(v_mac_f16, (Half a, Half b, Half c) {
    const Half p = result(wide(a) * wide(b), a, b);
    return result(wide(p) + wide(c), p, c);
  }).accumulates = true;
  LANE(v_madmk_f16, (Half a, Half b, Half c) {
    const Half p = result(wide(a) * wide(b), a, b);
    return result(wide(p) + wide(c), p, c);
  });
  LANE(v_madak_f16, (Half a, Half b, Half c) {
    const Half p = result(wide(a) * wide(b), a, b);
    return result(wide(p) + wide(c), p, c);
  });
  t.lane(Op::v_mad_f16, [](Half a, Half b, Half c) {
     const Half p = result(wide(a) * wide(b), a, b);
     return result(wide(p) + wide(c), p, c);
   }).preserves_high = true;
  LANE(v_mad_legacy_f16, (Half a, Half b, Half c) {
    const Half p = result(wide(a) * wide(b), a, b);
    return result(wide(p) + wide(c), p, c);
  });
  LANE(v_min_f16, (Half a, Half b, const Mode& m) { return min_max_half<false>(a, b, m.ieee); });
  LANE(v_max_f16, (Half a, Half b, const Mode& m) { return min_max_half<true>(a, b, m.ieee); });
  t.lane(Op::v_min3_f16, [](Half a, Half b, Half c, const Mode& m) {
     return min_max_half<false>(min_max_half<false>(a, b, m.ieee), c, m.ieee);
   }).preserves_high = true;
  t.lane(Op::v_max3_f16, [](Half a, Half b, Half c, const Mode& m) {
     return min_max_half<true>(min_max_half<true>(a, b, m.ieee), c, m.ieee);
   }).preserves_high = true;
  t.lane(Op::v_med3_f16, [](Half a, Half b, Half c, const Mode& m) {
     return median_half(a, b, c, m.ieee);
   }).preserves_high = true;
  LANE(v_ldexp_f16, (Half a, i16 b) { return result(std::ldexp(wide(a), b), a); });
  LANE(v_frexp_mant_f16, (Half a) { return result(frexp_mantissa(wide(a)), a); });
  LANE(v_frexp_exp_i16_f16, (Half a) { return static_cast<i16>(frexp_exponent(wide(a))); });
  LANE(v_trunc_f16, (Half a) { return result(std::trunc(wide(a)), a); });
  LANE(v_ceil_f16, (Half a) { return result(std::ceil(wide(a)), a); });
  LANE(v_floor_f16, (Half a) { return result(std::floor(wide(a)), a); });
  LANE(v_rndne_f16, (Half a) { return result(__builtin_roundeven(wide(a)), a); });
  LANE(v_fract_f16, (Half a) {
    const double r = wide(a) - std::floor(wide(a));
    return r >= 1.0 - 0x1p-11 ? Half(0x3BFF) : result(r, a);
  });
  t.lane(Op::v_div_fixup_f16, [](Half a, Half b, Half c) {
     return result(div_fixup<double>(wide(a), wide(b), wide(c)), c, b, a);
   }).preserves_high = true;
  LANE(v_div_fixup_legacy_f16, (Half a, Half b, Half c) {
    return result(div_fixup<double>(wide(a), wide(b), wide(c)), c, b, a);
  });
  LANE(v_pack_b32_f16, (Half a, Half b) { return u32{a.bits} | u32{b.bits} << 16; });
}

void transcendental(OpTable& t) {
  constexpr OpClass trans = OpClass::valu_trans;
  t.lane(Op::v_rcp_f16, [](Half a) { return result(1.0 / wide(a), a); }, trans);
  t.lane(Op::v_sqrt_f16, [](Half a) { return result(std::sqrt(wide(a)), a); }, trans);
  t.lane(Op::v_rsq_f16, [](Half a) { return result(1.0 / std::sqrt(wide(a)), a); }, trans);
  t.lane(Op::v_log_f16, [](Half a) { return result(std::log2(wide(a)), a); }, trans);
  t.lane(Op::v_exp_f16, [](Half a) { return result(std::exp2(wide(a)), a); }, trans);
  constexpr double turn = 6.28318530717958647692;
  t.lane(Op::v_sin_f16, [](Half a) { return result(std::sin((wide(a) - std::nearbyint(wide(a))) * turn), a); }, trans);
  t.lane(Op::v_cos_f16, [](Half a) { return result(std::cos((wide(a) - std::nearbyint(wide(a))) * turn), a); }, trans);
}

void conversions(OpTable& t) {
  LANE(v_cvt_f16_f32, (float a) { return Half::from(a); });
  LANE(v_cvt_f32_f16, (Half a) { return a.value(); });
  LANE(v_cvt_f16_u16, (u16 a) { return Half::from(static_cast<double>(a)); });
  LANE(v_cvt_f16_i16, (i16 a) { return Half::from(static_cast<double>(a)); });
  LANE(v_cvt_u16_f16, (Half a) { return half_to_int<u16>(a, 0, 65535); });
  LANE(v_cvt_i16_f16, (Half a) { return half_to_int<i16>(a, -32768, 32767); });
  LANE(v_cvt_norm_i16_f16, (Half a) {
    const double x = wide(a);
    return static_cast<i16>(__builtin_roundeven((x != x ? 0.0 : x < -1 ? -1.0 : x > 1 ? 1.0 : x) * 32767.0));
  });
  LANE(v_cvt_norm_u16_f16, (Half a) {
    const double x = wide(a);
    return static_cast<u16>(__builtin_roundeven((!(x > 0) ? 0.0 : x > 1 ? 1.0 : x) * 65535.0));
  });
  LANE(v_cvt_pknorm_i16_f16, (Half a, Half b) {
    const auto one = [](double x) {
      return u32{static_cast<u16>(static_cast<i16>(__builtin_roundeven((x != x ? 0.0 : x < -1 ? -1.0 : x > 1 ? 1.0 : x) * 32767.0)))};
    };
    return one(wide(a)) | one(wide(b)) << 16;
  });
  LANE(v_cvt_pknorm_u16_f16, (Half a, Half b) {
    const auto one = [](double x) { return u32{static_cast<u16>(__builtin_roundeven((!(x > 0) ? 0.0 : x > 1 ? 1.0 : x) * 65535.0))}; };
    return one(wide(a)) | one(wide(b)) << 16;
  });
  // Toward zero: round to nearest, then step back where that went outward.
  LANE(v_cvt_pkrtz_f16_f32, (float a, float b) {
    const auto one = [](float x) {
      u16 h = float_to_half(x);
      if (x == x && std::fabs(half_to_float(h)) > std::fabs(x)) --h;
      return u32{h};
    };
    return one(a) | one(b) << 16;
  });
}

}  // namespace

void register_valu_half(OpTable& t) {
  arithmetic(t);
  transcendental(t);
  conversions(t);
}

}  // namespace hfemu
