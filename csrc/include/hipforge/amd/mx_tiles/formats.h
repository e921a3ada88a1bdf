// The element formats of the tiles: elements in a byte, and the operands of the scaled 32 x 32 x 64 MFMA of gfx950.
//
// A half of a stage's row is 64 bytes, of which a lane has two chunks of 16: chunk 2 i + g of the half, g = lane / 32.
//
//   e4m3   64 k: one instruction with both chunks; scale byte g is that of k = 32 g .. 32 g + 31
//   e2m1  128 k: instruction i with chunk i, k = 64 i + 32 g .. + 31; scale byte 2 i + g is that of just these k
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"

namespace hf::tiles {

using f32x16 = float __attribute__((ext_vector_type(16)));

struct E4m3 {
  static constexpr bool kScaled = true;  // by MX scales; else sums are multiplied with one f32 for a row of X and of W
  // Elements of a byte; also matrix instructions for a half of a step, and words of scales for a step.
  static constexpr int kPerByte = 1;
  static constexpr bool kTakesShuffled = false;  // weights in 16 x 16-byte tiles, their scales in 32 x 8

#if defined(__gfx950__)
  // sums + A B over the half's k, with byte kByte of each scale.
  template <int kInstruction, int kByte>
  static __device__ __forceinline__ f32x16 multiply(const dev::u32x4 (&a)[2], uint32_t a_scale, const dev::u32x4 (&b)[2],
                                                    uint32_t b_scale, f32x16 sums) {
    constexpr int kCode = 0;
    return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(dev::mfma_operand(a[0], a[1]), dev::mfma_operand(b[0], b[1]), sums,
                                                           kCode, kCode, kByte, static_cast<int32_t>(a_scale), kByte,
                                                           static_cast<int32_t>(b_scale));
  }
#endif
};

struct PlainE4m3 : E4m3 {
  static constexpr bool kScaled = false;

#if defined(__gfx950__)
  template <int kInstruction, int kByte>
  static __device__ __forceinline__ f32x16 multiply(const dev::u32x4 (&a)[2], uint32_t, const dev::u32x4 (&b)[2], uint32_t,
                                                    f32x16 sums) {
    return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(dev::mfma_operand(a[0], a[1]), dev::mfma_operand(b[0], b[1]), sums, 0,
                                                           0, 0, 0, 0, 0);
  }
#endif
};

struct E2m1 {
  static constexpr bool kScaled = true;
  static constexpr int kPerByte = 2;
  static constexpr bool kTakesShuffled = true;

#if defined(__gfx950__)
  // Over the k of the half's instruction number kInstruction.
  template <int kInstruction, int kByte>
  static __device__ __forceinline__ f32x16 multiply(const dev::u32x4 (&a)[2], uint32_t a_scale, const dev::u32x4 (&b)[2],
                                                    uint32_t b_scale, f32x16 sums) {
    constexpr int kCode = 4;
    const dev::u32x4 zero = {0, 0, 0, 0};  // registers 4-7 are not read for 4-bit operands
    return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(
        dev::mfma_operand(a[kInstruction], zero), dev::mfma_operand(b[kInstruction], zero), sums, kCode, kCode, kByte,
        static_cast<int32_t>(a_scale), kByte, static_cast<int32_t>(b_scale));
  }
#endif
};

}  // namespace hf::tiles
