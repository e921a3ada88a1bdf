// Split-K decode attention over rows that are found one by one: pages of any size, from one key on, and head dimensions D that
// are multiples of 8, from 16 to 512. The other kernels read tiles of 16 keys in a row at a D of their own.
//
//   rows:    as in decode_kernel.h
//   columns: a wave owns a part of D, 128 columns. The 1 to 4 waves of a key range each multiply their part of K and q, add up
//            the scores through LDS, all in the same order, and have their part of V
//   keys:    blocks of 32. Lane l finds key l % 32: its page, the addresses of its rows of K and V and, where rows have them, its
//            words of scale and shift; all of these go to the lanes that need them through LDS
//
//   scores^T [32 keys x 16 rows] = K [32 x 128] Q^T    lane (g = lane / 16, i = lane % 16): keys 16 t + 4 g + r of row i
//   out^T    [128 x 16 rows]    += V^T [128 x 32] P^T  lane: d = 32 g + 8 r + j of row i, j < 8
//
// A lane without a key takes the block's last key. Either all rows see that key or, in tiles with keys that only some see, its
// special values are taken out as a hidden key's are.
//
// Bytes per key and KV head: 2 D of fp8, 4 D of 16-bit elements, D + 8 N of int4 with N scales a row, each read once, and 4 of
// the page table for each key.
// Latency: a block waits for memory once; the entries of the page table for the next block are asked for before.
//
// Registers: at most 128 VGPRs over fp8 and int4, 168 over 16-bit elements, no spills; the registry's limits hold every variant to it.
// LDS of a work-group: gathered_lds_bytes.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "gathered_parts.h"
#include "hidden_keys.h"
#include "merge_kernel.h"
#include "merge_ranges.h"
#include "output.h"
#include "row_end.h"
#include "tile_rows.h"

namespace hf::decode_attention {

constexpr int kGatheredBlockN = 32;
constexpr uint32_t kMaxDim = kMaxWaves * kPartColumns;

/// Waves that share a key range at a head dimension.
constexpr uint32_t parts_of(uint32_t d) { return (d + kPartColumns - 1) / kPartColumns; }

/// The LDS that one wave writes while it runs.
struct GatheredSlot {
  uint64_t k_rows[kGatheredBlockN], v_rows[kGatheredBlockN];  // addresses
  uint32_t k_words[kGatheredBlockN], v_words[kGatheredBlockN];
};
/// Scores of a block for the other parts; two of them take turns, so that one barrier a block is enough.
struct GatheredScores {
  dev::f32x4 tiles[2][kGatheredBlockN / kTileN][dev::kWaveSize];
};

/// Bytes of a work-group of `waves` waves, `parts` of which share a range: what waves with the same columns share, a slot and
/// scores per wave. The ranges' statistics and sums take the place of all at the end.
template <class Part>
constexpr uint32_t gathered_lds_bytes(uint32_t parts, uint32_t waves) {
  const uint32_t scores = parts > 1 ? sizeof(GatheredScores) : 0;
  const uint32_t running = parts * Part::kSharedBytes + waves * static_cast<uint32_t>(sizeof(GatheredSlot) + scores);
  const uint32_t merge = waves > parts ? waves / 2 * kPartColumns * kBlockM * 4 : 0;
  return running > merge ? running : merge;
}

/// Stores elements offset .. offset + count - 1 of out, count a multiple of 8 up to 32: a lane's part of a row.
template <class Half, class Column>
__device__ __forceinline__ void store_columns(const Problem& p, uint64_t offset, uint32_t count, Column column) {
  if (p.output == Output::mxfp8) return store_row<Half, kMxBlock>(p, offset, column);  // D is of whole blocks
#pragma unroll
  for (uint32_t from = 0; from < kMxBlock; from += 8) {
    if (from >= count) return;
    const auto of = [&](int c) { return column(static_cast<int>(from) + c); };
    const uint64_t at = offset + from;
    if (p.output == Output::input) {
      store_values<Half, 8>(static_cast<Half*>(p.out) + at, of);
    } else if (p.output == Output::f32) {
      store_values<float, 8>(static_cast<float*>(p.out) + at, of);
    } else {
      const float inverse = dev::inverse_scale(*p.out_scale);
      float scaled[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) scaled[c] = of(c) * inverse;
      uint32_t words[2];
      encode(scaled, false, words);
      *reinterpret_cast<dev::u32x2*>(static_cast<uint8_t*>(p.out) + at) = dev::u32x2{words[0], words[1]};
    }
  }
}

/// A wave's place in its work-group.
struct GatheredPlace {
  uint32_t parts, part, range;
};

template <class Half, class Part>
class GatheredWave {
  using Weight = typename Part::Weight;

