// What the kernels of decode attention are given, whichever GPU they are for.
#pragma once

#include "hipforge/device/divisor.h"
#include "hipforge/device/hip.h"

namespace hf::decode_attention {

constexpr int kBlockM = 16;
constexpr int kTileN = 16;  // keys of one MFMA; a page holds whole tiles
constexpr int kMaxBlockN = 64;
constexpr int kMaxMq = 16;
constexpr int kMaxWaves = 4;
constexpr uint32_t kMaxSplits = 512;
constexpr int64_t kMaxGroup = 65535;  // query heads that share a KV head
constexpr int64_t kMaxKeys = (int64_t{1} << 31) - 1 - kMaxBlockN;
constexpr uint32_t kNoWindow = static_cast<uint32_t>(kMaxKeys);
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

/// Bytes of the cache: [page, slot, KV head, D]; a sequence without block table is one page.
struct Cache {
  const uint8_t* data;
  int64_t page_stride;  // bytes, as all of these
  int64_t head_stride;
  uint32_t slot_stride;
  const float* scale;  // per tensor or per head; null where rows have their own
  uint32_t scale_stride;  // 0 or 1
  const uint8_t* rows;  // words: f16 scale in the low half, f16 shift in the high half; null where scale is used
  int64_t rows_page_stride;  // bytes, as all of these
  int64_t rows_head_stride;
  uint32_t rows_slot_stride;
};

/// What elements of out are: of q's dtype, float32, fp8 by one scale for all, or fp8 with an e8m0 scale per 32.
enum class Output : uint32_t { input, f32, fp8, mxfp8 };

struct Problem {
  Cache k, v;
  const void* q;  // [tokens, Hkv * group, D]
  void* out;      // like q
  Output output;
  const float* out_scale;  // one; for fp8
  uint8_t* block_scales;   // [tokens, Hkv * group * D / 32]; for mxfp8
  float* lse;     // [B, Hkv * group, Mq], or with q_starts [Hkv * group, tokens], natural logarithm
  float* partial;      // [splits, rows, D], normalised
  float* partial_lse;  // [splits, rows], base 2
  uint32_t rows;       // tokens * Hkv * group: first by sequence, then by head, then by token
  const int32_t* q_starts;  // [B + 1], the first token of each sequence; null where every sequence has mq
  Divisor lists;  // lengths and lines of pages of a sequence: 1, or as many as KV heads, each of which then has its own keys
  const int32_t* seqlens;       // [B * lists]
  const int32_t* block_tables;  // [B * lists, max_pages]
  uint32_t max_pages;  // 0 without block tables: sequence b is page b (block_tables then points to something readable)
  Divisor page_size;
  uint32_t max_keys;
  Divisor kv_heads;
  uint32_t group;
  uint32_t mq;          // tokens of each sequence, with q_starts the most that one has
  uint32_t lse_stride;  // elements of lse from a head to the next
  uint32_t splits;
  uint32_t ranges;  // parts of a split's keys, each of which a wave (two at D = 256) of the work-group takes
  Divisor parts;    // splits * ranges
  uint32_t causal;
  uint32_t all_seen;   // every token sees every key: nothing has to be found out about hidden ones
  uint32_t window;     // keys that a token sees, its own the last one; kNoWindow for all
  uint32_t new_keys;   // where not 0, all but so many keys of a sequence may be read ahead of the predecessor's end (sm_90)
  float factor;        // scale * log2(e)
  float cap;           // softcap * log2(e), 0 for none
  float cap_exponent;  // 2 / softcap
  const float* sinks;  // [Hkv * group], natural logarithm; null for none
};

/// What logits take of a scale of K: NaN unless it is finite. By an infinite one elements are infinite or NaN and their sums NaN; the
/// scaled sum of finite ones would be infinite, which hides a key or is a number past a soft cap.
__device__ __forceinline__ float scale_in_logits(float scale) { return scale + (scale - scale); }
/// The same of a row's word, scale and shift in f16.
__device__ __forceinline__ uint32_t word_in_logits(uint32_t word) {
  const uint32_t infinite = ((word & 0x7c007c00u) + 0x04000400u) & 0x80008000u;  // the exponent is all ones
  return word | infinite >> 6;
}

}  // namespace hf::decode_attention
