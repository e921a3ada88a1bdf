// Integer tiles in vectors of 512 bits: a table of 128 bytes is one permutation, and VNNI adds up products of pairs.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>

#include "integer_tile.h"

namespace hfemu {

// False: the elements do not suit.
template <int kEdge, int kItems>
bool load_integer_bytes(const Row* regs, const IntegerFormat& format, IntegerTile& tile) {
  const auto vector = [](const void* from) { return _mm512_loadu_si512(from); };
  const __m512i magnitude = _mm512_set1_epi8(0x7F), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  __m512i most[kEdge / 16] = {};
  for (int reg = 0; reg < kItems / 4; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 16) {
      const __m512i codes = vector(&regs[reg][lane]);
      if (format.fnuz && _mm512_cmpeq_epi8_mask(codes, sign)) return false;
      auto& so_far = most[lane % kEdge / 16];
      so_far = _mm512_max_epu8(so_far, _mm512_and_si512(codes, magnitude));
    }
  uint8_t top = 0;
  tile.rows = 0;
  for (int part = 0; part < kEdge / 16; ++part) {
    tile.rows |= static_cast<uint32_t>(_mm512_test_epi32_mask(most[part], most[part])) << 16 * part;
    alignas(64) uint8_t bytes[64];
    _mm512_store_si512(bytes, most[part]);
    for (const uint8_t x : bytes) top = x > top ? x : top;
  }
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
      if (!note_small(tile, format, shift, _mm512_cmplt_epu8_mask(below, last_small), &regs[reg][lane], i, k)) return false;
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
  const __m512i nibble = _mm512_set1_epi8(15), magnitudes = _mm512_set1_epi8(0x77);
  tile.rows = 0;
  for (int reg = 0; reg < kItems / 8; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 16) {
      const __m512i codes = _mm512_loadu_si512(&regs[reg][lane]);
      tile.rows |= static_cast<uint32_t>(_mm512_test_epi32_mask(codes, magnitudes)) << lane % kEdge;
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

// A small element's products with the integers of the other operand's row `k`, times its factors.
template <int kEdge>
inline void small_products(const IntegerTile::Small& x, const IntegerTile& other, double* __restrict row) {
  const uint32_t* pairs = other.pairs + x.k / 2 * kEdge;
  const int up = x.k % 2 ? 0 : 16;
  const double* factors = other.factors + x.k / kScaleBlock * kEdge;
  for (int i = 0; i < kEdge; ++i) row[i] = (static_cast<int32_t>(pairs[i] << up) >> 16) * int32_t{x.significand} * factors[i];
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
    double* to = acc + result_at<N>(r);
    const __m512d low = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(sum[r])), factor[0]);
    const __m512d high = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(sum[r], 1)), factor[1]);
    _mm512_store_pd(to, _mm512_fmadd_pd(low, of_a, _mm512_load_pd(to)));
    _mm512_store_pd(to + 8, _mm512_fmadd_pd(high, of_a, _mm512_load_pd(to + 8)));
  }
}

// D = A B + acc; acc in the order of D's registers.
template <int M, int N, int K>
void multiply_tiles(const IntegerTile& a, const IntegerTile& b, double* acc, uint32_t* d) {
  constexpr int block = std::min(K, kScaleBlock);
  for (int k = 0; k < K; k += kScaleBlock)
    for (int i = 0; i < M; i += 16)
      for (int j = 0; j < N; j += 16)
        add_integer_block<M, N>(a.pairs + k / 2 * M + i, b.pairs + k / 2 * N + j, block / 2, a.factors + k / kScaleBlock * M + i,
                                b.factors + k / kScaleBlock * N + j, acc + result_at<N>(i) + j);
  for (int at = 0; at < M * N; ++at) d[at] = float_to_bits(static_cast<float>(acc[at]));
}

}  // namespace hfemu
