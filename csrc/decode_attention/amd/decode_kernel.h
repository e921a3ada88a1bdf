// Split-K decode attention over an fp8 cache: a wave (two at D = 256) per 16 query rows, KV head, sequence and key range.
//
//   rows:    the query heads that share a KV head and their Mq tokens are folded, row m = head * Mq + token
//   keys:    blocks of 64, 32 or 16; a split's blocks follow each other, and so do those of its `ranges`, one per wave
//   columns: a wave owns 64, 128 or 192 columns of V. At D = 256 two waves share a range: each multiplies its half of K and q,
//            they exchange the sums through LDS, and each owns half of V's columns
//
//   scores^T [64 keys x 16 rows] = K [64 x D] Q^T      lane (g = lane / 16, i = lane % 16): keys 16 t + 4 g + r of row i
//   out^T    [D x 16 rows]      += V^T [D x 64] P^T    lane: d = (4 g + r) D/16 + j of row i, j < D/16 (Columns has D = 192)
//
// Both products are transposed, so that a lane holds one row's statistics, and the scores leave the first product as the
// second one takes them: no exchange between lanes but the row's maximum. The k index of an MFMA is permuted at will where
// both operands agree: K and Q take d = 64 c + 16 g + j (one 16-byte load each), V takes D/16 neighbouring bytes of a key
// per lane, 16 lanes to a row.
//
// K enters its product as it lies in memory, against q as two e4m3 terms that add up to its bf16 value exactly (three for
// f16; query.h): no instruction converts K. V is transposed byte by byte, along the way of its exact conversion to bf16. The
// weights are rounded to bf16, off by at most 2^-8 of each: the only rounding of the products, worst output error 3.4e-4 on
// outputs of 3.6e-2 (root mean square, 2,048 keys), 1e-6 of the log-sum-exp. Weights as two fp8 terms would take 30 more
// instructions per block, as one term ten times the error; q as one term would cost 1e-2 of the log-sum-exp. Scales stay out of
// the products:
//   q.(s k + t) = s (q.k) + t sum(q)        sum p (s v + t) = sum (p s) v + sum p t
//
// Blocks hold keys that every token of the sequence sees. Tiles with keys that only some see come one by one before them: a
// key's bytes may be NaN, which a weight of 0 does not hide (hidden_keys.h).
//
// Bytes per key and KV head: 2 D, each read once; 16 rows or fewer share them. Memory is the bound: 2 D bytes for
// 6 * 16 * D flops of MFMA.
//
// Latency: the loads of a block's K wait together, and those of its V are under way meanwhile (blocks of 16 and 32 keys) or
// during the softmax (64): one trip to memory for a block of 16 or 32 keys, two for 64. Blocks of 64 with a scale per row load V
// after the softmax (three trips), except at D = 64; at D = 192 there is a trip for each tile of K as well: registers are short.
// Two trips come before them: the sequence's length with q and the problem, then the line of the page table. Most calls are
// bound by these trips, not by bytes.
//
// Registers: at most 128 VGPRs (88 at D = 64) and no spills, so four waves per SIMD (five at D = 64); the
// registry's limits hold every variant to it. LDS of a work-group: Shape::lds_bytes; with bf16 and blocks of 64, 2 KiB at
// D = 128, 12 KiB at D = 256 (8 KiB with blocks of 32, which leaves gfx942's 64 KiB four waves per SIMD).
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "fp8_products.h"
#include "hidden_keys.h"
#include "merge_ranges.h"
#include "output.h"
#include "work.h"
#include "query.h"
#include "row_end.h"
#include "row_words.h"
#include "tile_rows.h"

namespace hf::decode_attention {

/// How D is spread over waves, and the LDS they need.
template <class Half, int kD>
struct Shape {
  static constexpr int kColumns = kD < 256 ? kD : 128;  // that a wave owns
  static constexpr int kParts = kD / kColumns;          // waves that share a key range
  static constexpr int kChunks = kColumns / 64;         // 16-byte loads of a key per lane, for the first product
  static_assert(kD % kColumns == 0 && kColumns % 64 == 0, "a lane loads whole 16-byte pieces of a key");

