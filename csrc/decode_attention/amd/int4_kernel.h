// Split-K decode attention over an int4 cache: a wave per 16 query rows, KV head, sequence and key range.
//
// A row of K or V is N words with the scale and shift (f16 each) of a group of D / N elements, then D / 8 words of eight
// nibbles. An element code * scale + shift is computed in float32 and rounded to nearest next to its use: of K to q's
// dtype, of V, like the weights, to bf16:
//
//   scores^T [32 keys x 16 rows] = K [32 x D] Q^T      lane (g = lane / 16, i = lane % 16): keys 16 t + 4 g + r of row i
//   out^T    [D x 16 rows]      += V^T [D x 32] P^T    lane: d = (4 g + r) D/16 + j of row i, j < D/16
//
// The k index of a product is permuted at will where both operands agree: for K and q a lane has the D/4 elements of a row
// from g D/4 on, D/32 neighbouring words, whose two halves lie in one group each as N <= 8. For V it has D/16 elements,
// from i D/16 on, of one group: two words, one, or half of one.
//
// Bytes per key and KV head: 2 (4 N + D/2). The words of scales come with loads of their own, from the cache lines of the
// row's elements.
//
// Registers: at most 72, 96 and 152 VGPRs at D = 64, 128 and 256, no spills: seven, five and three waves per SIMD; the
// registry's limits hold every variant to it. LDS: int4_lds_bytes, none with one wave.
#pragma once

#include <hip/hip_runtime.h>

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/fp8.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "merge_ranges.h"
#include "../problem.h"
#include "query.h"

namespace hf::decode_attention {

constexpr int kInt4BlockN = 32;

/// Bytes of a work-group of `waves` waves: the ranges' statistics and sums at its end.
constexpr uint32_t int4_lds_bytes(int head_dim, int waves) {
  return waves > 1 ? static_cast<uint32_t>(waves / 2 * head_dim * kBlockM * 4) : 0;
}

template <class Half>
__device__ inline dev::f32x4 int4_scores(Vector<Half, 8> k, Vector<Half, 8> q, dev::f32x4 sum) {
  if constexpr (!__is_same(Half, _Float16)) {
    return dev::mfma_k32(k, q, sum);
  } else {
#if defined(__gfx950__)
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(k, q, sum, 0, 0, 0);
#else
    const Vector<_Float16, 4> k_low = k.lo, k_high = k.hi, q_low = q.lo, q_high = q.hi;
    sum = __builtin_amdgcn_mfma_f32_16x16x16f16(k_low, q_low, sum, 0, 0, 0);
    return __builtin_amdgcn_mfma_f32_16x16x16f16(k_high, q_high, sum, 0, 0, 0);
#endif
  }
}

struct ScaleShift {
  float scale, shift;

  __device__ explicit ScaleShift(uint32_t word) {
    const auto both = __builtin_bit_cast(Vector<_Float16, 2>, word);
    scale = static_cast<float>(both[0]);
    shift = static_cast<float>(both[1]);
  }
  /// Nibble 4 kHalf + i of `word` as an element.
  template <int kHalf>
  __device__ dev::f32x4 elements(uint32_t word) const {
    const uint32_t even = (word >> 16 * kHalf) & 0x0f0f0f0fu, odd = (word >> (16 * kHalf + 4)) & 0x0f0f0f0fu;
    const dev::f32x4 codes = {code(even), code(odd), code(even >> 8), code(odd >> 8)};
    return codes * scale + shift;
  }

 private:
  __device__ static float code(uint32_t bytes) { return static_cast<float>(bytes & 0xff); }
};

template <class Half, int kD>
class Int4Wave {
 public:
  static constexpr int kBlockN = kInt4BlockN;
  static constexpr int kTiles = kBlockN / kTileN;
  static constexpr int kWords = kD / 32;    // of a key per lane, for the first product
  static constexpr int kPerLane = kD / 16;  // elements of a key per lane, for the second

  __device__ Int4Wave(const Problem& problem, uint32_t groups, uint32_t row0, const Work<kBlockN>& work)
      : p(problem), work(work), row0(row0) {
    const uint32_t lane = dev::lane_index(), group = lane / kTileN, column = lane % kTileN;
    const Row row(*this, lane);
    const int32_t hidden = p.causal ? static_cast<int32_t>(p.mq - 1 - row.token) : 0;
    const int32_t seen = static_cast<int32_t>(work.length) - hidden;
    limit = static_cast<int32_t>(min(static_cast<uint32_t>(seen < 0 ? 0 : seen), work.end)) - 4 * static_cast<int32_t>(group);
    const auto* q = reinterpret_cast<const Vector<Half, 8>*>(static_cast<const Half*>(p.q) + row.offset) + kWords * group;
#pragma unroll
    for (int c = 0; c < kWords; ++c) query[c] = q[c];
    k_data = p.k.data + work.head * p.k.head_stride;
    v_data = p.v.data + work.head * p.v.head_stride;
    k_offset = column * p.k.slot_stride + 4 * (groups + kWords * group);
    v_offset = 4 * group * p.v.slot_stride + 4 * groups + kPerLane / 2 * column;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      k_scales[half] = column * p.k.slot_stride + 4 * ((2 * group + half) * groups / 8);
    v_scales = 4 * group * p.v.slot_stride + 4 * (column * groups / 16);
  }