 public:
  static constexpr int kBlockN = kGatheredBlockN;
  static constexpr int kTiles = kBlockN / kTileN;

  /// `scores`: of the first part of the wave's range.
  __device__ GatheredWave(const Problem& problem, uint32_t row0, const Work<kBlockN>& work, const PartOf<Half>& of,
                          const typename Part::Queries& queries, float k_scale, const GatheredPlace& place, uint8_t* shared,
                          GatheredSlot* slot, GatheredScores* scores)
      : p(problem), work(work), row0(row0), d(of.d), place(place), slot(slot), scores_of(scores), first_page(page_of_first()),
        columns(problem, work.head, of, queries, k_scale, shared, place.range == 0) {
    k_data = reinterpret_cast<uint64_t>(p.k.data) + work.head * p.k.head_stride;
    v_data = reinterpret_cast<uint64_t>(p.v.data) + work.head * p.v.head_stride;
  }

  __device__ void run() {
    if (!p.all_seen) run_partly_seen();
    const uint32_t begin = work.whole_begin, whole = work.whole_end;
    // Waves that share a range meet at a barrier in every block, so all waves of the work-group run the same number of blocks.
    const uint32_t stop = place.parts > 1 ? begin + work.trips * kBlockN : whole;
    uint32_t page = first_page;
    for (uint32_t first = begin; first < stop; first += kBlockN) {
      if (first >= whole) {
        __syncthreads();
        continue;
      }
      const uint32_t key = key_of<kTiles>(first, whole), own = page;
      page = page_of(key_of<kTiles>(min(first + kBlockN, whole - 1), whole));
      block<kTiles, false>(key, own, kBlockN, static_cast<int32_t>(whole - first));
    }
  }

  dev::f32x4 acc[kLaneColumns] = {};
  float maximum = -__builtin_inff();  // less Part::kBias
  dev::f32x2 total = {}, shifted = {};  // of the lane's own keys, in two sums each

  /// Stores the lane's 32 neighbouring columns of its row, as far as D has them, whose weights add up to `total` and, times the
  /// shift of V, to `shifted`.
  __device__ void store(uint32_t split, float total, float shifted) const {
    const uint32_t lane = dev::lane_index(), group = lane / kTileN;
    const Problem p = problem_here();
    const Tokens tokens = tokens_here(p, work);
    const Row row(p, tokens, row0, lane);
    const auto [inverse, lse] = RowEnd(maximum, total, p.splits == 1 ? p.sinks : nullptr, work.head * p.group + row.head);
    const float scale = columns.scaled(inverse), shift = Part::kWords ? shifted * inverse : 0.f;
    const uint32_t from = place.part * kPartColumns + 4 * kLaneColumns * group;
    if (row.index >= p.group * tokens.count || from >= d) return;
    const uint32_t count = min(d - from, 4u * kLaneColumns);
    const auto column = [&](int c) { return acc[c % kLaneColumns][c / kLaneColumns] * scale + shift; };
    if (p.splits == 1) {
      store_columns<Half>(p, row.offset(p, tokens, work.head, d) + from, count, column);
      if (from == 0) p.lse[lse_place(p, tokens, work.head * p.group + row.head, row.token)] = lse * kLn2;
      return;
    }
    const uint64_t slice = uint64_t{split} * p.rows + first_row(p, tokens, work.head) + row.index;
    float* const to = p.partial + slice * d + from;
#pragma unroll
    for (uint32_t c = 0; c < 4 * kLaneColumns; c += 8) {
      if (c >= count) break;
      store_values<float, 8>(to + c, [&](int i) { return column(static_cast<int>(c) + i); });
    }
    if (from == 0) p.partial_lse[slice] = lse;
  }

