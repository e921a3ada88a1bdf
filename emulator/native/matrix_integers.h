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

#include <algorithm>
#include <bit>

#include "matrix_elements.h"

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include <immintrin.h>

namespace hfemu {

constexpr int kIntegerBits = 13, kScaleBlock = 32, kMaxEdgeDepth = 2048;

struct IntegerFormat {
  int lowest;  // exponent of the smallest magnitude
  int mantissa_bits;
  uint32_t first_special;  // magnitudes from here on are no numbers
  bool fnuz;
  double value[256];
  // Magnitudes as integers of the unit 2^(lowest + shift), low and high bytes; 0 where one has bits below it.
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

struct IntegerTile {
  struct Small {  // an element with bits below the unit
    int i, k;
    double value;
  };
  static constexpr int kMostSmall = 32;
  alignas(64) uint32_t pairs[kMaxEdgeDepth / 2];  // [k / 2][edge]: 16 bits each of k and k + 1
  int unit, lowest, highest;  // exponents: of the unit; of the lowest bit of any element; above every element
  int small_count = 0;
  Small small[kMostSmall];
};

// False: the elements do not suit.
template <int kEdge, int kItems>
bool load_integer_bytes(const Row* regs, const IntegerFormat& format, IntegerTile& tile) {
  const auto vector = [](const void* from) { return _mm512_loadu_si512(from); };
  const __m512i magnitude = _mm512_set1_epi8(0x7F), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i most = _mm512_setzero_si512();
  for (int reg = 0; reg < kItems / 4; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 16) {
      const __m512i codes = vector(&regs[reg][lane]);
      if (format.fnuz && _mm512_cmpeq_epi8_mask(codes, sign)) return false;
      most = _mm512_max_epu8(most, _mm512_and_si512(codes, magnitude));
    }
  alignas(64) uint8_t bytes[64];
  _mm512_store_si512(bytes, most);
  uint8_t top = 0;
  for (const uint8_t x : bytes) top = x > top ? x : top;
  if (top >= format.first_special) return false;
  const int width = std::bit_width(format.integer(top)), shift = width > kIntegerBits ? width - kIntegerBits : 0;
  const auto& table = format.shifted[shift];
  const __m512i low[2] = {vector(table.low), vector(table.low + 64)};
  const __m512i high[2] = {vector(table.high), vector(table.high + 64)};
  const uint32_t small_end = format.first_exact(shift);
  const __m512i last_small = _mm512_set1_epi8(static_cast<char>(small_end ? small_end - 1 : 0)), one = _mm512_set1_epi8(1);
  __m512i together[2], signs[2];  // for the pairs of bytes 0, 1 and 2, 3 of every lane
  for (int pair = 0; pair < 2; ++pair) {
    alignas(64) uint8_t both[64], upper[64];
    for (int at = 0; at < 64; ++at) {
      const int byte = at / 4 * 4 + 2 * pair + at % 4 / 2;
      both[at] = static_cast<uint8_t>(byte + at % 2 * 64);
      upper[at] = static_cast<uint8_t>(at % 2 ? byte % 16 : 0x80);
    }
    together[pair] = vector(both), signs[pair] = vector(upper);
  }
  tile.small_count = 0;
  for (int reg = 0; reg < kItems / 4; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 16) {
      const __m512i codes = vector(&regs[reg][lane]);
      const int k = k_of_item(8, kItems, kMatrixLanes / kEdge, lane / kEdge, 4 * reg), i = lane % kEdge;
      const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
      const __m512i upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
      for (int pair = 0; pair < 2; ++pair) {
        const __m512i x = _mm512_permutex2var_epi8(lower, together[pair], upper);
        const __mmask32 negative = _mm512_movepi16_mask(_mm512_shuffle_epi8(codes, signs[pair]));
        _mm512_store_si512(tile.pairs + (k / 2 + pair) * kEdge + i, _mm512_mask_sub_epi16(x, negative, _mm512_setzero_si512(), x));
      }
      // Zero wraps around and is none of them.
      const __m512i below = _mm512_sub_epi8(_mm512_and_si512(codes, magnitude), one);
      for (uint64_t left = _mm512_cmplt_epu8_mask(below, last_small); left; left &= left - 1) {
        const int at = std::countr_zero(left);
        if (tile.small_count == IntegerTile::kMostSmall) return false;
        const uint32_t code = regs[reg][lane + at / 4] >> (at % 4 * 8) & 0xFF;
        tile.small[tile.small_count++] = {i + at / 4, k + at % 4, format.value[code]};
      }
    }
  tile.unit = format.lowest + shift;
  tile.lowest = tile.small_count ? format.lowest : tile.unit;
  tile.highest = format.lowest + width;
  return true;
}

// The same for e2m1, eight items to a register.
template <int kEdge, int kItems>
bool load_integer_nibbles(const Row* regs, IntegerTile& tile) {
  alignas(16) static constexpr int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int reg = 0; reg < kItems / 8; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 16) {
      const __m512i codes = _mm512_loadu_si512(&regs[reg][lane]);
      const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, nibble));
      const __m512i odd = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble));
      const int k = k_of_item(4, kItems, kMatrixLanes / kEdge, lane / kEdge, 8 * reg);
      uint32_t* to = tile.pairs + k / 2 * kEdge + lane % kEdge;
      for (int pair = 0; pair < 4; ++pair) {
        const __m512i first = _mm512_srai_epi32(_mm512_slli_epi32(even, 24 - 8 * pair), 24);
        const __m512i second = _mm512_slli_epi32(_mm512_srai_epi32(_mm512_slli_epi32(odd, 24 - 8 * pair), 24), 16);
        _mm512_store_si512(to + pair * kEdge, _mm512_mask_blend_epi16(0xAAAAAAAA, first, second));
      }
    }
  tile.unit = tile.lowest = -1;
  tile.highest = 3;
  tile.small_count = 0;
  return true;
}

