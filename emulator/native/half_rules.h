// f16 rules shared by the plain and the packed handlers: one rounding, NaNs, minimum and maximum.
#pragma once

#include "exec.h"
#include "float_rules.h"

namespace hfemu {

inline bool half_nan(Half x) { return (x.bits & 0x7FFF) > 0x7C00; }
inline bool half_signaling(Half x) { return half_nan(x) && !(x.bits & 0x200); }
inline Half quiet_half(Half x) { return Half(static_cast<uint16_t>(x.bits | 0x200)); }
inline double wide(Half x) { return x.value(); }
constexpr uint16_t kHalfNan = 0x7E00;

// `r` rounded once, by MODE: in the default mode inline, else by the general encoder.
inline Half rounded_half(double r, const Mode& m) {
  if ((m.round64 | m.fp16_ovfl) == 0) [[likely]] return Half::from(r);
  return Half(double_to_half(r, m));
}
// The same, where a NaN is the first NaN source made quiet, or the positive default.
inline Half half_result(const Mode& m, double r, Half a, Half b = Half(0), Half c = Half(0)) {
  if (r == r) return rounded_half(r, m);
  return half_nan(a) ? quiet_half(a) : half_nan(b) ? quiet_half(b) : half_nan(c) ? quiet_half(c) : Half(kHalfNan);
}
// Products are exact in double. The sum rounds to nearest there, or in the very direction of the result: a sum that
// double cannot hold is so close to a result that a second rounding either leaves it or goes the same way.
inline Half fma_half(const Mode& m, Half a, Half b, Half c) { return half_result(m, wide(a) * wide(b) + wide(c), a, b, c); }

// The quotient's NaN keeps its payload under the operands' sign; 0 / 0 and inf / inf are the negative default NaN.
inline Half div_fixup_half(const Mode& m, Half quotient, Half below, Half above) {
  if (half_nan(above)) return quiet_half(above);
  if (half_nan(below)) return quiet_half(below);
  const double r = div_fixup<double, false>(wide(quotient), wide(below), wide(above));
  if (r == r) return rounded_half(r, m);
  const bool finite = std::isfinite(wide(below)) && std::isfinite(wide(above)), zeros = wide(below) == 0;
  if (!finite || zeros) return Half(kHalfNan | 0x8000);
  const int sign = (below.bits ^ above.bits) & 0x8000;
  return Half(static_cast<uint16_t>((quiet_half(quotient).bits & 0x7FFF) | sign));
}

// A NaN loses to a number; in IEEE mode a signaling NaN wins and is made quiet; -0 < +0.
template <bool maximum>
inline Half min_max_half(Half a, Half b, bool ieee) {
  if (ieee && half_signaling(a)) return quiet_half(a);
  if (ieee && half_signaling(b)) return quiet_half(b);
  if (half_nan(a)) return b;
  if (half_nan(b)) return a;
  const float x = a.value(), y = b.value();
  if (x == y) return Half(maximum ? a.bits & b.bits : a.bits | b.bits);
  return (maximum ? x > y : x < y) ? a : b;
}

}  // namespace hfemu
