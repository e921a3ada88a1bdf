// MFMA and SMFMAC: operand layouts, the multiplication, and the result layout.
//
// Notation of the ISA documents: M x N x K per block, B blocks; lane groups g of the operand registers hold successive
// stretches of k. The three layouts are
//   A, B   row i of block b, lane group g: lane i + M * (b + B * g); which k an item has is `k_of_item`
//   C, D   `ResultLayout`
//   scales the e8m0 byte of (row i, logical k-block kb of 32) is in lane i + M * kb, whatever the operand's k order
//
// Numerics: products are exact in double, sums are accumulated in double on top of C and rounded to f32 once. Integer
// data is therefore exact while sums stay below 2^53 (f32 results: below 2^24), i8 sums wrap at 32 bits, and f64 uses
// fused multiply-adds in k order. The hardware's own summation order is undocumented. EXEC is ignored.
#include "matrix.h"

#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "matrix_elements.h"
#include "matrix_integers.h"

#if defined(__FMA__) || defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

namespace hfemu {
namespace {

struct Shape {
  Op op;
  int m, n, k, blocks;
  Element a, b, cd;
  bool sparse;
  int cycles_gfx942, cycles_gfx950;

  constexpr int groups(int edge) const { return kMatrixLanes / (edge * blocks); }
  constexpr int result_items() const { return m * n * blocks / kMatrixLanes; }
};

constexpr Shape kShapes[] = {
#define MATRIX_OP(name, m, n, k, blocks, a, b, cd, sparse, c942, c950) \
  {Op::name, m, n, k, blocks, Element::a, Element::b, Element::cd, sparse, c942, c950},
#include "matrix_ops.inc"
#undef MATRIX_OP
};

// load_tile relies on this: no shape has both several blocks and several lane groups per block, except in f64.
constexpr bool blocks_or_groups() {
  for (const Shape& s : kShapes)
    if (s.a != Element::f64 && s.blocks > 1 && (s.groups(s.m) > 1 || s.groups(s.n) > 1)) return false;
  return true;
}
static_assert(blocks_or_groups());

constexpr int kMaxTile = 128 * 16;       // blocks * K * M of the largest operand
constexpr int kMaxResult = 2 * 32 * 32;  // blocks * M * N of the largest result

// f64 operands, one item per lane as a register pair, as a tile [block][k][edge].
void load_f64_tile(const Row* regs, int edge, int blocks, int depth, double* tile) {
  for (int lane = 0; lane < kMatrixLanes; ++lane) {
    const int group = lane / edge, block = group % blocks, k = group / blocks;
    const uint64_t bits = static_cast<uint64_t>(regs[1][lane]) << 32 | regs[0][lane];
    tile[(block * depth + k) * edge + lane % edge] = bits_to_double(bits);
  }
}

#if defined(__AVX512VBMI__)
// The upper two bytes of the floats that codes of at most 8 bits stand for, the others of which are 0, by the lower
// seven bits of the code.
struct ByteTable {
  alignas(64) uint8_t low[128], high[128];
};

template <class E>
ByteTable byte_table() {
  ByteTable table;
  for (uint32_t code = 0; code < 128; ++code) {
    const uint32_t bits = float_to_bits(static_cast<float>(E::value(code)));
    table.low[code] = static_cast<uint8_t>(bits >> 16);
    table.high[code] = static_cast<uint8_t>(bits >> 24);
  }
  return table;
}

const ByteTable* byte_table_of(Element e, bool fnuz) {
  static const ByteTable fn = byte_table<SmallFloat<4, 3, 7, Specials::fn>>(),
                         fn_wide = byte_table<SmallFloat<5, 2, 15, Specials::ieee>>(),
                         uz = byte_table<SmallFloat<4, 3, 8, Specials::fnuz>>(),
                         uz_wide = byte_table<SmallFloat<5, 2, 16, Specials::fnuz>>(),
                         four_bits = byte_table<SmallFloat<2, 1, 1, Specials::finite>>();
  switch (e) {
    case Element::fp8: return fnuz ? &uz : &fn;
    case Element::bf8: return fnuz ? &uz_wide : &fn_wide;
    case Element::fp4: return &four_bits;
    default: return nullptr;
  }
}

// Operand registers of 8- or 4-bit floats as a tile, 16 lanes of 4 items at a time, times scale[k / 32][kEdge] if there
// is one. Item j of lane group g is at k = ks[j] + g * k_step.
template <int kBits, int kEdge, bool kScaled>
void load_byte_tile(const Row* regs, const ByteTable& table, bool fnuz, const int* ks, int items, int k_step,
                    const double* scale, double* tile) {
  const auto vector = [](const void* from) { return _mm512_loadu_si512(from); };
  const __m512i low[2] = {vector(table.low), vector(table.low + 64)};
  const __m512i high[2] = {vector(table.high), vector(table.high + 64)};
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80)), nibble = _mm512_set1_epi8(15);
  __m512i to_low[4], to_high[4];  // byte j of every lane as the float's third byte, and as its fourth
  for (int j = 0; j < 4; ++j) {
    alignas(64) uint8_t third[64], fourth[64];
    for (int at = 0; at < 64; ++at) {
      third[at] = static_cast<uint8_t>(at % 4 == 2 ? at % 16 - 2 + j : 0x80);
      fourth[at] = static_cast<uint8_t>(at % 4 == 3 ? at % 16 - 3 + j : 0x80);
    }
    to_low[j] = vector(third), to_high[j] = vector(fourth);
  }
  constexpr int halves = 8 / kBits;
  for (int reg = 0; reg < items * kBits / 32; ++reg)
    for (int lane = 0; lane < kMatrixLanes; lane += 16) {
      const __m512i packed = vector(&regs[reg][lane]);
      for (int half = 0; half < halves; ++half) {
        __m512i codes = packed;
        if constexpr (kBits == 4) {
          using Words = uint32_t __attribute__((vector_size(64)));
          codes = _mm512_and_si512(half ? reinterpret_cast<__m512i>(reinterpret_cast<Words>(packed) >> 4) : packed, nibble);
        }
        __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        __m512i upper = _mm512_permutex2var_epi8(high[0], codes, high[1]);
        if (kBits == 8) upper = _mm512_or_si512(upper, _mm512_and_si512(codes, sign));
        if (kBits == 8 && fnuz) {  // the code of -0 is NaN
          const __mmask64 nan = _mm512_cmpeq_epi8_mask(codes, sign);
          lower = _mm512_mask_mov_epi8(lower, nan, _mm512_set1_epi8(static_cast<char>(0xC0)));
          upper = _mm512_mask_mov_epi8(upper, nan, _mm512_set1_epi8(0x7F));
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const int k = ks[halves * (4 * reg + j) + half] + lane / kEdge * k_step, i = lane % kEdge;
          double* out = tile + kEdge * k + i;
          const __m512 x = _mm512_castsi512_ps(
              _mm512_or_si512(_mm512_shuffle_epi8(lower, to_low[j]), _mm512_shuffle_epi8(upper, to_high[j])));
          __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
          __m512d second = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
          if constexpr (kScaled) {
            const double* factor = scale + k / 32 * kEdge + i;
            first = _mm512_mul_pd(first, _mm512_loadu_pd(factor));
            second = _mm512_mul_pd(second, _mm512_loadu_pd(factor + 8));
          }
          _mm512_storeu_pd(out, first);
          _mm512_storeu_pd(out + 8, second);
        }
      }
    }
}

