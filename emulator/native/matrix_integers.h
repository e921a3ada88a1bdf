// Products of 8- and 4-bit floats as sums of integers: the same bits as sums in double, in a third of the time.
//
// An operand's elements become 16-bit integers of a common unit, chosen so that the sum of 32 products fits 32 bits: the
// largest has at most 13 bits, or more where a header for some width of vectors proves that the sums fit. An element with
// bits below the unit (of normally distributed data one in some hundreds) is 0 there, and its products are added one by one.
// Integer sums are exact. Their sums in double with the scales and C are exact too if all terms of a result are multiples
// of one power of two and no more than 53 bits wide: no sum is rounded, so every order of additions gives the same bits.
// `exact_range` proves this for all results at once. Where it cannot, and for a NaN, an infinity or a C of -0 (whose sign
// depends on the signs of zero products), the caller multiplies in double.
#pragma once

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "matrix_integers_512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "matrix_integers_256.h"
#endif

#if defined(__AVX2__) && defined(__FMA__)
#include <algorithm>
#include <cstring>
#include <limits>

namespace hfemu {

inline bool same(const Row* a, const Row* b, int count) {
  for (int reg = 0; reg < count; ++reg) {
    uint32_t different = 0;
    for (int lane = 0; lane < kMatrixLanes; ++lane) different |= a[reg][lane] ^ b[reg][lane];
    if (different) return false;
  }
  return true;
}

// The operands that a thread has decoded of late, found by their bits: one register is used by several instructions, and the
// waves of a work-group multiply the same tiles.
class TileCache {
 public:
  // The tile of `count` registers; null: the elements do not suit. `load` fills a tile and says whether they do. `layout`
  // stands for all else that a tile depends on; `other` stays valid.
  template <class Load>
  IntegerTile* find(const Row* regs, int count, uint32_t layout, const IntegerTile* other, Load load) {
    uint32_t key = layout, found = 0;
    for (uint32_t lane = 0; lane < kMatrixLanes; ++lane) key += regs[0][lane] * ((2 * lane + 1) * 0x9E3779B1u);
    for (uint32_t slot = 0; slot < kSlots; ++slot) found |= static_cast<uint32_t>(keys_[slot] == key) << slot;
    for (; found; found &= found - 1) {
      Slot& slot = slots_[std::countr_zero(found)];
      if (slot.layout == layout && same(regs, slot.bits, count)) return slot.suits ? &slot.tile : nullptr;
    }
    if (&slots_[next_].tile == other) next_ = (next_ + 1) % kSlots;
    Slot& slot = slots_[next_];
    keys_[next_] = key;
    next_ = (next_ + 1) % kSlots;
    slot.layout = layout;
    std::memcpy(slot.bits, regs, sizeof(Row) * static_cast<size_t>(count));
    slot.suits = load(slot.tile);
    slot.tile.scale_byte = IntegerTile::kUnknownScale;
    return slot.suits ? &slot.tile : nullptr;
  }