  /// Bytes that one wave writes while it runs: a block's scores, or the words of its keys.
  static constexpr uint32_t slot_bytes(int block_n, bool row_scales) {
    const uint32_t scores = kParts > 1 ? block_n * kBlockM * 4 : 0;
    const uint32_t words = row_scales ? block_n * 4 : 0;
    return scores > words ? scores : words;
  }
  /// Bytes of a work-group of `waves` waves: the finer terms of q, then a slot per wave. The ranges' statistics and sums
  /// take the place of both at the end.
  static constexpr uint32_t lds_bytes(int block_n, int waves, bool row_scales) {
    const uint32_t running = kParts * Query<Half, kChunks>::kLdsBytes + waves * slot_bytes(block_n, row_scales);
    const uint32_t merge = waves > kParts ? waves / 2 * kColumns * kBlockM * 4 : 0;
    return running > merge ? running : merge;
  }
};

template <class Half, int kD, int kBlockN, bool kRowScales>
class Wave {
  using Layout = Shape<Half, kD>;

 public:
  static constexpr int kTiles = kBlockN / kTileN;
  static constexpr int kColumns = Layout::kColumns;
  static constexpr int kParts = Layout::kParts;
  static constexpr int kChunks = Layout::kChunks;
  using QueryPieces = typename Query<Half, kChunks>::Pieces;
  using Dealt = Columns<kColumns>;
  static constexpr int kPerLane = Dealt::kPerLane;  // bytes of a key per lane, for the second product
  // Where registers suffice, one wait serves all loads of a block's K, and V's loads are issued before the softmax; in a small
  // block, before that wait.
  static constexpr int kTilesInFlight = kChunks < 3 ? kTiles : 1;
  static constexpr bool kTogether = kChunks < 3 && kTiles <= 2;
  static constexpr bool kAhead = kTogether || kChunks == 1 || (kChunks == 2 && !kRowScales);

  /// `finer`: where the finer terms of q go; `own` and `other`: the slots of the wave and of that with the other half of D.
  __device__ Wave(const Problem& problem, uint32_t row0, const Work<kBlockN>& work, const QueryPieces& pieces, float k_scale,
                  uint32_t range, uint32_t part, uint8_t* finer, uint8_t* own, const uint8_t* other)
      : p(problem), work(work), row0(row0), part(part), own_slot(own), other_slot(other),
        finer(reinterpret_cast<dev::u32x4*>(finer)), lane(dev::lane_index()),
        query(pieces, reinterpret_cast<dev::u32x4*>(finer), lane, range == 0) {
    const uint32_t group = lane / kTileN, column = lane % kTileN;
    k_data = p.k.data + work.head * p.k.head_stride + part * kColumns;
    v_data = p.v.data + work.head * p.v.head_stride + part * kColumns;
    k_offset = column * p.k.slot_stride + 16 * group;
    v_offset = 4 * group * p.v.slot_stride + Dealt::kWide * column;
    v_narrow = 4 * group * p.v.slot_stride + Dealt::kNarrowFrom + Dealt::kNarrow * column;
    if constexpr (kRowScales) {
      k_rows = p.k.rows + work.head * p.k.rows_head_stride;
      v_rows = p.v.rows + work.head * p.v.rows_head_stride;
    }
    const float scale = kRowScales ? p.factor : p.factor * scale_in_logits(k_scale);
    factor = __builtin_ldexpf(scale, -query.exponent);
    q_sum = query.sum * p.factor;
  }

  __device__ void run() {
    if (!p.all_seen) run_partly_seen();
    const uint32_t begin = work.whole_begin, whole = work.whole_end;
    // Waves that share a range meet at barriers in every block, so all waves of the work-group run the same number of blocks.
    const uint32_t stop = kParts > 1 ? begin + work.trips * kBlockN : whole;
    Cursor cursor(p, work.list, begin, whole, work.length);
    for (uint32_t key = begin; key < stop; key += kBlockN) {
      Tile tiles[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) tiles[t] = cursor.next();
      block<kTiles, false>(tiles, static_cast<int32_t>(whole - key));
    }
  }

  dev::f32x4 acc[kPerLane] = {};
  float maximum = -__builtin_inff();
  dev::f32x2 total = {}, shifted = {};  // of the lane's own keys, in two sums each

