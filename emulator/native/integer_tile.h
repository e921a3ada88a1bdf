// An operand of a matrix multiplication as integers: what the elements of 8-bit floats are, and where they stand.
#pragma once

#include <bit>

#include "matrix_elements.h"

namespace hfemu {

constexpr int kIntegerBits = 13, kScaleBlock = 32, kMaxEdgeDepth = 2048;

struct IntegerFormat {
  int lowest;  // exponent of the smallest magnitude
  int mantissa_bits;
  uint32_t first_special;  // magnitudes from here on are no numbers
  bool fnuz;
  double value[256];
  // For vectors of 512 bits: magnitudes as integers of the unit 2^(lowest + shift), low and high bytes; 0 where one has bits below it.
  struct {
    alignas(64) uint8_t low[128], high[128];
  } shifted[21];

  explicit IntegerFormat(const FloatFormat& f)
      : lowest(1 - f.bias - f.mantissa_bits), mantissa_bits(f.mantissa_bits), first_special(f.max_code() + 1),
        fnuz(f.specials == Specials::fnuz) {
    for (uint32_t code = 0; code < 256; ++code) value[code] = decode(f, code);
    for (int shift = 0; shift < 21; ++shift)
      for (uint32_t code = 0; code < 128; ++code) {
        const uint64_t x = code < first_exact(shift) ? 0 : integer(code) >> shift;
        shifted[shift].low[code] = static_cast<uint8_t>(x);
        shifted[shift].high[code] = static_cast<uint8_t>(x >> 8);
      }
  }
  uint64_t integer(uint32_t magnitude) const {
    return magnitude < first_special ? static_cast<uint64_t>(value[magnitude] * power_of_two(-lowest)) : 0;
  }
  // Magnitudes from here on have no bits below the unit of `shift`.
  uint32_t first_exact(int shift) const { return shift == 0 ? 0 : static_cast<uint32_t>(shift + 1) << mantissa_bits; }
};

inline const IntegerFormat* integer_format(Element e, bool fnuz) {
  static const IntegerFormat fp8(e4m3fn), fp8_uz(e4m3fnuz), bf8(e5m2), bf8_uz(e5m2fnuz);
  return e == Element::fp8 ? fnuz ? &fp8_uz : &fp8 : e == Element::bf8 ? fnuz ? &bf8_uz : &bf8 : nullptr;
}

// Where row i of N results is among the result's registers: a register holds 64 / N rows, every fourth one.
template <int N>
constexpr int result_at(int i) {
  constexpr int rows = kMatrixLanes / N;
  return (i / (4 * rows) * 4 + i % 4) * kMatrixLanes + i / 4 % rows * N;
}

// Exponents of one operand's e8m0 scales, [depth / 32][edge], of the rows that have an element other than 0: the scales of
// the others change no sum (and where one is NaN, 0 times it is NaN here too). Without such a row least is above most.
struct ScaleRange {
  int least = 0, most = 0;
  int spread = 0;  // the most that two blocks of one row differ
};

struct IntegerTile {
  struct Small {  // an element with bits below the unit: its significand, times `units` of them
    uint8_t i, k;
    int16_t significand;
    double units;
  };
  static constexpr int kMostSmall = 32, kNoScale = -1, kUnknownScale = -2;
  alignas(64) uint32_t pairs[kMaxEdgeDepth / 2];  // [k / 2][edge]: 16 bits each of k and k + 1
  int unit, lowest, highest;  // exponents: of the unit; of the lowest bit of any element; above every element
  uint32_t rows;              // bit i: row i (a column of B) has an element that is not 0
  int scale_byte;             // of the scales that it had last; kNoScale, kUnknownScale
  Row scale;
  ScaleRange range;
  alignas(64) double factors[kMatrixLanes];  // of the integers, [k / 32][edge]: the unit's times the scales
  int small_count;
  Small small[kMostSmall];
};

// Notes the elements that bits of `found` tell, bytes of the registers from `codes` on; false: there are too many.
inline bool note_small(IntegerTile& tile, const IntegerFormat& format, int shift, uint64_t found, const uint32_t* codes, int i,
                       int k) {
  for (; found; found &= found - 1) {
    const int at = std::countr_zero(found);
    if (tile.small_count == IntegerTile::kMostSmall) return false;
    const uint32_t code = codes[at / 4] >> (at % 4 * 8) & 0xFF, exponent = (code & 0x7F) >> format.mantissa_bits;
    const uint32_t hidden = static_cast<uint32_t>(exponent != 0) << format.mantissa_bits;
    const auto significand = static_cast<int16_t>((code & ((1u << format.mantissa_bits) - 1)) | hidden);
    const double units = power_of_two(static_cast<int>(exponent) - (exponent != 0) - shift);
    tile.small[tile.small_count++] = {static_cast<uint8_t>(i + at / 4), static_cast<uint8_t>(k + at % 4),
                                      static_cast<int16_t>(code & 0x80 ? -significand : significand), units};
  }
  return true;
}

}  // namespace hfemu
