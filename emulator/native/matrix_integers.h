// Products of 8- and 4-bit floats as sums of integers: the same bits as sums in double, in a third of the time.
//
// An operand's elements become 16-bit integers of a common unit, chosen so that the largest has at most 13 bits and the
// sum of 32 products fits 32 bits. An element with bits below the unit (of normally distributed data one in some
// hundreds) is 0 there, and its products are added one by one. Integer sums are exact. Their sums in double with the
// scales and C are exact too if all terms of a result are multiples of one power of two and no more than 53 bits wide:
// no sum is rounded, so every order of additions gives the same bits. `fits` proves this for all results at once. Where
// it cannot, and for a NaN, an infinity or a C of -0 (whose sign depends on the signs of zero products), the caller
// multiplies in double.
#pragma once

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "matrix_integers_512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "matrix_integers_256.h"
#endif

#if defined(__AVX2__) && defined(__FMA__)
#include <algorithm>

namespace hfemu {

// Exponents of one operand's e8m0 scales, [depth / 32][edge], of the rows that have an element other than 0: the scales of
// the others change no sum (and where one is NaN, 0 times it is NaN here too). Without such a row least is above most.
struct ScaleRange {
  int least = 0, most = 0;
  int spread = 0;  // the most that two blocks of one row differ
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

// Whether every sum of products and C is exact in double; `c_count` registers of f32.
inline bool fits(const IntegerTile& a, const IntegerTile& b, const ScaleRange& sa, const ScaleRange& sb, int depth,
                 const Row* c, int c_count) {
  constexpr int digits = 53, bias = 127, c_digits = 24;
  if (sa.most == 128 || sb.most == 128) return false;  // NaN
  const int high = a.highest + b.highest + std::bit_width(static_cast<unsigned>(depth)), low = a.lowest + b.lowest;
  if (high - low + sa.spread + sb.spread >= digits) return false;
  // C's exponent lies in [first, end).
  const int first = high + sa.most + sb.most + c_digits - digits, end = low + sa.least + sb.least + digits - 1;
  const auto bits_from = [](int e) { return static_cast<uint32_t>(std::clamp(e + bias, 0, 255)) << 23; };
  const uint32_t least = std::max(bits_from(first), 1u), count = std::max(bits_from(end), least) - least;
  uint32_t wrong = 0;
  for (const uint32_t* at = c[0]; at < c[c_count]; ++at)
    wrong |= static_cast<uint32_t>(*at != 0) & static_cast<uint32_t>((*at & 0x7FFFFFFF) - least >= count);
  return wrong == 0;
}

// acc[M][N] += A[k][M]^T B[k][N]; scale factors of the units included, [k / 32][edge].
template <int M, int N>
void add_integer_products(const IntegerTile& a, const IntegerTile& b, int depth, const double* scale_a, const double* scale_b,
                          double* acc) {
  for (int block = 0; block * kScaleBlock < depth; ++block)
    for (int i = 0; i < M; i += 16)
      for (int j = 0; j < N; j += 16)
        add_integer_block<M, N>(a.pairs + block * (kScaleBlock / 2) * M + i, b.pairs + block * (kScaleBlock / 2) * N + j,
                                std::min(depth, kScaleBlock) / 2, scale_a + block * M + i, scale_b + block * N + j,
                                acc + i * N + j);
}

// The integers of one k, times the factors of its block.
template <int kEdge>
void scaled_row(const IntegerTile& tile, const double* factors, int k, double* row) {
  for (int i = 0; i < kEdge; ++i)
    row[i] = static_cast<int16_t>(tile.pairs[k / 2 * kEdge + i] >> k % 2 * 16) * factors[k / kScaleBlock * kEdge + i];
}

// The products of elements with bits below their operand's unit; factors as above.
template <int M, int N>
void add_small_products(const IntegerTile& a, const IntegerTile& b, const double* factor_a, const double* factor_b, double* acc) {
  alignas(64) double row[32];
  const double per_unit_a = power_of_two(-a.unit), per_unit_b = power_of_two(-b.unit);
  for (int s = 0; s < a.small_count; ++s) {
    const auto& x = a.small[s];
    const double value = x.value * per_unit_a * factor_a[x.k / kScaleBlock * M + x.i];
    scaled_row<N>(b, factor_b, x.k, row);
    double* to = acc + x.i * N;
    for (int j = 0; j < N; ++j) to[j] += value * row[j];
  }
  for (int s = 0; s < b.small_count; ++s) {
    const auto& y = b.small[s];
    const double value = y.value * per_unit_b * factor_b[y.k / kScaleBlock * N + y.i];
    scaled_row<M>(a, factor_a, y.k, row);
    for (int t = 0; t < a.small_count; ++t)
      if (a.small[t].k == y.k) row[a.small[t].i] = a.small[t].value * per_unit_a * factor_a[y.k / kScaleBlock * M + a.small[t].i];
    double* to = acc + y.i;
    for (int i = 0; i < M; ++i) to[i * N] += value * row[i];
  }
}

}  // namespace hfemu
#endif