  /// Stores the lane's D/4 neighbouring columns of its row, whose weights add up to `total` and, times the shift of V, to
  /// `shifted`.
  __device__ void store(uint32_t split, float total, float shifted) const {
    // Computed again, not kept in registers over the loop.
    const uint32_t own_lane = dev::lane_index();
    const Problem p = problem_here();
    const Tokens tokens = tokens_here(p, work);
    const Row row(p, tokens, row0, own_lane);
    const auto [inverse, lse] = RowEnd(maximum, total, p.splits == 1 ? p.sinks : nullptr, work.head * p.group + row.head);
    const float shift = kRowScales ? shifted * inverse : 0.f;
    const float v_scale = kRowScales ? 1.f : load_constant(p.v.scale + p.v.scale_stride * work.head);
    const float scale = inverse == 0.f ? 0.f : inverse * v_scale;
    if (row.index >= p.group * tokens.count) return;
    const uint32_t group = own_lane / kTileN;
    const bool first = group == 0 && part == 0;
    if (p.splits == 1) {
      const uint64_t offset = row.offset(p, tokens, work.head, kD) + part * kColumns;
      Dealt::each_stretch(acc, group, [&](auto count, uint32_t at, auto sums) {
        store_row<Half, count.value>(p, offset + at, [&](int c) { return sums(c) * scale + shift; });
      });
      if (first) p.lse[lse_place(p, tokens, work.head * p.group + row.head, row.token)] = lse * kLn2;
      return;
    }
    const uint64_t slice = uint64_t{split} * p.rows + first_row(p, tokens, work.head) + row.index;
    float* const to = p.partial + slice * kD + part * kColumns;
    Dealt::each_stretch(acc, group, [&](auto count, uint32_t at, auto sums) {
      store_values<float, count.value>(to + at, [&](int c) { return sums(c) * scale + shift; });
    });
    if (first) p.partial_lse[slice] = lse;
  }

 private:
  // The tiles with keys that only some tokens see.
  __device__ void run_partly_seen() {
    const Sight sight(p, dev::wave_value_here(work.list), work.length);
    for (uint32_t key = sight.begin;; key += kTileN) {
      if (key >= sight.whole_begin) key = max(key, sight.whole_end);
      // Waves that share a range go through the same tiles.
      if (key >= min(work.length, kParts > 1 ? work.split_end : work.end)) break;
      if (key < (kParts > 1 ? work.split_begin : work.begin)) continue;
      const Tile tiles[1] = {tile_at(p, work, key)};
      block<1, true>(tiles, static_cast<int32_t>(work.length - key));
    }
  }

  using Terms = TermProducts<Half, kChunks>;
  using Values = ValueProducts<kPerLane / 4>;
  using Bytes = typename Values::Bytes;
  using Weights = typename Values::Weights;

  // kPartly: a row may see only some of the keys; the sequence has `left` keys from the first one on. Otherwise every row sees
  // the first `left` keys, and the others do not exist.
  template <int kCount, bool kPartly>
  __device__ void block(const Tile (&tiles)[kCount], int32_t left) {
    uint32_t word = 0, v_word = 0;
    if constexpr (kRowScales) word = load_row_word(k_rows, p.k.rows_page_stride, p.k.rows_slot_stride, tiles);
    Bytes values[4 * kCount];
    const auto load_v_word = [&] {
      if constexpr (kRowScales) {
        const Cache v = kParts > 1 ? problem_here().v : p.v;  // scalar registers are short where two waves share a range
        v_word = load_row_word(v_rows, v.rows_page_stride, v.rows_slot_stride, tiles);
      }
    };
    dev::f32x4 scores[kCount];
    constexpr int kInFlight = kCount < kTilesInFlight ? kCount : kTilesInFlight;
#pragma unroll
    for (int t = 0; t < kCount; t += kInFlight) {
      products<kInFlight>(tiles + t, scores + t, [&] {
        if constexpr (kTogether) {
          load_v_word();
          load_values<kCount>(tiles, values);
        }
      });
    }
    if constexpr (kAhead && !kTogether) {
      load_values<kCount>(tiles, values);
      stay_in_order();
    }
    if constexpr (kRowScales) {
      const uint8_t* words = share_row_words<kCount>(own_slot, word_in_logits(word));
      const float shift = dev::lane_float_here(q_sum);
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        const RowWords own = row_words(words, t);
        scores[t] = own.scale * scores[t] + own.shift * shift;
        stay_in_order();
      }
    }
    if constexpr (kParts > 1) add_other_part(scores);
    if (p.cap != 0.f) cap_scores(problem_here(), scores);
    // As in load_v_word, scalar registers are short.
    const Seen seen = hide<kPartly>(kPartly && kParts > 1 ? problem_here() : p, work, row0, left, tiles[0].keys, scores);
    if constexpr (!kTogether) load_v_word();

    const float next = __builtin_fmaxf(maximum, column_max(largest_of(scores)));
    const float base = next == -__builtin_inff() ? 0.f : next;  // nothing seen yet: -inf - 0 instead of -inf + inf
    const float keep = __builtin_amdgcn_exp2f(maximum - base);
    maximum = next;
    total *= keep;
    shifted *= keep;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) acc[j] *= keep;

