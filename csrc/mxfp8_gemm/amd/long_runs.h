// The steps of a wave of wave_split_kernel.h in long runs of straight code: loads of kAhead steps are in flight from the
// first step of a run to its last. At the end of a run a wave waits for memory, so a loop over shorter runs would wait more
// often. A loop that keeps its loads in flight from round to round copies them into other registers (clang 22).
#pragma once

#include "hipforge/amd/hip.h"
#include "wave_split_kernel.h"

namespace hf::wave_split {

#if defined(__gfx950__)

constexpr int kLongRun = 48, kMiddleRun = 24, kHalfRun = 12, kShortRun = 8;

/// The scales of kScaleSteps steps, 16 bytes of a row in each lane: lane l has the words of steps 4 (l / 16) .. + 3 of row
/// l % 16. A row's 64 bytes are loaded at once, and all of a run before its steps: between two loads from a line the line would
/// leave the caches, L2 included where the weights of many experts stream through it.
constexpr int kScaleSteps = 16;

template <int kRowTiles>
struct ScaleBlock {
  dev::u32x4 w, x[kRowTiles];

  template <class W>
  __device__ __forceinline__ void load(const W& mine, uint32_t step) {
    const uint32_t in_lane = mine.group * sizeof(dev::u32x4);
    w = dev::load_b128(mine.ws, mine.w_scales[0] + in_lane, step * kBlocks);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
      x[t] = dev::load_b128(mine.x.scales, mine.x.scales_in_lane(t) + in_lane, step * kBlocks + mine.x.scales_in_wave(t));
  }
};

/// A step's scales, a row's word in every lane of the row.
template <int kRowTiles>
struct StepScales {
  uint32_t w, x[kRowTiles];

  __device__ __forceinline__ StepScales(const ScaleBlock<kRowTiles>& from, int step, uint32_t row) {
    const uint32_t lane = row + step / 4 % 4 * kTile;
    w = dev::from_lane(from.w[step % 4], lane);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) x[t] = dev::from_lane(from.x[t][step % 4], lane);
  }
};

template <class W>
__device__ __forceinline__ void multiply(W& mine, const typename W::Step& step, const StepScales<W::kTilesOfX>& scales) {
  const uint32_t w_scale = scales.w >> 8 * mine.group;
#pragma unroll
  for (int t = 0; t < W::kTilesOfX; ++t)
    mine.acc[t] = mine.scaled_products(step, 0, w_scale, t, scales.x[t] >> 8 * mine.group, mine.acc[t]);
}

/// At most kShortRun whole steps from `first` on: a load of scales for each four of them, which every lane takes as they are.
template <int kCount, bool kWholeK, class W>
__device__ __forceinline__ void short_run(W& mine, uint32_t first) {
  constexpr int kRowTiles = W::kTilesOfX;
  constexpr int kAhead = kRowTiles == 1 ? 3 : 4;
  typename W::ScaleWords words[(kCount + 3) / 4];
  typename W::Step steps[kCount];
  const auto load = [&](int i) {
    // From step 0 on the steps' offsets are constants of the loads themselves.
    if constexpr (kWholeK)
      mine.load(steps[i], 0, i);
    else
      mine.load(steps[i], (first + i) * kStep, 0);
    __builtin_amdgcn_sched_barrier(0);
  };
#pragma unroll
  for (int i = 0; i < kCount; i += 4) mine.load_scales(words[i / 4], first + i);
#pragma unroll
  for (int i = 0; i < kAhead && i < kCount; ++i) load(i);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    mine.multiply(steps[i], words[i / 4], i % 4);
    if (i + kAhead < kCount) load(i + kAhead);
    __builtin_amdgcn_sched_barrier(0);
  }
}

/// kCount whole steps from `first` on.
template <int kCount, class W>
__device__ __forceinline__ void straight(W& mine, uint32_t first) {
  constexpr int kRowTiles = W::kTilesOfX;
  if constexpr (kCount <= kShortRun) return short_run<kCount, false>(mine, first);
  constexpr int kAhead = kRowTiles == 1 ? 3 : 4;
  ScaleBlock<kRowTiles> scales[(kCount + kScaleSteps - 1) / kScaleSteps];
  typename W::Step steps[kCount];
  // The step's offset is the same in all lanes: as a constant in the lanes' offset it would take a register for each step.
  const auto load = [&](int i) {
    mine.load(steps[i], (first + i) * kStep, 0);
    __builtin_amdgcn_sched_barrier(0);  // in the order of their use: loads return in order
  };
#pragma unroll
  for (int i = 0; i < kCount; i += kScaleSteps) scales[i / kScaleSteps].load(mine, first + i);
#pragma unroll
  for (int i = 0; i < kAhead && i < kCount; ++i) load(i);
  const uint32_t row = dev::lane_index() % kTile;
  StepScales<kRowTiles> next(scales[0], 0, row);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const StepScales<kRowTiles> now = next;
    if (i + 1 < kCount) next = StepScales<kRowTiles>(scales[(i + 1) / kScaleSteps], i + 1, row);
    multiply(mine, steps[i], now);
    if (i + kAhead < kCount) load(i + kAhead);
    __builtin_amdgcn_sched_barrier(0);
  }
}

/// The steps from `first` to `end`, at most kMost; kWholeK: from step 0 on, at most kShortRun.
template <int kMost, bool kWholeK, class W>
__device__ __forceinline__ void run_rest(W& mine, uint32_t first, uint32_t end) {
  if constexpr (kMost > 0) {
    if (end - first != kMost)
      run_rest<kMost - 1, kWholeK>(mine, first, end);
    else if constexpr (kWholeK)
      short_run<kMost, true>(mine, 0);
    else
      straight<kMost>(mine, first);
  }
}

#endif

/// The same as mine.run(begin, end, aligned, between); kWholeK: all of K.
template <bool kWholeK, class W>
__device__ __forceinline__ void run_long(W& mine, uint32_t begin, uint32_t end, bool aligned, bool between = false) {
#if defined(__gfx950__)
  const uint32_t steps = mine.k / kStep;  // begin is at most that
  const uint32_t whole = !aligned ? begin : kWholeK ? steps : min(end, steps);
  if (whole - begin <= kShortRun) {
    run_rest<kShortRun, kWholeK>(mine, begin, whole);
  } else {
    uint32_t step = begin;
    for (; step + kLongRun <= whole; step += kLongRun) straight<kLongRun>(mine, step);
    if (step + kMiddleRun <= whole) {
      straight<kMiddleRun>(mine, step);
      step += kMiddleRun;
    }
    if (step + kHalfRun <= whole) {
      straight<kHalfRun>(mine, step);
      step += kHalfRun;
    }
    run_rest<kHalfRun - 1, false>(mine, step, whole);
  }
  mine.run_to_end(max(whole, begin), end, between);
#else
  mine.run(begin, end, aligned, between);
#endif
}

}  // namespace hf::wave_split
