// The end of decode attention's stream: the warps' sums become the block's, the blocks' the cluster's, and rows are stored.
//
//   warps  w0 w1 w2 w3   each has all rows and columns, in shared memory where its ring was
//              \   \  /   /
//   block     sums       runs of 32 columns of a row, which eight lanes add up over the warps
//               |
//   cluster   run i goes to block i % cluster, through distributed shared memory; that block adds up the parts and stores
//
// Parts are added in one order, so the bits do not depend on which block came first.
#pragma once

#include "stream_elements.h"

namespace hf::decode_attention {

/// Whose rows a block has: rows row0 and following of `rows`, of a sequence and a KV head.
struct RowsOf {
  uint32_t head, row0, rows;
};

/// What a lane has at the end of its warp's keys; see decode_stream.
template <class L>
struct Sums {
  static constexpr int kEights = L::kRows / 8, kRows = 2 * kEights;  // of a lane
  const float (&acc)[L::kHeadDim / 16][kEights][4];
  const float (&maximum)[kRows], (&total)[kRows], (&shifted)[kRows], (&gain)[kRows];
  float v_scale_of_head;
};

/// Adds up what all warps of a cluster have, and stores it. Everything in `shared` but `statistics` is free in all blocks.
template <class Half, class L>
__device__ __forceinline__ void add_up(const Problem& p, const Split& split, const Tokens& tokens, const RowsOf& of_block, const Sums<L>& of_lane,
                                       uint8_t* shared, Statistics* statistics) {
  constexpr int kD = L::kHeadDim, kRows = Sums<L>::kRows;
  constexpr bool kRowScales = L::kRowScales, kScaled = L::kScaled;
  const uint32_t head = of_block.head, row0 = of_block.row0, rows = of_block.rows;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float* const own = sums + warp * L::kSums;
    const uint32_t row = r / 2 * 8 + 2 * t + r % 2;
    const float lowered = kRowScales ? 1.f / of_lane.gain[r] : 1.f;
    const float sum = sum_of_row(of_lane.total[r]), shift = kRowScales ? sum_of_row(of_lane.shifted[r]) : 0.f;
    if (g == 0) statistics[warp * L::kRows + row] = {of_lane.maximum[r] - L::kRaised, sum, shift, of_lane.v_scale_of_head};
    const auto value = [&](int c) { return of_lane.acc[c / 2][r / 2][c % 2 * 2 + r % 2] * lowered; };  // of the lane's column c
    if constexpr (L::kQuantised) {
#pragma unroll
      for (int c = 0; c < kD / 8; c += 4)
        *reinterpret_cast<float4*>(own + L::four(row, L::column(c, g) / 4)) = make_float4(value(c), value(c + 1), value(c + 2), value(c + 3));
    } else {
#pragma unroll
      for (int c = 0; c < kD / 8; ++c) own[L::four(row, 2 * c + g / 4) + g % 4] = value(c);
    }
  }
  __syncthreads();
  constexpr uint32_t kFours = kD / 4, kRuns = kFours / 8;
  const uint32_t own_rows = min(rows - row0, static_cast<uint32_t>(L::kRows)), runs = own_rows * kRuns;
  // Adds up `count` parts of four columns, each with its row's statistics; returns theirs. A lane adds up four parts; of more, lanes
  // that have the same columns each have some of them.
  const auto lanes_log = [](uint32_t count) { return count > 8 ? 2u : count > 4 ? 1u : 0u; };
  const auto added = [&](uint32_t count, const Statistics* first_statistics, uint32_t statistics_step, const float4* first_values,
                         uint32_t values_step, float (&sum)[4]) {
    const uint32_t log = lanes_log(count), step = 1u << log, first = lane / 8 & (step - 1);
    Statistics of[4];
    float4 values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t i = first + j * step;
      of[j] = {-kInfinity, 0.f, 0.f, 0.f}, values[j] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i < count) of[j] = first_statistics[i * statistics_step], values[j] = first_values[i * values_step];
    }
    float largest = fmaxf(fmaxf(of[0].maximum, of[1].maximum), fmaxf(of[2].maximum, of[3].maximum));
    if (log > 0) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
    if (log > 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    const float from = finite_base(largest);
    Statistics all = {largest, 0.f, 0.f, of[0].scale};
    sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float weight = power2(of[j].maximum - from);
      all.total += weight * of[j].total;
      all.shifted += weight * of[j].shifted;
      sum[0] += weight * values[j].x, sum[1] += weight * values[j].y, sum[2] += weight * values[j].z, sum[3] += weight * values[j].w;
    }
    const auto add_across = [&](int distance) {
      all.total += __shfl_xor_sync(~0u, all.total, distance);
      if constexpr (kRowScales) all.shifted += __shfl_xor_sync(~0u, all.shifted, distance);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
    };
    if (log > 0) add_across(8);
    if (log > 1) add_across(16);
    return all;
  };
  const auto finish = [&](uint32_t row, uint32_t c, const Statistics& of, float (&sum)[4]) {
    const uint32_t m = row0 + row, of_group = tokens.of_group(m), token = m - of_group * tokens.count;
    const ResultRow to(p, tokens, head * p.group + of_group, token, kD);
    const RowEnd end(of.maximum, of.total, split.outer == 1 ? p.sinks : nullptr, to.head);
    const float scale = kScaled && end.inverse != 0.f ? end.inverse * of.scale : end.inverse;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = end.inverse == 0.f ? 0.f : (sum[i] + of.shifted) * scale;
    if (split.outer == 1) {
      store_four<Half>(p, to.offset + 4 * c, sum);
      if (c == 0) p.lse[to.lse] = end.lse * kLn2;
      return;
    }
    const uint64_t at = uint64_t{split.cluster.quotient(blockIdx.x)} * p.rows + uint64_t{tokens.first} * (p.kv_heads.value * p.group) +
                        head * p.group * tokens.count + m;
    *reinterpret_cast<float4*>(p.partial + at * kD + 4 * c) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (c == 0) p.partial_lse[at] = end.lse;
  };
  // A run is 32 columns of a row, which eight lanes have. Calls `each` with the runs that those of this lane add up, below `count`.
  static_assert(kFours % 8 == 0 && L::kMostWarps <= 4 * 4 && Split::kMostBlocks <= 4 * 4);
  const auto for_runs = [&](uint32_t count, uint32_t parts_of_each, const auto& each) {
    const uint32_t log = lanes_log(parts_of_each), at_once = 4u >> log, own = lane >> (3 + log);
    const bool stores = (lane / 8 & ((1u << log) - 1)) == 0;
    for (uint32_t i = warp * at_once; i < count; i += warps * at_once) each(min(i + own, count - 1), stores && i + own < count);
  };
  // Run i of a cluster's sums is added up by its block i % cluster, as its run i / cluster, where part p lies at p * own_runs.
  const uint32_t blocks = split.cluster.value, own_runs = split.cluster.quotient(runs + blocks - 1), of_eight = lane % 8;
  float4* const parts = reinterpret_cast<float4*>(shared + L::meeting_at(warps));
  Statistics* const part_statistics = reinterpret_cast<Statistics*>(parts + own_runs * blocks * 8);
  const uint32_t rank = split.cluster.value > 1 ? __clusterRelativeBlockRank() : 0;
  for_runs(runs, warps, [&](uint32_t run, bool stores) {
    const uint32_t row = run / kRuns, c = run % kRuns * 8 + of_eight;
    float sum[4];
    const Statistics all = added(warps, statistics + row, L::kRows, reinterpret_cast<const float4*>(sums + L::four(row, c)), L::kSums / 4, sum);
    if (!stores) return;
    if (split.cluster.value == 1) return finish(row, c, all, sum);
    const uint32_t of_owner = split.cluster.quotient(run), owner = run - of_owner * blocks, at = rank * own_runs + of_owner;
    *in_block(parts + at * 8 + of_eight, owner) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (of_eight == 0) *in_block(part_statistics + at, owner) = all;
  });
  if (split.cluster.value == 1) return;
  meet_cluster();  // the parts are here; nothing of this block is read by another one
  for_runs(own_runs, blocks, [&](uint32_t own, bool stores) {
    const uint32_t run = own * blocks + rank;
    float sum[4];
    const Statistics all = added(blocks, part_statistics + own, own_runs, parts + own * 8 + of_eight, own_runs * 8, sum);
    if (stores && run < runs) finish(run / kRuns, run % kRuns * 8 + of_eight, all, sum);
  });
}

}  // namespace hf::decode_attention
