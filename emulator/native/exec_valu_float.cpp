// f32 and f64 vector arithmetic, conversions between them and integers, transcendentals, division helpers.
#include <iterator>

#include "exec.h"
#include "float_rules.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;

#define LANE(name, ...) t.lane(Op::name, [] __VA_ARGS__)
#define ARITHMETIC(name, ...) t.arithmetic(Op::name, [] __VA_ARGS__)
#define TRANSCENDENTAL(name, ...) \
  t.lane(Op::name, [] __VA_ARGS__, OpClass::valu_trans).rounding = HostRounding::nearest

// The polynomial with these coefficients, the highest power first, by Horner's rule.
template <size_t count>
double polynomial(const double (&coefficients)[count], double x) {
  double p = coefficients[0];
  for (size_t i = 1; i < count; ++i) p = p * x + coefficients[i];
  return p;
}

// 2^x for finite x: the nearest integer goes into the exponent, a degree-13 Taylor polynomial (error below 2^-52 on
// |r| <= 1/2) covers the rest.
inline double exp2_double(double x) {
  constexpr double kTaylor[] = {1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0,
                                1 / 40320.0,      1 / 5040.0,      1 / 720.0,      1 / 120.0,     1 / 24.0,
                                1 / 6.0,          0.5,             1.0,            1.0};
  const double n = __builtin_floor(x + 0.5);
  const double p = polynomial(kTaylor, (x - n) * 0.69314718055994530942);
  // n is in [-200, 200] for every f32 input that matters; adding 2^52 * 1.5 leaves it in the low bits.
  const u64 biased = std::bit_cast<u64>(n + 6755399441055744.0 + 1023.0) << 52;
  return p * std::bit_cast<double>(biased);
}

// log2 of a positive normal float: mantissa in [1/sqrt2, sqrt2), then 2 atanh(s) with s = (m-1)/(m+1), |s| < 0.172.
inline double log2_double(float x) {
  constexpr double kAtanh[] = {1 / 21.0, 1 / 19.0, 1 / 17.0, 1 / 15.0, 1 / 13.0, 1 / 11.0,
                               1 / 9.0,  1 / 7.0,  1 / 5.0,  1 / 3.0,  1.0};
  const u32 bits = as_bits(x);
  const u32 shifted = bits - 0x3F3504F3u;  // sqrt(1/2)
  const i32 e = static_cast<i32>(shifted) >> 23;
  const double m = std::bit_cast<float>(bits - (static_cast<u32>(e) << 23));
  const double s = (m - 1.0) / (m + 1.0);
  return e + 2.0 * s * polynomial(kAtanh, s * s) * 1.44269504088896340736;
}

constexpr u32 kNan = 0x7FC00000, kInf = 0x7F800000;

inline float exp_f32(float x) {
  const float in = flushed(x);
  const float bounded = in > 200.0f ? 200.0f : in < -200.0f ? -200.0f : in;
  const float r = flushed(static_cast<float>(exp2_double(bounded)));
  return x != x ? quieted(x) : r;
}
inline float log_f32(float x) {
  const float in = flushed(x);
  const u32 bits = as_bits(in);
  const bool normal = bits >= 0x00800000u && bits < kInf;
  const float r = static_cast<float>(log2_double(normal ? in : 1.0f));
  const float special = x != x ? quieted(x) : is_zero(in) ? from_bits<float>(kInf | sign_mask<float>)
                        : bits == kInf ? x : from_bits<float>(kNan);
  return normal ? r : special;
}
inline float rcp_f32(float x) {
  const float r = flushed(static_cast<float>(1.0 / flushed(x)));
  return x != x ? quieted(x) : r;
}
inline float rsq_f32(float x) {
  const float in = flushed(x);
  const float r = flushed(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(in))));
  return x != x ? quieted(x) : in < 0 ? from_bits<float>(kNan) : r;
}
inline float sqrt_f32(float x) {
  const float in = flushed(x);
  const float r = static_cast<float>(__builtin_sqrt(static_cast<double>(in)));
  return x != x ? quieted(x) : in < 0 ? from_bits<float>(kNan) : r;
}
// The argument counts revolutions; outside +-256 the hardware returns 0 (sin) and 1 (cos).
inline float sin_f32(float x) {
  if (x != x) return quieted(x);
  if (is_inf(x)) return from_bits<float>(kNan);
  if (std::fabs(x) > 256.0f) return 0.0f;
  const double r = x - std::nearbyint(static_cast<double>(x));
  return static_cast<float>(std::sin(r * 6.28318530717958647692));
}
inline float cos_f32(float x) {
  if (x != x) return quieted(x);
  if (is_inf(x)) return from_bits<float>(kNan);
  if (std::fabs(x) > 256.0f) return 1.0f;
  const double r = x - std::nearbyint(static_cast<double>(x));
  return static_cast<float>(std::cos(r * 6.28318530717958647692));
}