    const uint8_t* words = nullptr;
    if constexpr (kRowScales) {
      // A lane without a key holds another key's word, which times 0 may be NaN.
      v_word = static_cast<int32_t>(dev::lane_index()) < left ? v_word : 0;
      if constexpr (kPartly) v_word = without_special_words(v_word, seen.here(), tiles[0].keys);
      words = share_row_words<kCount>(own_slot, v_word);
    }
    Weights weights[kCount];
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      dev::f32x4 weight = scores[t] - base;
#pragma unroll
      for (int r = 0; r < 4; ++r) weight[r] = __builtin_amdgcn_exp2f(weight[r]);
      total += weight.lo + weight.hi;
      if constexpr (kRowScales) {
        const RowWords own = row_words(words, t);
        shifted += weight.lo * own.shift.lo;
        shifted += weight.hi * own.shift.hi;
        weight *= own.scale;
        stay_in_order();
      }
      weights[t] = dev::nearest_bf16(weight);
    }
    stay_in_order();
    constexpr int kStep = kCount > 1 ? 2 : 1;  // tiles of one instruction of the second product
#pragma unroll
    for (int t = 0; t < kCount; t += kStep) {
      if constexpr (!kAhead) load_values<kStep>(tiles + t, values + 4 * t);
      if constexpr (kPartly) Values::take_nans(acc, values + 4 * t, ones_where<dev::bf16>(seen.here()));
      Values::template add<kStep>(acc, values + 4 * t, weights + t);
    }
  }

  // The words of V of a tile. A key whose scale or shift is infinite or NaN makes the rows that see it NaN, and its word
  // becomes 0; so does the word of a key that the wave does not have.
  __device__ uint32_t without_special_words(uint32_t word, const Seen& seen, uint32_t keys) {
    const uint32_t own_lane = dev::lane_index();
    word = own_lane < keys ? word : 0;
    const auto special = static_cast<uint32_t>(__builtin_amdgcn_ballot_w64(has_special_half(word)));
    const uint32_t own = special >> (own_lane / kTileN * 4);
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (seen(r) && own >> r & 1) shifted[0] = __builtin_nanf("");
    return has_special_half(word) ? 0 : word;
  }

  // q by K of the next kCount tiles: keys 4 g + r of row i. `meanwhile` is called when the loads are on their way.
  template <int kCount, class F>
  __device__ void products(const Tile* tiles, dev::f32x4* sums, F meanwhile) const {
    dev::u32x4 bytes[kCount][kChunks];
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      const dev::Buffer buffer = tile_of(p.k, k_data, tiles[t]);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) bytes[t][c] = dev::load_b128(buffer, k_offset, 64 * c);
      sums[t] = {};
    }
    meanwhile();
    uint32_t scales = kRowScales ? 0 : Terms::scales();
    // Read from LDS again for each group of tiles, one term after the other: registers are short.
    const uint32_t place = dev::lane_index();
#pragma unroll
    for (int term = kTerms<Half> - 1; term >= 0; --term) {
      stay_in_order();
      dev::u32x4 row[kChunks];
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        row[c] = term < query.kKept ? query.kept[term % query.kKept][c] : finer[query.place(term, c, place)];
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        // With a scale per row no register is left for it between the products.
        if (kRowScales && term > 0) scales = Terms::scales();
        sums[t] = Terms::multiplied(bytes[t], row, term, scales, sums[t]);
      }
    }
    const float times = dev::lane_float_here(factor);
