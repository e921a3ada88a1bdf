// How a wave of gathered_kernel.h reads 128 columns of K and V, its part of D, of each format of caches.
//
// A part multiplies its columns of K by those of q, a lane (g = lane / 16, i = lane % 16) those of key 16 t + i of a tile, and of V
// it has the columns 8 i .. 8 i + 7 of four keys. Where D ends inside the part, a lane without columns loads others of the same row
// instead: of K they meet zeros of q, of V their sums are not stored. Nothing outside a row is read.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "fp8_products.h"
#include "half_products.h"
#include "int4_elements.h"
#include "query.h"
#include "row_words.h"
#include "work.h"

namespace hf::decode_attention {

constexpr uint32_t kPartColumns = 128;
constexpr int kLaneColumns = kPartColumns / kTileN;  // of a key per lane, for the second product
constexpr uint32_t kLeastDim = 16;                   // what a lane of the fp8 format loads at once

/// Elements from an address of the cache. Rows start at multiples of 4 or 8 bytes; the hardware loads 16 at any such address.
template <class T>
__device__ inline T load_row(uint64_t address) {
  typedef T Loose __attribute__((aligned(4)));
  return *(const __attribute__((address_space(1))) Loose*)address;
}

/// Where a lane's row of q is, and which columns of it the wave has.
template <class Half>
struct PartOf {
  const Half* q;
  uint32_t d, first;  // the head dimension, and the part's first column
  uint32_t groups;    // of an int4 row, each with a scale

  __device__ Vector<Half, 8> eight(uint32_t column, bool exists) const {
    const auto found = *reinterpret_cast<const Vector<Half, 8>*>(q + (exists ? column : 0));
    return exists ? found : Vector<Half, 8>{};
  }
};

/// fp8, with a scale per tensor or head, or (kRowScales) with a word of scale and shift per row.
template <class Half, bool kRowScales>
class Fp8Part {
  static constexpr int kChunks = kPartColumns / 64;
  using Terms = TermProducts<Half, kChunks>;
  using Products = ValueProducts<kLaneColumns / 4>;

 public:
  using Weight = dev::bf16;
  static constexpr bool kWords = kRowScales, kScaled = !kRowScales;
  static constexpr float kBias = 0.f;
  static constexpr uint32_t kSharedBytes = Query<Half, kChunks>::kLdsBytes;  // of the waves that have the same columns
  struct Key {
    dev::u32x4 chunks[kChunks];
  };
  using Value = typename Products::Bytes;

  /// The lane's part of its row of q, on its way. Of 16 columns that end with D after 8, the lane takes the 16 that end there; q has
  /// zeros for the first half of them.
  struct Queries {
    typename Query<Half, kChunks>::Pieces pieces;
    uint32_t k_at[kChunks];  // of K, in bytes

    __device__ explicit Queries(const PartOf<Half>& of) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t column = of.first + 64 * c + 16 * (dev::lane_index() / kTileN);
        const bool whole = column + 16 <= of.d, half = column + 8 == of.d;
        k_at[c] = whole ? column : half ? of.d - 16 : 0;
        pieces.of[c][0] = of.eight(column, whole);
        pieces.of[c][1] = of.eight(k_at[c] + 8, whole || half);
      }
    }
  };

  /// `shared`: kSharedBytes of LDS, which one of the waves writes.
  __device__ Fp8Part(const Problem& problem, uint32_t head, const PartOf<Half>& of, const Queries& queries, float k_scale,
                     uint8_t* shared, bool writes)
      : p(problem), head(head), finer(reinterpret_cast<dev::u32x4*>(shared)),
        query(queries.pieces, reinterpret_cast<dev::u32x4*>(shared), dev::lane_index(), writes) {
    const uint32_t column = of.first + kLaneColumns * (dev::lane_index() % kTileN);
    v_at = column < of.d ? column : 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) k_at[c] = queries.k_at[c];
    factor = __builtin_ldexpf(kRowScales ? p.factor : p.factor * scale_in_logits(k_scale), -query.exponent);
    q_sum = query.sum * p.factor;
  }

  /// The factor of a row's sums, which its weights' total has the `inverse` of.
  __device__ float scaled(float inverse) const {
    if (kRowScales || inverse == 0.f) return inverse;
    return inverse * load_constant(p.v.scale + p.v.scale_stride * head);
  }

  __device__ Key load_key(uint64_t row) const {
    Key key;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) key.chunks[c] = load_row<dev::u32x4>(row + k_at[c]);
    return key;
  }
  __device__ Value load_value(uint64_t row) const { return load_row<Value>(row + v_at); }

  /// q by K: keys 4 g + r of row i.
  template <int kCount>
  __device__ void products(const Key (&keys)[kCount], dev::f32x4 (&scores)[kCount]) const {
#pragma unroll
    for (int t = 0; t < kCount; ++t) scores[t] = {};
    const uint32_t place = dev::lane_index(), scales = Terms::scales();
#pragma unroll
    for (int term = kTerms<Half> - 1; term >= 0; --term) {
      stay_in_order();
      dev::u32x4 row[kChunks];
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        row[c] = term < query.kKept ? query.kept[term % query.kKept][c] : finer[query.place(term, c, place)];
#pragma unroll
      for (int t = 0; t < kCount; ++t) scores[t] = Terms::multiplied(keys[t].chunks, row, term, scales, scores[t]);
    }
#pragma unroll
    for (int t = 0; t < kCount; ++t) scores[t] *= factor;
  }

  /// Adds the second product: element 4 t + r of a lane is key 16 t + 4 g + r.
  template <int kCount, bool kPartly>
  __device__ void add_values(Value (&values)[4 * kCount], const dev::bf16x4 (&weights)[kCount], const Seen& seen,
                             dev::f32x4* acc) const {
    if constexpr (kPartly) Products::take_nans(acc, values, ones_where<dev::bf16>(seen.here()));
    Products::template add<kCount>(acc, values, weights);
  }

  float q_sum;  // of the part's columns, scaled as scores are

 private:
  const Problem& p;
  const uint32_t head;
  const dev::u32x4* const finer;
  uint32_t k_at[kChunks], v_at;  // of the lane in a row, in bytes
  const Query<Half, kChunks> query;
  float factor;
};

