// f16 vector arithmetic, in double and rounded once.
#include "exec.h"
#include "float_rules.h"
#include "half_rules.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using i16 = int16_t;
using u16 = uint16_t;

#define LANE(name, ...) t.lane(Op::name, [] __VA_ARGS__)

// The approximations round to nearest whatever MODE says, but saturate as it says.
inline Half approximation(Mode m, double r, Half a) {
  m.round64 = 0;
  return half_result(m, r, a);
}
// mac and mad round the product first.
inline Half mad_half(const Mode& m, Half a, Half b, Half c) {
  const Half p = half_result(m, wide(a) * wide(b), a, b);
  return half_result(m, wide(p) + wide(c), p, c);
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

void half_arithmetic(OpTable& t) {
  LANE(v_add_f16, (Half a, Half b, const Mode& m) { return half_result(m, wide(a) + wide(b), a, b); });
  LANE(v_sub_f16, (Half a, Half b, const Mode& m) { return half_result(m, wide(a) - wide(b), a, b); });
  LANE(v_subrev_f16, (Half a, Half b, const Mode& m) { return half_result(m, wide(b) - wide(a), a, b); });
  LANE(v_mul_f16, (Half a, Half b, const Mode& m) { return half_result(m, wide(a) * wide(b), a, b); });
  LANE(v_fma_f16, (Half a, Half b, Half c, const Mode& m) { return fma_half(m, a, b, c); }).preserves_high = true;
  LANE(v_fma_legacy_f16, (Half a, Half b, Half c, const Mode& m) { return fma_half(m, a, b, c); });
  LANE(v_mac_f16, (Half a, Half b, Half c, const Mode& m) { return mad_half(m, a, b, c); }).accumulates = true;
  LANE(v_madmk_f16, (Half a, Half b, Half c, const Mode& m) { return mad_half(m, a, b, c); });
  LANE(v_madak_f16, (Half a, Half b, Half c, const Mode& m) { return mad_half(m, a, b, c); });
  LANE(v_mad_f16, (Half a, Half b, Half c, const Mode& m) { return mad_half(m, a, b, c); }).preserves_high = true;
  LANE(v_mad_legacy_f16, (Half a, Half b, Half c, const Mode& m) { return mad_half(m, a, b, c); });
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
  LANE(v_ldexp_f16, (Half a, i16 b, const Mode& m) { return half_result(m, std::ldexp(wide(a), b), a); });
  LANE(v_frexp_mant_f16, (Half a, const Mode& m) { return half_result(m, frexp_mantissa(wide(a)), a); });
  LANE(v_frexp_exp_i16_f16, (Half a) { return static_cast<i16>(frexp_exponent(wide(a))); });
  LANE(v_trunc_f16, (Half a, const Mode& m) { return half_result(m, std::trunc(wide(a)), a); });
  LANE(v_ceil_f16, (Half a, const Mode& m) { return half_result(m, std::ceil(wide(a)), a); });
  LANE(v_floor_f16, (Half a, const Mode& m) { return half_result(m, std::floor(wide(a)), a); });
  LANE(v_rndne_f16, (Half a, const Mode& m) { return half_result(m, __builtin_roundeven(wide(a)), a); });
  LANE(v_fract_f16, (Half a, const Mode& m) {
    const Half r = half_result(m, wide(a) - std::floor(wide(a)), a);
    return r.bits == 0x3C00 ? Half(0x3BFF) : r;  // never 1
  });
  t.lane(Op::v_div_fixup_f16, [](Half a, Half b, Half c, const Mode& m) {
     return div_fixup_half(m, a, b, c);
   }).preserves_high = true;
  LANE(v_div_fixup_legacy_f16, (Half a, Half b, Half c, const Mode& m) {
    return div_fixup_half(m, a, b, c);
  });
  LANE(v_pack_b32_f16, (Half a, Half b) { return u32{a.bits} | u32{b.bits} << 16; }).keeps_denormals = true;
}

void half_transcendental(OpTable& t) {
#define APPROXIMATION(name, value)                                                                                \
  t.lane(Op::name, [](Half a, const Mode& m) { return approximation(m, value, a); }, OpClass::valu_trans).rounding = \
      HostRounding::nearest
  constexpr double turn = 6.28318530717958647692;
  APPROXIMATION(v_rcp_f16, 1.0 / wide(a));
  APPROXIMATION(v_sqrt_f16, std::sqrt(wide(a)));
  APPROXIMATION(v_rsq_f16, 1.0 / std::sqrt(wide(a)));
  APPROXIMATION(v_log_f16, std::log2(wide(a)));
  // Beyond 2^1000 double would overflow first, and FP16_OVFL keeps true infinities.
  APPROXIMATION(v_exp_f16, std::exp2(wide(a) > 1000 && std::isfinite(wide(a)) ? 1000.0 : wide(a)));
  APPROXIMATION(v_sin_f16, std::sin((wide(a) - std::nearbyint(wide(a))) * turn));
  APPROXIMATION(v_cos_f16, std::cos((wide(a) - std::nearbyint(wide(a))) * turn));
#undef APPROXIMATION
}

void half_conversions(OpTable& t) {
  LANE(v_cvt_f16_f32, (float a, const Mode& m) {
    // In the default mode by the host's vector conversion, which keeps a NaN's payload as double does.
    return (m.round64 | m.fp16_ovfl) == 0 ? Half::from(a) : Half(double_to_half(static_cast<double>(a), m));
  });
  LANE(v_cvt_f32_f16, (Half a) { return a.value(); });
  LANE(v_cvt_f16_u16, (u16 a, const Mode& m) { return rounded_half(static_cast<double>(a), m); });
  LANE(v_cvt_f16_i16, (i16 a, const Mode& m) { return rounded_half(static_cast<double>(a), m); });
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
  // Toward zero whatever MODE says: round to nearest, then step back where that went outward.
  LANE(v_cvt_pkrtz_f16_f32, (float a, float b, const Mode& m) {
    const auto one = [&](float x) {
      u16 h = float_to_half(x);
      if (x == x && std::fabs(half_to_float(h)) > std::fabs(x)) --h;
      return u32{!(m.denorm64 & 2) && !(h & 0x7C00) ? static_cast<u16>(h & 0x8000) : h};
    };
    return one(a) | one(b) << 16;
  });
}

}  // namespace

void register_valu_half(OpTable& t) {
  half_arithmetic(t);
  half_transcendental(t);
  half_conversions(t);
}

}  // namespace hfemu