template <int kBits, int kEdge>
void load_byte_tile(const Row* regs, const ByteTable& table, bool fnuz, const int* ks, int items, int k_step,
                    const double* scale, double* tile) {
  const auto load = scale != nullptr ? &load_byte_tile<kBits, kEdge, true> : &load_byte_tile<kBits, kEdge, false>;
  load(regs, table, fnuz, ks, items, k_step, scale, tile);
}
#endif

// tile[k][i] *= scale[k / 32][i]: exact, and a NaN scale makes its whole block NaN, zeros included. Two exponents of at
// most 127 in size leave the products far inside double.
void apply_scales(double* tile, int edge, int depth, const double* scale) {
  for (int k = 0; k < depth; ++k)
    for (int i = 0; i < edge; ++i) tile[k * edge + i] *= scale[k / 32 * edge + i];
}

// Operand registers as a tile [block][k][edge] of doubles, times `scale` where there is one. Sparse A gives [slot][edge], slots in lane-group order.
// Successive groups of `edge` lanes are either blocks or, with one block, stretches of k: evenly spaced in the tile.
void load_tile(const Row* regs, Element element, const MatrixArgs& args, int edge, int blocks, int k_per_lane,
               bool in_k_order, const double* scale, double* tile) {
  const int bits = element_bits(element), groups = kMatrixLanes / (edge * blocks), depth = k_per_lane * groups;
  if (element == Element::f64) return load_f64_tile(regs, edge, blocks, depth, tile);
  const auto k_of = [&](int g, int item) {
    return in_k_order ? k_of_item(bits, k_per_lane, groups, g, item) : g * k_per_lane + item;
  };
  const int stride = edge * (blocks > 1 ? depth : k_of(1, 0) - k_of(0, 0));
#if defined(__AVX512VBMI__)
  const ByteTable* table = byte_table_of(element, args.fnuz);
  if (table != nullptr && edge >= 16 && k_per_lane * bits % 32 == 0) {
    int ks[32];
    for (int item = 0; item < k_per_lane; ++item) ks[item] = k_of(0, item);
    const auto load = bits == 8 ? edge == 16 ? &load_byte_tile<8, 16> : &load_byte_tile<8, 32>
                                : edge == 16 ? &load_byte_tile<4, 16> : &load_byte_tile<4, 32>;
    return load(regs, *table, args.fnuz, ks, k_per_lane, stride / edge, scale, tile);
  }
#endif
  const DecodeFn decode = decoder_of(element, args.fnuz, args.flush_f32, edge);
  alignas(64) uint32_t codes[kMatrixLanes];
  for (int item = 0; item < k_per_lane; ++item) {
    extract_codes(regs, bits, item, codes);
    decode(codes, tile + edge * k_of(0, item), stride);
  }
  if (scale != nullptr) apply_scales(tile, edge, depth, scale);
}