/// Elements of q's dtype, with a scale per tensor or head.
template <class Half>
class HalfPart {
  static constexpr int kChunks = kPartColumns / 32;
  static constexpr int kWordsOfLane = kLaneColumns / 2;

 public:
  using Weight = Half;
  static constexpr bool kWords = false, kScaled = true;
  static constexpr float kBias = __is_same(Half, _Float16) ? 15.f : 0.f;  // see half_kernel.h
  static constexpr uint32_t kSharedBytes = 0;
  struct Key {
    dev::u32x4 chunks[kChunks];
  };
  using Value = dev::u32x4;

  struct Queries {
    Vector<Half, 8> of[kChunks];

    __device__ explicit Queries(const PartOf<Half>& from) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t column = from.first + 32 * c + kLaneColumns * (dev::lane_index() / kTileN);
        of[c] = from.eight(column, column < from.d);
      }
    }
  };

  __device__ HalfPart(const Problem& problem, uint32_t head, const PartOf<Half>& of, const Queries& queries, float k_scale, uint8_t*,
                      bool)
      : p(problem), head(head), query(queries) {
    const uint32_t lane = dev::lane_index();
    left = static_cast<int32_t>(of.d - of.first - kLaneColumns * (lane / kTileN));
    k_at = 2 * (of.d - left);
    const uint32_t column = of.first + kLaneColumns * (lane % kTileN);
    v_at = column < of.d ? 2 * column : 0;
    factor = p.factor * scale_in_logits(k_scale);
  }

  __device__ float scaled(float inverse) const {
    return inverse == 0.f ? 0.f : inverse * load_constant(p.v.scale + p.v.scale_stride * head);
  }

  __device__ Key load_key(uint64_t row) const {
    Key key;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) key.chunks[c] = load_row<dev::u32x4>(row + (has(c) ? k_at + 64 * c : 0));
    return key;
  }
  __device__ Value load_value(uint64_t row) const { return load_row<Value>(row + v_at); }

  template <int kCount>
  __device__ void products(const Key (&keys)[kCount], dev::f32x4 (&scores)[kCount]) const {
    using Eight = Vector<Half, 8>;
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      scores[t] = {};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        // Where the row's first columns stand in for none, infinity by a zero of q would be NaN.
        const dev::u32x4 own = has(c) ? keys[t].chunks[c] : dev::u32x4{};
        scores[t] = product_k32(__builtin_bit_cast(Eight, own), query.of[c], scores[t]);
      }
      scores[t] *= factor;
    }
  }

  template <int kCount, bool kPartly>
  __device__ void add_values(Value (&values)[4 * kCount], const Vector<Half, 4> (&weights)[kCount], const Seen& seen,
                             dev::f32x4* acc) const {
    if constexpr (kPartly) HalfValues<Half>::template take_specials<kWordsOfLane>(values, ones_where<Half>(seen), acc);
#pragma unroll
    for (int word = 0; word < kWordsOfLane; ++word) {
      uint32_t keys[4 * kCount];
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i) keys[i] = values[i][word];
      HalfValues<Half>::template add_pair<kCount>(keys, weights, acc[2 * word], acc[2 * word + 1]);
      stay_in_order();
    }
  }

 private:
  __device__ bool has(int chunk) const { return 32 * chunk < left; }

  const Problem& p;
  const uint32_t head;
  const Queries query;
  int32_t left;         // columns from the lane's first one on to the end of D
  uint32_t k_at, v_at;  // of the lane in a row, in bytes
  float factor;
};