  __device__ void run() {
    const uint32_t hidden = p.causal ? p.mq - 1 : 0;
    const uint32_t seen_by_all = work.length > hidden ? work.length - hidden : 0;
    const uint32_t whole = min(work.end, seen_by_all);
    Cursor cursor(p, work.batch, work.begin, work.end, work.length);
    for (uint32_t key = work.begin; key < work.end; key += kBlockN) block(key, key + kBlockN > whole, cursor);
  }

  dev::f32x4 acc[kPerLane] = {};
  float maximum = -__builtin_inff();
  dev::f32x2 total = {}, shifted = {};  // of the lane's own keys, in two sums; shifts are in the elements

  /// Stores the lane's D/4 neighbouring columns of its row, whose weights add up to `total`.
  __device__ void store(uint32_t split, uint32_t batch_heads, float total) const {
    const bool any = total > 0.f || total != total;
    const float inverse = any ? 1.f / total : 0.f;
    const float lse = any ? maximum + __builtin_amdgcn_logf(total) : -__builtin_inff();
    const uint32_t lane = dev::lane_index(), group = lane / kTileN;
    const Row row(*this, lane);
    const uint32_t rows = p.group * p.mq;
    if (row.index >= rows) return;
    const uint64_t folded = (uint64_t{work.batch} * p.kv_heads + work.head) * rows + row.index;
    const uint32_t at = 4 * kPerLane * group;
    if (p.splits == 1) {
      store_columns(static_cast<Half*>(p.out) + row.offset + at, inverse);
      if (group == 0) p.lse[folded] = lse * kLn2;
      return;
    }
    const uint64_t slice = uint64_t{split} * batch_heads * rows + folded;
    store_columns(p.partial + slice * kD + at, inverse);
    if (group == 0) p.partial_lse[slice] = lse;
  }

 private:
  // Without these the compiler loads and converts all keys of a block ahead of their products and runs out of registers.
  __device__ static void stay_in_order() { __builtin_amdgcn_sched_barrier(0); }

  struct Row {
    uint32_t index, token;
    uint64_t offset;  // in q and out

    // Lanes without a row of their own load the last one.
    __device__ Row(const Int4Wave& wave, uint32_t lane) : index(wave.row0 + lane % kTileN) {
      const Problem& p = wave.p;
      const uint32_t loaded = min(index, p.group * p.mq - 1);
      token = loaded % p.mq;
      offset = ((uint64_t{wave.work.batch} * p.mq + token) * p.kv_heads * p.group + wave.work.head * p.group +
                loaded / p.mq) * kD;
    }
  };

  // `keys` keys of the tile: the buffer's range check answers every other one, its scales included, with 0.
  __device__ static dev::Buffer tile_of(const uint8_t* from, int64_t page_stride, uint32_t slot_stride, const Tile& tile) {
    return dev::make_buffer(from + tile.page * page_stride + uint64_t{tile.slot} * slot_stride, tile.keys * slot_stride);
  }

  __device__ void block(uint32_t key, bool masked, Cursor& cursor) {
    Tile tiles[kTiles];
    dev::f32x4 scores[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      tiles[t] = cursor.next();
      scores[t] = products(tiles[t]);
      stay_in_order();
    }
    if (masked) {
      const int32_t left = limit - static_cast<int32_t>(key);
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
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) acc[j] *= keep;
    dev::bf16x4 weights[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      dev::f32x4 weight = scores[t] - base;
#pragma unroll
      for (int r = 0; r < 4; ++r) weight[r] = __builtin_amdgcn_exp2f(weight[r]);
      total += weight.lo + weight.hi;
      weights[t] = dev::nearest_bf16(weight);
    }
    stay_in_order();
    add_values(tiles, weights);
  }

