// RoPE of q and k and the write of k and v into a paged cache, with an RMS norm per head of q and k before it on request.
//
//   token t    q heads  | 0 | 1 | ... |   k heads | 0 | ... |   v heads | 0 | ... |      a head is D elements
//                        `--wave 0---' ...         `-wave-'               `-wave-'
//   wave       kLanes lanes per head, 64 / kLanes heads; lane c of a head owns elements 8c .. 8c + 7 (16 bytes)
//
//   q: norm, rotation, stored                k: norm, rotation, to the cache           v: to the cache
//   norm       sum of squares over the head's lanes, y = H(x f), H(y w) or H(x f (offset + w)); H rounds to 16 bits
//   rotation   of the first rotary_dim elements, in fp32, rounded once: (a cos - b sin, b cos + a sin), where (a, b) are
//              elements (i, i + rotary_dim / 2) (neox) or (2 i, 2 i + 1) (interleaved). The partner of a neox element is
//              in another lane of the wave: heads pass through LDS, a slot per wave, without barriers.
//   cache      at slot_mapping[t] = page * page_size + slot, one of
//                half   the 16-bit element                              2 D bytes a head
//                fp8    e4m3 of x / scale, a scale per tensor or head   D
//                rows   e4m3 of (x - shift) / scale, and a word         D + 4
//                int4   a word per group and eight codes per word       D / 2 + 4 groups
//   index      of sparse attention, on request: further heads like q, stored, and one like k, to a cache of its own, as 16-bit
//              elements or e4m3
//
// A wave has heads of one kind (q, k, v, or either of the index), so that its lanes do not diverge. A token without a slot has no work
// for k and v. Bytes: each element is read once and written once; cos and sin of a token are read by each of its waves,
// from memory once. Memory is the bound for many tokens, one wave's latency (load, reduce, LDS, store) for few.
//
// rotation.h and norm.h compute, store.h writes the caches; chunk.h is what they share.
#include "guards.h"
#include "chunk.h"
#include "hipforge/device/early_start.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/wave.h"
#include "hipforge/module.h"
#include "norm.h"
#include "rotation.h"
#include "store.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::rope_and_cache;

