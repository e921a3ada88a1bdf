// Split-K decode attention over an fp8 cache: one wave per 16 query rows, KV head, sequence and split.
//
//   rows:  the query heads that share a KV head and their Mq tokens are folded, row m = head * Mq + token
//   keys:  blocks of 64, a split's blocks follow each other
//
//   scores^T [64 keys x 16 rows] = K [64 x D] Q^T      lane (g = lane / 16, i = lane % 16): keys 16 t + 4 g + r of row i
//   out^T    [D x 16 rows]      += V^T [D x 64] P^T    lane: d = (4 g + r) D/16 + j of row i, j < D/16
//
// Both products are transposed, so that a lane holds one row's statistics, and the scores leave the first product as the
// second one takes them: no exchange between lanes but the row's maximum. The k index of an MFMA is permuted at will where
// both operands agree: K and Q take d = 64 c + 16 g + 8 h + j (one 16-byte load each), V takes D/16 neighbouring bytes of
// a key per lane, 16 lanes to a row.
//
// fp8 -> bf16 (or f16 for K where q is f16) is exact and happens next to its use; scales stay out of the products:
//   q.(s k + t) = s (q.k) + t sum(q)        sum p (s v + t) = sum (p s) v + sum p t
// Bytes per key and KV head: 2 D, each read once; 16 rows or fewer share them. Memory is the bound: 2 D bytes for
// 4 * 16 * D flops of MFMA.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/buffer.h"
#include "hipforge/fp8.h"
#include "hipforge/mfma.h"
#include "hipforge/vector.h"
#include "hipforge/wave.h"

namespace hf::decode_attention {

constexpr int kBlockM = 16;
constexpr int kBlockN = 64;
constexpr int kTileN = 16;  // keys of one MFMA; a page holds whole tiles
constexpr int kTiles = kBlockN / kTileN;
constexpr int kMaxMq = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

/// Bytes of the cache: [page, slot, KV head, D]; a sequence without block table is one page.
struct Cache {
  const uint8_t* data;
  int64_t page_stride;  // bytes, as all of these
  int64_t slot_stride;
  int64_t head_stride;
  const float* scale;    // per tensor or per head; null where rows have their own
  int64_t scale_stride;  // 0 or 1
  const uint32_t* rows;  // f16 scale in the low half, f16 shift in the high half; null where scale is used
  int64_t rows_page_stride;  // words, as all of these
  int64_t rows_slot_stride;
  int64_t rows_head_stride;
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
  bool causal;
  float factor;  // scale * log2(e)
};

template <class T, int kCount>
using Vector = T __attribute__((ext_vector_type(kCount)));

/// The larger or the sum over the four lanes that share lane % 16.
__device__ inline float column_max(float value) {
  value = fmaxf(value, __shfl_xor(value, 16));
  return fmaxf(value, __shfl_xor(value, 32));
}
__device__ inline float column_sum(float value) {
  value += __shfl_xor(value, 16);
  return value + __shfl_xor(value, 32);
}

__device__ inline float row_scale(uint32_t word) {
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(word)));
}
__device__ inline float row_shift(uint32_t word) {
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(word >> 16)));
}

/// What a wave works on, the same in all lanes. A division leaves its result in a vector register: wave_value_here moves
/// it, for a buffer that is built from vector registers costs a loop around each of its loads.
struct Work {
  uint32_t batch, head;
  uint32_t length;      // keys of the sequence
  uint32_t begin, end;  // keys of this split

  __device__ Work(const Problem& p, uint32_t batch_and_head, uint32_t split)
      : batch(dev::wave_value_here(batch_and_head / p.kv_heads)), head(batch_and_head - batch * p.kv_heads) {
    const auto given = static_cast<int32_t>(dev::uniform(p.seqlens[batch]));
    length = given < 0 ? 0 : min(static_cast<uint32_t>(given), p.max_keys);
    const uint32_t blocks = (length + kBlockN - 1) / kBlockN;
    const uint32_t each = dev::wave_value_here((blocks + p.splits - 1) / p.splits) * kBlockN;
    begin = min(split * each, length);
    end = min(begin + each, length);
  }
};