 private:
  // The tiles with keys that only some tokens see.
  __device__ void run_partly_seen() {
    const bool shared = place.parts > 1;  // waves that share a range go through the same tiles, and all meet at each
    const Sight sight(p, dev::wave_value_here(work.list), work.length);
    for (uint32_t first = sight.begin;; first += kTileN) {
      if (first >= sight.whole_begin) first = max(first, sight.whole_end);
      if (first >= min(work.length, shared ? work.split_end : work.end)) break;
      if (first < (shared ? work.split_begin : work.begin)) continue;
      if (first < work.begin || first >= work.end) {
        __syncthreads();
        continue;
      }
      const uint32_t key = max(key_of<1>(first, work.end), sight.first);  // the pages before may not exist
      const auto left = static_cast<int32_t>(work.length - first);
      block<1, true>(key, page_of(key), min(work.end - first, static_cast<uint32_t>(kTileN)), left);
    }
  }

  // The lane's key of those of kCount tiles from `first` to before `end`.
  template <int kCount>
  __device__ uint32_t key_of(uint32_t first, uint32_t end) const {
    return min(first + dev::lane_index() % (kTileN * kCount), end - 1);
  }
  __device__ uint32_t page_of(uint32_t key) const {
    if (p.max_pages == 0) return work.list;
    const int32_t* table = p.block_tables + uint64_t{work.list} * p.max_pages;
    return static_cast<uint32_t>(table[p.page_size.quotient(key)]);
  }

  // For the first block, asked for before q is converted.
  __device__ uint32_t page_of_first() const {
    return work.whole_begin < work.whole_end ? page_of(key_of<kTiles>(work.whole_begin, work.whole_end)) : 0;
  }