 private:
  static constexpr uint32_t kSlots = 32;  // fewer than fill a core's second-level cache
  struct Slot {
    Row bits[8];
    IntegerTile tile;
    uint32_t layout;
    bool suits;
  };
  uint32_t keys_[kSlots] = {}, next_ = 0;
  Slot slots_[kSlots] = {};
};

inline ScaleRange scale_range(const Row& scale, int byte, int edge, uint32_t rows) {
  uint8_t e[kMatrixLanes];
  for (int lane = 0; lane < kMatrixLanes; ++lane) e[lane] = static_cast<uint8_t>(scale[lane] >> (8 * byte));
  uint8_t low[32], high[32];
  for (int i = 0; i < edge; ++i) low[i] = high[i] = e[i];
  for (int block = edge; block < kMatrixLanes; block += edge)
    for (int i = 0; i < edge; ++i) {
      low[i] = e[block + i] < low[i] ? e[block + i] : low[i];
      high[i] = e[block + i] > high[i] ? e[block + i] : high[i];
    }
  uint8_t least = 255, most = 0, spread = 0;
  for (int i = 0; i < edge; ++i) {
    const auto counts = static_cast<uint8_t>(-(rows >> i & 1));
    const auto from = static_cast<uint8_t>(low[i] | ~counts), to = static_cast<uint8_t>(high[i] & counts);
    least = from < least ? from : least;
    most = to > most ? to : most;
    const auto apart = static_cast<uint8_t>((high[i] - low[i]) & counts);
    spread = apart > spread ? apart : spread;
  }
  return {least - 127, most - 127, spread};
}

// The bits of C's magnitudes for which every sum of products and C is exact in double: 0, and from `least` on `count`.
struct ExactRange {
  uint32_t least = 1, count = 0;
};
// False: there are none.
inline bool exact_range(const IntegerTile& a, const IntegerTile& b, int depth, ExactRange& range) {
  constexpr int digits = 53, bias = 127, c_digits = 24;
  const ScaleRange &sa = a.range, &sb = b.range;
  if (sa.most == 128 || sb.most == 128) return false;  // NaN
  const int high = a.highest + b.highest + std::bit_width(static_cast<unsigned>(depth)), low = a.lowest + b.lowest;
  if (high - low + sa.spread + sb.spread >= digits) return false;
  // C's exponent lies in [first, end).
  const int first = high + sa.most + sb.most + c_digits - digits, end = low + sa.least + sb.least + digits - 1;
  const auto bits_from = [](int e) { return static_cast<uint32_t>(std::clamp(e + bias, 0, 255)) << 23; };
  range.least = std::max(bits_from(first), 1u);
  range.count = std::max(bits_from(end), range.least) - range.least;
  return true;
}

// C as doubles; false: not all of it lies in the range.
inline bool load_results(const Row* c, int registers, const ExactRange& range, double* __restrict acc) {
  // A zero is no least magnitude, and -0 is the least of all integers.
  uint32_t most = 0, least = ~0u;
  int32_t lowest = 0;
  const uint32_t* from = c[0];
  for (int at = 0; at < registers * kMatrixLanes; ++at) {
    const uint32_t x = from[at], magnitude = x & 0x7FFFFFFF;
    most = std::max(most, magnitude);
    least = std::min(least, magnitude - 1);
    lowest = std::min(lowest, static_cast<int32_t>(x));
    acc[at] = bits_to_float(x);
  }
  if (lowest == std::numeric_limits<int32_t>::min()) return false;
  return most == 0 || (least + 1 >= range.least && most < range.least + range.count);
}

// Gives a tile the factors and the range of scales, or of none, unless it has them: an operand's scales rarely change.
template <int kEdge, int kFactors>
void set_scale(IntegerTile& tile, const Row* scale, int byte) {
  if (scale == nullptr) {
    if (tile.scale_byte == IntegerTile::kNoScale) return;
    tile.scale_byte = IntegerTile::kNoScale;
    tile.range = {};
    return void(std::fill_n(tile.factors, kFactors, power_of_two(tile.unit)));
  }
  if (tile.scale_byte == byte && same(scale, &tile.scale, 1)) return;
  tile.scale_byte = byte;
  std::memcpy(tile.scale, *scale, sizeof(Row));
  tile.range = scale_range(*scale, byte, kEdge, tile.rows);
  const uint32_t* from = *scale;
  const int shift = 8 * byte;
  for (int lane = 0; lane < kMatrixLanes; ++lane) {
    const uint32_t e = from[lane] >> shift & 255;
    const uint32_t high = e == 255 ? 0x7FF80000 : (e + static_cast<uint32_t>(896 + tile.unit)) << 20;
    tile.factors[lane] = bits_to_double(uint64_t{high} << 32);
  }
}

// The products of elements with bits below their operand's unit.
template <int M, int N>
void add_small_products(const IntegerTile& a, const IntegerTile& b, double* acc) {
  alignas(64) double row[32];
  for (int s = 0; s < a.small_count; ++s) {
    const auto& x = a.small[s];
    const double factor = x.units * a.factors[x.k / kScaleBlock * M + x.i];
    small_products<N>(x, b, row);
    double* to = acc + result_at<N>(x.i);
    for (int j = 0; j < N; ++j) to[j] += factor * row[j];
  }
  for (int s = 0; s < b.small_count; ++s) {
    const auto& y = b.small[s];
    const double factor = y.units * b.factors[y.k / kScaleBlock * N + y.i];
    small_products<M>(y, a, row);
    for (int t = 0; t < a.small_count; ++t)
      if (const auto& x = a.small[t]; x.k == y.k)
        row[x.i] = x.significand * y.significand * x.units * a.factors[x.k / kScaleBlock * M + x.i];
    double* to = acc + y.i;
    for (int i = 0; i < M; ++i) to[result_at<N>(i)] += factor * row[i];
  }
}

}  // namespace hfemu
#endif
