// Split-K decode attention over an int4 cache: a wave (row_wave.h) per 16 query rows, KV head, sequence and key range.
//
// A row of K or V is N words with the scale and shift (f16 each) of a group of D / N elements, then D / 8 words of eight
// nibbles. An element, code * scale + shift, is computed in float32 just before its use and rounded to nearest: of K to q's
// dtype, of V, like the weights, to bf16.
//
// The k index of a product is permuted at will where both operands agree: for K and q a lane has the D/4 elements of a row
// from g D/4 on, D/32 neighbouring words, whose two halves lie in one group each as N <= 8. For V it has D/16 elements,
// from i D/16 on, of one group: two words, one, or half of one; at D = 192 a word and half of one (Columns), of two groups.
//
// A scale or shift of V that is infinite counts as NaN in a tile that only some tokens see.
//
// Bytes per key and KV head: 2 (4 N + D/2). The words of scales take loads of their own, from the same cache lines as the
// elements.
//
// Registers: at most 72, 96 and 152 VGPRs at D = 64, 128 and above, no spills: seven, five and three waves per SIMD; the
// registry's limits hold every variant to it. LDS: row_lds_bytes, none with one wave.
#pragma once

#include "hipforge/amd/hip.h"
#include "int4_elements.h"
#include "merge_ranges.h"
#include "row_wave.h"

namespace hf::decode_attention {

template <class Half, int kD>
class Int4Rows {
 public:
  using Weight = dev::bf16;
  static constexpr float kBias = 0.f;
  static constexpr int kWords = kD / 32;    // of a key per lane, for the first product
  using Dealt = Columns<kD>;
  static constexpr int kPerLane = Dealt::kPerLane;  // elements of a key per lane, for the second

  /// `q`: the lane's row.
  __device__ Int4Rows(const Problem& problem, uint32_t head, const Half* q, uint32_t groups) : p(problem) {
    const uint32_t lane = dev::lane_index(), group = lane / kTileN, column = lane % kTileN;
#pragma unroll
    for (int c = 0; c < kWords; ++c) query[c] = reinterpret_cast<const Vector<Half, 8>*>(q)[kWords * group + c];
    k_data = p.k.data + head * p.k.head_stride;
    v_data = p.v.data + head * p.v.head_stride;
    k_offset = column * p.k.slot_stride + 4 * (groups + kWords * group);
    const uint32_t v_row = 4 * group * p.v.slot_stride;
    v_offset = v_row + 4 * groups + Dealt::kWide / 2 * column;
    v_narrow = v_row + 4 * groups + (Dealt::kNarrowFrom + Dealt::kNarrow * column) / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      k_scales[half] = column * p.k.slot_stride + 4 * ((2 * group + half) * groups / 8);
    v_scales = v_row + 4 * (Dealt::kWide * column * groups / kD);
    v_narrow_scales = v_row + 4 * ((Dealt::kNarrowFrom + Dealt::kNarrow * column) * groups / kD);
  }

  /// `inverse` itself: the elements of V are scaled before their product.
  __device__ float scaled(float inverse) const { return inverse; }

  template <int kCount>
  __device__ void products(const Tile (&tiles)[kCount], dev::f32x4 (&scores)[kCount]) const {
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      scores[t] = product(tiles[t]);
      stay_in_order();
    }
  }