// D[b, i, j] is item `item(b, i)` of lane `lane(b, i) + j`.
struct ResultLayout {
  int height, blocks_per_item, rows_per_item, row_groups, n;
  constexpr explicit ResultLayout(const Shape& s)
      : height(s.cd == Element::f64 ? 1 : 4),
        blocks_per_item(kMatrixLanes * height > s.n * s.m ? kMatrixLanes * height / (s.n * s.m) : 1),
        rows_per_item(kMatrixLanes / blocks_per_item / s.n),
        row_groups(s.m / (height * rows_per_item)),
        n(s.n) {}
  constexpr int item(int b, int i) const {
    return i % height + height * (i / (height * rows_per_item) + row_groups * (b / blocks_per_item));
  }
  constexpr int lane(int b, int i) const {
    return n * (i / height % rows_per_item + rows_per_item * (b % blocks_per_item));
  }
};

template <const Shape& S>
void load_result(const Row* c, double* acc) {
  constexpr ResultLayout layout(S);
  for (int b = 0; b < S.blocks; ++b)
    for (int i = 0; i < S.m; ++i) {
      const int item = layout.item(b, i), lane = layout.lane(b, i);
      double* to = acc + (b * S.m + i) * S.n;
      for (int j = 0; j < S.n; ++j) {
        if (S.cd == Element::f64)
          to[j] = bits_to_double(static_cast<uint64_t>(c[2 * item + 1][lane + j]) << 32 | c[2 * item][lane + j]);
        else if (S.cd == Element::i32)
          to[j] = static_cast<int32_t>(c[item][lane + j]);
        else
          to[j] = bits_to_float(c[item][lane + j]);
      }
    }
}