/// Walks the tiles of a split, the same in all lanes and without branches, which would cut the schedule of the products
/// into pieces. Past the end it stays at the last tile that has keys.
struct Cursor {
  uint32_t first;  // key
  uint32_t index, slot;  // page of the sequence, and the key's place in it

  __device__ Cursor(const Problem& p, uint32_t key)
      : first(key), index(dev::wave_value_here(key / p.page_size)), slot(key - index * p.page_size) {}

  __device__ void advance(const Problem& p, uint32_t end) {
    const uint32_t step = first + kTileN < end ? kTileN : 0;
    first += step;
    slot += step;
    const bool turned = slot >= p.page_size;
    slot = turned ? 0 : slot;
    index += turned ? 1 : 0;
  }
};

template <class Half, int kD, bool kRowScales>
class Wave {
 public:
  static constexpr int kChunks = kD / 64;   // 16-byte loads of a key per lane, for the first product
  static constexpr int kTilesInFlight = kD > 64 ? 1 : kRowScales ? 2 : 4;  // of K, as many as registers hold
  static constexpr int kPerLane = kD / 16;  // bytes of a key per lane, for the second product
  static_assert(kD % 64 == 0, "a lane loads whole 16-byte pieces of a key");

  __device__ Wave(const Problem& problem, uint32_t row0, const Work& work)
      : p(problem), work(work), group(threadIdx.x / kTileN), column(threadIdx.x % kTileN) {
    const uint32_t rows = p.group * p.mq;
    row = row0 + column;
    exists = row < rows;
    const uint32_t loaded = exists ? row : rows - 1;
    const uint32_t token = loaded % p.mq;
    offset = ((uint64_t{work.batch} * p.mq + token) * p.kv_heads * p.group + work.head * p.group + loaded / p.mq) * kD;
    const int32_t hidden = p.causal ? static_cast<int32_t>(p.mq - 1 - token) : 0;
    const int32_t seen = static_cast<int32_t>(work.length) - hidden;
    limit = seen < 0 ? 0 : seen;
    table = p.block_tables + static_cast<uint64_t>(work.batch) * p.max_pages;
    k_data = p.k.data + work.head * p.k.head_stride;
    v_data = p.v.data + work.head * p.v.head_stride;
    k_offset = column * static_cast<uint32_t>(p.k.slot_stride) + 16 * group;
    v_offset = 4 * group * static_cast<uint32_t>(p.v.slot_stride) + kPerLane * column;
    if constexpr (kRowScales) {
      k_rows = p.k.rows + work.head * p.k.rows_head_stride;
      v_rows = p.v.rows + work.head * p.v.rows_head_stride;
      k_rows_offset = 16 * group * static_cast<uint32_t>(p.k.rows_slot_stride);
      v_rows_offset = 16 * group * static_cast<uint32_t>(p.v.rows_slot_stride);
    }
    const Half* from = static_cast<const Half*>(p.q) + offset + 16 * group;
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[c][h] = *reinterpret_cast<const Vector<Half, 8>*>(from + 64 * c + 8 * h);
        if constexpr (kRowScales)
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += static_cast<float>(q[c][h][j]);
      }
    q_sum = kRowScales ? column_sum(sum) * p.factor : 0.f;
    factor = kRowScales ? p.factor : p.factor * p.k.scale[p.k.scale_stride * work.head];
  }

  __device__ void run() {
    const uint32_t hidden = p.causal ? p.mq - 1 : 0;
    const uint32_t seen_by_all = work.length > hidden ? work.length - hidden : 0;
    Cursor cursor(p, work.begin);
    const uint32_t whole = min(work.end, seen_by_all);
    for (uint32_t key = work.begin; key < work.end; key += kBlockN) block(key, key + kBlockN > whole, cursor);
  }

  __device__ void finish(uint32_t split, uint32_t batch_heads) {
    const float sum = column_sum(total);
    const float inverse = sum > 0.f || sum != sum ? 1.f / sum : 0.f;
    const float shift = kRowScales ? column_sum(shifted) * inverse : 0.f;
    const float scale = kRowScales ? inverse : inverse * p.v.scale[p.v.scale_stride * work.head];
    const float lse = sum > 0.f || sum != sum ? maximum + __builtin_amdgcn_logf(sum) : -__builtin_inff();
    if (!exists) return;
    const uint32_t rows = p.group * p.mq;
    const uint64_t folded = (uint64_t{work.batch} * p.kv_heads + work.head) * rows + row;
    const uint64_t at = 4 * kPerLane * group;
    if (p.splits == 1) {
      store(static_cast<Half*>(p.out) + offset + at, scale, shift);
      if (group == 0) p.lse[folded] = lse * kLn2;
      return;
    }
    const uint64_t slice = uint64_t{split} * batch_heads * rows + folded;
    store(p.partial + slice * kD + at, scale, shift);
    if (group == 0) p.partial_lse[slice] = lse;
  }

 private:
  using Bytes = Vector<uint32_t, kPerLane / 4>;
  using Weights = dev::bf16x4;

  // Without these the compiler loads and converts all keys of a block ahead of their products and runs out of registers.
  __device__ static void stay_in_order() { __builtin_amdgcn_sched_barrier(0); }

  __device__ int64_t page_at(const Cursor& cursor) const {
    const auto listed = static_cast<int32_t>(dev::uniform(table[cursor.index]));
    return p.max_pages ? listed : static_cast<int32_t>(work.batch);
  }
  __device__ uint32_t keys_from(uint32_t key) const {
    return key < work.end ? min(work.end - key, static_cast<uint32_t>(kTileN)) : 0;
  }
  // The tile's keys of this split: the buffer's range check answers every other one with 0.
  __device__ dev::Buffer tile_of(const uint8_t* from, const Cache& cache, const Cursor& cursor, uint32_t key) const {
    const uint32_t keys = keys_from(key);
    return dev::make_buffer(from + page_at(cursor) * cache.page_stride + cursor.slot * cache.slot_stride,
                            keys * static_cast<uint32_t>(cache.slot_stride));
  }
  __device__ dev::Buffer rows_of(const uint32_t* from, const Cache& cache, const Cursor& cursor, uint32_t key) const {
    const uint32_t keys = keys_from(key);
    return dev::make_buffer(from + page_at(cursor) * cache.rows_page_stride + cursor.slot * cache.rows_slot_stride,
                            keys * 4 * static_cast<uint32_t>(cache.rows_slot_stride));
  }

  __device__ void block(uint32_t key, bool masked, Cursor& cursor) {
    dev::f32x4 scores[kTiles];
    Cursor values = cursor;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      scores[t] = score_tile(key + t * kTileN, cursor);
      cursor.advance(p, work.end);
      if (t % kTilesInFlight == kTilesInFlight - 1) stay_in_order();
    }

    if (masked) {
      // Keys that the row sees from the lane's first one on.
      const auto left = static_cast<int32_t>(min(limit, work.end)) - static_cast<int32_t>(key + 4 * group);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (left <= kTileN * t + r) scores[t][r] = -__builtin_inff();
    }

    float largest = -__builtin_inff();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int r = 0; r < 4; ++r) largest = fmaxf(largest, scores[t][r]);
    const float next = fmaxf(maximum, column_max(largest));
    const float base = next == -__builtin_inff() ? 0.f : next;  // nothing seen yet: -inf - 0 instead of -inf + inf
    const float keep = __builtin_amdgcn_exp2f(maximum - base);
    maximum = next;
    total *= keep;
    shifted *= keep;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) acc[j] *= keep;
    if (kRowScales && kD == 128) stay_in_order();

    Weights weights[kTiles];
    Cursor again = values;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      weights[t] = weights_of(key + t * kTileN, again, scores[t], base);
      again.advance(p, work.end);
      if (kRowScales && kD == 128) stay_in_order();
    }
    stay_in_order();
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) add_values(key + t * kTileN, values, weights[t], weights[t + 1]);
  }

  // Scores in base 2 of the tile's keys 4 g + r.
  __device__ dev::f32x4 score_tile(uint32_t key, const Cursor& cursor) {
    const dev::Buffer tile = tile_of(k_data, p.k, cursor, key);
    dev::u32x4 bytes[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) bytes[c] = dev::load_b128(tile, k_offset + 64 * c, 0);
    dev::f32x4 sum = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        sum = dev::mfma_k32(dev::fp8x8_as<Half>(bytes[c][2 * h], bytes[c][2 * h + 1]), q[c][h], sum);
    if constexpr (kRowScales) {
      if (kD == 128) stay_in_order();
      const dev::Buffer rows = rows_of(k_rows, p.k, cursor, key);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t word = dev::load_b32(rows, k_rows_offset, 4 * r * static_cast<uint32_t>(p.k.rows_slot_stride));
        sum[r] = row_scale(word) * (factor * sum[r]) + row_shift(word) * q_sum;
      }
    } else {
      sum *= factor;
    }
    return sum;
  }

  // 2^(score - base) of the tile's keys 4 g + r, times the scale of the row of V where it has one.
  __device__ Weights weights_of(uint32_t key, const Cursor& cursor, dev::f32x4 scores, float base) {
    dev::f32x4 weights;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      weights[r] = __builtin_amdgcn_exp2f(scores[r] - base);
      total += weights[r];
    }
    if constexpr (kRowScales) {
      const dev::Buffer rows = rows_of(v_rows, p.v, cursor, key);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t word = dev::load_b32(rows, v_rows_offset, 4 * r * static_cast<uint32_t>(p.v.rows_slot_stride));
        shifted += weights[r] * row_shift(word);
        weights[r] *= row_scale(word);
      }
    }
    return __builtin_convertvector(weights, Weights);
  }

  // The second product's next 32 keys: element 4 u + r of a lane is key 16 u + 4 g + r.
  __device__ void add_values(uint32_t key, Cursor& cursor, Weights first, Weights second) {
    const dev::bf16x8 weights = __builtin_shufflevector(first, second, 0, 1, 2, 3, 4, 5, 6, 7);
    Bytes bytes[8];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const dev::Buffer tile = tile_of(v_data, p.v, cursor, key + u * kTileN);
      cursor.advance(p, work.end);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        bytes[4 * u + r] = load_bytes(tile, v_offset, r * static_cast<uint32_t>(p.v.slot_stride));
    }