namespace {

constexpr int kWaveSize = hf::dev::kWaveSize;
constexpr int kMaxWaves = 4;
constexpr int64_t kManyWaves = 1024;  // from here on several waves share a work-group
constexpr uint32_t kMaxGridY = 65535;

template <int kLanes>
__global__ __launch_bounds__(kMaxWaves* kWaveSize) void rope_and_cache_kernel(
    const int64_t* slots, const void* positions, bool wide_positions, uint32_t cache_slots, uint32_t group_waves,
    uint32_t q_waves, uint32_t k_waves, uint32_t main_waves, uint32_t waves, bool known, const Arguments a) {
  __shared__ Half8 lds[kMaxWaves * kWaveSize];
  // Two loads from memory, position and angles, one after the other, are then over before q, k and v are there.
  const bool early = hf::dev::kStartsEarly && known;
  const auto begin = [] {
    hf::dev::wait_for_predecessor();
    hf::dev::let_next_start();  // after the wait: attention's clusters should find all multiprocessors as empty as each other
  };
  if (!early) begin();
  const uint32_t in_group = hf::dev::uniform(threadIdx.x / kWaveSize);
  const uint32_t lane = threadIdx.x % kWaveSize;
  const uint32_t token = blockIdx.x;
  const uint32_t wave = blockIdx.y * group_waves + in_group;
  if (wave >= waves) return early ? begin() : void();
  const bool of_index = wave >= main_waves;
  const uint32_t index_q_end = main_waves + a.index.q_waves;
  const bool is_q = of_index ? wave < index_q_end : wave < q_waves, is_k = !is_q && (of_index || wave < q_waves + k_waves);

  // Ahead of every store, so that these are scalar loads.
  const int64_t slot = slots[token];
  const int64_t position = wide_positions ? static_cast<const int64_t*>(positions)[token]
                                          : static_cast<const int32_t*>(positions)[token];
  const Heads& from = of_index ? (is_q ? a.index.q : a.index.k) : is_q ? a.q : is_k ? a.k : a.v;
  const TurnedHeads& to = of_index ? a.index.q_out : a.q_out;
  const Half* const weight = of_index ? (is_q ? a.index.q_weight : a.index.k_weight) : is_q ? a.q_weight : a.k_weight;
  hf::dev::wave_values_loaded_here(slot, position, from.data, from.token_stride, from.head_stride, from.count, from.aligned,
                                   a.cos_sin, a.max_positions, a.page_size, a.chunks, a.rotary_dim, weight,
                                   to.data, to.token_stride, to.head_stride, to.aligned, a.epsilon,
                                   a.weight_offset, a.half_angles, a.interleaved, a.whole_chunks);
  if (!is_q && (slot < 0 || slot >= cache_slots)) return early ? begin() : void();
  const uint32_t first_wave = of_index ? (is_q ? main_waves : index_q_end) : is_q ? 0 : is_k ? q_waves : q_waves + k_waves;
  const uint32_t head = (wave - first_wave) * (kWaveSize / kLanes) + lane / kLanes;
  const uint32_t chunk = lane % kLanes;
  const bool active = head < from.count && chunk < a.chunks;

  const bool rotates = (is_q || is_k) && active && chunk * kChunk < a.rotary_dim, weighed = weight && active;
  Angles angles = {};
  Half8 own_weight = {};
  if (early) {
    if (rotates) angles = angles_of(a, position, chunk);
    if (weighed) own_weight = weight_of(weight, chunk);
    begin();
  }
  Half8 x = {};
  if (active)
    x = load_chunk(from.data + token * from.token_stride + head * from.head_stride + chunk * kChunk, from.aligned);
  if (is_q || is_k) {
    if (!early && rotates) angles = angles_of(a, position, chunk);
    if (!early && weighed) own_weight = weight_of(weight, chunk);
    if (weight) x = normalised<kLanes>(x, own_weight, a);
    share_chunk(x, lds + threadIdx.x - chunk, chunk, a);
    if (rotates) x = rotated(x, angles, lds + threadIdx.x - chunk, chunk, a);
  }
  if (is_q) {
    if (active)
      store_chunk(to.data + token * to.token_stride + head * to.head_stride + chunk * kChunk, x, to.aligned);
    return;
  }
  if (of_index) {
    if (active) store_index_key(a.index, slot, a.page_size, x, chunk);
    return;
  }
  store_head<kLanes>(is_k ? a.k_cache : a.v_cache, slot, a.page_size, head, x, chunk, active, a);
}

template <int kLanes>
void launch(Arguments a, const Tokens& each, int64_t tokens, bool programmatic, bool known, hipStream_t stream) {
  constexpr uint32_t kHeads = kWaveSize / kLanes;
  const uint32_t q_waves = (a.q.count + kHeads - 1) / kHeads, k_waves = (a.k.count + kHeads - 1) / kHeads;
  const uint32_t main_waves = q_waves + k_waves + (a.v.count + kHeads - 1) / kHeads;
  a.index.q_waves = (a.index.q.count + kHeads - 1) / kHeads;
  const uint32_t waves = main_waves + a.index.q_waves + a.index.k.count;  // of a token
  const uint32_t in_group = tokens * waves < kManyWaves ? 1 : kMaxWaves;
  const uint32_t groups = (waves + in_group - 1) / in_group;
  HF_CHECK(groups <= kMaxGridY, "q, k and v have too many heads for one launch: ", waves, " waves of ", kHeads, " a token");
  hf::Launch at{dim3(static_cast<uint32_t>(tokens), groups), in_group * kWaveSize, 0, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(rope_and_cache_kernel<kLanes>, at, each.slots, each.positions, each.wide_positions, each.cache_slots, in_group, q_waves, k_waves,
             main_waves, waves, programmatic && known, a);
}

}  // namespace

/// q_out like q [T, Hq, D] (q itself to write in place); k, v [T, Hkv, D]; caches [pages, page_size, Hkv, D] (int4:
/// num_groups + D / 8 words), scales float32 [1] or [Hkv] or numbers, words int32 [pages, page_size, Hkv]; cos_sin
/// [max_pos, rotary_dim] float32 or q's dtype; positions int32 or int64 [T]; slot_mapping int64 [T]. With an index:
/// index_q [T, groups, D], index_k [T, 1, D], index_cache [pages, page_size, D] of fp8 or q's dtype. programmatic: the launch may
/// start before its predecessor has ended; known: it may then read positions and slot_mapping too.
void rope_and_cache_out(Tensor q_out, Tensor k_cache, Tensor v_cache, OptionalTensor k_scale_shift,
                        OptionalTensor v_scale_shift, OptionalTensor index_q_out, OptionalTensor index_cache, Tensor q, Tensor k,
                        Tensor v, OptionalTensor index_q, OptionalTensor index_k, Tensor cos_sin, Tensor positions,
                        Tensor slot_mapping, OptionalTensor q_weight, OptionalTensor k_weight, OptionalTensor index_q_weight,
                        OptionalTensor index_k_weight, OptionalTensor k_scale,
                        OptionalTensor v_scale, double k_scale_value, double v_scale_value, bool interleaved,
                        double weight_offset, double epsilon, int64_t num_groups, bool programmatic, bool known,
                        hipStream_t stream) {
  HF_CHECK_ARCH(q, HF_ARCHS);
  const bool fnuz = hf::has_fnuz(q);
  check_queries(q_out, q, k, v);
  const int64_t tokens = q.size(0), dim = q.size(2), heads = k.size(1);
  check_tokens(cos_sin, positions, slot_mapping, tokens, dim);
  HF_CHECK(epsilon >= 0 && epsilon < __builtin_inf(), "epsilon must be finite and at least 0; got ", epsilon);
  HF_CHECK(weight_offset - weight_offset == 0, "weight_offset must be finite; got ", weight_offset);
  if constexpr (kStorage == Storage::int4) {
    HF_CHECK(num_groups == 1 || num_groups == 2 || num_groups == 4 || num_groups == 8, "num_groups must be 1, 2, 4 or 8; got ",
             num_groups);
    HF_CHECK((dim & (dim - 1)) == 0 && dim / num_groups >= kChunk, "D must be a power of two with at least ", kChunk,
             " elements in each of ", num_groups, " groups for an int4 cache; got ", dim);
  }

  Arguments a = {};
  a.q = heads_of(q);
  a.k = heads_of(k);
  a.v = heads_of(v);
  a.q_out = turned_heads_of(q_out);
  a.k_cache = cache_of(k_cache, "k_cache", k_scale, k_scale_value, k_scale_shift, heads, dim, num_groups, fnuz);
  a.v_cache = cache_of(v_cache, "v_cache", v_scale, v_scale_value, v_scale_shift, heads, dim, num_groups, fnuz);
  HF_CHECK(v_cache.size(0) == k_cache.size(0) && v_cache.size(1) == k_cache.size(1),
           "v_cache must have the pages and page_size of k_cache, ", k_cache, "; got ", v_cache);
  a.q_weight = weight_of(q_weight, "q_weight", dim);
  a.k_weight = weight_of(k_weight, "k_weight", dim);
  a.index = index_of(index_q_out, index_cache, index_q, index_k, index_q_weight, index_k_weight, k_cache, tokens, dim, fnuz);
  const int64_t cache_slots = k_cache.size(0) * k_cache.size(1);
  HF_CHECK(cache_slots <= kMaxCacheSlots, "k_cache must have fewer than 2^31 slots; got ", cache_slots);
  if (tokens == 0) return;

  const int64_t rotary_dim = cos_sin.size(1);
  a.cos_sin = cos_sin.data();
  a.max_positions = cos_sin.size(0);
  a.page_size = static_cast<uint32_t>(k_cache.size(1));
  a.chunks = static_cast<uint32_t>(dim / kChunk);
  a.rotary_dim = static_cast<uint32_t>(rotary_dim);
  a.int4_group_lanes = kStorage == Storage::int4 ? static_cast<uint32_t>(dim / kChunk / num_groups) : 0;
  a.epsilon = static_cast<float>(epsilon);
  a.weight_offset = static_cast<float>(weight_offset);
  a.half_angles = cos_sin.dtype() != HF_F32;
  a.interleaved = interleaved;
  a.whole_chunks = hf::aligned_to(cos_sin.data(), 16) && rotary_dim % (interleaved ? kChunk : 2 * kChunk) == 0;
  const Tokens each{.slots = slot_mapping.data<const int64_t>(),
                    .positions = positions.data(),
                    .wide_positions = positions.dtype() == HF_I64,
                    .cache_slots = static_cast<uint32_t>(cache_slots)};
  if (a.chunks <= 8) return launch<8>(a, each, tokens, programmatic, known, stream);
  if (a.chunks <= 16) return launch<16>(a, each, tokens, programmatic, known, stream);
  if (a.chunks <= 32) return launch<32>(a, each, tokens, programmatic, known, stream);
  if constexpr (kWaveSize == 64) launch<64>(a, each, tokens, programmatic, known, stream);
}
HF_EXPORT(rope_and_cache_out);
