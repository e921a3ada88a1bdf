// Integer tiles in vectors of 256 bits: a magnitude is its significand times a power of two that its exponent looks up.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>

#include "integer_tile.h"

namespace hfemu {

inline __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_256(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
inline __m256i byte_256(uint32_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }
// In these tiles rows 2, 3 and 4, 5 of every eight change places: interleaved with words of their own, the sums are in order.
inline __m256i exchanged(__m256i x) { return _mm256_permute4x64_epi64(x, 0xD8); }

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

// Integers of the unit 2^(lowest + shift); false: too many elements have bits below it.
template <int kEdge, int kItems>
bool load_integer_bytes(const Row* regs, const IntegerFormat& format, int shift, IntegerTile& tile) {
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
      const __m256i codes = load_256(&regs[reg][lane]), pairs = _mm256_shuffle_epi8(exchanged(codes), order);
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
      if (!note_small(tile, format, shift, static_cast<uint32_t>(_mm256_movemask_epi8(is_small)), &regs[reg][lane], i, k)) return false;
    }
  tile.unit = format.lowest + shift;
  tile.lowest = tile.small_count ? format.lowest : tile.unit;
  return true;
}

// Whether the squares of no 32 elements that are summed reach 2^31. Where those of neither operand do, no sum of products
// does (Cauchy and Schwarz).
template <int kEdge>
bool squares_fit(const IntegerTile& tile, int depth) {
  constexpr int dropped = 6;  // of the bits of two squares, counted as set
  __m256i most = _mm256_setzero_si256();
  for (int k = 0; k < depth; k += kScaleBlock)
    for (int i = 0; i < kEdge; i += 8) {
      __m256i sum = _mm256_setzero_si256();
      for (int pair = k / 2; pair < std::min(depth, k + kScaleBlock) / 2; ++pair) {
        const __m256i x = load_256(tile.pairs + pair * kEdge + i);
        const __m256i squares = _mm256_srli_epi32(_mm256_madd_epi16(x, x), dropped);
        sum = _mm256_sub_epi32(_mm256_add_epi32(sum, squares), _mm256_set1_epi32(-1));
      }
      most = _mm256_max_epi32(most, sum);
    }
  const __m256i beyond = _mm256_cmpgt_epi32(most, _mm256_set1_epi32(1 << (31 - dropped)));
  return _mm256_testz_si256(beyond, beyond);
}

// False: the elements do not suit.
template <int kEdge, int kItems>
bool load_integer_bytes(const Row* regs, const IntegerFormat& format, IntegerTile& tile) {
  const Magnitudes all = magnitudes_of<kEdge>(regs, kItems / 4, 0x7F);
  if (all.largest >= format.first_special || (format.fnuz && all.negative_zero)) return false;
  const int width = std::bit_width(format.integer(all.largest));
  tile.highest = format.lowest + width;
  tile.rows = all.rows;
  // One more bit halves the small elements, where the sums still fit.
  if (width > kIntegerBits && load_integer_bytes<kEdge, kItems>(regs, format, width - kIntegerBits - 1, tile) &&
      squares_fit<kEdge>(tile, kItems * kMatrixLanes / kEdge))
    return true;
  return load_integer_bytes<kEdge, kItems>(regs, format, std::max(width - kIntegerBits, 0), tile);
}

// The same for e2m1, eight items to a register.
template <int kEdge, int kItems>
bool load_integer_nibbles(const Row* regs, IntegerTile& tile) {
  const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,  //
                                         0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int reg = 0; reg < kItems / 8; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 8) {
      const __m256i codes = exchanged(load_256(&regs[reg][lane]));
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

// A small element's products with the integers of the other operand's row `k`, times its factors.
template <int kEdge>
void small_products(const IntegerTile::Small& x, const IntegerTile& other, double* row) {
  const uint32_t* pairs = other.pairs + x.k / 2 * kEdge;
  const __m256i by = _mm256_set1_epi32(static_cast<int>(uint32_t{static_cast<uint16_t>(x.significand)} << x.k % 2 * 16));
  const double* factors = other.factors + x.k / kScaleBlock * kEdge;
  for (int i = 0; i < kEdge; i += 8) {
    const __m256i products = exchanged(_mm256_madd_epi16(load_256(pairs + i), by));
    const __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(products));
    const __m256d high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(products, 1));
    _mm256_storeu_pd(row + i, _mm256_mul_pd(low, _mm256_loadu_pd(factors + i)));
    _mm256_storeu_pd(row + i + 4, _mm256_mul_pd(high, _mm256_loadu_pd(factors + i + 4)));
  }
}