// Truncating conversions saturate, and NaN gives 0.
inline i32 to_i32(double x) {
  return x != x ? 0 : x >= 2147483647.0 ? 2147483647 : x <= -2147483648.0 ? -2147483647 - 1 : static_cast<i32>(x);
}
inline u32 to_u32(double x) {
  return !(x > 0.0) ? 0u : x >= 4294967295.0 ? 0xFFFFFFFFu : static_cast<u32>(static_cast<int64_t>(x));
}

inline float ldexp_f32(float x, i32 e) {
  if (x != x) return quieted(x);
  const i32 k = e > 600 ? 600 : e < -600 ? -600 : e;
  // Exact in double for every f32 and |k| <= 600, then one rounding.
  const double factor = std::bit_cast<double>(static_cast<u64>(k + 1023) << 52);
  return static_cast<float>(x * factor);
}
inline double ldexp_f64(double x, i32 e) {
  return x != x ? quieted(x) : std::ldexp(x, e > 5000 ? 5000 : e < -5000 ? -5000 : e);
}

template <class F>
inline F fract(F x) {
  const F below_one = sizeof(F) == 4 ? F(0x1.fffffep-1f) : F(0x1.fffffffffffffp-1);
  const F r = x - std::floor(x);
  return r < below_one || r != r ? r : below_one;
}

// v_cube*: the face of the largest coordinate (z before y before x), the coordinates on it, and the largest itself.
struct CubeFace {
  float id, s, t, major;
};
inline CubeFace cube(float x, float y, float z) {
  const float ax = std::fabs(x), ay = std::fabs(y), az = std::fabs(z);
  if (az >= ax && az >= ay) return {z < 0 ? 5.0f : 4.0f, z < 0 ? -x : x, -y, z};
  if (ay >= ax) return {y < 0 ? 3.0f : 2.0f, x, y < 0 ? -z : z, y};
  return {x < 0 ? 1.0f : 0.0f, x < 0 ? z : -z, -y, x};
}

