// Products of fp8 elements as they lie in memory: K by the terms of q (query.h), V by bf16 weights. Lane layouts are those of
// decode_kernel.h.
#pragma once

#include "hipforge/amd/fp8.h"
#include "hipforge/amd/fp8_mfma.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"
#include "hidden_keys.h"
#include "query.h"
#include "tile_rows.h"

namespace hf::decode_attention {

/// A tile of K, kChunks 16-byte chunks of a key per lane, by one term of q.
template <class Half, int kChunks>
struct TermProducts {
  /// The e8m0 scales of the terms 1 and 2 in bytes 1 and 2. Half of the exponent: both sides of the product take it, so that
  /// one register holds all.
  __device__ static uint32_t scales() {
    static_assert(kTermBits % 2 == 0 && kTerms<Half> <= 3);
#if defined(__gfx950__)
    constexpr uint32_t kOne = 127, kStep = kTermBits / 2;
    if constexpr (kChunks == 2) return dev::scale_in_vgpr((kOne - kStep) << 8 | (kOne - 2 * kStep) << 16);
#endif
    return 0;
  }

  /// sum + K by one term of q. The terms from 1 on are scaled to term 0 along the way.
  __device__ static dev::f32x4 multiplied(const dev::u32x4 (&bytes)[kChunks], const dev::u32x4 (&row)[kChunks], int term,
                                          [[maybe_unused]] uint32_t scales, dev::f32x4 sum) {
#if defined(__gfx950__)
    if constexpr (kChunks == 2) {
      if (term == 0) return dev::mfma_e4m3_16x16x128(bytes[0], bytes[1], row[0], row[1], sum);
      const dev::i32x8 keys = dev::mfma_operand(bytes[0], bytes[1]), queries = dev::mfma_operand(row[0], row[1]);
      return term == 1 ? dev::mfma_scaled_e4m3<1>(keys, scales, queries, scales, sum)
                       : dev::mfma_scaled_e4m3<2>(keys, scales, queries, scales, sum);
    }
#endif
    if (term < kTerms<Half> - 1) sum *= 1.f / (1 << kTermBits);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) sum = dev::mfma_e4m3_16x16x64(bytes[c], row[c], sum);
    return sum;
  }
};

/// Tiles of V, of which a lane has kWords words of each of four keys, four columns a word.
template <int kWords>
struct ValueProducts {
  using Bytes = Vector<uint32_t, kWords>;
  using Weights = dev::bf16x4;

  /// The second product's next kStep tiles, of 4 kStep keys a lane.
  template <int kStep>
  __device__ static void add(dev::f32x4* acc, const Bytes* bytes, const Weights* weights) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t keys[4 * kStep];
#pragma unroll
      for (int i = 0; i < 4 * kStep; ++i) keys[i] = bytes[i][word];
      add_pair<0, kStep>(keys, weights, acc[4 * word], acc[4 * word + 1]);
      stay_in_order();
      add_pair<1, kStep>(keys, weights, acc[4 * word + 2], acc[4 * word + 3]);
      stay_in_order();
    }
  }

  /// Gives the NaNs of a tile of V to the rows that see them, those with a 1 in `seen`, and takes them for 0.
  __device__ static void take_nans(dev::f32x4* acc, Bytes* bytes, Weights seen) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      uint32_t marks[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t nans = dev::fp8_nan_bytes(bytes[r][word]);
        marks[r] = nans >> 1;  // a code above 0 in both formats
        bytes[r][word] &= ~((nans >> 7) * 0xFF);
      }
      dev::f32x4 counts[4] = {};
      add_pair<0, 1>(marks, &seen, counts[0], counts[1]);
      add_pair<1, 1>(marks, &seen, counts[2], counts[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[4 * word + j] = spoiled(acc[4 * word + j], counts[j]);
      stay_in_order();
    }
  }

 private:
  // Bytes 2 kPair and 2 kPair + 1 of the keys' words: two rows of V^T.
  template <int kPair, int kStep>
  __device__ static void add_pair(const uint32_t (&keys)[4 * kStep], const Weights* weights, dev::f32x4& even,
                                  dev::f32x4& odd) {
    Vector<uint32_t, 2 * kStep> even_row, odd_row;
#pragma unroll
    for (int i = 0; i < 2 * kStep; ++i) {
      const dev::u32x2 pair = dev::zip_fp8_as_bf16<kPair>(keys[2 * i], keys[2 * i + 1]);
      even_row[i] = pair[0];
      odd_row[i] = pair[1];
    }
    even = multiplied<kStep>(even_row, weights, even);
    odd = multiplied<kStep>(odd_row, weights, odd);
  }
  template <int kStep>
  __device__ static dev::f32x4 multiplied(Vector<uint32_t, 2 * kStep> values, const Weights* weights, dev::f32x4 sum) {
    if constexpr (kStep == 1) return dev::mfma_k16(__builtin_bit_cast(dev::bf16x4, values), weights[0], sum);
    if constexpr (kStep == 2) {
      const dev::bf16x8 both = __builtin_shufflevector(weights[0], weights[1], 0, 1, 2, 3, 4, 5, 6, 7);
      return dev::mfma_k32(__builtin_bit_cast(dev::bf16x8, values), both, sum);
    }
  }
};

}  // namespace hf::decode_attention
