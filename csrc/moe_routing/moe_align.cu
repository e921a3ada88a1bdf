// Slots (a token's choices, flat) sorted by expert, each expert's padded to whole tiles of block_m: a counting sort in
// one launch, in which no work-group waits for another.
//
//   slots   | range of group 0 | range of group 1 | ...         `range` slots each, cut into kWaves chunks, one per wave
//
//   count   every work-group counts those of each of its chunks by expert (LDS); one of several also all slots, and those
//           before its range
//   place   start[e] = sum of the padded counts of lower experts; chunk c of the group puts its slots of expert e from
//           start[e] + before[e] + (those of its earlier chunks) on
//   write   a wave takes 64 slots at a time: a ballot per bit of the expert gives each lane the lanes with its expert,
//           and how many come before it is its rank; so an expert's slots stay in ascending order
//   pad     a wave per expert fills the expert's last tile and names its tiles; all threads fill what is left over
//
// Reads: 4 or 8 bytes per slot and work-group, from L2 after the first one; writes: each entry once. For the slots of a
// decode step (one work-group) the latency of three passes is the bound.
#include "hipforge/device/early_start.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/math.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace {

constexpr int kWaveSize = hf::dev::kWaveSize;
constexpr int kWaves = 8;
constexpr int kThreads = kWaves * kWaveSize;
constexpr uint32_t kRange = 4096;  // slots of a work-group, where there are few of them
constexpr uint32_t kMaxGroups = 64;
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxEntries = (int64_t{1} << 31) - 1;

// The kernel takes these one by one, in this order: all are in SGPRs when a wave starts (kernel-argument preload).
struct Arguments {
  const void* ids;
  uint32_t slots, experts, block_m;
  bool wide_ids, wide_map;  // int64
  int32_t* sorted;
  int32_t* tiles;
  int32_t* padded;
  const void* expert_map;  // null: an expert is its own number
};

using hf::dev::of_lane;

constexpr uint32_t divided_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

/// Work-groups of a launch.
constexpr uint32_t groups_of(uint32_t slots) {
  const uint32_t groups = divided_up(slots, kRange);
  return groups < 1 ? 1 : groups < kMaxGroups ? groups : kMaxGroups;
}

/// Tiles that any distribution of the slots fits in.
constexpr uint32_t tiles_of(uint32_t slots, uint32_t experts, uint32_t block_m) {
  return divided_up(slots + experts * (block_m - 1), block_m);
}

using ChunkCounts = hf::dev::Vector<uint32_t, kWaves>;

// Counters in LDS, `experts` of each.
struct Counts {
  uint32_t* total;
  uint32_t* before;  // of the work-group's range
  uint32_t* start;   // padded counts, then their exclusive sums
  uint32_t* own;     // [kWaves]: of each chunk, then where its next slot goes

  __device__ Counts(uint32_t* lds, uint32_t experts)
      : total(lds), before(lds + experts), start(lds + 2 * experts), own(lds + 3 * experts), experts_(experts) {}

  // Those of an expert in all chunks, all asked for before one is waited for.
  __device__ ChunkCounts of_chunks(uint32_t expert) const {
    ChunkCounts found;
#pragma unroll
    for (int w = 0; w < kWaves; ++w) found[w] = own[w * experts_ + expert];
    return found;
  }

 private:
  uint32_t experts_;
};
constexpr int kCountersPerExpert = 3 + kWaves;

__device__ inline uint32_t sum_of_chunks(ChunkCounts counts) {
  uint32_t sum = 0;
#pragma unroll
  for (int w = 0; w < kWaves; ++w) sum += counts[w];
  return sum;
}

// A count of slots rounded up to whole tiles.
__device__ inline uint32_t padded_count(uint32_t count, uint32_t block_m) { return divided_up(count, block_m) * block_m; }

// The expert of a slot; `experts` for one that is not 0 .. experts - 1.
__device__ inline uint32_t expert_of(const Arguments& a, uint32_t slot) {
  const int64_t id = a.wide_ids ? static_cast<const int64_t*>(a.ids)[slot] : static_cast<const int32_t*>(a.ids)[slot];
  return id >= 0 && id < a.experts ? static_cast<uint32_t>(id) : a.experts;
}

// start[e] from padded counts to their exclusive sums; the total in all lanes. One wave, whose lanes own `each`
// consecutive experts.
__device__ inline void sum_starts(uint32_t* start, uint32_t experts, uint32_t lane) {
  const uint32_t each = (experts + kWaveSize - 1) / kWaveSize;
  const uint32_t first = min(lane * each, experts), end = min(first + each, experts);
  uint32_t sum = 0;
  for (uint32_t e = first; e < end; ++e) sum += start[e];
  uint32_t upto = sum;  // inclusive over lanes
#pragma unroll
  for (int distance = 1; distance < kWaveSize; distance *= 2) {
    const uint32_t below = hf::dev::from_lane(upto, lane - distance);
    upto += lane >= static_cast<uint32_t>(distance) ? below : 0;
  }
  uint32_t at = upto - sum;
  for (uint32_t e = first; e < end; ++e) {
    const uint32_t count = start[e];
    start[e] = at;
    at += count;
  }
}