  // As RowWave's; `key` and `page` are the lane's, `keys` and `left` as hide takes them.
  template <int kCount, bool kPartly>
  __device__ void block(uint32_t key, uint32_t page, uint32_t keys, int32_t left) {
    const uint32_t in_page = key - p.page_size.quotient(key) * p.page_size.value;
    find_rows<kCount>(page, in_page);
    const uint32_t lane = dev::lane_index(), group = lane / kTileN;
    typename Part::Key of_k[kCount];
#pragma unroll
    for (int t = 0; t < kCount; ++t) of_k[t] = columns.load_key(slot->k_rows[kTileN * t + lane % kTileN]);
    typename Part::Value of_v[4 * kCount];
#pragma unroll
    for (int t = 0; t < kCount; ++t)
#pragma unroll
      for (int r = 0; r < 4; ++r) of_v[4 * t + r] = columns.load_value(slot->v_rows[kTileN * t + 4 * group + r]);
    dev::f32x4 scores[kCount];
    columns.template products<kCount>(of_k, scores);
    if constexpr (Part::kWords) {
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
        const RowWords own = row_words(words_of(slot->k_words), t);
        scores[t] = own.scale * scores[t] + own.shift * columns.q_sum;
      }
    }
    if (place.parts > 1) add_other_parts(scores);
    if (p.cap != 0.f) cap_scores(problem_here(), scores);
    const Seen seen = hide<kPartly>(kPartly ? problem_here() : p, work, row0, left, keys, scores);
    const float next = __builtin_fmaxf(maximum, column_max(largest_of(scores)) - Part::kBias);
    const float base = next == -__builtin_inff() ? 0.f : next;  // nothing seen yet: -inf - 0 instead of -inf + inf
    const float keep = __builtin_amdgcn_exp2f(maximum - base);
    maximum = next;
    total *= keep;
    shifted *= keep;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) acc[j] *= keep;
    if constexpr (Part::kWords && kPartly) take_special_words(seen);
    Vector<Weight, 4> weights[kCount];
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      dev::f32x4 weight = scores[t] - base;
#pragma unroll
      for (int r = 0; r < 4; ++r) weight[r] = __builtin_amdgcn_exp2f(weight[r]);
      total += weight.lo + weight.hi;
      if constexpr (Part::kWords) {
        const RowWords own = row_words(words_of(slot->v_words), t);
        shifted += weight.lo * own.shift.lo;
        shifted += weight.hi * own.shift.hi;
        weight *= own.scale;
      }
      weights[t] = nearest<Weight>(weight);
    }
    stay_in_order();
    columns.template add_values<kCount, kPartly>(of_v, weights, seen, acc);
  }

  // Hands the addresses of the lane's key, and its words, on through the slot.
  template <int kCount>
  __device__ void find_rows(uint32_t page, uint32_t in_page) {
    const uint32_t lane = dev::lane_index();
    const uint64_t k_row = k_data + page * p.k.page_stride + uint64_t{in_page} * p.k.slot_stride;
    const uint64_t v_row = v_data + page * p.v.page_stride + uint64_t{in_page} * p.v.slot_stride;
    dev::wave_fence();  // what the block before reads has been read
    if (lane < kTileN * kCount) {
      slot->k_rows[lane] = k_row;
      slot->v_rows[lane] = v_row;
      if constexpr (Part::kWords) {
        const Problem here = problem_here();  // scalar registers are short
        slot->k_words[lane] = word_in_logits(word_of(here.k, page, in_page));
        slot->v_words[lane] = word_of(here.v, page, in_page);
      }
    }
    dev::wave_fence();
  }
  __device__ uint32_t word_of(const Cache& cache, uint32_t page, uint32_t in_page) const {
    return load_row<uint32_t>(reinterpret_cast<uint64_t>(cache.rows) + work.head * cache.rows_head_stride +
                              page * cache.rows_page_stride + uint64_t{in_page} * cache.rows_slot_stride);
  }
  // Where row_words finds the lane's.
  __device__ static const uint8_t* words_of(const uint32_t* words) {
    return reinterpret_cast<const uint8_t*>(words) + dev::lane_index() / kTileN * 16;
  }

  // The words of V of a tile: a key whose scale or shift is infinite or NaN makes the rows that see it NaN, and its word
  // becomes 0.
  __device__ void take_special_words(const Seen& seen) {
    const uint32_t lane = dev::lane_index();
    const uint32_t word = slot->v_words[lane % kTileN];
    const auto special = static_cast<uint32_t>(__builtin_amdgcn_ballot_w64(has_special_half(word)));
    const uint32_t own = special >> (lane / kTileN * 4);
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (seen(r) && own >> r & 1) shifted[0] = __builtin_nanf("");
    dev::wave_fence();
    if (lane < kTileN) slot->v_words[lane] = has_special_half(word) ? 0 : word;
    dev::wave_fence();
  }

  // The sums over the waves of the range, which have the same rows and keys.
  template <int kCount>
  __device__ void add_other_parts(dev::f32x4 (&scores)[kCount]) {
    const uint32_t lane = dev::lane_index();
    turn ^= 1;
#pragma unroll
    for (int t = 0; t < kCount; ++t) scores_of[place.part].tiles[turn][t][lane] = scores[t];
    __syncthreads();  // before the others' are read
#pragma unroll
    for (int t = 0; t < kCount; ++t) scores[t] = scores_of[0].tiles[turn][t][lane];
    for (uint32_t part = 1; part < place.parts; ++part)
#pragma unroll
      for (int t = 0; t < kCount; ++t) scores[t] += scores_of[part].tiles[turn][t][lane];
  }

  const Problem& p;
  const Work<kBlockN>& work;
  const uint32_t row0, d;
  const GatheredPlace place;
  GatheredSlot* const slot;
  GatheredScores* const scores_of;
  uint32_t turn = 0;
  const uint32_t first_page;
  Part columns;
  uint64_t k_data, v_data;  // of the KV head
};

