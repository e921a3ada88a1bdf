// Exact scalar conversions between f32/f64 and every small float of gfx942 and gfx950.
//
// A format is a value of `FloatFormat`; `encode` and `decode` are constexpr and round exactly once. All wider inputs
// (f32, f16, bf16, and any of them times a power of two) are exact in double, so double is the common carrier.
//
//   name        S/E/M   bias  specials
//   e4m3fn      1/4/3   7     NaN 0x7F and 0xFF, no infinity (gfx950 "fp8")
//   e5m2        1/5/2   15    IEEE infinities and NaN (gfx950 "bf8")
//   e4m3fnuz    1/4/3   8     NaN 0x80 only, no -0, no infinity (gfx942 "fp8")
//   e5m2fnuz    1/5/2   16    NaN 0x80 only, no -0, no infinity (gfx942 "bf8")
//   e2m3        1/2/3   1     finite only ("fp6")
//   e3m2        1/3/2   3     finite only ("bf6")
//   e2m1        1/2/1   1     finite only ("fp4")
//   f16, bf16   IEEE
//
// Overflow: a value that rounds past the largest finite number, and an infinite input, become
//   - the largest finite number when `saturate` is set (MODE.FP16_OVFL), and always in the finite-only formats;
//   - else infinity where the format has one, else NaN.
// A finite-only format turns NaN into its largest magnitude, the input's sign kept (not stated by the ISA).
#pragma once

#include <cstddef>
#include <cstdint>

namespace hfemu {

enum class Specials : uint8_t { ieee, fn, fnuz, finite };

struct FloatFormat {
  uint8_t exponent_bits, mantissa_bits;
  int16_t bias;
  Specials specials;