__global__ __launch_bounds__(kThreads) void moe_align_kernel(
    const void* ids, uint32_t slots, uint32_t experts, uint32_t block_m, bool wide_ids, bool wide_map, int32_t* sorted,
    int32_t* tiles, int32_t* padded, const void* expert_map) {
  const Arguments a{ids, slots, experts, block_m, wide_ids, wide_map, sorted, tiles, padded, expert_map};
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  const uint32_t groups = groups_of(slots), range = groups == 1 ? slots : divided_up(slots, groups);
  extern __shared__ uint32_t lds[];
  const Counts counts(lds, a.experts);
  const uint32_t thread = threadIdx.x, lane = thread % kWaveSize;
  const uint32_t wave = hf::dev::uniform(thread / kWaveSize);
  const uint32_t begin = min(blockIdx.x * range, a.slots), end = min(begin + range, a.slots);
  const uint32_t chunk = divided_up(range, kWaves);
  const uint32_t chunk_begin = min(begin + wave * chunk, end), chunk_end = min(chunk_begin + chunk, end);
  uint32_t* own = counts.own + wave * a.experts;
  const auto expert_in_chunk = [&](uint32_t slot) { return slot < chunk_end ? expert_of(a, slot) : a.experts; };
  const uint32_t first_expert = expert_in_chunk(chunk_begin + lane);  // asked for ahead of the first barrier

  for (uint32_t i = thread; i < kCountersPerExpert * a.experts; i += kThreads) lds[i] = 0;
  __syncthreads();
  if (groups > 1)
    for (uint32_t slot = thread; slot < a.slots; slot += kThreads) {
      const uint32_t expert = expert_of(a, slot);
      if (expert == a.experts) continue;
      hf::dev::atomic_count(&counts.total[expert]);
      if (slot < begin) hf::dev::atomic_count(&counts.before[expert]);
    }
  for (uint32_t slot = chunk_begin + lane; slot < chunk_end; slot += kWaveSize) {
    const uint32_t expert = slot == chunk_begin + lane ? first_expert : expert_of(a, slot);
    if (expert != a.experts) hf::dev::atomic_count(&own[expert]);
  }
  __syncthreads();
  for (uint32_t e = thread; e < a.experts; e += kThreads) {
    if (groups == 1) counts.total[e] = sum_of_chunks(counts.of_chunks(e));
    counts.start[e] = padded_count(counts.total[e], a.block_m);
  }
  __syncthreads();
  if (wave == 0) sum_starts(counts.start, a.experts, lane);
  __syncthreads();
  for (uint32_t e = thread; e < a.experts; e += kThreads) {
    uint32_t at = counts.start[e] + counts.before[e];
    const ChunkCounts of_chunks = counts.of_chunks(e);
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
      counts.own[w * a.experts + e] = at;
      at += of_chunks[w];
    }
  }
  __syncthreads();

  for (uint32_t base = chunk_begin; base < chunk_end; base += kWaveSize) {
    const uint32_t slot = base + lane;
    const uint32_t expert = base == chunk_begin ? first_expert : expert_in_chunk(slot);
    hf::dev::LaneMask alike = hf::dev::lanes_with(expert != a.experts);
    for (uint32_t left = a.experts - 1, bit = 0; left != 0; left >>= 1, ++bit) {
      const bool mine = expert >> bit & 1;
      const hf::dev::LaneMask set = hf::dev::lanes_with(mine);
      alike &= mine ? set : ~set;
    }
    const bool is_local = expert != a.experts;
    const uint32_t rank = hf::dev::lanes_before(alike);
    const uint32_t at = is_local ? own[expert] : 0;
    hf::dev::wave_fence();  // the lanes of a warp need not run in step: all have read before one writes, and
    if (is_local && rank == 0) own[expert] = at + hf::dev::lane_count(alike);
    hf::dev::wave_fence();  // it has written before the next round reads
    if (is_local) a.sorted[at + rank] = static_cast<int32_t>(slot);
  }

  // A wave's experts, one per lane; then one after another, each by all lanes.
  const uint32_t all_waves = groups * kWaves;
  for (uint32_t base = blockIdx.x * kWaves + wave; base < a.experts; base += all_waves * kWaveSize) {
    const uint32_t e = base + lane * all_waves;
    uint32_t first = 0, count = 0;
    auto named = static_cast<int32_t>(e);
    if (e < a.experts) {
      first = counts.start[e], count = counts.total[e];
      if (a.expert_map)
        named = a.wide_map ? static_cast<int32_t>(static_cast<const int64_t*>(a.expert_map)[e])
                           : static_cast<const int32_t*>(a.expert_map)[e];
    }
    const uint32_t past = first + padded_count(count, a.block_m);
    const uint32_t first_tile = first / a.block_m, past_tile = past / a.block_m;
    for (hf::dev::LaneMask left = hf::dev::lanes_with(count != 0); left != 0; left &= left - 1) {
      const auto owner = hf::dev::lowest_bit(left);
      const uint32_t past_here = of_lane(past, owner), past_tile_here = of_lane(past_tile, owner);
      for (uint32_t at = of_lane(first + count, owner) + lane; at < past_here; at += kWaveSize)
        a.sorted[at] = static_cast<int32_t>(a.slots);
      const int32_t name = of_lane(named, owner);
      for (uint32_t tile = of_lane(first_tile, owner) + lane; tile < past_tile_here; tile += kWaveSize) a.tiles[tile] = name;
    }
  }
  const uint32_t last = a.experts - 1, used = counts.start[last] + padded_count(counts.total[last], a.block_m);
  const uint32_t index = blockIdx.x * kThreads + thread, step = groups * kThreads;
  const uint32_t tile_count = tiles_of(a.slots, a.experts, a.block_m);
  for (uint32_t at = used + index; at < tile_count * a.block_m; at += step) a.sorted[at] = static_cast<int32_t>(a.slots);
  for (uint32_t tile = used / a.block_m + index; tile < tile_count; tile += step) a.tiles[tile] = -1;
  if (index == 0) *a.padded = static_cast<int32_t>(used);
}

}  // namespace