/// Grid: (ceil(M / 16), B * Hkv, splits); block: `ranges` times `parts` waves, part fastest; dynamic LDS: gathered_lds_bytes.
template <class Half, class Part>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize, sizeof(typename Part::Value) > 8 ? 3 : 4) void decode_split_gathered(
    const int32_t* seqlens, const int32_t* q_starts, const void* q, const float* k_scale,
    uint32_t kv_heads, uint32_t kv_factor, uint32_t kv_shift, uint32_t group, uint32_t mq, uint32_t per_head,
    const Problem problem, uint32_t d, uint32_t parts, uint32_t groups) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host pass needs no more than the launch
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  using AnyWave = GatheredWave<Half, Part>;
  const First first = {seqlens, q_starts, q, k_scale, {kv_heads, kv_factor, kv_shift}, group, mq, per_head};
  const QueryTile tile(first);
  if (tile.is_empty(first)) return;
  const uint32_t index = dev::uniform(threadIdx.x / dev::kWaveSize), ranges = problem.ranges;
  const uint32_t range = parts == 1 ? index : parts == 2 ? index / 2 : 0;  // four waves at most
  const GatheredPlace place = {parts, index - range * parts, range};
  // All of these are under way at once.
  const int32_t length = dev::load_constant(seqlens + tile.list(first));
  float k_factor = 1.f, v_factor = 1.f;
  if constexpr (Part::kScaled) k_factor = load_constant(k_scale + (per_head & kOwnScale ? tile.head : 0));
  const PartOf<Half> of = {static_cast<const Half*>(q) + tile.first_element(first, d), d, place.part * kPartColumns,
                           groups};
  const typename Part::Queries queries(of);
  const Work<kGatheredBlockN> work(problem, tile.list(first), tile.head, length, blockIdx.z, range);
  auto* const slots = reinterpret_cast<GatheredSlot*>(lds + parts * Part::kSharedBytes);
  auto* const scores = reinterpret_cast<GatheredScores*>(slots + parts * ranges);
  // For the scalar cache, which has it when it is used.
  if constexpr (Part::kScaled) v_factor = load_constant(problem.v.scale + problem.v.scale_stride * tile.head);
  AnyWave wave(problem, tile.row0, work, of, queries, k_factor, place, lds + place.part * Part::kSharedBytes, slots + index,
               scores + range * parts);
  dev::wave_values_loaded_here(v_factor);
  if (Part::kSharedBytes > 0 && ranges > 1) __syncthreads();  // what waves with the same columns share is written
  wave.run();
  float total, shifted;
  merge_ranges(wave, parts, problem_here().ranges, range, place.part, lds, total, shifted);
  if (range == 0) wave.store(blockIdx.z, total, shifted);
#endif
}

/// Grid: (query heads times parts of D, heads fastest; the most tokens of a sequence; B).
template <class Half>
__global__ __launch_bounds__(kMergeThreads) void decode_merge_gathered(const float* partial, const float* partial_lse,
                                                                       const int32_t* q_starts, uint32_t rows, uint32_t splits,
                                                                       uint32_t heads, uint32_t mq, const Problem problem,
                                                                       uint32_t d) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host pass needs no more than the launch
  uint32_t head = blockIdx.x, first = 0;
  for (; head >= heads; head -= heads) first += kPartColumns;
  merge_columns<Half, static_cast<int>(kPartColumns)>({partial, partial_lse, q_starts, rows, splits, heads, mq}, problem, head,
                                                      PartOfRow{d, first});
#endif
}

}  // namespace hf::decode_attention