template <const Shape& S>
void store_result(const double* acc, Row* d, bool saturate) {
  const bool limit = saturate && S.a != Element::f8f6f4;
  constexpr double single = 0x1.fffffep127, integer = 2147483647;
  constexpr ResultLayout layout(S);
  for (int b = 0; b < S.blocks; ++b)
    for (int i = 0; i < S.m; ++i) {
      const int item = layout.item(b, i), lane = layout.lane(b, i);
      const double* from = acc + (b * S.m + i) * S.n;
      for (int j = 0; j < S.n; ++j) {
        if (S.cd == Element::f64) {
          const uint64_t bits = double_to_bits(from[j]);
          d[2 * item][lane + j] = static_cast<uint32_t>(bits);
          d[2 * item + 1][lane + j] = static_cast<uint32_t>(bits >> 32);
        } else if (S.cd == Element::i32) {
          const double x = limit ? std::fmin(std::fmax(from[j], -integer - 1), integer) : from[j];
          d[item][lane + j] = static_cast<uint32_t>(static_cast<int64_t>(x));
        } else {
          const bool finite = limit && std::isfinite(from[j]);
          const double x = finite ? std::fmin(std::fmax(from[j], -single), single) : from[j];
          d[item][lane + j] = float_to_bits(static_cast<float>(x));
        }
      }
    }
}

// The widest vector that the build's instruction set has: wider ones would be split through memory.
#if defined(__AVX512F__)
constexpr int kVector = 8;
#elif defined(__AVX__)
constexpr int kVector = 4;
#else
constexpr int kVector = 2;
#endif

template <int width>
struct VectorOf {
  typedef double Type __attribute__((vector_size(width * sizeof(double))));
};

// sum + x * y. The product is exact, so fusing changes only the speed; the build flags forbid it elsewhere.
template <int width>
inline typename VectorOf<width>::Type multiply_add(double x, typename VectorOf<width>::Type y,
                                                   typename VectorOf<width>::Type sum) {
#if defined(__AVX512F__)
  if constexpr (width == 8) return _mm512_fmadd_pd(_mm512_set1_pd(x), y, sum);
#endif
#if defined(__FMA__)
  if constexpr (width == 4) return _mm256_fmadd_pd(_mm256_set1_pd(x), y, sum);
#endif
  return sum + x * y;
}

// acc[M][N] += A[k][M]^T B[k][N]. Eight rows by two vectors live in registers over the whole k loop: fewer would wait for
// their own sums.
template <int M, int N>
void multiply(const double* a, const double* b, int depth, double* acc) {
  constexpr int width = N < kVector ? N : kVector, vectors = N >= 2 * width ? 2 : 1;
  using Vector = typename VectorOf<width>::Type;
  constexpr int rows = M >= 8 && kVector == 8 ? 8 : 4;
  for (int i = 0; i < M; i += rows)
    for (int j = 0; j < N; j += width * vectors) {
      Vector sum[rows][vectors];
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) std::memcpy(&sum[r][v], acc + (i + r) * N + j + width * v, sizeof(Vector));
      for (int k = 0; k < depth; ++k) {
        Vector right[vectors];
        for (int v = 0; v < vectors; ++v) std::memcpy(&right[v], b + k * N + j + width * v, sizeof(Vector));
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r)
          for (int v = 0; v < vectors; ++v) sum[r][v] = multiply_add<width>(a[k * M + i + r], right[v], sum[r][v]);
      }
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < vectors; ++v) std::memcpy(acc + (i + r) * N + j + width * v, &sum[r][v], sizeof(Vector));
    }
}

// f64 products are not exact: fuse explicitly.
void multiply_f64(const double* a, const double* b, int m, int n, int depth, double* acc) {
  for (int k = 0; k < depth; ++k)
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j) acc[i * n + j] = std::fma(a[k * m + i], b[k * n + j], acc[i * n + j]);
}

// The e8m0 factors of one operand as [k-block][edge].
void load_scales(const Row* scale, int byte, double* out) {
  for (int lane = 0; lane < kMatrixLanes; ++lane) out[lane] = decode_e8m0((*scale)[lane] >> (8 * byte));
}