/// sorted_ids int32 [T k + E (block_m - 1), rounded up to block_m], expert_ids int32 (one per tile), padded int32 [1];
/// topk_ids int32 or int64 [T, k]; expert_map int32 or int64 [E].
void moe_align_block_size_out(hf::Tensor sorted_ids, hf::Tensor expert_ids, hf::Tensor padded, hf::Tensor topk_ids,
                              hf::OptionalTensor expert_map, int64_t block_m, int64_t experts, bool programmatic,
                              hipStream_t stream) {
  HF_CHECK_ARCH(topk_ids, HF_ARCHS);
  hf::check_operand(topk_ids, "topk_ids", hf::kIndex, {"T", "top_k"});
  HF_CHECK(block_m >= 1, "block_m must be at least 1; got ", block_m);
  HF_CHECK(experts >= 1 && experts <= kMaxExperts, "num_experts must be 1 to ", kMaxExperts, "; got ", experts);
  const int64_t slots = topk_ids.numel();
  HF_CHECK(block_m <= kMaxEntries && slots + experts * (block_m - 1) + block_m <= kMaxEntries,
           "T * top_k + E * (block_m - 1) must be below 2^31, as indices are int32; got ", slots, " slots, E = ", experts,
           " and block_m = ", block_m);
  const int64_t tiles = tiles_of(static_cast<uint32_t>(slots), static_cast<uint32_t>(experts), static_cast<uint32_t>(block_m));
  hf::check_operand(sorted_ids, "sorted_ids", HF_I32, {tiles * block_m});
  hf::check_operand(expert_ids, "expert_ids", HF_I32, {tiles});
  hf::check_operand(padded, "num_tokens_post_padded", HF_I32, {1});
  Arguments a = {};
  if (expert_map) {
    const hf::Tensor map = *expert_map;
    hf::check_operand(map, "expert_map", hf::kIndex, {experts});
    for (const hf::Named& written : {hf::Named{sorted_ids, "sorted_ids"}, {expert_ids, "expert_ids"}, {padded, "padded"}})
      hf::check_not_in_place(written, {{map, "expert_map"}});
    a.expert_map = map.data();
    a.wide_map = map.dtype() == HF_I64;
  }
  a.ids = topk_ids.data();
  a.wide_ids = topk_ids.dtype() == HF_I64;
  a.sorted = sorted_ids.data<int32_t>();
  a.tiles = expert_ids.data<int32_t>();
  a.padded = padded.data<int32_t>();
  a.slots = static_cast<uint32_t>(slots);
  a.experts = static_cast<uint32_t>(experts);
  a.block_m = static_cast<uint32_t>(block_m);
  const auto bytes = static_cast<uint32_t>(kCountersPerExpert * experts * sizeof(uint32_t));
  hf::Launch at{groups_of(a.slots), kThreads, bytes, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(moe_align_kernel, at, a.ids, a.slots, a.experts, a.block_m,
             a.wide_ids, a.wide_map, a.sorted, a.tiles, a.padded, a.expert_map);
}
HF_EXPORT(moe_align_block_size_out);
