// Slots of a decode step sorted by expert and padded to whole tiles: one work-group, a thread for each slot and for each expert.
//
//   mark    thread t: bit t of its expert's mask (LDS)                | past slots x block_m no entry is in use: padding
//   count   thread e: the bits of its experts' masks, their tiles, and those of lower experts by a scan over the work-group
//   write   thread t: slot t behind the slots of its expert that have lower bits, so that they stay in ascending order
//   pad     all threads: four entries of a tile at once, of which those past the expert's slots are padding
//
// Reads: 4 or 8 bytes for each slot; writes: each entry once. Latency is the bound: ids, four barriers, the last stores. More slots,
// and tiles of another number of entries, are for moe_align.cu.
#include "hipforge/device/early_start.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/slots.h"
#include "hipforge/device/vector.h"
#include "hipforge/device/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace {

using hf::dev::kWaveSize;

constexpr uint32_t kWaves = 8, kThreads = kWaves * kWaveSize;
constexpr uint32_t kMostSlots = 256, kMostExperts = 1024, kMostEntries = 1024;  // the last of a tile
constexpr uint32_t kWordBits = 32, kMaskWords = kMostSlots / kWordBits;
constexpr uint32_t kMostEach = kMostExperts / kThreads;
constexpr uint32_t kAtOnce = 4;  // entries

static_assert(kMostSlots <= kThreads, "a thread has one slot at most");
// The tile of an entry is entry x reciprocal / 2^32: off by less than entry / 2^32, which is below 1 / block_m.
static_assert(uint64_t{kMostSlots} * kMostEntries * kMostEntries < uint64_t{1} << 32);

using Mask = hf::dev::Vector<uint32_t, kMaskWords>;

// Of an expert: its first entry, and its slots.
struct Span {
  uint32_t first, count;
};

// The tile of an entry, from the reciprocal of block_m.
__device__ inline uint32_t tile_of(uint32_t entry, uint32_t reciprocal) {
  return static_cast<uint32_t>(uint64_t{entry} * reciprocal >> 32);
}

constexpr uint32_t divided_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

__device__ inline uint32_t bits_of(const Mask& mask) {
  uint32_t bits = 0;
#pragma unroll
  for (uint32_t w = 0; w < kMaskWords; ++w) bits += __builtin_popcount(mask[w]);
  return bits;
}

// Those below bit `at`.
__device__ inline uint32_t bits_below(const Mask& mask, uint32_t at) {
  uint32_t bits = 0;
#pragma unroll
  for (uint32_t w = 0; w < kMaskWords; ++w) {
    const uint32_t first = w * kWordBits, below = (1u << at % kWordBits) - 1;
    bits += __builtin_popcount(first + kWordBits <= at ? mask[w] : first <= at ? mask[w] & below : 0);
  }
  return bits;
}

// All arguments are in SGPRs when a wave starts (kernel-argument preload), as far as those hold them.
__global__ __launch_bounds__(kThreads) void moe_align_few(
    const int32_t* ids, uint32_t slots, uint32_t experts, uint32_t block_m, uint32_t reciprocal, int32_t* sorted, int32_t* tiles,
    uint32_t tile_count, uint32_t wide_ids, const int32_t* expert_map, uint32_t wide_map, int32_t* padded) {
  extern __shared__ __attribute__((aligned(32))) uint8_t lds[];
  __shared__ uint32_t owners[kMostSlots];  // of tiles in use, which have a slot each at least
  __shared__ uint32_t sums[kWaves];        // tiles of a wave's experts
  auto* const masks = reinterpret_cast<Mask*>(lds);
  auto* const spans = reinterpret_cast<Span*>(masks + experts);
  const uint32_t thread = threadIdx.x, lane = thread % kWaveSize, wave = hf::dev::uniform(thread / kWaveSize);
  const auto padding = static_cast<int32_t>(slots);
  const auto pad_four = [&](uint32_t at) { hf::dev::store_words(sorted + at, padding); };

  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  int32_t low = -1, high = 0;
  if (thread < slots) {
    low = ids[thread << wide_ids];
    if (wide_ids) high = ids[2 * thread + 1];
  }
  const uint32_t each = experts > kThreads ? kMostEach : 1, expert0 = thread * each;
  int32_t names[kMostEach];
#pragma unroll
  for (uint32_t i = 0; i < kMostEach; ++i) {
    names[i] = static_cast<int32_t>(expert0 + i);
    if (expert_map != nullptr && i < each && expert0 + i < experts) names[i] = expert_map[(expert0 + i) << wide_map];
  }
  for (uint32_t e = thread; e < experts; e += kThreads) masks[e] = Mask{};
  const uint32_t entries = tile_count * block_m, most_used = min(slots, tile_count) * block_m;
  for (uint32_t at = most_used + kAtOnce * thread; at < entries; at += kAtOnce * kThreads)
    pad_four(at);
  for (uint32_t tile = slots + thread; tile < tile_count; tile += kThreads) tiles[tile] = -1;
  __syncthreads();

  const int32_t sign = wide_ids ? high : low >> 31;  // of an expert's number all are 0
  const bool counts = thread < slots && sign == 0 && static_cast<uint32_t>(low) < experts;
  const uint32_t expert = counts ? static_cast<uint32_t>(low) : 0;
  if (counts)
    hf::dev::set_bits(reinterpret_cast<uint32_t*>(masks + expert) + thread / kWordBits, 1u << thread % kWordBits);
  __syncthreads();

  uint32_t count[kMostEach], own[kMostEach], mine = 0;  // slots and tiles
#pragma unroll
  for (uint32_t i = 0; i < kMostEach; ++i) {
    const bool has = i < each && expert0 + i < experts;
    count[i] = has ? bits_of(masks[expert0 + i]) : 0;
    own[i] = tile_of(count[i] + block_m - 1, reciprocal);
    mine += own[i];
  }
  uint32_t of_wave;
  uint32_t tile = hf::dev::wave_sum_before(mine, lane, of_wave);
  if (lane == 0) sums[wave] = of_wave;
  __syncthreads();
  uint32_t used = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWaves; ++w) {
    if (w == wave) tile += used;
    used += sums[w];
  }