  constexpr uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  // Code of the largest finite magnitude.
  constexpr uint32_t max_code() const {
    const uint32_t all = sign_bit() - 1;
    if (specials == Specials::ieee) return all - (1u << mantissa_bits);
    return specials == Specials::fn ? all - 1 : all;
  }
};

inline constexpr FloatFormat e4m3fn{4, 3, 7, Specials::fn};
inline constexpr FloatFormat e4m3fnuz{4, 3, 8, Specials::fnuz};
inline constexpr FloatFormat e5m2{5, 2, 15, Specials::ieee};
inline constexpr FloatFormat e5m2fnuz{5, 2, 16, Specials::fnuz};
inline constexpr FloatFormat e2m3{2, 3, 1, Specials::finite};
inline constexpr FloatFormat e3m2{3, 2, 3, Specials::finite};
inline constexpr FloatFormat e2m1{2, 1, 1, Specials::finite};
inline constexpr FloatFormat f16_format{5, 10, 15, Specials::ieee};
inline constexpr FloatFormat bf16_format{8, 7, 127, Specials::ieee};
inline constexpr FloatFormat f32_format{8, 23, 127, Specials::ieee};

// The 8-bit formats behind the mnemonics' "fp8" and "bf8".
constexpr FloatFormat fp8_format(bool fnuz) { return fnuz ? e4m3fnuz : e4m3fn; }
constexpr FloatFormat bf8_format(bool fnuz) { return fnuz ? e5m2fnuz : e5m2; }

enum class Rounding : uint8_t { nearest_even, up, down, toward_zero, stochastic };

constexpr double bits_to_double(uint64_t bits) { return __builtin_bit_cast(double, bits); }
constexpr uint64_t double_to_bits(double x) { return __builtin_bit_cast(uint64_t, x); }
constexpr float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
constexpr uint32_t float_to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

// 2^e as a double, -1022 <= e <= 1023.
constexpr double power_of_two(int e) { return bits_to_double(static_cast<uint64_t>(e + 1023) << 52); }

// The value of `code`; its low bits only are read. NaN comes out quiet with the code's sign and payload.
constexpr double decode(const FloatFormat& f, uint32_t code) {
  const uint32_t magnitude = code & (f.sign_bit() - 1);
  const bool negative = (code & f.sign_bit()) != 0;
  const uint64_t sign = static_cast<uint64_t>(negative) << 63;
  const uint64_t quiet_nan = 0x7FF8000000000000ull;
  if (f.specials == Specials::fnuz && negative && magnitude == 0) return bits_to_double(quiet_nan);
  if (f.specials == Specials::fn && magnitude > f.max_code()) return bits_to_double(sign | quiet_nan);
  const uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  const uint32_t exponent = magnitude >> f.mantissa_bits;
  if (f.specials == Specials::ieee && magnitude > f.max_code()) {
    if (mantissa == 0) return bits_to_double(sign | 0x7FF0000000000000ull);
    return bits_to_double(sign | quiet_nan | static_cast<uint64_t>(mantissa) << (52 - f.mantissa_bits));
  }
  const int unit = (exponent == 0 ? 1 : static_cast<int>(exponent)) - f.bias - f.mantissa_bits;
  const uint32_t significand = exponent == 0 ? mantissa : mantissa | 1u << f.mantissa_bits;
  const double value = static_cast<double>(significand) * power_of_two(unit);
  return negative ? -value : value;
}

// `x` rounded once to `f`. `random` serves Rounding::stochastic: its 32 bits, read as a fraction of the result's last
// place, are added before truncation, so the top bits of the seed are the ones that count.
constexpr uint32_t encode(const FloatFormat& f, double x, bool saturate = false,
                          Rounding rounding = Rounding::nearest_even, uint32_t random = 0) {
  const uint64_t bits = double_to_bits(x);
  const bool negative = (bits >> 63) != 0;
  const uint32_t sign = negative ? f.sign_bit() : 0;
  const uint64_t magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
  const int exponent = static_cast<int>(magnitude >> 52) - 1023;
  const bool is_nan = magnitude > 0x7FF0000000000000ull;
  if (is_nan) {
    switch (f.specials) {
      case Specials::finite: return sign | f.max_code();
      case Specials::fnuz: return f.sign_bit();
      case Specials::fn: return sign | (f.sign_bit() - 1);
      case Specials::ieee: break;
    }
    // An 8-bit result is the all-ones NaN; the wider ones keep the payload's top bits, made quiet.
    if (f.mantissa_bits == 2) return sign | (f.sign_bit() - 1);
    const uint32_t payload = static_cast<uint32_t>(magnitude >> (52 - f.mantissa_bits)) & ((1u << f.mantissa_bits) - 1);
    return sign | (f.max_code() + 1) | payload | 1u << (f.mantissa_bits - 1);
  }
  uint32_t code = f.max_code() + 1;  // stays so for an infinite input
  if (exponent < 1024) {
    if (magnitude < 0x0010000000000000ull) {
      code = 0;  // zero: no source of these conversions is a subnormal double
    } else {
      const int min_exponent = 1 - f.bias;
      const int biased = exponent < min_exponent ? 1 : exponent + f.bias;
      const uint64_t significand = (magnitude & 0x000FFFFFFFFFFFFFull) | 0x0010000000000000ull;
      int shift = 52 - f.mantissa_bits + (exponent < min_exponent ? min_exponent - exponent : 0);
      uint64_t rounded = 0;
      if (shift > 62) {  // below a quarter of the smallest subnormal, unless its exact size matters
        const bool away = (rounding == Rounding::up && !negative) || (rounding == Rounding::down && negative);
        const bool carry = rounding == Rounding::stochastic && shift <= 52 + 32 &&
                           (significand >> (shift - 32)) + random > 0xFFFFFFFFull;
        rounded = away || carry;
      } else {
        const uint64_t unit = 1ull << shift, half = unit >> 1;
        const uint64_t kept = significand >> shift;
        uint64_t add = 0;
        switch (rounding) {
          case Rounding::nearest_even: add = half - 1 + (kept & 1); break;
          case Rounding::up: add = negative ? 0 : unit - 1; break;
          case Rounding::down: add = negative ? unit - 1 : 0; break;
          case Rounding::toward_zero: break;
          case Rounding::stochastic:
            add = shift >= 32 ? static_cast<uint64_t>(random) << (shift - 32) : random >> (32 - shift);
            break;
        }
        rounded = (significand + add) >> shift;
      }
      // The hidden bit of a normal significand carries into the exponent field.
      const uint64_t wide = (static_cast<uint64_t>(biased - 1) << f.mantissa_bits) + rounded;
      code = wide > f.max_code() ? f.max_code() + 1 : static_cast<uint32_t>(wide);
      if (code > f.max_code()) {
        const bool inward = rounding == Rounding::toward_zero || (rounding == Rounding::up && negative) ||
                            (rounding == Rounding::down && !negative);
        if (inward) code = f.max_code();
      }
    }
  }
  if (code > f.max_code()) {
    if (saturate || f.specials == Specials::finite) return sign | f.max_code();
    if (f.specials == Specials::fnuz) return f.sign_bit();
    return sign | (f.specials == Specials::fn ? f.sign_bit() - 1 : f.max_code() + 1);
  }
  if (f.specials == Specials::fnuz && code == 0) return 0;  // no negative zero
  return sign | code;
}

// A code of at most 8 bits as f32, by arithmetic on the encoding: unlike a table lookup it vectorises. `code` must have
// no bits above the sign.
template <int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
constexpr float decode_small(uint32_t code) {
  constexpr int width = kExponentBits + kMantissaBits;
  constexpr uint32_t magnitude_mask = (1u << width) - 1;
  constexpr uint32_t infinity = magnitude_mask - ((1u << kMantissaBits) - 1);
  constexpr float hidden = static_cast<float>(power_of_two(1 - kBias));
  const uint32_t magnitude = code & magnitude_mask;
  // A subnormal gets exponent 1 and has the hidden bit that this implies subtracted again.
  const bool subnormal = magnitude < (1u << kMantissaBits);
  uint32_t bits = (magnitude << (23 - kMantissaBits)) + (static_cast<uint32_t>(127 - kBias + subnormal) << 23);
  bits = float_to_bits(bits_to_float(bits) - (subnormal ? hidden : 0.0f));
  if (kSpecials == Specials::fn) bits = magnitude == magnitude_mask ? 0x7FC00000u : bits;
  if (kSpecials == Specials::ieee) {
    const uint32_t special = 0x7F800000u | (magnitude - infinity) << (23 - kMantissaBits);
    bits = magnitude >= infinity ? special : bits;
  }
  bits |= (code >> width & 1) << 31;
  if (kSpecials == Specials::fnuz) bits = code == (1u << width) ? 0x7FC00000u : bits;
  return bits_to_float(bits);
}

// E8M0: 2^(code - 127); 0xFF is NaN; 0 is 2^-127, not zero.
constexpr double decode_e8m0(uint32_t code) {
  return (code & 255) == 255 ? bits_to_double(0x7FF8000000000000ull) : power_of_two(static_cast<int>(code & 255) - 127);
}
// The E8M0 scale that v_cvt_scalef32_* takes from an f32 operand: its exponent field, whatever sign and mantissa say.
constexpr uint32_t scale_of_float(uint32_t f32_bits) { return f32_bits >> 23 & 255; }

// bf16 <-> f32. A NaN keeps sign and top payload bits and is made quiet.
constexpr float bf16_to_f32(uint32_t code) { return bits_to_float((code & 0xFFFF) << 16); }
constexpr uint16_t f32_to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// The next state of the generator behind v_prng_b32 and the multi-pass stochastic conversions.
constexpr uint32_t next_random(uint32_t state) { return state << 1 ^ (state >> 31 ? 197u : 0u); }

}  // namespace hfemu