// acc[i][:] += A[slot][i] * B[k(slot, i)][:], where k is picked by two index bits among the four of the slot's group.
// A's stored items fill at most 16 bytes of a lane, so its groups of four are contiguous over the lane groups even
// where B's items come in interleaved chunks: lane group g of A is multiplied with other lane groups of B.
template <const Shape& S>
void multiply_sparse(const MatrixArgs& args, const double* a, const double* b, double* acc) {
  constexpr int groups = S.groups(S.m), dense = S.k / groups, stored = dense / 2;
  constexpr int index_bits = 2 * stored, sets = 32 / index_bits;
  const int set = (args.cbsz & 3) == 0 ? args.abid % sets : 0;
  const uint32_t* index = *args.index;
  for (int g = 0; g < groups; ++g)
    for (int item = 0; item < stored; ++item) {
      const int group_of_four = item / 2 * 4, shift = set * index_bits + 2 * item;
      const double* left = a + (g * stored + item) * S.m;
      for (int i = 0; i < S.m; ++i) {
        const int position = index[i + S.m * g] >> (shift % 32) & 3;
        const int k = dense * g + group_of_four + position;
        const double* right = b + k * S.n;
        double* to = acc + i * S.n;
        for (int j = 0; j < S.n; ++j) to[j] += left[i] * right[j];
      }
    }
}

// CBSZ/ABID replace A's lanes by one block's, BLGP permutes B's (ISA, "Broadcasting values").
int lane_of_a(int lane, int cbsz, int abid) {
  const int size = kMatrixLanes >> cbsz;
  return size == 0 ? lane : (lane % size + size * abid) % kMatrixLanes;
}

int lane_of_b(int lane, int blgp) {
  switch (blgp) {
    case 0: return lane;
    case 1: return lane % 32;
    case 2: return lane % 32 + 32;
    case 3: return (lane + 16) % kMatrixLanes;
    default: return lane % 16 + 16 * (blgp - 4);
  }
}

template <class LaneMap>
void permute(const Row* from, int count, LaneMap source_lane, Row* to) {
  for (int r = 0; r < count; ++r)
    for (int lane = 0; lane < kMatrixLanes; ++lane) to[r][lane] = from[r][source_lane(lane)];
}

void negate(double* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = -values[i];
}

constexpr int registers_per_lane(Element e, int items) { return (items * element_bits(e) + 31) / 32; }

#if defined(__AVX2__) && defined(__FMA__)
constexpr bool takes_integers(const Shape& s) {
  return !s.sparse && (s.a == Element::f8f6f4 || s.a == Element::fp8 || s.a == Element::bf8);
}

TileCache& tile_cache() {
  static constinit thread_local TileCache cache;
  return cache;
}

// Null: the elements do not suit.
template <int kEdge, int kItems>
IntegerTile* integers_of(const Row* regs, Element element, bool fnuz, const IntegerTile* other) {
  const IntegerFormat* format = integer_format(element, fnuz);
  if (format == nullptr && element != Element::fp4) return nullptr;
  const uint32_t layout = static_cast<uint32_t>(element) | static_cast<uint32_t>(fnuz) << 8 |
                          static_cast<uint32_t>(other != nullptr) << 9 | kEdge << 16 | kItems << 24;
  return tile_cache().find(regs, registers_per_lane(element, kItems), layout, other, [&](IntegerTile& tile) {
    return format == nullptr ? load_integer_nibbles<kEdge, kItems>(regs, tile)
                             : load_integer_bytes<kEdge, kItems>(regs, *format, tile);
  });
}