#pragma unroll
    for (int t = 0; t < kCount; ++t) sums[t] = dev::lane_vector_here(sums[t] * times);
    stay_in_order();
  }

  // Adds what the wave with the other half of D has for the same rows and keys.
  template <int kCount>
  __device__ void add_other_part(dev::f32x4 (&scores)[kCount]) {
    const uint32_t lane = dev::lane_index();
    auto* own = reinterpret_cast<dev::f32x4*>(own_slot) + lane;
    const auto* other = reinterpret_cast<const dev::f32x4*>(other_slot) + lane;
#pragma unroll
    for (int t = 0; t < kCount; ++t) own[t * dev::kWaveSize] = scores[t];
    __syncthreads();  // before the other slot is read
#pragma unroll
    for (int t = 0; t < kCount; ++t) scores[t] += other[t * dev::kWaveSize];
    __syncthreads();  // before a slot is written again
  }

  // V of the next kStep tiles: element 4 u + r of a lane is key 16 u + 4 g + r.
  template <int kStep>
  __device__ void load_values(const Tile* tiles, Bytes* bytes) const {
#pragma unroll
    for (int u = 0; u < kStep; ++u) {
      const dev::Buffer buffer = tile_of(p.v, v_data, tiles[u]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        bytes[4 * u + r] = load_bytes(buffer, r * p.v.slot_stride);
    }
  }

  __device__ Bytes load_bytes(dev::Buffer tile, uint32_t wave_offset) const {
    if constexpr (kPerLane == 4) return dev::load_b32(tile, v_offset, wave_offset);
    if constexpr (kPerLane == 8) return dev::load_b64(tile, v_offset, wave_offset);
    if constexpr (kPerLane == 12) {
      const dev::u32x2 wide = dev::load_b64(tile, v_offset, wave_offset);
      return Bytes{wide[0], wide[1], dev::load_b32(tile, v_narrow, wave_offset)};
    }
  }

  const Problem& p;
  const Work<kBlockN>& work;
  const uint32_t row0;
  const uint32_t part;
  uint8_t* const own_slot;
  const uint8_t* const other_slot;
  const dev::u32x4* const finer;
  const uint32_t lane;
  const Query<Half, kChunks> query;
  const uint8_t *k_data, *v_data;  // of the KV head
  const uint8_t *k_rows, *v_rows;
  uint32_t k_offset, v_offset, v_narrow;  // of the lane in a tile, in bytes
  float factor, q_sum;
};

/// Waves per SIMD for which registers suffice. Clang 21 spills 16 to 44 bytes of a head of 192 into scratch at four.
constexpr int least_waves(int d) { return d == 192 && __clang_major__ < 22 ? 3 : 4; }

/// Grid: (ceil(M / 16), B * Hkv, splits); block: `ranges` times Shape::kParts waves, part fastest; dynamic LDS:
/// Shape::lds_bytes.
template <class Half, int kD, int kBlockN, bool kRowScales>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize, least_waves(kD)) void decode_split(
    const int32_t* seqlens, const int32_t* q_starts, const void* q, const float* k_scale,
    uint32_t kv_heads, uint32_t kv_factor, uint32_t kv_shift, uint32_t group, uint32_t mq, uint32_t per_head,
    const Problem problem) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host pass needs no more than the launch
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  using Layout = Shape<Half, kD>;
  using AnyWave = Wave<Half, kD, kBlockN, kRowScales>;
  constexpr int kParts = Layout::kParts;
  const First first = {seqlens, q_starts, q, k_scale, {kv_heads, kv_factor, kv_shift}, group, mq, per_head};
  const QueryTile tile(first);
  if (tile.is_empty(first)) return;
  const uint32_t index = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t range = index / kParts, part = index % kParts;
  // All of these are under way at once.
  const int32_t length = dev::load_constant(seqlens + tile.list(first));
  const typename AnyWave::QueryPieces pieces(static_cast<const Half*>(q) + tile.first_element(first, kD) +
                                             part * AnyWave::kColumns + 16 * (dev::lane_index() / kTileN));
  float k_factor = 1.f;
  if constexpr (!kRowScales) k_factor = load_constant(k_scale + (per_head & kOwnScale ? tile.head : 0));
  const Work<kBlockN> work(problem, tile.list(first), tile.head, length, blockIdx.z, range);
  constexpr uint32_t kSlot = Layout::slot_bytes(kBlockN, kRowScales), kFiner = Query<Half, Layout::kChunks>::kLdsBytes;
  uint8_t* const slots = lds + kParts * kFiner;
  // Loaded ahead of q's conversion, which hides the trips to memory; later loads find these lines in the scalar cache.
  float v_factor = 1.f;
  if constexpr (!kRowScales) v_factor = load_constant(problem.v.scale + problem.v.scale_stride * tile.head);
  stay_in_order();
  const uint32_t page =
      Cursor(problem, dev::wave_value_here(work.list), dev::wave_value_here(work.whole_begin), 0, work.length).listed();
  stay_in_order();
  AnyWave wave(problem, tile.row0, work, pieces, k_factor, range, part, lds + part * kFiner, slots + index * kSlot,
               slots + (index ^ (kParts - 1)) * kSlot);
  dev::wave_values_loaded_here(page, v_factor);
  if (problem.ranges > 1) __syncthreads();  // the finer terms are written
  wave.run();
  float total, shifted;
  merge_ranges(wave, kParts, problem_here().ranges, range, part, lds, total, shifted);
  if (range == 0) wave.store(blockIdx.z, total, shifted);
#endif
}

}  // namespace hf::decode_attention
