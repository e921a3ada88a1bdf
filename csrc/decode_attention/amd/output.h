// How float32 results become what a call writes: q's dtype, float32, fp8 by one static scale, or MX-FP8.
//
//   unsplit:  a lane has kCount neighbouring columns of a row, its neighbours 16 lanes on the next ones
//
//     kCount = 16 (D = 64)   |  lane g = 0   |  lane g = 1   |      a block of 32 is two lanes'
//     kCount = 32            |          one block            |      of one lane
//     kCount = 64 (D = 256)  |          one block            |          and another             |
//
//   At D = 192 a lane has 32 of the first 128 columns and 16 of the others (tile_rows.h).
//
//   merged:   a thread has 4 neighbouring columns, 8 neighbouring threads a block
//
// Codes and scales are those of fp8_encode.h and mx_encode.h (round_up) of the float32 value, so that they equal, bit for
// bit, what the quantising ops make of an output in float32. Bytes written per element: 2, 4, 1, or 1 + 1/32.
#pragma once

#include "hipforge/device/fp8_encode.h"
#include "hipforge/amd/hip.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "work.h"
#include "query.h"

namespace hf::decode_attention {

constexpr float kE4m3Limit = static_cast<float>(dev::kMxE4m3.largest);

/// The larger of the values of two lanes whose indices differ in bit 4, in both.
__device__ inline uint32_t larger_of_neighbours(uint32_t value) {
  constexpr int kXor16 = 16 << 10 | 0x1F;  // ds_swizzle
  return dev::larger(value, static_cast<uint32_t>(__builtin_amdgcn_ds_swizzle(static_cast<int>(value), kXor16)));
}

/// Stores column(c), c < kCount, as neighbouring elements of type T.
template <class T, int kCount, class Column>
__device__ __forceinline__ void store_values(T* at, Column column) {
  using Four = Vector<T, 4>;
#pragma unroll
  for (int c = 0; c < kCount; c += 4) {
    const dev::f32x4 values = {column(c), column(c + 1), column(c + 2), column(c + 3)};
    *reinterpret_cast<Four*>(at + c) = __builtin_convertvector(values, Four);
  }
}

/// The codes of values that have been scaled; those of an MX block without a scale are NaN.
template <int kCount>
__device__ inline void encode(const float (&scaled)[kCount], bool without_scale, uint32_t (&words)[kCount / 4]) {
  constexpr uint32_t kNans = dev::kE4m3Nan * 0x01010101u;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint32_t word = dev::encode_fp8x4<dev::Fp8Format::e4m3>(scaled + 4 * i, kE4m3Limit);
    words[i] = without_scale ? kNans : word;
  }
}

/// Stores elements offset .. offset + kCount - 1 of out, a lane's part of a row: column(c) is the float32 value of element
/// c. The four lanes that share a row call it together.
template <class Half, int kCount, class Column>
__device__ __forceinline__ void store_row(const Problem& p, uint64_t offset, Column column) {
  if (p.output == Output::input) return store_values<Half, kCount>(static_cast<Half*>(p.out) + offset, column);
  if (p.output == Output::f32) return store_values<float, kCount>(static_cast<float*>(p.out) + offset, column);
  constexpr int kPiece = 16;  // codes of one store
  constexpr int kPieces = kCount / kPiece, kOfBlock = kMxBlock / kPiece;
  static_assert(kCount % kPiece == 0 && (kPieces == 1 || kPieces % kOfBlock == 0), "a lane has half a block, or whole ones");
  const bool blocks = p.output == Output::mxfp8;
  const float inverse = blocks ? 1.f : dev::inverse_scale(*p.out_scale);
  uint32_t byte = 0;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const uint64_t at = offset + kPiece * piece;
    if (blocks && piece % kOfBlock == 0) {
      uint32_t amax = 0;
#pragma unroll
      for (int c = 0; c < (kPieces == 1 ? kPiece : static_cast<int>(kMxBlock)); ++c)
        amax = dev::larger(amax, dev::magnitude_bits(column(kPiece * piece + c)));
      if constexpr (kPieces == 1) amax = larger_of_neighbours(amax);
      byte = dev::e4m3_block_scale(amax);
      if (at % kMxBlock == 0) p.block_scales[at / kMxBlock] = static_cast<uint8_t>(byte);
    }
    const float factor = blocks ? dev::e8m0_inverse(byte) : inverse;
    float scaled[kPiece];
#pragma unroll
    for (int c = 0; c < kPiece; ++c) scaled[c] = column(kPiece * piece + c) * factor;
    uint32_t words[kPiece / 4];
    encode(scaled, blocks && byte == kE8m0Nan, words);
    *reinterpret_cast<dev::u32x4*>(static_cast<uint8_t*>(p.out) + at) = dev::u32x4{words[0], words[1], words[2], words[3]};
  }
}

/// Stores elements offset .. offset + 3 of out; 8 neighbouring threads have those of a block.
template <class Half>
__device__ __forceinline__ void store_four(const Problem& p, uint64_t offset, dev::f32x4 values) {
  constexpr int kThreadsOfBlock = kMxBlock / 4;
  const auto column = [&](int c) { return values[c]; };
  if (p.output == Output::input) return store_values<Half, 4>(static_cast<Half*>(p.out) + offset, column);
  if (p.output == Output::f32) return store_values<float, 4>(static_cast<float*>(p.out) + offset, column);
  const bool blocks = p.output == Output::mxfp8;
  float factor;
  uint32_t byte = 0;
  if (blocks) {
    uint32_t amax = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) amax = dev::larger(amax, dev::magnitude_bits(values[c]));
    byte = dev::e4m3_block_scale(dev::lanes_combined<kThreadsOfBlock>(amax, dev::larger));
    if (offset % kMxBlock == 0) p.block_scales[offset / kMxBlock] = static_cast<uint8_t>(byte);
    factor = dev::e8m0_inverse(byte);
  } else {
    factor = dev::inverse_scale(*p.out_scale);
  }
  const float scaled[] = {values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor};
  uint32_t words[1];
  encode(scaled, byte == kE8m0Nan, words);
  *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + offset) = words[0];
}

}  // namespace hf::decode_attention
