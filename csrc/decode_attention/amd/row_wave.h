// A wave of decode attention that owns all columns of its 16 query rows. `Rows` (Int4Rows, HalfRows) reads rows of the cache.
// The fp8 kernel has a wave of its own, because its waves may share columns.
//
//   scores^T [32 keys x 16 rows] = K [32 x D] Q^T      lane (g = lane / 16, i = lane % 16): keys 16 t + 4 g + r of row i
//   out^T    [D x 16 rows]      += V^T [D x 32] P^T    lane: d = (4 g + r) D/16 + j of row i, j < D/16 (Columns has D = 192)
//
// Blocks of 32 hold keys that every token of the sequence sees. Tiles with keys that only some see come one by one before
// them (hidden_keys.h).
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "half_products.h"
#include "hidden_keys.h"
#include "output.h"
#include "work.h"
#include "query.h"
#include "row_end.h"
#include "tile_rows.h"

namespace hf::decode_attention {

constexpr int kRowBlockN = 32;

/// Bytes of LDS of a work-group of `waves` waves: the ranges' statistics and sums at its end.
constexpr uint32_t row_lds_bytes(int head_dim, int waves) {
  return waves > 1 ? static_cast<uint32_t>(waves / 2 * head_dim * kBlockM * 4) : 0;
}

template <class Half, int kD, template <class, int> class AnyRows>
class RowWave {
  using Rows = AnyRows<Half, kD>;
  using Weight = typename Rows::Weight;

 public:
  static constexpr int kBlockN = kRowBlockN;
  static constexpr int kTiles = kBlockN / kTileN;
  using Dealt = Columns<kD>;
  static constexpr int kPerLane = Dealt::kPerLane;  // elements of a key per lane, for the second product

  /// `q`: the lane's row; `more`: what Rows takes besides.
  template <class... More>
  __device__ RowWave(const Problem& problem, uint32_t row0, const Work<kBlockN>& work, const Half* q, More... more)
      : p(problem), work(work), row0(row0), rows(problem, work.head, q, more...) {}

  __device__ void run() {
    if (!p.all_seen) run_partly_seen();
    const uint32_t begin = work.whole_begin, whole = work.whole_end;
    Cursor cursor(p, work.list, begin, whole, work.length);
    for (uint32_t key = begin; key < whole; key += kBlockN) {
      Tile tiles[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) tiles[t] = cursor.next();
      block<kTiles, false>(tiles, static_cast<int32_t>(whole - key));
    }
  }

  dev::f32x4 acc[kPerLane] = {};
  float maximum = -__builtin_inff();  // less Rows::kBias
  dev::f32x2 total = {}, shifted = {};  // of the lane's own keys, in two sums; shifts are in the elements

  /// Stores the lane's D/4 neighbouring columns of its row, whose weights add up to `total`.
  __device__ void store(uint32_t split, float total) const {
    const uint32_t lane = dev::lane_index(), group = lane / kTileN;
    const Problem p = problem_here();
    const Tokens tokens = tokens_here(p, work);
    const Row row(p, tokens, row0, lane);
    const auto [inverse, lse] = RowEnd(maximum, total, p.splits == 1 ? p.sinks : nullptr, work.head * p.group + row.head);
    const float scale = rows.scaled(inverse);
    if (row.index >= p.group * tokens.count) return;
    if (p.splits == 1) {
      const uint64_t offset = row.offset(p, tokens, work.head, kD);
      Dealt::each_stretch(acc, group, [&](auto count, uint32_t at, auto sums) {
        store_row<Half, count.value>(p, offset + at, [&](int c) { return sums(c) * scale; });
      });
      if (group == 0) p.lse[lse_place(p, tokens, work.head * p.group + row.head, row.token)] = lse * kLn2;
      return;
    }
    const uint64_t slice = uint64_t{split} * p.rows + first_row(p, tokens, work.head) + row.index;
    float* const to = p.partial + slice * kD;
    Dealt::each_stretch(acc, group, [&](auto count, uint32_t at, auto sums) {
      store_values<float, count.value>(to + at, [&](int c) { return sums(c) * scale; });
    });
    if (group == 0) p.partial_lse[slice] = lse;
  }

 private:
  // The tiles with keys that only some tokens see.
  __device__ void run_partly_seen() {
    const Sight sight(p, dev::wave_value_here(work.list), work.length);
    for (uint32_t key = sight.begin;; key += kTileN) {
      if (key >= sight.whole_begin) key = max(key, sight.whole_end);
      if (key >= work.end) break;
      if (key < work.begin) continue;
      const Tile tiles[1] = {tile_at(p, work, key)};
      block<1, true>(tiles, static_cast<int32_t>(work.length - key));
    }
  }

  // kPartly: a row may see only some of the keys; the sequence has `left` keys from the first one on. Otherwise every row sees
  // the first `left` keys, and the others do not exist.
  template <int kCount, bool kPartly>
  __device__ void block(const Tile (&tiles)[kCount], int32_t left) {
    dev::f32x4 scores[kCount];
    rows.template products<kCount>(tiles, scores);
    if (p.cap != 0.f) cap_scores(problem_here(), scores);
    const Seen seen = hide<kPartly>(p, work, row0, left, tiles[0].keys, scores);
    const float next = __builtin_fmaxf(maximum, column_max(largest_of(scores)) - Rows::kBias);
    const float base = next == -__builtin_inff() ? 0.f : next;  // nothing seen yet: -inf - 0 instead of -inf + inf
    const float keep = __builtin_amdgcn_exp2f(maximum - base);
    maximum = next;
    total *= keep;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) acc[j] *= keep;
    Vector<Weight, 4> weights[kCount];
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      dev::f32x4 weight = scores[t] - base;
#pragma unroll
      for (int r = 0; r < 4; ++r) weight[r] = __builtin_amdgcn_exp2f(weight[r]);
      total += weight.lo + weight.hi;
      weights[t] = nearest<Weight>(weight);
    }
    stay_in_order();
    rows.template add_values<kCount, kPartly>(tiles, weights, seen, acc);
  }

  const Problem& p;
  const Work<kBlockN>& work;
  const uint32_t row0;
  Rows rows;
};

}  // namespace hf::decode_attention
