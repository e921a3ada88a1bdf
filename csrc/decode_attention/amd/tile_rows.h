// What the kernels of every cache share about a tile of 16 query rows by tiles of 16 keys: which row a lane has, which keys it
// sees, and how they are read. Lane (g = lane / 16, i = lane % 16) holds keys 16 t + 4 g + r, r < 4, of row i.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "work.h"

namespace hf::decode_attention {

// Without these the compiler loads and converts all keys of a block ahead of their products and runs out of registers.
__device__ inline void stay_in_order() { __builtin_amdgcn_sched_barrier(0); }

/// Which columns of V, of the kColumns that a wave owns, a lane of column index i has: kWide from kWide i on. Of 192 a lane has
/// 8 of the first 128 and 4 of the other 64, so that the sizes of loads are powers of two and at most two lanes share a block
/// of 32.
template <int kColumns>
struct Columns {
  static constexpr int kNarrow = kColumns == 192 ? 4 : 0;
  static constexpr int kWide = kColumns / 16 - kNarrow;
  static constexpr int kNarrowFrom = 16 * kWide;
  static constexpr int kPerLane = kWide + kNarrow;

  template <int kValue>
  struct Count {
    static constexpr int value = kValue;
  };
  /// Calls use(count, at, sums) for each run of neighbouring columns whose sums a lane of `group` has after the products:
  /// columns at .. at + count - 1 of the wave, `count` a compile-time number; sums(c) is the sum of column at + c.
  template <class Use>
  __device__ __forceinline__ static void each_stretch(const dev::f32x4 (&acc)[kPerLane], uint32_t group, Use use) {
    use(Count<4 * kWide>{}, 4 * kWide * group, [&](int c) { return acc[c % kWide][c / kWide]; });
    if constexpr (kNarrow > 0)
      use(Count<4 * kNarrow>{}, kNarrowFrom + 4 * kNarrow * group,
          [&](int c) { return acc[kWide + c % kNarrow][c / kNarrow]; });
  }
};

/// A buffer over `keys` keys of the tile: the range check gives 0 for every other key and its scales.
__device__ inline dev::Buffer tile_of(const Cache& cache, const uint8_t* data, const Tile& tile) {
  return dev::make_buffer(data + tile.page * cache.page_stride + uint64_t{tile.slot} * cache.slot_stride,
                          tile.keys * cache.slot_stride);
}

/// The row of a lane, of the tile whose first row is `row0`. Lanes without one of their own load the last one.
struct Row {
  uint32_t index, token, head;  // the head of those that share the KV head

  /// `p`, here and below: a Problem, or First.
  template <class P>
  __device__ __forceinline__ Row(const P& p, const Tokens& tokens, uint32_t row0, uint32_t lane)
      : index(row0 + lane % kTileN) {
    const uint32_t loaded = min(index, p.group * tokens.count - 1);
    // Exact up to kMaxGroup heads: the float quotient is off by less than 2^-22 of it and at least 1 / 32 away from an integer.
    const float inverse = __builtin_amdgcn_rcpf(static_cast<float>(tokens.count));
    head = static_cast<uint32_t>((static_cast<float>(loaded) + 0.5f) * inverse);
    token = loaded - head * tokens.count;
  }

  /// Elements of q and out before it.
  template <class P>
  __device__ __forceinline__ uint64_t offset(const P& p, const Tokens& tokens, uint32_t kv_head, uint32_t head_dim) const {
    return (uint64_t{tokens.first + token} * (p.kv_heads.value * p.group) + kv_head * p.group + head) * head_dim;
  }
};

/// The query rows of a work-group, which has rows row0 .. row0 + 15 of a sequence's KV head.
struct QueryTile {
  uint32_t batch, head, row0;
  Tokens tokens;

  __device__ __forceinline__ explicit QueryTile(const First& first)
      : batch(first.kv_heads.quotient(blockIdx.y)), head(blockIdx.y - batch * first.kv_heads.value),
        row0(blockIdx.x * kBlockM), tokens(first, batch) {}
  /// The list of keys that the rows attend to: the sequence's, or their KV head's own.
  __device__ __forceinline__ uint32_t list(const First& first) const { return first.per_head & kOwnKeys ? blockIdx.y : batch; }
  /// Whether the work-group has no row: the grid covers the most tokens that a sequence has.
  __device__ __forceinline__ bool is_empty(const First& first) const {
    return first.q_starts && row0 >= first.group * tokens.count;
  }
  /// Elements of q before the lane's row.
  __device__ __forceinline__ uint64_t first_element(const First& first, uint32_t head_dim) const {
    return Row(first, tokens, row0, dev::lane_index()).offset(first, tokens, head, head_dim);
  }
};

/// Where the rows of a sequence's KV head are in the workspaces: from here on, its query heads and their tokens.
__device__ __forceinline__ uint64_t first_row(const Problem& p, const Tokens& tokens, uint32_t kv_head) {
  return uint64_t{tokens.first} * (p.kv_heads.value * p.group) + kv_head * p.group * tokens.count;
}

/// The address of the log-sum-exp of query head `head` (of all heads) and of a token of the sequence.
__device__ __forceinline__ uint64_t lse_place(const Problem& p, const Tokens& tokens, uint32_t head, uint32_t token) {
  const uint64_t sequence = p.q_starts ? tokens.first : uint64_t{tokens.first} * (p.kv_heads.value * p.group);
  return sequence + uint64_t{head} * p.lse_stride + token;
}

/// Sets the scores of keys that a lane's row does not see to -inf, and returns which of its four keys it sees. kPartly: a row
/// may see only some of the tile's keys; the sequence has `left` keys from the first one on, and the wave has `keys`. Otherwise
/// every row sees the first `left` keys, and the others do not exist. Inlined before other optimisations: optimised by itself
/// first, it keeps 16 comparisons in scalar registers, which then spill.
template <bool kPartly, int kBlockN, int kCount>
__device__ __forceinline__ Seen hide(const Problem& p, const Work<kBlockN>& work, uint32_t row0, int32_t left, uint32_t keys,
                                     dev::f32x4 (&scores)[kCount]) {
  Seen seen;
  if constexpr (kPartly) {
    const Tokens tokens = tokens_here(p, work);
    const uint32_t lane = dev::lane_index();
    const auto first = 4 * static_cast<int32_t>(lane / kTileN);
    const int32_t hidden = p.causal ? static_cast<int32_t>(tokens.count - 1 - Row(p, tokens, row0, lane).token) : 0;
    seen = {left - hidden - static_cast<int32_t>(p.window) - first, min(left - hidden, static_cast<int32_t>(keys)) - first};
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (!seen(r)) scores[0][r] = -__builtin_inff();
  } else if (left < kCount * kTileN) {
    const int32_t own_left = left - 4 * static_cast<int32_t>(dev::lane_index() / kTileN);
#pragma unroll
    for (int t = 0; t < kCount; ++t)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (own_left <= kTileN * t + r) scores[t][r] = -__builtin_inff();
  }
  return seen;
}

/// The largest of a lane's scores.
template <int kCount>
__device__ __forceinline__ float largest_of(const dev::f32x4 (&scores)[kCount]) {
  float largest = -__builtin_inff();
#pragma unroll
  for (int t = 0; t < kCount; ++t)
#pragma unroll
    for (int r = 0; r < 4; ++r) largest = __builtin_fmaxf(largest, scores[t][r]);
  return largest;
}

}  // namespace hf::decode_attention
