// Exact floating-point rules shared by f32 and f64 handlers: min/max, ldexp, frexp, classes, division helpers.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "formats.h"

namespace hfemu {

template <class F> struct float_bits;
template <> struct float_bits<float> {
  using U = uint32_t;
  static constexpr int mantissa = 23, bias = 127, max_exponent = 255;
};
template <> struct float_bits<double> {
  using U = uint64_t;
  static constexpr int mantissa = 52, bias = 1023, max_exponent = 2047;
};
template <class F> using bits_of = typename float_bits<F>::U;

template <class F> constexpr bits_of<F> sign_mask = bits_of<F>{1} << (sizeof(F) * 8 - 1);
template <class F> constexpr bits_of<F> quiet_bit = bits_of<F>{1} << (float_bits<F>::mantissa - 1);
template <class F> constexpr bits_of<F> infinity_bits = bits_of<F>(float_bits<F>::max_exponent) << float_bits<F>::mantissa;

template <class F> inline bits_of<F> as_bits(F x) { return std::bit_cast<bits_of<F>>(x); }
template <class F> inline F from_bits(bits_of<F> x) { return std::bit_cast<F>(x); }
template <class F> inline bits_of<F> magnitude(F x) { return as_bits(x) & ~sign_mask<F>; }
template <class F> inline bool is_nan(F x) { return magnitude(x) > infinity_bits<F>; }
template <class F> inline bool is_snan(F x) { return is_nan(x) && !(as_bits(x) & quiet_bit<F>); }
template <class F> inline bool is_inf(F x) { return magnitude(x) == infinity_bits<F>; }
template <class F> inline bool is_zero(F x) { return magnitude(x) == 0; }
template <class F> inline bool is_denormal(F x) {
  return magnitude(x) != 0 && magnitude(x) < (bits_of<F>{1} << float_bits<F>::mantissa);
}
template <class F> inline F quieted(F x) { return from_bits<F>(as_bits(x) | quiet_bit<F>); }
template <class F> inline int exponent_field(F x) {
  return static_cast<int>(magnitude(x) >> float_bits<F>::mantissa);
}
template <class F> inline F flushed(F x) {
  return magnitude(x) < (bits_of<F>{1} << float_bits<F>::mantissa) ? from_bits<F>(as_bits(x) & sign_mask<F>) : x;
}

// minimum and maximum: a NaN loses to a number; in IEEE mode a signaling NaN wins and is made quiet; -0 < +0.
template <class F, bool maximum>
inline F min_max(F a, F b, bool ieee) {
  const F picked = a == b ? from_bits<F>(maximum ? as_bits(a) & as_bits(b) : as_bits(a) | as_bits(b))
                          : (maximum ? a > b : a < b) ? a : b;
  F r = a != a ? b : b != b ? a : picked;
  r = ieee && is_snan(b) ? quieted(b) : r;
  return ieee && is_snan(a) ? quieted(a) : r;
}

template <class F>
inline F median(F a, F b, F c, bool ieee) {
  if (a != a || b != b || c != c) return min_max<F, false>(min_max<F, false>(a, b, ieee), c, ieee);
  const F top = min_max<F, true>(min_max<F, true>(a, b, ieee), c, ieee);
  if (top == a) return min_max<F, true>(b, c, ieee);
  if (top == b) return min_max<F, true>(a, c, ieee);
  return min_max<F, true>(a, b, ieee);
}

// The ten classes of v_cmp_class, lowest bit first: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
template <class F>
inline uint32_t class_bit(F x) {
  if (is_nan(x)) return is_snan(x) ? 1 : 2;
  const bool negative = (as_bits(x) & sign_mask<F>) != 0;
  if (is_inf(x)) return negative ? 1u << 2 : 1u << 9;
  if (is_zero(x)) return negative ? 1u << 5 : 1u << 6;
  if (is_denormal(x)) return negative ? 1u << 4 : 1u << 7;
  return negative ? 1u << 3 : 1u << 8;
}

template <class F>
inline int frexp_exponent(F x) {
  if (is_nan(x) || is_inf(x) || is_zero(x)) return 0;
  int e = 0;
  std::frexp(x, &e);
  return e;
}

template <class F>
inline F frexp_mantissa(F x) {
  if (is_nan(x)) return quieted(x);
  if (is_inf(x)) return x;
  int e = 0;
  return std::frexp(x, &e);
}

// v_div_scale: s0 is the denominator s1 or the numerator s2, pre-scaled so that the Newton steps neither overflow nor
// lose bits; the flag asks v_div_fmas to undo it.
template <class F>
inline F div_scale(F s0, F s1, F s2, bool* flag) {
  constexpr bool single = sizeof(F) == 4;
  constexpr int step = single ? 64 : 128, near_max = single ? 96 : 768;
  constexpr int tiny = single ? 23 : 53;
  *flag = false;
  if (is_zero(s2) || is_zero(s1)) return from_bits<F>(infinity_bits<F> | quiet_bit<F>);
  const F reciprocal = F{1} / s1, quotient = s2 / s1;
  if (exponent_field(s2) - exponent_field(s1) >= near_max) {
    *flag = true;
    return as_bits(s0) == as_bits(s1) ? std::ldexp(s0, step) : s0;
  }
  if (is_denormal(s1)) return std::ldexp(s0, step);
  // The ISA documents print ldexp(s0, +step) here, which would overflow every such denominator; scaled down, its
  // reciprocal is normal and v_div_fmas, which multiplies quotients below 2 by 2^-step, undoes it.
  if (is_denormal(reciprocal) && is_denormal(quotient)) {
    *flag = true;
    return as_bits(s0) == as_bits(s1) ? std::ldexp(s0, -step) : s0;
  }
  if (is_denormal(reciprocal)) return std::ldexp(s0, -step);
  if (is_denormal(quotient)) {
    *flag = true;
    return as_bits(s0) == as_bits(s2) ? std::ldexp(s0, step) : s0;
  }
  if (exponent_field(s2) <= tiny) return std::ldexp(s0, step);
  return s0;
}

// v_div_fixup: the special cases of s2 / s1; s0 is the quotient the preceding steps found. Half precision, computed
// through F, has no Newton steps whose NaN would mean an overflow.
template <class F, bool newton = true>
inline F div_fixup(F s0, F s1, F s2) {
  const bits_of<F> sign = (as_bits(s1) ^ as_bits(s2)) & sign_mask<F>;
  const F invalid = from_bits<F>(sign_mask<F> | infinity_bits<F> | quiet_bit<F>);
  if (is_nan(s2)) return quieted(s2);
  if (is_nan(s1)) return quieted(s1);
  if (is_zero(s1) && is_zero(s2)) return invalid;
  if (is_inf(s1) && is_inf(s2)) return invalid;
  if (is_zero(s1) || is_inf(s2)) return from_bits<F>(sign | infinity_bits<F>);
  if (is_inf(s1) || is_zero(s2)) return from_bits<F>(sign);
  constexpr int underflow = sizeof(F) == 4 ? -150 : -1075;
  if (exponent_field(s2) - exponent_field(s1) < underflow) return from_bits<F>(sign);
  // A quotient beyond the range makes the Newton steps meet inf - inf; the hardware turns that NaN into an infinity.
  if (newton && is_nan(s0)) return from_bits<F>(sign | infinity_bits<F>);
  return from_bits<F>(sign | magnitude(s0));
}

// fma(a, b, c) in double with its last bit made sticky: rounding it to any narrower format rounds the exact sum once.
inline double sticky_fma(float a, float b, float c) {
  const double p = static_cast<double>(a) * b;  // exact
  const double s = p + c, t = s - p;
  const double error = (p - (s - t)) + (static_cast<double>(c) - t);
  if (error == 0 || !std::isfinite(s) || (as_bits(s) & 1)) return s;
  const bool away = (error > 0) == (s > 0);
  return from_bits<double>(away ? as_bits(s) + 1 : as_bits(s) - 1);
}

// fma(a, b, c) * 2^k, rounded once, in MODE's direction: f32 with the host's rounding at nearest...
inline float scaled_fma(float a, float b, float c, int k, int rounding) {
  static constexpr Rounding directions[] = {Rounding::nearest_even, Rounding::up, Rounding::down, Rounding::toward_zero};
  const double exact = std::ldexp(sticky_fma(a, b, c), k);
  if (exact == 0 || !std::isfinite(exact)) return static_cast<float>(exact);
  return bits_to_float(encode(f32_format, exact, false, directions[rounding]));
}

// ... and f64 with the host's rounding set to that direction, which its quadruple arithmetic obeys too.
inline double scaled_fma(double a, double b, double c, int k) {
  // 113 bits hold the exact product and all of the sum that can matter here: c is within a few bits of the result.
  const __float128 s = static_cast<__float128>(a) * b + c;
  const __float128 factor = k >= 0 ? static_cast<__float128>(std::ldexp(1.0, k)) : 1 / static_cast<__float128>(std::ldexp(1.0, -k));
  return static_cast<double>(s * factor);
}

}  // namespace hfemu