  /// Adds the second product of the block: element 4 u + r of a lane is key 16 u + 4 g + r.
  template <int kCount, bool kPartly>
  __device__ void add_values(const Tile (&tiles)[kCount], const dev::bf16x4 (&weights)[kCount], const Seen& seen,
                             dev::f32x4 (&acc)[kPerLane]) const {
    constexpr int kKeys = 4 * kCount, kLoaded = (kPerLane + 7) / 8;
    uint32_t words[kKeys][kLoaded], own[kKeys], own_narrow[kKeys];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const dev::Buffer buffer = tile_of(p.v, v_data, tiles[u]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t at = r * p.v.slot_stride;
        own[4 * u + r] = dev::load_b32(buffer, v_scales, at);
        if constexpr (kPerLane == 16) *reinterpret_cast<dev::u32x2*>(words[4 * u + r]) = dev::load_b64(buffer, v_offset, at);
        if constexpr (kPerLane == 8 || kPerLane == 12) words[4 * u + r][0] = dev::load_b32(buffer, v_offset, at);
        if constexpr (Dealt::kNarrow > 0) {
          words[4 * u + r][1] = load_u16(buffer, v_narrow, at);
          own_narrow[4 * u + r] = dev::load_b32(buffer, v_narrow_scales, at);
        }
        if constexpr (kPerLane == 4) words[4 * u + r][0] = load_u16(buffer, v_offset, at);
      }
    }
    if constexpr (kPartly) {
      const dev::bf16x4 ones = ones_where<dev::bf16>(seen);
      take_special_scales<Dealt::kWide>(own, ones, acc);
      if constexpr (Dealt::kNarrow > 0) take_special_scales<Dealt::kNarrow>(own_narrow, ones, acc + Dealt::kWide);
    }
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      dev::f32x4 values[kCount];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const ScaleShift of(j < Dealt::kWide ? own[i] : own_narrow[i]);
        values[i / 4][i % 4] = static_cast<float>((words[i][j / 8] >> 4 * (j % 8)) & 0xf) * of.scale + of.shift;
      }
      const dev::bf16x4 low = dev::nearest_bf16(values[0]);
      if constexpr (kCount == 1) {
        acc[j] = weighted<1, dev::bf16>(low, weights, acc[j]);
      } else {
        const dev::bf16x4 high = dev::nearest_bf16(values[1]);
        acc[j] = weighted<2, dev::bf16>(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7), weights, acc[j]);
      }
      stay_in_order();
    }
  }

 private:
  // q by K of a tile: keys 4 g + r of row i.
  __device__ dev::f32x4 product(const Tile& tile) const {
    const dev::Buffer buffer = tile_of(p.k, k_data, tile);
    uint32_t words[kWords];
    if constexpr (kWords == 2) {
      *reinterpret_cast<dev::u32x2*>(words) = dev::load_b64(buffer, k_offset, 0);
    } else {
#pragma unroll
      for (int c = 0; c + 4 <= kWords; c += 4)
        *reinterpret_cast<dev::u32x4*>(words + c) = dev::load_b128(buffer, k_offset, 4 * c);
      if constexpr (kWords % 4 == 2)
        *reinterpret_cast<dev::u32x2*>(words + kWords - 2) = dev::load_b64(buffer, k_offset, 4 * (kWords - 2));
    }
    const uint32_t own[2] = {dev::load_b32(buffer, k_scales[0], 0), dev::load_b32(buffer, k_scales[1], 0)};
    dev::f32x4 sum = {};
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
      const ScaleShift of(own[2 * c / kWords]);
      const Vector<Half, 4> low = nearest<Half>(of.template elements<0>(words[c]));
      const Vector<Half, 4> high = nearest<Half>(of.template elements<1>(words[c]));
      sum = product_k32(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7), query[c], sum);
      stay_in_order();
    }
    return sum * p.factor;
  }
  __device__ static uint32_t load_u16(dev::Buffer tile, uint32_t lane_offset, uint32_t wave_offset) {
    return __builtin_amdgcn_raw_buffer_load_b16(tile, static_cast<int32_t>(lane_offset), static_cast<int32_t>(wave_offset),
                                                0);
  }

  const Problem& p;
  Vector<Half, 8> query[kWords];
  const uint8_t *k_data, *v_data;  // of the KV head
  uint32_t k_offset, v_offset, v_narrow, k_scales[2], v_scales, v_narrow_scales;  // of the lane in a tile, in bytes
};

/// Grid: (ceil(M / 16), B * Hkv, splits); block: `ranges` waves; dynamic LDS: row_lds_bytes.
template <class Half, int kD>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize, kD > 128 ? 3 : 4) void decode_split_int4(
    const int32_t* seqlens, const int32_t* q_starts, const void* q, const float* k_scale,
    uint32_t kv_heads, uint32_t kv_factor, uint32_t kv_shift, uint32_t group, uint32_t mq, uint32_t per_head,
    const Problem problem, uint32_t groups) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host pass needs no more than the launch
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const First first = {seqlens, q_starts, q, k_scale, {kv_heads, kv_factor, kv_shift}, group, mq, per_head};
  const QueryTile tile(first);
  if (tile.is_empty(first)) return;
  const uint32_t range = dev::uniform(threadIdx.x / dev::kWaveSize);
  const int32_t length = dev::load_constant(seqlens + tile.list(first));
  const Work<kRowBlockN> work(problem, tile.list(first), tile.head, length, blockIdx.z, range);
  RowWave<Half, kD, Int4Rows> wave(problem, tile.row0, work, static_cast<const Half*>(q) + tile.first_element(first, kD), groups);
  wave.run();
  float total, shifted;
  merge_ranges(wave, 1, problem_here().ranges, range, 0, lds, total, shifted);
  if (range == 0) wave.store(blockIdx.z, total);
#endif
}

}  // namespace hf::decode_attention