  // q by K of a tile: keys 4 g + r of row i.
  __device__ dev::f32x4 products(const Tile& tile) const {
    const dev::Buffer buffer = tile_of(k_data, p.k.page_stride, p.k.slot_stride, tile);
    uint32_t words[kWords];
    if constexpr (kWords == 2) {
      *reinterpret_cast<dev::u32x2*>(words) = dev::load_b64(buffer, k_offset, 0);
    } else {
#pragma unroll
      for (int c = 0; c < kWords; c += 4)
        *reinterpret_cast<dev::u32x4*>(words + c) = dev::load_b128(buffer, k_offset, 4 * c);
    }
    const uint32_t own[2] = {dev::load_b32(buffer, k_scales[0], 0), dev::load_b32(buffer, k_scales[1], 0)};
    dev::f32x4 sum = {};
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
      const ScaleShift of(own[2 * c / kWords]);
      const Vector<Half, 4> low = rounded(of.template elements<0>(words[c]));
      const Vector<Half, 4> high = rounded(of.template elements<1>(words[c]));
      sum = int4_scores<Half>(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7), query[c], sum);
      stay_in_order();
    }
    return sum * p.factor;
  }
  __device__ static Vector<Half, 4> rounded(dev::f32x4 values) {
    if constexpr (__is_same(Half, _Float16)) return __builtin_convertvector(values, Vector<_Float16, 4>);
    if constexpr (!__is_same(Half, _Float16)) return dev::nearest_bf16(values);
  }

  __device__ static uint32_t load_u16(dev::Buffer tile, uint32_t lane_offset, uint32_t wave_offset) {
    return __builtin_amdgcn_raw_buffer_load_b16(tile, static_cast<int32_t>(lane_offset), static_cast<int32_t>(wave_offset),
                                                0);
  }

  // The second product of the block: element 4 u + r of a lane is key 16 u + 4 g + r.
  __device__ void add_values(const Tile (&tiles)[kTiles], const dev::bf16x4 (&weights)[kTiles]) {
    constexpr int kKeys = 4 * kTiles, kLoaded = kPerLane / 8 > 0 ? kPerLane / 8 : 1;
    uint32_t words[kKeys][kLoaded], own[kKeys];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const dev::Buffer buffer = tile_of(v_data, p.v.page_stride, p.v.slot_stride, tiles[u]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t at = r * p.v.slot_stride;
        own[4 * u + r] = dev::load_b32(buffer, v_scales, at);
        if constexpr (kLoaded == 2) *reinterpret_cast<dev::u32x2*>(words[4 * u + r]) = dev::load_b64(buffer, v_offset, at);
        if constexpr (kPerLane == 8) words[4 * u + r][0] = dev::load_b32(buffer, v_offset, at);
        if constexpr (kPerLane == 4) words[4 * u + r][0] = load_u16(buffer, v_offset, at);
      }
    }
    const dev::bf16x8 both = __builtin_shufflevector(weights[0], weights[1], 0, 1, 2, 3, 4, 5, 6, 7);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      dev::f32x4 values[kTiles];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const ScaleShift of(own[i]);
        values[i / 4][i % 4] = static_cast<float>((words[i][j / 8] >> 4 * (j % 8)) & 0xf) * of.scale + of.shift;
      }
      const dev::bf16x4 low = dev::nearest_bf16(values[0]), high = dev::nearest_bf16(values[1]);
      acc[j] = dev::mfma_k32(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7), both, acc[j]);
      stay_in_order();
    }
  }

  template <class T>
  __device__ void store_columns(T* at, float scale) const {
    using Four = Vector<T, 4>;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int j = 0; j < kPerLane; j += 4) {
        const dev::f32x4 values = {acc[j][r], acc[j + 1][r], acc[j + 2][r], acc[j + 3][r]};
        *reinterpret_cast<Four*>(at + r * kPerLane + j) = __builtin_convertvector(values * scale, Four);
      }
  }

  const Problem& p;
  const Work<kBlockN>& work;
  const uint32_t row0;
  Vector<Half, 8> query[kWords];
  int32_t limit;                   // keys that the row sees, less 4 g
  const uint8_t *k_data, *v_data;  // of the KV head
  uint32_t k_offset, v_offset, k_scales[2], v_scales;  // of the lane in a tile, in bytes
};

/// Grid: (ceil(M / 16), B * Hkv, splits); block: `ranges` waves; dynamic LDS: int4_lds_bytes.
template <class Half, int kD>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize, kD == 256 ? 3 : 4) void decode_split_int4(const Problem problem,
                                                                                            uint32_t groups) {
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const uint32_t range = dev::uniform(threadIdx.x / dev::kWaveSize);
  const Work<kInt4BlockN> work(problem, blockIdx.y, blockIdx.z, range);
  Int4Wave<Half, kD> wave(problem, groups, blockIdx.x * kBlockM, work);
  wave.run();
  float total, shifted;
  merge_ranges<1>(wave, problem.ranges, range, 0, lds, total, shifted);
  if (range == 0) wave.store(blockIdx.z, gridDim.y, total);
}

}  // namespace hf::decode_attention
