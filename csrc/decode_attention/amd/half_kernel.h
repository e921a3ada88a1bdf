// Split-K decode attention over a bf16 or f16 cache of q's dtype: a wave (row_wave.h) per 16 query rows, KV head, sequence and
// key range.
//
// The products take the elements in place: of K and q a lane has elements 32 c + 8 g .. + 7 of a row; of V it has the D/16
// elements from i D/16 on of four keys per tile, zipped into rows of V^T. Weights are rounded to the elements' dtype. An f16
// weight is stored times 2^15, so that it is exact to 11 bits down to 2^-29 of the largest. A scale per tensor or head is
// applied in float32 outside the products.
//
// An infinite element of V counts as NaN in a tile that only some tokens see.
//
// Bytes per key and KV head: 4 D, each read once; 16 rows or fewer share them. Memory is the bound: 4 D bytes for 4 * 16 * D
// flops of MFMA.
//
// Registers: at most 72, 112, 144 and 168 VGPRs at D = 64, 128, 192 and 256, no spills: seven, four, three and three waves; the
// registry's limits hold every variant to it. LDS: row_lds_bytes, none with one wave.
#pragma once

#include "hipforge/amd/hip.h"
#include "merge_ranges.h"
#include "row_wave.h"

namespace hf::decode_attention {

template <class Half, int kD>
class HalfRows {
  using Four = Vector<Half, 4>;
  using Eight = Vector<Half, 8>;

 public:
  using Weight = Half;
  static constexpr bool kF16 = __is_same(Half, _Float16);
  static constexpr float kBias = kF16 ? 15.f : 0.f;
  static constexpr int kWords = kD / 32;    // products of 32 elements
  using Dealt = Columns<kD>;
  static constexpr int kPerLane = Dealt::kPerLane;  // elements of a key per lane, for the second product

  /// `q`: the lane's row.
  __device__ HalfRows(const Problem& problem, uint32_t head, const Half* q) : p(problem), head(head) {
    const uint32_t lane = dev::lane_index(), group = lane / kTileN, column = lane % kTileN;
#pragma unroll
    for (int c = 0; c < kWords; ++c) query[c] = *reinterpret_cast<const Vector<Half, 8>*>(q + 32 * c + 8 * group);
    k_data = p.k.data + head * p.k.head_stride;
    v_data = p.v.data + head * p.v.head_stride;
    k_offset = column * p.k.slot_stride + 16 * group;
    v_offset = 4 * group * p.v.slot_stride + 2 * Dealt::kWide * column;
    v_narrow = 4 * group * p.v.slot_stride + 2 * (Dealt::kNarrowFrom + Dealt::kNarrow * column);
    factor = p.factor * scale_in_logits(load_constant(p.k.scale + p.k.scale_stride * head));
  }

  /// `inverse` times the scale of V.
  __device__ float scaled(float inverse) const {
    return inverse == 0.f ? 0.f : inverse * load_constant(p.v.scale + p.v.scale_stride * head);
  }

  /// q by K: keys 4 g + r of row i.
  template <int kCount>
  __device__ void products(const Tile (&tiles)[kCount], dev::f32x4 (&scores)[kCount]) const {
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      const dev::Buffer buffer = tile_of(p.k, k_data, tiles[t]);
      scores[t] = {};
#pragma unroll
      for (int first = 0; first < kWords; first += kInFlight) {
        dev::u32x4 keys[kInFlight];
#pragma unroll
        for (int c = 0; c < kInFlight; ++c) keys[c] = dev::load_b128(buffer, k_offset, 64 * (first + c));
#pragma unroll
        for (int c = 0; c < kInFlight; ++c)
          scores[t] = product_k32(__builtin_bit_cast(Eight, keys[c]), query[first + c], scores[t]);
        if (kWords == kInFlight * kCount) continue;  // two tiles in flight where registers hold them
        stay_in_order();
      }
      scores[t] *= factor;
    }
  }

