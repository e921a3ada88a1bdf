// Integer tiles in vectors of 256 bits: a magnitude is its significand times a power of two that its exponent looks up.
#pragma once

#include <immintrin.h>

#include <bit>

#include "integer_tile.h"

namespace hfemu {

inline __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_256(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
inline __m256i byte_256(uint32_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }

// The bytes of registers, rows of kEdge lanes over each other: the largest under `mask`, the rows that have any such bits,
// and whether a byte is fnuz's NaN.
struct Magnitudes {
  uint8_t largest = 0;
  uint32_t rows = 0;
  bool negative_zero;
};

template <int kEdge>
Magnitudes magnitudes_of(const Row* regs, int count, uint32_t mask) {
  __m256i most[kEdge / 8] = {}, found = _mm256_setzero_si256();
  for (int reg = 0; reg < count; ++reg)
#pragma GCC unroll 8
    for (int lane = 0; lane < kMatrixLanes; lane += 8) {
      const __m256i codes = load_256(&regs[reg][lane]);
      auto& so_far = most[lane % kEdge / 8];
      found = _mm256_or_si256(found, _mm256_cmpeq_epi8(codes, byte_256(0x80)));
      so_far = _mm256_max_epu8(so_far, _mm256_and_si256(codes, byte_256(mask)));
    }
  Magnitudes all;
  all.negative_zero = !_mm256_testz_si256(found, found);
  for (int part = 0; part < kEdge / 8; ++part) {
    const __m256i empty = _mm256_cmpeq_epi32(most[part], _mm256_setzero_si256());
    all.rows |= static_cast<uint32_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(empty)) & 0xFF) << 8 * part;
    alignas(32) uint8_t bytes[32];
    store_256(bytes, most[part]);
    for (const uint8_t x : bytes) all.largest = x > all.largest ? x : all.largest;
  }
  return all;
}

