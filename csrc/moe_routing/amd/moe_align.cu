// Slots (a token's choices, flat) sorted by expert, each expert's padded to whole tiles of block_m: a counting sort in
// one launch, in which no work-group waits for another.
//
//   slots   | range of group 0 | range of group 1 | ...         `range` slots each, cut into kWaves chunks, one per wave
//
//   count   every work-group counts all slots by expert, those before its range, and those of each of its chunks (LDS)
//   place   start[e] = sum of the padded counts of lower experts; chunk c of the group puts its slots of expert e from
//           start[e] + before[e] + (those of its earlier chunks) on
//   write   a wave takes 64 slots at a time: a ballot per bit of the expert gives each lane the lanes with its expert,
//           and how many come before it is its rank; so an expert's slots stay in ascending order
//   pad     a wave per expert fills the expert's last tile and names its tiles; all threads fill what is left over
//
// Reads: 4 or 8 bytes per slot and work-group, from L2 after the first one; writes: each entry once. For the slots of a
// decode step (one work-group) the latency of three passes is the bound.
#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"
#include "hipforge/host/addresses.h"
#include "hipforge/module.h"

namespace {

constexpr int kWaveSize = hf::dev::kWaveSize;
constexpr int kWaves = 8;
constexpr int kThreads = kWaves * kWaveSize;
constexpr int64_t kRange = 4096;  // slots of a work-group, where there are few of them
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxEntries = (int64_t{1} << 31) - 1;

struct Arguments {
  const void* ids;
  bool wide_ids;  // int64
  const void* expert_map;  // null: an expert is its own number
  bool wide_map;
  int32_t* sorted;
  int32_t* tiles;
  int32_t* padded;
  uint32_t slots, experts, expert_bits, block_m, range;
  uint32_t entries, tile_count;
};

// Counters in LDS, `experts` of each.
struct Counts {
  uint32_t* total;
  uint32_t* before;  // of the work-group's range
  uint32_t* start;   // padded counts, then their exclusive sums
  uint32_t* own;     // [kWaves]: of each chunk, then where its next slot goes

  __device__ Counts(uint32_t* lds, uint32_t experts)
      : total(lds), before(lds + experts), start(lds + 2 * experts), own(lds + 3 * experts) {}
};
constexpr int kCountersPerExpert = 3 + kWaves;

// One more in a counter in LDS.
__device__ inline void count_one(uint32_t* counter) {
  __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

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

__global__ __launch_bounds__(kThreads) void moe_align_kernel(const Arguments a) {
  extern __shared__ uint32_t lds[];
  const Counts counts(lds, a.experts);
  const uint32_t thread = threadIdx.x, lane = thread % kWaveSize;
  const uint32_t wave = hf::dev::uniform(thread / kWaveSize);
  const uint32_t begin = min(blockIdx.x * a.range, a.slots), end = min(begin + a.range, a.slots);
  const uint32_t chunk = (a.range + kWaves - 1) / kWaves;
  const uint32_t chunk_begin = min(begin + wave * chunk, end), chunk_end = min(chunk_begin + chunk, end);
  uint32_t* own = counts.own + wave * a.experts;

  for (uint32_t i = thread; i < kCountersPerExpert * a.experts; i += kThreads) lds[i] = 0;
  __syncthreads();
  for (uint32_t slot = thread; slot < a.slots; slot += kThreads) {
    const uint32_t expert = expert_of(a, slot);
    if (expert == a.experts) continue;
    count_one(&counts.total[expert]);
    if (slot < begin) count_one(&counts.before[expert]);
  }
  for (uint32_t slot = chunk_begin + lane; slot < chunk_end; slot += kWaveSize) {
    const uint32_t expert = expert_of(a, slot);
    if (expert != a.experts) count_one(&own[expert]);
  }
  __syncthreads();
  for (uint32_t e = thread; e < a.experts; e += kThreads)
    counts.start[e] = (counts.total[e] + a.block_m - 1) / a.block_m * a.block_m;
  __syncthreads();
  if (wave == 0) sum_starts(counts.start, a.experts, lane);
  __syncthreads();
  for (uint32_t e = thread; e < a.experts; e += kThreads) {
    uint32_t at = counts.start[e] + counts.before[e];
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
      uint32_t& next = counts.own[w * a.experts + e];
      const uint32_t count = next;
      next = at;
      at += count;
    }
  }
  __syncthreads();

  for (uint32_t base = chunk_begin; base < chunk_end; base += kWaveSize) {
    const uint32_t slot = base + lane;
    const uint32_t expert = slot < chunk_end ? expert_of(a, slot) : a.experts;
    uint64_t alike = __builtin_amdgcn_ballot_w64(expert != a.experts);
    for (uint32_t bit = 0; bit < a.expert_bits; ++bit) {
      const bool mine = expert >> bit & 1;
      const uint64_t set = __builtin_amdgcn_ballot_w64(mine);
      alike &= mine ? set : ~set;
    }
    if (expert == a.experts) continue;
    const uint32_t rank = __builtin_amdgcn_mbcnt_hi(static_cast<uint32_t>(alike >> 32),
                                                    __builtin_amdgcn_mbcnt_lo(static_cast<uint32_t>(alike), 0));
    const uint32_t at = own[expert];
    if (rank == 0) own[expert] = at + static_cast<uint32_t>(__builtin_popcountll(alike));
    a.sorted[at + rank] = static_cast<int32_t>(slot);
  }

  const auto padded_end = [&](uint32_t e) {
    return counts.start[e] + (counts.total[e] + a.block_m - 1) / a.block_m * a.block_m;
  };
  for (uint32_t e = blockIdx.x * kWaves + wave; e < a.experts; e += gridDim.x * kWaves) {
    const uint32_t first = hf::dev::uniform(counts.start[e]), past = hf::dev::uniform(padded_end(e));
    if (first == past) continue;
    for (uint32_t at = first + hf::dev::uniform(counts.total[e]) + lane; at < past; at += kWaveSize)
      a.sorted[at] = static_cast<int32_t>(a.slots);
    auto named = static_cast<int32_t>(e);
    if (a.expert_map)
      named = a.wide_map ? static_cast<int32_t>(static_cast<const int64_t*>(a.expert_map)[e])
                         : static_cast<const int32_t*>(a.expert_map)[e];
    for (uint32_t tile = first / a.block_m + lane; tile < past / a.block_m; tile += kWaveSize) a.tiles[tile] = named;
  }
  const uint32_t used = padded_end(a.experts - 1);
  const uint32_t index = blockIdx.x * kThreads + thread, step = gridDim.x * kThreads;
  for (uint32_t at = used + index; at < a.entries; at += step) a.sorted[at] = static_cast<int32_t>(a.slots);
  for (uint32_t tile = used / a.block_m + index; tile < a.tile_count; tile += step) a.tiles[tile] = -1;
  if (index == 0) *a.padded = static_cast<int32_t>(used);
}

bool is_index(const hf::Tensor& x) { return x.dtype() == HF_I32 || x.dtype() == HF_I64; }

}  // namespace