// Four rows of 16 sums of kPairs pairs of products, each plus 2^31. In assembly, because GCC 12 moves the sums between
// registers and memory.
template <int M, int N, int kPairs>
inline void sum_products(const uint32_t* left, const uint32_t* right, __m256i (&sum)[4][2]) {
  __m256i b0, b1, x, y;
#define SUM_ROW(at, s0, s1)                          \
  "vpbroadcastd " at "+%c[a]*\\p(%[left]), %[y]\n\t" \
  "vpmaddwd %[b0], %[y], %[x]\n\t"                   \
  "vpmaddwd %[b1], %[y], %[y]\n\t"                   \
  "vpaddd %[x], " s0 ", " s0 "\n\tvpaddd %[y], " s1 ", " s1 "\n\t"
  asm("vpcmpeqd %0, %0, %0\n\tvpslld $31, %0, %0\n\t"
      "vmovdqa %0, %1\n\tvmovdqa %0, %2\n\tvmovdqa %0, %3\n\tvmovdqa %0, %4\n\t"
      "vmovdqa %0, %5\n\tvmovdqa %0, %6\n\tvmovdqa %0, %7\n\t"
      ".irp p, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15\n\t"
      ".if \\p < %c[pairs]\n\t"
      "vmovdqu %c[b]*\\p(%[right]), %[b0]\n\t"
      "vmovdqu 32+%c[b]*\\p(%[right]), %[b1]\n\t"  //
      SUM_ROW("0", "%0", "%1") SUM_ROW("4", "%2", "%3") SUM_ROW("16", "%4", "%5") SUM_ROW("20", "%6", "%7")
      ".endif\n\t.endr"
      : "=&x"(sum[0][0]), "=&x"(sum[0][1]), "=&x"(sum[1][0]), "=&x"(sum[1][1]), "=&x"(sum[2][0]), "=&x"(sum[2][1]),
        "=&x"(sum[3][0]), "=&x"(sum[3][1]), [b0] "=&x"(b0), [b1] "=&x"(b1), [x] "=&x"(x), [y] "=&x"(y)
      : [left] "r"(left), [right] "r"(right), [pairs] "i"(kPairs), [a] "i"(4 * M), [b] "i"(4 * N)
      : "memory");
#undef SUM_ROW
}

// Four rows of 16 results: D = (A^T B) factor_a factor_b + acc, block by block.
template <int M, int N, int K>
__attribute__((noinline)) void multiply_rows(const uint32_t* left, const uint32_t* right, const double* factor_a,
                                             const double* factor_b, const double* bias_b, double* acc, uint32_t* d) {
  constexpr int rows = 4, pairs = std::min(K, kScaleBlock) / 2;
  for (int k = 0; k < K; k += kScaleBlock, left += pairs * M, right += pairs * N, factor_a += M, factor_b += N, bias_b += N) {
    __m256i sum[rows][2];
    sum_products<M, N, pairs>(left, right, sum);
    const bool last = k + kScaleBlock >= K;
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const __m256d of_a = _mm256_set1_pd(factor_a[r]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        double* at = acc + r * kMatrixLanes + 8 * half;
        const auto added = [&](__m256i four, int j) {  // 2^52 + 2^31 + sum as doubles
          const __m256d scaled = _mm256_fmadd_pd(_mm256_castsi256_pd(four), _mm256_loadu_pd(factor_b + 8 * half + j),
                                                 _mm256_loadu_pd(bias_b + 8 * half + j));
          return _mm256_fmadd_pd(scaled, of_a, _mm256_loadu_pd(at + j));
        };
        const __m256i exponent = _mm256_set1_epi32(0x43300000);
        const __m256d low = added(_mm256_unpacklo_epi32(sum[r][half], exponent), 0);
        const __m256d high = added(_mm256_unpackhi_epi32(sum[r][half], exponent), 4);
        if (last) {
          _mm256_storeu_ps(reinterpret_cast<float*>(d + r * kMatrixLanes + 8 * half),
                           _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)));
        } else {
          _mm256_storeu_pd(at, low);
          _mm256_storeu_pd(at + 4, high);
        }
      }
    }
  }
}

// D = A B + acc; acc in the order of D's registers.
template <int M, int N, int K>
void multiply_tiles(const IntegerTile& a, const IntegerTile& b, double* acc, uint32_t* d) {
  alignas(64) double bias_b[kMatrixLanes];
  for (int i = 0; i < (K + kScaleBlock - 1) / kScaleBlock * N; ++i) bias_b[i] = -(0x1p52 + 0x1p31) * b.factors[i];
  for (int i = 0; i < M; i += 4)
    for (int j = 0; j < N; j += 16) {
      const int at = result_at<N>(i) + j;
      multiply_rows<M, N, K>(a.pairs + i / 8 * 8 + i % 8 / 2, b.pairs + j, a.factors + i, b.factors + j, bias_b + j, acc + at,
                            d + at);
    }
}

}  // namespace hfemu