#pragma unroll
  for (uint32_t i = 0; i < kMostEach; ++i) {
    if (count[i] == 0) continue;
    spans[expert0 + i] = {tile * block_m, count[i]};
    for (const uint32_t end = tile + own[i]; tile < end; ++tile) {
      owners[tile] = expert0 + i;
      tiles[tile] = names[i];
    }
  }
  for (uint32_t at = used + thread; at < min(slots, tile_count); at += kThreads) tiles[at] = -1;
  if (thread == 0) *padded = static_cast<int32_t>(used * block_m);
  __syncthreads();

  if (counts) sorted[spans[expert].first + bits_below(masks[expert], thread)] = static_cast<int32_t>(thread);
  for (uint32_t at = kAtOnce * thread; at < most_used; at += kAtOnce * kThreads) {
    uint32_t filled = 0;  // of the four
    if (at < used * block_m) {
      const Span span = spans[owners[tile_of(at, reciprocal)]];
      const uint32_t end = span.first + span.count;
      filled = end > at ? min(end - at, kAtOnce) : 0;
    }
    if (filled == 0) {
      pad_four(at);
    } else {
#pragma unroll
      for (uint32_t i = 1; i < kAtOnce; ++i)
        if (i >= filled) sorted[at + i] = padding;
    }
  }
}

}  // namespace

/// What moe_align_block_size_out writes, for at most 256 slots and a block_m that is a multiple of 4, at most 1024.
void moe_align_few_out(hf::Tensor sorted_ids, hf::Tensor expert_ids, hf::Tensor padded, hf::Tensor topk_ids,
                       hf::OptionalTensor expert_map, int64_t block_m, int64_t experts, bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(topk_ids, HF_ARCHS);
  hf::check_operand(topk_ids, "topk_ids", hf::kIndex, {"T", "top_k"});
  const int64_t slots = topk_ids.numel();
  HF_CHECK(slots <= kMostSlots, "topk_ids must have at most ", kMostSlots, " slots; got ", slots);
  HF_CHECK(block_m >= kAtOnce && block_m <= kMostEntries && block_m % kAtOnce == 0, "block_m must be a multiple of ", kAtOnce,
           " up to ", kMostEntries, "; got ", block_m);
  HF_CHECK(experts >= 1 && experts <= kMostExperts, "num_experts must be 1 to ", kMostExperts, "; got ", experts);
  const auto tiles = divided_up(static_cast<uint32_t>(slots + experts * (block_m - 1)), static_cast<uint32_t>(block_m));
  hf::check_operand(sorted_ids, "sorted_ids", HF_I32, {tiles * block_m});
  hf::check_operand(expert_ids, "expert_ids", HF_I32, {tiles});
  hf::check_operand(padded, "num_tokens_post_padded", HF_I32, {1});
  const int32_t* map = nullptr;
  bool wide_map = false;
  if (expert_map) {
    hf::check_operand(*expert_map, "expert_map", hf::kIndex, {experts});
    for (const hf::Named& written : {hf::Named{sorted_ids, "sorted_ids"}, {expert_ids, "expert_ids"}, {padded, "padded"}})
      hf::check_not_in_place(written, {{*expert_map, "expert_map"}});
    map = static_cast<const int32_t*>(expert_map.value().data());
    wide_map = expert_map.value().dtype() == HF_I64;
  }
  const auto reciprocal = static_cast<uint32_t>(((uint64_t{1} << 32) + block_m - 1) / block_m);
  const auto bytes = static_cast<uint32_t>(experts * (sizeof(Mask) + sizeof(Span)));
  hf::Launch at{1, kThreads, bytes, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(moe_align_few, at, static_cast<const int32_t*>(topk_ids.data()),
             static_cast<uint32_t>(slots), static_cast<uint32_t>(experts), static_cast<uint32_t>(block_m), reciprocal,
             sorted_ids.data<int32_t>(), expert_ids.data<int32_t>(), tiles, uint32_t{topk_ids.dtype() == HF_I64}, map,
             uint32_t{wide_map}, padded.data<int32_t>());
}
HF_EXPORT(moe_align_few_out);