// D = A B + C as sums of integers (matrix_integers.h); false: the operands do not suit, and D is as before.
template <const Shape& S>
bool multiply_integers(const MatrixArgs& args, Element element_a, Element element_b) {
  if (args.saturate && S.a != Element::f8f6f4) return false;
  constexpr int blocks = (S.k + kScaleBlock - 1) / kScaleBlock;
  IntegerTile* a = integers_of<S.m, S.k / S.groups(S.m)>(args.a, element_a, args.fnuz, nullptr);
  IntegerTile* b = a ? integers_of<S.n, S.k / S.groups(S.n)>(args.b, element_b, args.fnuz, a) : nullptr;
  if (b == nullptr) return false;
  set_scale<S.m, blocks * S.m>(*a, args.scale_a, args.scale_sel_a);
  set_scale<S.n, blocks * S.n>(*b, args.scale_b, args.scale_sel_b);
  ExactRange range;
  alignas(64) double acc[S.m * S.n];
  if (!exact_range(*a, *b, S.k, range) || !load_results(args.c, S.result_items(), range, acc)) return false;
  if (a->small_count + b->small_count) add_small_products<S.m, S.n>(*a, *b, acc);
  multiply_tiles<S.m, S.n, S.k>(*a, *b, acc, *args.d);
  return true;
}
#else
constexpr bool takes_integers(const Shape&) { return false; }
#endif

template <const Shape& S>
void run(const MatrixArgs& args) {
  constexpr bool mixed = S.a == Element::f8f6f4;
  const Element element_a = mixed ? element_of_format(args.cbsz) : S.a;
  const Element element_b = mixed ? element_of_format(args.blgp) : S.b;
  if constexpr (takes_integers(S))
    if (multiply_integers<S>(args, element_a, element_b)) return;
  alignas(64) double a[kMaxTile], b[kMaxTile], acc[kMaxResult];
  static_assert(S.blocks * S.k * S.m <= kMaxTile && S.blocks * S.k * S.n <= kMaxTile);
  static_assert(S.blocks * S.m * S.n <= kMaxResult);

  const Row* c = S.sparse && args.c == nullptr ? args.d : args.c;
  load_result<S>(c, acc);
  if (mixed && (element_a == Element::f8f6f4 || element_b == Element::f8f6f4)) {  // reserved CBSZ or BLGP
    for (double& value : acc) value = std::nan("");
    store_result<S>(acc, args.d, args.saturate);
    return;
  }

  constexpr int a_items = S.k / S.groups(S.m) / (S.sparse ? 2 : 1), b_items = S.k / S.groups(S.n);
  const Row* a_regs = args.a;
  const Row* b_regs = args.b;
  constexpr int a_count = registers_per_lane(S.a, a_items), b_count = registers_per_lane(S.b, b_items);
  Row a_copy[a_count], b_copy[b_count];
  if (!mixed && !S.sparse && S.a != Element::f64) {
    if (args.cbsz != 0) {
      permute(args.a, a_count, [&](int lane) { return lane_of_a(lane, args.cbsz, args.abid); }, a_copy);
      a_regs = a_copy;
    }
    if (args.blgp != 0) {
      permute(args.b, b_count, [&](int lane) { return lane_of_b(lane, args.blgp); }, b_copy);
      b_regs = b_copy;
    }
  }
  alignas(64) double scale_a[kMatrixLanes], scale_b[kMatrixLanes];
  const bool scaled = mixed && args.scale_a != nullptr;
  if (scaled) {
    load_scales(args.scale_a, args.scale_sel_a, scale_a);
    load_scales(args.scale_b, args.scale_sel_b, scale_b);
  }
  load_tile(a_regs, element_a, args, S.m, S.blocks, a_items, !S.sparse, scaled ? scale_a : nullptr, a);
  load_tile(b_regs, element_b, args, S.n, S.blocks, b_items, true, scaled ? scale_b : nullptr, b);

  if constexpr (S.sparse) {
    multiply_sparse<S>(args, a, b, acc);
  } else if constexpr (S.a == Element::f64) {
    if (args.blgp & 1) negate(a, S.blocks * S.k * S.m);
    if (args.blgp & 2) negate(b, S.blocks * S.k * S.n);
    if (args.blgp & 4) negate(acc, S.blocks * S.m * S.n);
    for (int block = 0; block < S.blocks; ++block)
      multiply_f64(a + block * S.k * S.m, b + block * S.k * S.n, S.m, S.n, S.k, acc + block * S.m * S.n);
  } else {
    for (int block = 0; block < S.blocks; ++block)
      multiply<S.m, S.n>(a + block * S.k * S.m, b + block * S.k * S.n, S.k, acc + block * S.m * S.n);
  }
  store_result<S>(acc, args.d, args.saturate);
}