/// Words of eight int4 codes behind the scales and shifts of `groups` parts of a row (int4_kernel.h); a group has whole words.
template <class Half>
class Int4Part {
  static constexpr int kChunks = kPartColumns / 32;  // a word of each for a lane

 public:
  using Weight = dev::bf16;
  static constexpr bool kWords = false, kScaled = false;
  static constexpr float kBias = 0.f;
  static constexpr uint32_t kSharedBytes = 0;
  struct Key {
    uint32_t words[kChunks], scales[kChunks];
  };
  using Value = dev::u32x2;  // the word, and that of its scale

  using Queries = typename HalfPart<Half>::Queries;

  __device__ Int4Part(const Problem& problem, uint32_t, const PartOf<Half>& of, const Queries& queries, float, uint8_t*, bool)
      : p(problem), query(queries) {
    const uint32_t lane = dev::lane_index();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) k_at[c] = place_of(of, of.first + 32 * c + kLaneColumns * (lane / kTileN));
    left = static_cast<int32_t>(of.d - of.first - kLaneColumns * (lane / kTileN));
    v_at = place_of(of, of.first + kLaneColumns * (lane % kTileN));
  }

  __device__ float scaled(float inverse) const { return inverse; }

  __device__ Key load_key(uint64_t row) const {
    Key key;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      key.words[c] = load_row<uint32_t>(row + k_at[c].word);
      key.scales[c] = load_row<uint32_t>(row + k_at[c].scale);
    }
    return key;
  }
  __device__ Value load_value(uint64_t row) const {
    return Value{load_row<uint32_t>(row + v_at.word), load_row<uint32_t>(row + v_at.scale)};
  }

  template <int kCount>
  __device__ void products(const Key (&keys)[kCount], dev::f32x4 (&scores)[kCount]) const {
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      scores[t] = {};
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const ScaleShift of(32 * c < left ? keys[t].scales[c] : 0);  // 0 for what stands in for columns past D
        const Vector<Half, 4> low = nearest<Half>(of.template elements<0>(keys[t].words[c]));
        const Vector<Half, 4> high = nearest<Half>(of.template elements<1>(keys[t].words[c]));
        scores[t] = product_k32(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7), query.of[c], scores[t]);
        stay_in_order();
      }
      scores[t] *= p.factor;
    }
  }

  template <int kCount, bool kPartly>
  __device__ void add_values(Value (&values)[4 * kCount], const dev::bf16x4 (&weights)[kCount], const Seen& seen,
                             dev::f32x4* acc) const {
    uint32_t own[4 * kCount];
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) own[i] = values[i][1];
    if constexpr (kPartly) take_special_scales<kLaneColumns>(own, ones_where<dev::bf16>(seen), acc);
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      dev::bf16x4 rows[kCount];
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        dev::f32x4 elements;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const ScaleShift of(own[4 * t + r]);
          elements[r] = static_cast<float>(values[4 * t + r][0] >> 4 * j & 0xf) * of.scale + of.shift;
        }
        rows[t] = dev::nearest_bf16(elements);
      }
      if constexpr (kCount == 1)
        acc[j] = weighted<1, dev::bf16>(rows[0], weights, acc[j]);
      else
        acc[j] = weighted<2, dev::bf16>(__builtin_shufflevector(rows[0], rows[1], 0, 1, 2, 3, 4, 5, 6, 7), weights, acc[j]);
      stay_in_order();
    }
  }

 private:
  struct Place {
    uint32_t word, scale;  // of a row, in bytes
  };
  // Of the word of eight columns; of the first one where D ends before.
  __device__ static Place place_of(const PartOf<Half>& of, uint32_t column) {
    const uint32_t own = column < of.d ? column : 0;
    return {4 * (of.groups + own / 8), 4 * (own * of.groups / of.d)};
  }

  const Problem& p;
  const Queries query;
  int32_t left;  // columns from the lane's first one of K on to the end of D
  Place k_at[kChunks], v_at;
};

}  // namespace hf::decode_attention