#pragma unroll
    for (int word = 0; word < kPerLane / 4; ++word) {
      uint32_t column_bytes[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) column_bytes[i] = bytes[i][word];
      add_word<0>(column_bytes, weights, acc[4 * word], acc[4 * word + 1]);
      stay_in_order();
      add_word<1>(column_bytes, weights, acc[4 * word + 2], acc[4 * word + 3]);
      stay_in_order();
    }
  }

  __device__ static Bytes load_bytes(dev::Buffer tile, uint32_t lane_offset, uint32_t wave_offset) {
    if constexpr (kPerLane == 16) return dev::load_b128(tile, lane_offset, wave_offset);
    if constexpr (kPerLane == 8) return dev::load_b64(tile, lane_offset, wave_offset);
    if constexpr (kPerLane == 4) return dev::load_b32(tile, lane_offset, wave_offset);
  }

  // Bytes 2 kPair and 2 kPair + 1 of eight keys' words: two rows of V^T.
  template <int kPair>
  __device__ static void add_word(const uint32_t (&words)[8], dev::bf16x8 weights, dev::f32x4& even,
                                  dev::f32x4& odd) {
    dev::u32x4 even_row, odd_row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const dev::f32x2 a = kPair ? dev::fp8_high_pair(words[2 * i]) : dev::fp8_low_pair(words[2 * i]);
      const dev::f32x2 b = kPair ? dev::fp8_high_pair(words[2 * i + 1]) : dev::fp8_low_pair(words[2 * i + 1]);
      even_row[i] = dev::exact_bf16_pair(a[0], b[0]);
      odd_row[i] = dev::exact_bf16_pair(a[1], b[1]);
    }
    even = dev::mfma_k32(__builtin_bit_cast(dev::bf16x8, even_row), weights, even);
    odd = dev::mfma_k32(__builtin_bit_cast(dev::bf16x8, odd_row), weights, odd);
  }

  // A lane's D/4 neighbouring elements of its row.
  template <class T>
  __device__ void store(T* at, float scale, float shift) const {
    using Four = Vector<T, 4>;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int j = 0; j < kPerLane; j += 4) {
        const dev::f32x4 values = {acc[j][r], acc[j + 1][r], acc[j + 2][r], acc[j + 3][r]};
        *reinterpret_cast<Four*>(at + r * kPerLane + j) = __builtin_convertvector(values * scale + shift, Four);
      }
  }

  const Problem& p;
  const Work& work;
  const uint32_t group, column;
  uint32_t row;
  bool exists;
  uint64_t offset;  // of the row in q and out
  uint32_t limit;   // keys that the row sees
  const int32_t* table;  // of the sequence
  const uint8_t *k_data, *v_data;  // of the KV head
  const uint32_t *k_rows, *v_rows;
  uint32_t k_offset, v_offset, k_rows_offset, v_rows_offset;  // of the lane in a tile, in bytes
  float factor, q_sum;
  Vector<Half, 8> q[kChunks][2];
  dev::f32x4 acc[kPerLane] = {};
  float maximum = -__builtin_inff(), total = 0.f, shifted = 0.f;
};