constexpr std::size_t kCount = sizeof(kShapes) / sizeof(kShapes[0]);

template <std::size_t I>
constexpr Shape kShape = kShapes[I];

template <std::size_t... I>
constexpr std::array<MatrixFn, sizeof...(I)> functions_of(std::index_sequence<I...>) {
  return {run<kShape<I>>...};
}
constexpr std::array<MatrixFn, kCount> kFunctions = functions_of(std::make_index_sequence<kCount>());

// Row of each Op in kShapes, or kCount.
constexpr auto index_of_ops() {
  std::array<uint8_t, static_cast<std::size_t>(Op::count)> rows{};
  for (auto& row : rows) row = static_cast<uint8_t>(kCount);
  for (std::size_t i = 0; i < kCount; ++i) rows[static_cast<std::size_t>(kShapes[i].op)] = static_cast<uint8_t>(i);
  return rows;
}
constexpr auto kRowOfOp = index_of_ops();

std::size_t row_of(Op op) { return kRowOfOp[static_cast<std::size_t>(op)]; }

}  // namespace

MatrixFn matrix_function(Op op) { return row_of(op) < kCount ? kFunctions[row_of(op)] : nullptr; }

const char* matrix_modifier_fault(Op op, uint8_t cbsz, uint8_t abid, uint8_t blgp) {
  if (row_of(op) >= kCount) return nullptr;
  const Shape& s = kShapes[row_of(op)];
  if (s.a == Element::f8f6f4) return nullptr;  // formats; the decoder knows the reserved ones
  if (s.sparse) return blgp ? "BLGP on a sparse matrix instruction" : nullptr;
  if (s.a == Element::f64) return cbsz || abid ? "CBSZ or ABID on an f64 matrix instruction" : nullptr;
  if ((s.a == Element::fp8 || s.a == Element::bf8) && (cbsz || abid || blgp))
    return "CBSZ, ABID or BLGP on an 8-bit float matrix instruction";
  if (1 << cbsz > s.blocks) return "a CBSZ that broadcasts to more blocks than the instruction has";
  return abid >= 1 << cbsz ? "an ABID beyond the blocks that CBSZ broadcasts to" : nullptr;
}

int matrix_cycles(Op op, uint8_t cbsz, uint8_t blgp, Arch arch) {
  if (row_of(op) >= kCount) return 0;
  const Shape& s = kShapes[row_of(op)];
  const int cycles = arch == Arch::gfx950 ? s.cycles_gfx950 : s.cycles_gfx942;
  if (s.a != Element::f8f6f4) return cycles;
  const bool eight_bit = element_bits(element_of_format(cbsz)) == 8 || element_bits(element_of_format(blgp)) == 8;
  return eight_bit ? cycles : cycles / 2;
}

MatrixShape matrix_shape(Op op, uint8_t cbsz, uint8_t blgp) {
  MatrixShape shape{};
  if (row_of(op) >= kCount) return shape;
  const Shape& s = kShapes[row_of(op)];
  const bool mixed = s.a == Element::f8f6f4;
  const Element a = mixed ? element_of_format(cbsz) : s.a, b = mixed ? element_of_format(blgp) : s.b;
  if (mixed && (a == Element::f8f6f4 || b == Element::f8f6f4)) return shape;
  shape.m = static_cast<uint8_t>(s.m);
  shape.n = static_cast<uint8_t>(s.n);
  shape.k = static_cast<uint8_t>(s.k);
  shape.blocks = static_cast<uint8_t>(s.blocks);
  shape.a_regs = static_cast<uint8_t>(registers_per_lane(a, s.k / s.groups(s.m) / (s.sparse ? 2 : 1)));
  shape.b_regs = static_cast<uint8_t>(registers_per_lane(b, s.k / s.groups(s.n)));
  shape.cd_regs = static_cast<uint8_t>(registers_per_lane(s.cd, s.result_items()));
  shape.sparse = s.sparse;
  return shape;
}

}  // namespace hfemu
