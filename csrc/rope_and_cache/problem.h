// What the kernel is given: q, k and v, the caches, and what each token does.
#pragma once

#include "hipforge/device/element.h"
#include "hipforge/device/hip.h"

#if !defined(HF_INPUT) || !defined(HF_CACHE)
#error "build a variant: -DHF_INPUT=f16 or bf16 and -DHF_CACHE=half, fp8, rows or int4"
#endif

// Every operation rounds on its own, as torch's do.
#pragma clang fp contract(off)

namespace hf::rope_and_cache {

using Half = HF_ELEMENT(HF_INPUT);
enum class Storage { half, fp8, rows, int4 };
constexpr Storage kStorage = Storage::HF_CACHE;

constexpr int kChunk = 8;  // elements of a lane

using Half8 = dev::Vector<Half, 8>;
using F32x8 = dev::Vector<float, 8>;

// Heads of all tokens, [tokens, heads, D] with any strides.
struct Heads {
  const Half* data;
  int64_t token_stride, head_stride;  // elements
  uint32_t count;
  bool aligned;  // every head starts at a multiple of 16 bytes
};

struct CacheRows {
  uint8_t* data;
  int64_t page_stride, slot_stride, head_stride;  // bytes
  const float* scale;                             // fp8: one, or one per head; null: scale_value
  uint32_t scale_stride;
  float scale_value;
  uint8_t* words;  // rows: float16 scale in the low half, float16 shift in the high half
  int64_t words_page_stride, words_slot_stride, words_head_stride;  // bytes
};

// Where the turned heads of all tokens go, like Heads.
struct TurnedHeads {
  Half* data;
  int64_t token_stride, head_stride;  // elements
  bool aligned;
};

// The index queries and the index key of a token (sparse attention): normalised and rotated like q and k.
struct Index {
  Heads q, k;  // k has one head; both none where there is no index
  TurnedHeads q_out;
  uint8_t* cache;
  int64_t page_stride, slot_stride;  // bytes
  bool fp8;                          // of the cache: e4m3, saturated; otherwise the 16-bit element
  const Half* q_weight;
  const Half* k_weight;
  uint32_t q_waves;
};

struct Arguments {
  Heads q, k, v;
  TurnedHeads q_out;
  CacheRows k_cache, v_cache;
  const Half* q_weight;
  const Half* k_weight;
  Index index;
  const void* cos_sin;
  int64_t max_positions;
  uint32_t page_size;
  uint32_t chunks;  // of a head: D / 8
  uint32_t rotary_dim;
  uint32_t int4_group_lanes;
  float epsilon, weight_offset;
  bool half_angles;        // cos_sin has the inputs' dtype instead of float32
  bool interleaved;
  bool whole_chunks;       // a chunk's elements rotate alike, and their angles can be read at once
};

// What each token does. A kernel takes these one by one, so that they are in SGPRs when a wave starts (kernel-argument
// preload); Arguments are loaded while a wave waits for its token's slot and position.
struct Tokens {
  const int64_t* slots;
  const void* positions;
  bool wide_positions;   // int64
  uint32_t cache_slots;  // from here on a slot does not exist
};

}  // namespace hf::rope_and_cache
