// What both kernels of decode attention are given, and which keys a wave works on.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/amd/wave.h"

namespace hf::decode_attention {

constexpr int kBlockM = 16;
constexpr int kTileN = 16;  // keys of one MFMA; a page holds whole tiles
constexpr int kMaxBlockN = 64;
constexpr int kMaxMq = 16;
constexpr int kMaxWaves = 4;
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

struct Problem {
  Cache k, v;
  const void* q;  // [B, Mq, Hkv * group, D]
  void* out;      // like q
  float* lse;     // [B, Hkv * group, Mq], natural logarithm
  float* partial;      // [splits, B * Hkv * M, D], normalised
  float* partial_lse;  // [splits, B * Hkv * M], base 2
  const int32_t* seqlens;
  const int32_t* block_tables;  // [B, max_pages]
  uint32_t max_pages;  // 0 without block tables: sequence b is page b (block_tables then points to something readable)
  uint32_t page_size;
  uint32_t max_keys;
  uint32_t kv_heads, group, mq;
  uint32_t splits;
  uint32_t ranges;  // parts of a split's keys, each of which a wave (two at D = 256) of the work-group takes
  bool causal;
  float factor;  // scale * log2(e)
};

/// What a wave works on, the same in all lanes. A division leaves its result in a vector register: wave_value_here moves
/// it, for a buffer that is built from vector registers costs a loop around each of its loads.
template <int kBlockN>
struct Work {
  uint32_t batch, head;
  uint32_t length;      // keys of the sequence
  uint32_t begin, end;  // keys of this wave
  uint32_t trips;       // blocks of the work-group's first range, which has the most

  __device__ Work(const Problem& p, uint32_t batch_and_head, uint32_t split, uint32_t range)
      : batch(dev::wave_value_here(batch_and_head / p.kv_heads)), head(batch_and_head - batch * p.kv_heads) {
    const auto given = static_cast<int32_t>(dev::uniform(p.seqlens[batch]));
    length = given < 0 ? 0 : min(static_cast<uint32_t>(given), p.max_keys);
    const uint32_t blocks = (length + kBlockN - 1) / kBlockN;
    const uint32_t parts = p.splits * p.ranges;
    const uint32_t each = dev::wave_value_here((blocks + parts - 1) / parts);
    const uint32_t first = split * p.ranges * each;
    trips = first < blocks ? min(each, blocks - first) : 0;
    begin = min((first + range * each) * kBlockN, length);
    end = min(begin + each * kBlockN, length);
  }
};

/// A tile of 16 keys, the same in all lanes.
struct Tile {
  int32_t page;
  uint32_t slot;  // of its first key in the page
  uint32_t keys;  // that the wave works on, from the first one on; 0 past the end
};

/// Walks the tiles of a wave, the same in all lanes and without branches, which would cut the schedule of the products
/// into pieces. Past the end it stays at the last tile that has keys.
class Cursor {
 public:
  __device__ Cursor(const Problem& problem, uint32_t batch, uint32_t begin, uint32_t end, uint32_t length)
      : p(problem), batch(batch), key(begin), end(end), table(problem.block_tables + uint64_t{batch} * problem.max_pages) {
    const uint32_t first = begin < length ? begin : length ? length - 1 : 0;
    index = dev::wave_value_here(first / p.page_size);
    slot = first - index * p.page_size;
  }

  __device__ Tile next() {
    const int32_t listed = dev::load_constant(table + index);
    const Tile tile = {p.max_pages ? listed : static_cast<int32_t>(batch), slot,
                       key < end ? min(end - key, static_cast<uint32_t>(kTileN)) : 0};
    key += kTileN;
    slot += key < end ? kTileN : 0;
    const bool turned = slot >= p.page_size;
    slot = turned ? 0 : slot;
    index += turned ? 1 : 0;
    return tile;
  }

 private:
  const Problem& p;
  const uint32_t batch;
  uint32_t key;
  const uint32_t end;
  const int32_t* const table;  // of the sequence
  uint32_t index, slot;
};

}  // namespace hf::decode_attention