  /// Adds the second product: element 4 u + r of a lane is key 16 u + 4 g + r.
  template <int kCount, bool kPartly>
  __device__ void add_values(const Tile (&tiles)[kCount], const Four (&weights)[kCount], const Seen& seen,
                             dev::f32x4 (&acc)[kPerLane]) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      Piece values[4 * kCount];
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const dev::Buffer buffer = tile_of(p.v, v_data, tiles[u]);
#pragma unroll
        for (int r = 0; r < 4; ++r)
          values[4 * u + r] = load_piece(buffer, piece_offset(piece), r * p.v.slot_stride);
      }
      dev::f32x4* sums = acc + 2 * kPieceWords * piece;
      if constexpr (kPartly) HalfValues<Half>::take_specials(values, ones_where<Half>(seen), sums);
#pragma unroll
      for (int word = 0; word < kPieceWords; ++word) {
        uint32_t keys[4 * kCount];
#pragma unroll
        for (int i = 0; i < 4 * kCount; ++i) keys[i] = values[i][word];
        HalfValues<Half>::template add_pair<kCount>(keys, weights, sums[2 * word], sums[2 * word + 1]);
        stay_in_order();
      }
    }
  }

 private:
  // Words of one load of V per key; at D = 256 more do not fit into the registers of three waves.
  static constexpr int kPieceWords = kD == 128 ? 4 : 2;
  static constexpr int kPieces = kPerLane / (2 * kPieceWords);
  static constexpr int kInFlight = kWords == 6 ? 3 : kWords < 4 ? kWords : 4;  // loads of K that wait together
  using Piece = Vector<uint32_t, kPieceWords>;
  static_assert(kD % 32 == 0 && kPerLane % (2 * kPieceWords) == 0 && kWords % kInFlight == 0);
  static_assert(Dealt::kNarrow == 0 || Dealt::kNarrow == 2 * kPieceWords);

  __device__ uint32_t piece_offset(int piece) const {
    return 2 * kPieceWords * piece < Dealt::kWide ? v_offset + 4 * kPieceWords * piece : v_narrow;
  }
  __device__ static Piece load_piece(dev::Buffer tile, uint32_t lane_offset, uint32_t wave_offset) {
    if constexpr (kPieceWords == 2) return dev::load_b64(tile, lane_offset, wave_offset);
    if constexpr (kPieceWords == 4) return dev::load_b128(tile, lane_offset, wave_offset);
  }

  const Problem& p;
  const uint32_t head;
  Eight query[kWords];
  const uint8_t *k_data, *v_data;  // of the KV head
  uint32_t k_offset, v_offset, v_narrow;  // of the lane in a tile, in bytes
  float factor;
};

/// Grid: (ceil(M / 16), B * Hkv, splits); block: `ranges` waves; dynamic LDS: row_lds_bytes.
template <class Half, int kD>
__global__ __launch_bounds__(kMaxWaves * dev::kWaveSize, kD > 128 ? 3 : 4) void decode_split_half(
    const int32_t* seqlens, const int32_t* q_starts, const void* q, const float* k_scale,
    uint32_t kv_heads, uint32_t kv_factor, uint32_t kv_shift, uint32_t group, uint32_t mq, uint32_t per_head,
    const Problem problem) {
#if defined(__HIP_DEVICE_COMPILE__)  // the host pass needs no more than the launch
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const First first = {seqlens, q_starts, q, k_scale, {kv_heads, kv_factor, kv_shift}, group, mq, per_head};
  const QueryTile tile(first);
  if (tile.is_empty(first)) return;
  const uint32_t range = dev::uniform(threadIdx.x / dev::kWaveSize);
  const int32_t length = dev::load_constant(seqlens + tile.list(first));
  const Work<kRowBlockN> work(problem, tile.list(first), tile.head, length, blockIdx.z, range);
  RowWave<Half, kD, HalfRows> wave(problem, tile.row0, work, static_cast<const Half*>(q) + tile.first_element(first, kD));
  wave.run();
  float total, shifted;
  merge_ranges(wave, 1, problem_here().ranges, range, 0, lds, total, shifted);
  if (range == 0) wave.store(blockIdx.z, total);
#endif
}

}  // namespace hf::decode_attention
