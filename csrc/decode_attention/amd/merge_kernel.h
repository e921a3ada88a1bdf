// The end of a call with several splits: their outputs added up by log-sum-exp.
//
//   out = sum of 2^(lse_s - L) partial_s / sum of 2^(lse_s - L), L the largest lse_s
//
// A sink is one more lse_s without a partial output, so it counts once for any number of splits.
//
// A work-group of four waves owns a row; wave w has the splits w, w + 4, ..., and a lane has D/64 neighbouring columns of each.
// A wave weighs its splits by their largest lse_s, and the work-group adds up the waves' sums through LDS with one barrier. The
// lanes hold the log-sum-exps, at most two each, loaded together with the first partial outputs. A wave has up to eight loads
// of partial outputs in flight, so up to 32 splits take one trip to memory, and 128 take four. Four or eight loads are issued
// without a branch between them: past its last split a wave loads that split again. The split index is the same in all lanes,
// so addresses and branches are scalar. Sums are float32, in an order that the number of splits fixes; output.h quantises them
// where the call asks for it, without another launch.
//
// Counted on gfx950: a work-group takes 884 instructions for 16 splits of D = 128, and 2,152 for 128.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "output.h"
#include "work.h"
#include "query.h"
#include "row_end.h"
#include "tile_rows.h"

namespace hf::decode_attention {

constexpr uint32_t kMergeThreads = 256;
constexpr uint32_t kMergeWaves = kMergeThreads / dev::kWaveSize;

/// What the first loads of decode_merge need; its arguments before the problem, as First's members are of the other kernels.
struct MergeFirst {
  const float *partial, *partial_lse;
  const int32_t* q_starts;
  uint32_t rows, splits, heads, mq;
};

/// The splits of a wave: their weights over their largest, added up, and kColumns columns of their partial outputs by these
/// weights.
template <int kColumns>
struct MergeWave {
  static constexpr int kPerLane = kColumns / dev::kWaveSize;
  struct Part {  // of a row: a lane's columns; three are no power of two
    alignas(kPerLane == 3 ? 4 : 4 * kPerLane) float columns[kPerLane];
  };
  static_assert(kColumns % dev::kWaveSize == 0);

  float largest, total;
  Part sum = {};

  /// `row`: of the workspaces, whose rows have the columns that `shape` says. `meanwhile` is called when the first loads are on
  /// their way.
  template <class Shape, class F>
  __device__ MergeWave(const MergeFirst& p, uint64_t row, const Shape& shape, uint32_t wave, F meanwhile) {
    static_assert(kMaxSplits == 2 * kMergeThreads, "a lane has two of the log-sum-exps");
    const uint32_t count = wave < p.splits ? (p.splits - wave + kMergeWaves - 1) / kMergeWaves : 0;
    float weights[2];
    weights[0] = lse_of(p, row, wave + kMergeWaves * dev::lane_index());
    const uint32_t own = min(wave, p.splits - 1);
    const Splits splits = {p.partial + (uint64_t{own} * p.rows + row) * shape.d + shape.column(kPerLane * dev::lane_index(), kPerLane),
                           uint64_t{kMergeWaves} * p.rows * shape.d, count};
    const auto weigh = [&] {
      meanwhile();
      weights[1] = -__builtin_inff();
      if (p.splits > kMergeThreads) weights[1] = lse_of(p, row, wave + kMergeThreads + kMergeWaves * dev::lane_index());
      const auto larger = [](float a, float b) { return __builtin_fmaxf(a, b); };
      largest = dev::lanes_combined<dev::kWaveSize>(__builtin_fmaxf(weights[0], weights[1]), larger);
      const float base = largest == -__builtin_inff() ? 0.f : largest;
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) weights[i] = __builtin_amdgcn_exp2f(weights[i] - base);
      total = dev::lanes_combined<dev::kWaveSize>(weights[0] + weights[1], [](float a, float b) { return a + b; });
    };
    if (count <= kMany / 2) {
      add<kMany / 2>(splits, 0, weights, weigh);
      return;
    }
    add<kMany>(splits, 0, weights, weigh);
    uint32_t first = kMany;
    for (; first + kMany / 2 < count; first += kMany) add<kMany>(splits, first, weights, [] {});
    if (first < count) add<kMany / 2>(splits, first, weights, [] {});
  }

 private:
  static constexpr uint32_t kMany = 8;  // loads in flight

  struct Splits {  // of the wave
    const float* columns;  // the lane's, of the first one
    uint64_t step;
    uint32_t count;
  };