/// sorted_ids int32 [T k + E (block_m - 1), rounded up to block_m], expert_ids int32 (one per tile), padded int32 [1];
/// topk_ids int32 or int64 [T, k]; expert_map int32 or int64 [E].
void moe_align_block_size_out(hf::Tensor sorted_ids, hf::Tensor expert_ids, hf::Tensor padded, hf::Tensor topk_ids,
                              hf::OptionalTensor expert_map, int64_t block_m, int64_t experts, hipStream_t stream) {
  HF_CHECK_ARCH(topk_ids, "gfx950", "gfx942");
  HF_CHECK(is_index(topk_ids) && topk_ids.dim() == 2 && topk_ids.is_contiguous(),
           "topk_ids must be contiguous int32 or int64 [T, top_k]; got ", topk_ids);
  HF_CHECK(block_m >= 1, "block_m must be at least 1; got ", block_m);
  HF_CHECK(experts >= 1 && experts <= kMaxExperts, "num_experts must be 1 to ", kMaxExperts, "; got ", experts);
  const int64_t slots = topk_ids.numel();
  HF_CHECK(block_m <= kMaxEntries && slots + experts * (block_m - 1) + block_m <= kMaxEntries,
           "T * top_k + E * (block_m - 1) must be below 2^31, as indices are int32; got ", slots, " slots, E = ", experts,
           " and block_m = ", block_m);
  const int64_t tiles = (slots + experts * (block_m - 1) + block_m - 1) / block_m;
  HF_CHECK(sorted_ids.dtype() == HF_I32 && sorted_ids.is_shape(tiles * block_m) && sorted_ids.is_contiguous(),
           "sorted_ids must be contiguous int32 [", tiles * block_m, "]; got ", sorted_ids);
  HF_CHECK(expert_ids.dtype() == HF_I32 && expert_ids.is_shape(tiles) && expert_ids.is_contiguous(),
           "expert_ids must be contiguous int32 [", tiles, "]; got ", expert_ids);
  HF_CHECK(padded.dtype() == HF_I32 && padded.is_shape(1), "num_tokens_post_padded must be int32 [1]; got ", padded);
  Arguments a = {};
  hf::check_apart({sorted_ids, "sorted_ids"}, {{topk_ids, "topk_ids"}, {expert_ids, "expert_ids"}, {padded, "padded"}});
  hf::check_apart({expert_ids, "expert_ids"}, {{topk_ids, "topk_ids"}, {padded, "padded"}});
  hf::check_apart({padded, "padded"}, {{topk_ids, "topk_ids"}});
  if (expert_map) {
    const hf::Tensor map = *expert_map;
    HF_CHECK(is_index(map) && map.is_shape(experts) && map.is_contiguous(), "expert_map must be contiguous int32 or int64 [",
             experts, "]; got ", map);
    for (const hf::Named& written : {hf::Named{sorted_ids, "sorted_ids"}, {expert_ids, "expert_ids"}, {padded, "padded"}})
      hf::check_apart(written, {{map, "expert_map"}});
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
  while (experts - 1 >> a.expert_bits) ++a.expert_bits;
  a.block_m = static_cast<uint32_t>(block_m);
  a.entries = static_cast<uint32_t>(tiles * block_m);
  a.tile_count = static_cast<uint32_t>(tiles);
  int64_t groups = (slots + kRange - 1) / kRange;
  groups = groups < 1 ? 1 : groups > kMaxGroups ? kMaxGroups : groups;
  a.range = static_cast<uint32_t>((slots + groups - 1) / groups);
  const auto bytes = static_cast<uint32_t>(kCountersPerExpert * experts * sizeof(uint32_t));
  moe_align_kernel<<<static_cast<uint32_t>(groups), kThreads, bytes, stream>>>(a);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(moe_align_block_size_out);