void single(OpTable& t) {
  ARITHMETIC(v_add_f32, (float a, float b) { return a + b; });
  ARITHMETIC(v_sub_f32, (float a, float b) { return a - b; });
  ARITHMETIC(v_subrev_f32, (float a, float b) { return b - a; });
  ARITHMETIC(v_mul_f32, (float a, float b) { return a * b; });
  LANE(v_mul_legacy_f32, (float a, float b) { const float r = a * b; return a == 0 || b == 0 ? 0.0f : r; });
  ARITHMETIC(v_fma_f32, (float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  ARITHMETIC(v_fmac_f32, (float a, float b, float c) { return __builtin_fmaf(a, b, c); }).accumulates = true;
  ARITHMETIC(v_fmamk_f32, (float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  ARITHMETIC(v_fmaak_f32, (float a, float b, float c) { return __builtin_fmaf(a, b, c); });
  LANE(v_min_f32, (float a, float b, const Mode& m) { return min_max<float, false>(a, b, m.ieee); });
  LANE(v_max_f32, (float a, float b, const Mode& m) { return min_max<float, true>(a, b, m.ieee); });
  LANE(v_min3_f32, (float a, float b, float c, const Mode& m) {
    return min_max<float, false>(min_max<float, false>(a, b, m.ieee), c, m.ieee);
  });
  LANE(v_max3_f32, (float a, float b, float c, const Mode& m) {
    return min_max<float, true>(min_max<float, true>(a, b, m.ieee), c, m.ieee);
  });
  LANE(v_med3_f32, (float a, float b, float c, const Mode& m) { return median(a, b, c, m.ieee); });
  // IEEE 754-2019 minimum and maximum: a NaN wins.
  LANE(v_minimum3_f32, (float a, float b, float c) {
    if (a != a) return quieted(a);
    if (b != b) return quieted(b);
    if (c != c) return quieted(c);
    return min_max<float, false>(min_max<float, false>(a, b, false), c, false);
  });
  LANE(v_maximum3_f32, (float a, float b, float c) {
    if (a != a) return quieted(a);
    if (b != b) return quieted(b);
    if (c != c) return quieted(c);
    return min_max<float, true>(min_max<float, true>(a, b, false), c, false);
  });
  // The cube map face that (a, b, c) points to: ids 0 to 5 are +x, -x, +y, -y, +z, -z.
  LANE(v_cubeid_f32, (float a, float b, float c) { return cube(a, b, c).id; });
  LANE(v_cubesc_f32, (float a, float b, float c) { return cube(a, b, c).s; });
  LANE(v_cubetc_f32, (float a, float b, float c) { return cube(a, b, c).t; });
  LANE(v_cubema_f32, (float a, float b, float c) { return 2.0f * cube(a, b, c).major; });
  LANE(v_trunc_f32, (float a) { return __builtin_truncf(a); });
  LANE(v_ceil_f32, (float a) { return __builtin_ceilf(a); });
  LANE(v_floor_f32, (float a) { return __builtin_floorf(a); });
  LANE(v_rndne_f32, (float a) { return __builtin_roundevenf(a); });
  LANE(v_fract_f32, (float a) { return fract(a); });
  LANE(v_ldexp_f32, (float a, i32 b) { return ldexp_f32(a, b); });
  LANE(v_frexp_exp_i32_f32, (float a) { return frexp_exponent(a); });
  LANE(v_frexp_mant_f32, (float a) { return frexp_mantissa(a); });
}

void transcendental(OpTable& t) {
  TRANSCENDENTAL(v_exp_f32, (float a) { return exp_f32(a); });
  TRANSCENDENTAL(v_exp_legacy_f32, (float a) { return exp_f32(a); });
  TRANSCENDENTAL(v_log_f32, (float a) { return log_f32(a); });
  TRANSCENDENTAL(v_log_legacy_f32, (float a) { return log_f32(a); });
  TRANSCENDENTAL(v_rcp_f32, (float a) { return rcp_f32(a); });
  TRANSCENDENTAL(v_rcp_iflag_f32, (float a) { return rcp_f32(a); });
  TRANSCENDENTAL(v_rsq_f32, (float a) { return rsq_f32(a); });
  TRANSCENDENTAL(v_sqrt_f32, (float a) { return sqrt_f32(a); });
  TRANSCENDENTAL(v_sin_f32, (float a) { return sin_f32(a); });
  TRANSCENDENTAL(v_cos_f32, (float a) { return cos_f32(a); });
  // These flush denormals by themselves.
  for (const Op op : {Op::v_exp_f32, Op::v_exp_legacy_f32, Op::v_log_f32, Op::v_log_legacy_f32, Op::v_rcp_f32,
                      Op::v_rcp_iflag_f32, Op::v_rsq_f32, Op::v_sqrt_f32, Op::v_sin_f32, Op::v_cos_f32})
    t.entry(op).keeps_denormals = true;
  TRANSCENDENTAL(v_rcp_f64, (double a) { return a != a ? quieted(a) : 1.0 / a; });
  TRANSCENDENTAL(v_rsq_f64, (double a) {
    return a != a ? quieted(a) : a < 0 ? from_bits<double>(0x7FF8000000000000) : 1.0 / std::sqrt(a);
  });
  TRANSCENDENTAL(v_sqrt_f64, (double a) {
    return a != a ? quieted(a) : a < 0 ? from_bits<double>(0x7FF8000000000000) : std::sqrt(a);
  });
}

void twice(OpTable& t) {
  ARITHMETIC(v_add_f64, (double a, double b) { return a + b; });
  ARITHMETIC(v_mul_f64, (double a, double b) { return a * b; });
  ARITHMETIC(v_fma_f64, (double a, double b, double c) { return __builtin_fma(a, b, c); });
  ARITHMETIC(v_fmac_f64, (double a, double b, double c) { return __builtin_fma(a, b, c); }).accumulates = true;
  LANE(v_min_f64, (double a, double b, const Mode& m) { return min_max<double, false>(a, b, m.ieee); });
  LANE(v_max_f64, (double a, double b, const Mode& m) { return min_max<double, true>(a, b, m.ieee); });
  LANE(v_trunc_f64, (double a) { return __builtin_trunc(a); });
  LANE(v_ceil_f64, (double a) { return __builtin_ceil(a); });
  LANE(v_floor_f64, (double a) { return __builtin_floor(a); });
  LANE(v_rndne_f64, (double a) { return __builtin_roundeven(a); });
  LANE(v_fract_f64, (double a) { return fract(a); });
  LANE(v_ldexp_f64, (double a, i32 b) { return ldexp_f64(a, b); });
  LANE(v_frexp_exp_i32_f64, (double a) { return frexp_exponent(a); });
  LANE(v_frexp_mant_f64, (double a) { return frexp_mantissa(a); });
}

inline u32 with_byte(float x, u32 which, u32 old) {
  const double r = x != x ? 0.0 : __builtin_roundeven(static_cast<double>(x));
  const u32 byte = r <= 0 ? 0 : r >= 255 ? 255 : static_cast<u32>(r), shift = 8 * (which & 3);
  return (old & ~(0xFFu << shift)) | byte << shift;
}

void conversions(OpTable& t) {
  LANE(v_cvt_f32_i32, (i32 a) { return static_cast<float>(a); });
  LANE(v_cvt_f32_u32, (u32 a) { return static_cast<float>(a); });
  LANE(v_cvt_i32_f32, (float a) { return to_i32(a); });
  LANE(v_cvt_u32_f32, (float a) { return to_u32(a); });
  LANE(v_cvt_rpi_i32_f32, (float a) { return to_i32(std::floor(static_cast<double>(a) + 0.5)); }).keeps_denormals = true;
  LANE(v_cvt_flr_i32_f32, (float a) { return to_i32(std::floor(static_cast<double>(a))); }).keeps_denormals = true;
  LANE(v_cvt_off_f32_i4, (u32 a) { return static_cast<float>(static_cast<i32>(a << 28) >> 28) * 0.0625f; });
  LANE(v_cvt_f32_ubyte0, (u32 a) { return static_cast<float>(a & 0xFF); });
  LANE(v_cvt_f32_ubyte1, (u32 a) { return static_cast<float>(a >> 8 & 0xFF); });
  LANE(v_cvt_f32_ubyte2, (u32 a) { return static_cast<float>(a >> 16 & 0xFF); });
  LANE(v_cvt_f32_ubyte3, (u32 a) { return static_cast<float>(a >> 24); });
  LANE(v_cvt_i32_f64, (double a) { return to_i32(a); });
  LANE(v_cvt_u32_f64, (double a) { return to_u32(a); });
  LANE(v_cvt_f64_i32, (i32 a) { return static_cast<double>(a); });
  LANE(v_cvt_f64_u32, (u32 a) { return static_cast<double>(a); });
  LANE(v_cvt_f32_f64, (double a) { return static_cast<float>(a); }).rounding = HostRounding::wide;
  LANE(v_cvt_f64_f32, (float a) { return static_cast<double>(a); });
  // One byte of the third source, or of the destination, is replaced by the saturated integer.
  LANE(v_cvt_pk_u8_f32, (float a, u32 b, u32 c) { return with_byte(a, b, c); });
  LANE(v_cvt_pkaccum_u8_f32, (float a, u32 b, u32 c) { return with_byte(a, b, c); }).accumulates = true;
  LANE(v_cvt_pknorm_i16_f32, (float a, float b) {
    const auto one = [](float x) {
      const double r = x != x ? 0.0 : __builtin_roundeven((x < -1 ? -1.0 : x > 1 ? 1.0 : static_cast<double>(x)) * 32767.0);
      return static_cast<u32>(static_cast<i32>(r)) & 0xFFFF;
    };
    return one(a) | one(b) << 16;
  });
  LANE(v_cvt_pknorm_u16_f32, (float a, float b) {
    const auto one = [](float x) {
      return static_cast<u32>(__builtin_roundeven((!(x > 0) ? 0.0 : x > 1 ? 1.0 : static_cast<double>(x)) * 65535.0));
    };
    return one(a) | one(b) << 16;
  });
}

// The first 1248 bits of 2/pi after the binary point.
constexpr u32 kTwoOverPi[] = {
    0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB, 0xDEBBC561,
    0xB7246E3A, 0x424DD2E0, 0x06492EEA, 0x09D1921C, 0xFE1DEB1C, 0xB129A73E, 0xE88235F5, 0x2EBB4484,
    0xE99C7026, 0xB45F7E41, 0x3991D639, 0x835339F4, 0x9C845F8B, 0xBDF9283B, 0x1FF897FF, 0xDE05980F,
    0xEF2F118B, 0x5A0A6D1F, 0x6D367ECF, 0x27CB09B7, 0x4F463F66, 0x9E5FEA2D, 0x7527BAC7, 0xEBE5F17B,
    0x3D0739F7, 0x8A5292EA, 0x6BFB5FB1, 0x1F8D5D08, 0x56033046, 0xFC7B6BAB, 0xF0CFBC20,
};

// v_trig_preop_f64: 53 bits of 2/pi, chosen by the segment and the argument's exponent, at their weight.
inline double trig_preop(double x, u32 segment) {
  const int exponent = exponent_field(x);
  const u32 shift = (segment & 31) * 53 + static_cast<u32>(exponent > 1077 ? exponent - 1077 : 0);
  const u32 word = shift / 32, bit = shift % 32;
  if (word + 2 >= std::size(kTwoOverPi)) return 0.0;
  u64 bits = u64{kTwoOverPi[word]} << 32 | kTwoOverPi[word + 1];
  if (bit) bits = bits << bit | kTwoOverPi[word + 2] >> (32 - bit);
  return std::ldexp(static_cast<double>(bits >> 11), -53 - static_cast<int>(shift) + (exponent >= 1968 ? 128 : 0));
}

// A source of a division step, its denormals flushed where MODE says so.
template <LaneType type>
const uint32_t* division_source(const Wave& w, const ExecInst& in, int index, RowBuffer& staged, RowBuffer& flushed) {
  const uint32_t* row = stage_source(w, in, index, type, staged);
  return keeps_inputs(w.mode, type) ? row : flush_denormals(row, type, flushed);
}

// The reciprocal and the quotient that v_div_scale looks at are exponents, not results: MODE does not flush them.
template <class F, LaneType type>
void run_div_scale(Wave& w, const ExecInst& in) {
  RowBuffer x[3], y[3], out;
  const uint32_t* a = division_source<type>(w, in, 0, x[0], y[0]);
  const uint32_t* b = division_source<type>(w, in, 1, x[1], y[1]);
  const uint32_t* c = division_source<type>(w, in, 2, x[2], y[2]);
  uint64_t mask = 0;
  for (int l = 0; l < kLanes; ++l) {
    bool flag = false;
    lane_store(out.x, l, div_scale(lane_load<F>(a, l), lane_load<F>(b, l), lane_load<F>(c, l), &flag));
    mask |= uint64_t{flag} << l;
  }
  if (!keeps_outputs(w.mode, type)) flush_denormals(out.x, type, out);
  const uint64_t exec = w.exec();
  write_result(w, in, type, out.x);
  w.set_s64(in.dst2, mask & exec);
}

template <class F, LaneType type>
void run_div_fmas(Wave& w, const ExecInst& in) {
  constexpr int step = sizeof(F) == 4 ? 64 : 128;
  RowBuffer x[3], y[3], out;
  const uint32_t* a = division_source<type>(w, in, 0, x[0], y[0]);
  const uint32_t* b = division_source<type>(w, in, 1, x[1], y[1]);
  const uint32_t* c = division_source<type>(w, in, 2, x[2], y[2]);
  const uint64_t vcc = w.s64(kVcc);
  for (int l = 0; l < kLanes; ++l) {
    const F p = lane_load<F>(a, l), q = lane_load<F>(b, l), r = lane_load<F>(c, l);
    const int k = !(vcc >> l & 1) ? 0 : exponent_field(r) > float_bits<F>::bias ? step : -step;
    F result;
    if constexpr (sizeof(F) == 4) {
      result = k == 0 && w.mode.round32 == 0 ? std::fma(p, q, r) : scaled_fma(p, q, r, k, w.mode.round32);
    } else {
      result = k == 0 ? std::fma(p, q, r) : scaled_fma(p, q, r, k);
    }
    lane_store(out.x, l, result);
  }
  if (!keeps_outputs(w.mode, type)) flush_denormals(out.x, type, out);
  write_result(w, in, type, out.x);
}

}  // namespace

void register_valu_float(OpTable& t) {
  single(t);
  transcendental(t);
  twice(t);
  conversions(t);
  t.special(Op::v_div_scale_f32, OpClass::valu, &run_div_scale<float, LaneType::f32>);
  t.special(Op::v_div_scale_f64, OpClass::valu, &run_div_scale<double, LaneType::f64>);
  t.special(Op::v_div_fmas_f32, OpClass::valu, &run_div_fmas<float, LaneType::f32>);
  t.special(Op::v_div_fmas_f64, OpClass::valu, &run_div_fmas<double, LaneType::f64>).rounding = HostRounding::wide;
  t.lane(Op::v_trig_preop_f64, [](double a, u32 b) { return trig_preop(a, b); });
  t.lane(Op::v_div_fixup_f32, [](float a, float b, float c) { return div_fixup(a, b, c); });
  t.lane(Op::v_div_fixup_f64, [](double a, double b, double c) { return div_fixup(a, b, c); });
}

}  // namespace hfemu