  // -inf past the last split, which is loaded there: a branch would separate this load from those that follow.
  __device__ static float lse_of(const MergeFirst& p, uint64_t row, uint32_t split) {
    const float lse = p.partial_lse[uint64_t{min(split, p.splits - 1)} * p.rows + row];
    return split < p.splits ? lse : -__builtin_inff();
  }

  // Adds the splits first .. first + kCount - 1 of the wave's, as far as they exist. `weigh` is called behind their loads.
  template <uint32_t kCount, class F>
  __device__ void add(const Splits& splits, uint32_t first, const float (&weights)[2], F weigh) {
    static_assert(dev::kWaveSize % kCount == 0);
    const uint32_t last = max(splits.count, 1u) - 1;
    Part values[kCount];
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i)
      values[i] = *reinterpret_cast<const Part*>(splits.columns + min(first + i, last) * splits.step);
    weigh();
    const float held = first < dev::kWaveSize ? weights[0] : weights[1];
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      if (first + i >= splits.count) break;
      const float weight = dev::of_lane(held, (first + i) % dev::kWaveSize);
      for (int c = 0; c < kPerLane; ++c) sum.columns[c] += weight * values[i].columns[c];
    }
  }
};

/// A work-group of the merge has all columns of a row.
template <uint32_t kD>
struct WholeRow {
  static constexpr uint32_t d = kD, first = 0;

  /// The first of the lane's `count` columns, which are at `at` of the work-group's.
  __device__ static uint32_t column(uint32_t at, uint32_t) { return at; }
};

/// Or those from `first` on, of which a lane past the end of the row takes the last ones.
struct PartOfRow {
  uint32_t d, first;

  __device__ uint32_t column(uint32_t at, uint32_t count) const { return min(first + at, d - count); }
};

/// Merges the columns of `shape` of a query head's token, at most kColumns.
template <class Half, int kColumns, class Shape>
__device__ __forceinline__ void merge_columns(const MergeFirst& given, const Problem& problem, uint32_t head, const Shape& shape) {
  constexpr uint32_t kColumnThreads = kColumns / 4;
  __shared__ dev::f32x4 sums[kMergeWaves][kColumnThreads];
  __shared__ float largest[kMergeWaves], totals[kMergeWaves];

  const uint32_t token = blockIdx.y;
  const Tokens tokens(given, blockIdx.z);
  if (token >= tokens.count) return;  // the grid is for the most tokens that a sequence has
  const uint32_t wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  using Wave = MergeWave<kColumns>;
  const Wave own(given, uint64_t{tokens.first} * given.heads + head * tokens.count + token, shape, wave, [&] {
    dev::wave_values_loaded_here(problem.output, problem.out, problem.sinks, problem.lse, problem.lse_stride);
  });
  reinterpret_cast<typename Wave::Part*>(sums[wave])[dev::lane_index()] = own.sum;
  largest[wave] = own.largest;  // by all lanes alike
  totals[wave] = own.total;
  __syncthreads();
  const uint32_t thread = threadIdx.x;
  if (thread >= kColumnThreads || shape.first + 4 * thread >= shape.d) return;

  float maximum = largest[0];
#pragma unroll
  for (uint32_t w = 1; w < kMergeWaves; ++w) maximum = __builtin_fmaxf(maximum, largest[w]);
  const float base = maximum == -__builtin_inff() ? 0.f : maximum;
  float total = 0.f;
  dev::f32x4 sum = {};
#pragma unroll
  for (uint32_t w = 0; w < kMergeWaves; ++w) {
    const float weight = __builtin_amdgcn_exp2f(largest[w] - base);
    total += weight * totals[w];
    sum += weight * sums[w][thread];
  }
  const auto [inverse, lse] = RowEnd(maximum, total, problem.sinks, head);
  const uint64_t offset = (uint64_t{tokens.first + token} * given.heads + head) * shape.d + shape.first;
  store_four<Half>(problem, offset + 4 * thread, sum * inverse);
  if (shape.first == 0 && thread == 0) problem.lse[lse_place(problem, tokens, head, token)] = lse * kLn2;
}

/// Grid: (query heads, the most tokens of a sequence, B).
template <class Half, int kD>
__global__ __launch_bounds__(kMergeThreads) void decode_merge(const float* partial, const float* partial_lse,
                                                              const int32_t* q_starts, uint32_t rows, uint32_t splits,
                                                              uint32_t heads, uint32_t mq, const Problem problem) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host pass needs no more than the launch
  merge_columns<Half, kD>({partial, partial_lse, q_starts, rows, splits, heads, mq}, problem, blockIdx.x, WholeRow<kD>());
#endif
}

}  // namespace hf::decode_attention