// Exponents of one operand's e8m0 scales, [depth / 32][edge].
struct ScaleRange {
  int least = 0, most = 0;
  int spread = 0;  // the most that two blocks of one row differ
};
inline ScaleRange scale_range(const Row& scale, int byte, int edge) {
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
    least = low[i] < least ? low[i] : least;
    most = high[i] > most ? high[i] : most;
    const auto apart = static_cast<uint8_t>(high[i] - low[i]);
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
  const auto bits_from = [](int e) { return std::clamp(e + bias, 0, 255) << 23; };
  const int least = std::max(bits_from(first), 1), count = std::max(bits_from(end), least) - least;
  const __m512i size = _mm512_set1_epi32(0x7FFFFFFF);
  __mmask16 wrong = 0;
  for (const uint32_t* at = c[0]; at < c[c_count]; at += 16) {
    const __m512i x = _mm512_loadu_si512(at), from = _mm512_sub_epi32(_mm512_and_si512(x, size), _mm512_set1_epi32(least));
    wrong |= _mm512_mask_cmpge_epu32_mask(_mm512_test_epi32_mask(x, x), from, _mm512_set1_epi32(count));
  }
  return wrong == 0;
}

// 16 x 16 results of one scale block: acc += (A^T B) factor_a factor_b. Its own function, so that GCC 12 keeps the sums in
// registers.
template <int M, int N>
__attribute__((noinline)) void add_integer_block(const uint32_t* left, const uint32_t* right, int pairs, const double* factor_a,
                                                 const double* factor_b, double* acc) {
  constexpr int rows = 16;
  __m512i sum[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sum[r] = _mm512_setzero_si512();
  for (int pair = 0; pair < pairs; ++pair, left += M, right += N) {
    const __m512i of_b = _mm512_load_si512(right);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      // Not the intrinsic, with which the sums move between registers in every round.
      asm("vpdpwssd %2, %1, %0" : "+v"(sum[r]) : "v"(_mm512_set1_epi32(static_cast<int>(left[r]))), "v"(of_b));
    }
  }
  const __m512d factor[2] = {_mm512_load_pd(factor_b), _mm512_load_pd(factor_b + 8)};
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const __m512d of_a = _mm512_set1_pd(factor_a[r]);
    double* to = acc + r * N;
    const __m512d low = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(sum[r])), factor[0]);
    const __m512d high = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(sum[r], 1)), factor[1]);
    _mm512_store_pd(to, _mm512_fmadd_pd(low, of_a, _mm512_load_pd(to)));
    _mm512_store_pd(to + 8, _mm512_fmadd_pd(high, of_a, _mm512_load_pd(to + 8)));
  }
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
  for (int i = 0; i < kEdge; i += 8) {
    const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile.pairs + k / 2 * kEdge + i));
    const __m256i x = _mm256_srai_epi32(k % 2 ? pairs : _mm256_slli_epi32(pairs, 16), 16);
    const __m512d factor = _mm512_load_pd(factors + k / kScaleBlock * kEdge + i);
    _mm512_store_pd(row + i, _mm512_mul_pd(_mm512_cvtepi32_pd(x), factor));
  }
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
    for (int j = 0; j < N; j += 8)
      _mm512_store_pd(to + j, _mm512_fmadd_pd(_mm512_set1_pd(value), _mm512_load_pd(row + j), _mm512_load_pd(to + j)));
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