// False: the elements do not suit.
template <int kEdge, int kItems>
bool load_integer_bytes(const Row* regs, const IntegerFormat& format, IntegerTile& tile) {
  const Magnitudes all = magnitudes_of<kEdge>(regs, kItems / 4, 0x7F);
  if (all.largest >= format.first_special || (format.fnuz && all.negative_zero)) return false;
  const int width = std::bit_width(format.integer(all.largest)), shift = width > kIntegerBits ? width - kIntegerBits : 0;
  // By exponent - shift, 0 where that is below: powers of two, of which the first is 1 where it stands for subnormals.
  alignas(16) uint8_t low[16], high[16];
  for (int at = 0; at < 16; ++at) {
    const int power = at ? 1 << (at - 1) : shift == 0;
    low[at] = static_cast<uint8_t>(power), high[at] = static_cast<uint8_t>(power >> 8);
  }
  const auto twice = [](const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  };
  const __m256i power_low = twice(low), power_high = twice(high), zero = _mm256_setzero_si256();
  // Bytes 0 and 1 of four lanes, then bytes 2 and 3.
  alignas(16) static constexpr uint8_t by_pair[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
  const __m256i order = twice(by_pair), hidden = byte_256(1u << format.mantissa_bits);
  const __m256i exponent = byte_256(0x7F >> format.mantissa_bits), fraction = byte_256((1u << format.mantissa_bits) - 1);
  const __m128i down = _mm_cvtsi32_si128(format.mantissa_bits);
  const uint32_t small_end = format.first_exact(shift);
  const __m256i last_small = byte_256(small_end ? small_end - 2 : 0);
  tile.small_count = 0;
  for (int reg = 0; reg < kItems / 4; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 8) {
      const __m256i codes = load_256(&regs[reg][lane]), pairs = _mm256_shuffle_epi8(codes, order);
      const int k = k_of_item(8, kItems, kMatrixLanes / kEdge, lane / kEdge, 4 * reg), i = lane % kEdge;
      const __m256i e = _mm256_and_si256(_mm256_srl_epi16(pairs, down), exponent);
      const __m256i significand =
          _mm256_or_si256(_mm256_and_si256(pairs, fraction), _mm256_andnot_si256(_mm256_cmpeq_epi8(e, zero), hidden));
      const __m256i index = _mm256_subs_epu8(e, byte_256(static_cast<uint32_t>(shift)));
      const __m256i lower = _mm256_shuffle_epi8(power_low, index), upper = _mm256_shuffle_epi8(power_high, index);
      const __m256i odd = byte_256(1);  // a number with an element's sign that is not 0
      uint32_t* to = tile.pairs + k / 2 * kEdge + i;
      store_256(to, _mm256_sign_epi16(_mm256_mullo_epi16(_mm256_unpacklo_epi8(significand, zero), _mm256_unpacklo_epi8(lower, upper)),
                                      _mm256_unpacklo_epi8(odd, pairs)));
      store_256(to + kEdge, _mm256_sign_epi16(_mm256_mullo_epi16(_mm256_unpackhi_epi8(significand, zero), _mm256_unpackhi_epi8(lower, upper)),
                                              _mm256_unpackhi_epi8(odd, pairs)));
      if (small_end == 0) continue;
      // Zero wraps around and is none of them.
      const __m256i below = _mm256_sub_epi8(_mm256_and_si256(codes, byte_256(0x7F)), byte_256(1));
      const __m256i is_small = _mm256_cmpeq_epi8(_mm256_min_epu8(below, last_small), below);
      if (!note_small(tile, format, static_cast<uint32_t>(_mm256_movemask_epi8(is_small)), &regs[reg][lane], i, k)) return false;
    }
  tile.unit = format.lowest + shift;
  tile.lowest = tile.small_count ? format.lowest : tile.unit;
  tile.highest = format.lowest + width;
  tile.rows = all.rows;
  return true;
}

// The same for e2m1, eight items to a register.
template <int kEdge, int kItems>
bool load_integer_nibbles(const Row* regs, IntegerTile& tile) {
  const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,  //
                                         0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int reg = 0; reg < kItems / 8; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 8) {
      const __m256i codes = load_256(&regs[reg][lane]);
      const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, byte_256(15)));
      const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), byte_256(15)));
      const int k = k_of_item(4, kItems, kMatrixLanes / kEdge, lane / kEdge, 8 * reg);
      uint32_t* to = tile.pairs + k / 2 * kEdge + lane % kEdge;
      for (int pair = 0; pair < 4; ++pair) {
        const __m256i first = _mm256_srai_epi32(_mm256_slli_epi32(even, 24 - 8 * pair), 24);
        const __m256i second = _mm256_slli_epi32(_mm256_srai_epi32(_mm256_slli_epi32(odd, 24 - 8 * pair), 24), 16);
        store_256(to + pair * kEdge, _mm256_blend_epi16(first, second, 0xAA));
      }
    }
  tile.unit = tile.lowest = -1;
  tile.highest = 3;
  tile.rows = magnitudes_of<kEdge>(regs, kItems / 8, 0x77).rows;
  tile.small_count = 0;
  return true;
}

// Four rows of 16 results of one scale block: acc += (A^T B) factor_a factor_b.
template <int M, int N>
inline void add_integer_rows(const uint32_t* left, const uint32_t* right, int pairs, const double* factor_a,
                             const double* factor_b, double* acc) {
  constexpr int rows = 4, vectors = 2;
  __m256i sum[rows][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
  for (int pair = 0; pair < pairs; ++pair, left += M, right += N) {
    const __m256i of_b[vectors] = {load_256(right), load_256(right + 8)};
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const __m256i of_a = _mm256_set1_epi32(static_cast<int>(left[r]));
      sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(of_a, of_b[0]));
      sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(of_a, of_b[1]));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; ++quarter) {
      const __m256i eight = sum[r][quarter / 2];
      const __m128i four = quarter % 2 ? _mm256_extracti128_si256(eight, 1) : _mm256_castsi256_si128(eight);
      const __m256d scaled = _mm256_mul_pd(_mm256_cvtepi32_pd(four), _mm256_loadu_pd(factor_b + 4 * quarter));
      double* to = acc + r * N + 4 * quarter;
      _mm256_storeu_pd(to, _mm256_fmadd_pd(scaled, _mm256_set1_pd(factor_a[r]), _mm256_loadu_pd(to)));
    }
}

// 16 x 16 results of one scale block.
template <int M, int N>
__attribute__((noinline)) void add_integer_block(const uint32_t* left, const uint32_t* right, int pairs, const double* factor_a,
                                                 const double* factor_b, double* acc) {
  for (int r = 0; r < 16; r += 4) add_integer_rows<M, N>(left + r, right, pairs, factor_a + r, factor_b, acc + r * N);
}

}  // namespace hfemu