// Waves per SIMD that the registers are to leave room for.
constexpr int waves_per_simd(int d) { return d <= 128 ? 4 : 2; }

/// Grid: (ceil(M / 16), B * Hkv, splits).
template <class Half, int kD, bool kRowScales>
__global__ __launch_bounds__(dev::kWaveSize, waves_per_simd(kD)) void decode_split(const Problem problem) {
  const Work work(problem, blockIdx.y, blockIdx.z);
  Wave<Half, kD, kRowScales> wave(problem, blockIdx.x * kBlockM, work);
  wave.run();
  wave.finish(blockIdx.z, gridDim.y);
}

/// out = sum of 2^(lse_s - L) partial_s / sum of 2^(lse_s - L), L the largest lse_s; the splits are added in their order.
/// Grid: (M, B * Hkv); a wave owns one row.
template <class Half, int kD>
__global__ __launch_bounds__(dev::kWaveSize) void decode_merge(const Problem problem) {
  constexpr int kPerLane = kD / dev::kWaveSize;
  using Values = Vector<float, kPerLane>;
  const uint32_t rows = gridDim.x, lane = threadIdx.x;
  const uint64_t folded = uint64_t{blockIdx.y} * rows + blockIdx.x;
  const uint64_t stride = uint64_t{gridDim.y} * rows;
  float largest = -__builtin_inff();
  for (uint32_t s = 0; s < problem.splits; ++s) largest = fmaxf(largest, problem.partial_lse[s * stride + folded]);
  const float base = largest == -__builtin_inff() ? 0.f : largest;
  Values sum = {};
  float weights = 0.f;
  for (uint32_t s = 0; s < problem.splits; ++s) {
    const float weight = __builtin_amdgcn_exp2f(problem.partial_lse[s * stride + folded] - base);
    weights += weight;
    sum += weight * *reinterpret_cast<const Values*>(problem.partial + (s * stride + folded) * kD + lane * kPerLane);
  }
  const bool seen = weights > 0.f || weights != weights;
  const uint32_t batch = blockIdx.y / problem.kv_heads, head = blockIdx.y % problem.kv_heads;
  const uint32_t token = blockIdx.x % problem.mq;
  const uint64_t offset = ((uint64_t{batch} * problem.mq + token) * problem.kv_heads * problem.group +
                           head * problem.group + blockIdx.x / problem.mq) * kD;
  Half* out = static_cast<Half*>(problem.out) + offset + lane * kPerLane;
  const float inverse = seen ? 1.f / weights : 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) out[i] = static_cast<Half>(Values(sum * inverse)[i]);
  if (lane == 0) problem.lse[folded] = seen ? (base + __builtin_amdgcn_logf(weights)) * kLn2 : -__builtin_inff();
}

}  // namespace hf::decode_attention
