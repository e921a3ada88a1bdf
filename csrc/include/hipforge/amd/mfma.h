// Matrix instructions: those of gfx950 with MX block scales, and the dense bf16 ones of both architectures.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"

namespace hf::dev {

// v_mfma_scale_f32_16x16x128_f8f6f4 with e4m3fn on both sides. Lane l has g = l / 16 and i = l % 16.
//   operands: row i of A (column i of B); registers 0-3 hold k = 16 g .. 16 g + 15, registers 4-7 k = 64 + 16 g .. + 15
//   scales:   the low byte is the e8m0 scale of row i for the block k = 32 g .. 32 g + 31 (not of the lane's own k)
//   result:   register r is row 4 g + r of A, column i of B
constexpr int kMfmaTile = 16;
constexpr int kMfmaK = 128;
constexpr int kMfmaGroups = 4;       // lane groups g
constexpr int kMfmaLaneBytes = 16;   // consecutive k per lane in each half
constexpr int kMfmaHalf = kMfmaK / 2;  // distance in k from a lane's first chunk to its second

static_assert(kMfmaGroups * kMfmaLaneBytes == kMfmaHalf, "four lane groups fill each half");

#if defined(__gfx950__)

__device__ inline i32x8 mfma_operand(u32x4 first_half, u32x4 second_half) {
  return __builtin_shufflevector(__builtin_bit_cast(i32x4, first_half), __builtin_bit_cast(i32x4, second_half), 0, 1, 2,
                                 3, 4, 5, 6, 7);
}

/// A scale that is the same in all lanes, a constant for example, in a vector register. From a scalar register or an inline
/// constant gfx950 takes bits 30:23, as if it were a float, instead of the selected byte; clang before 22 does not know that
/// (LLVM pull request 158117). The build refuses a module with a scale outside the vector registers. Scales that each lane
/// loads for itself need no such copy: no scalar register can hold them, and an asm on them costs registers (8 in mxfp4_gemm).
__device__ inline uint32_t scale_in_vgpr(uint32_t scale) { return lane_value_here(scale); }

/// accumulator + (A scaled by a_scale) (B scaled by b_scale); only byte kByte of each scale counts.
template <int kByte = 0>
__device__ inline f32x4 mfma_scaled_e4m3(i32x8 a, uint32_t a_scale, i32x8 b, uint32_t b_scale, f32x4 accumulator) {
  constexpr int kE4m3 = 0;
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, accumulator, kE4m3, kE4m3, kByte,
                                                          static_cast<int32_t>(a_scale), kByte,
                                                          static_cast<int32_t>(b_scale));
}

/// accumulator + A B, unscaled.
__device__ inline f32x4 mfma_e4m3(i32x8 a, i32x8 b, f32x4 accumulator) {
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, accumulator, 0, 0, 0, 0, 0, 0);
}

/// mfma_scaled_e4m3 with e2m1 on both sides: lane l holds k = 32 g .. 32 g + 31 of its row in 16 bytes, low nibble first, and the scale
/// of just that block.
__device__ inline f32x4 mfma_scaled_e2m1(u32x4 a, uint32_t a_scale, u32x4 b, uint32_t b_scale, f32x4 accumulator) {
  constexpr int kE2m1 = 4, kLowByte = 0;
  const u32x4 zero = {0, 0, 0, 0};  // registers 4-7 are not read for 4-bit operands
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(mfma_operand(a, zero), mfma_operand(b, zero), accumulator, kE2m1,
                                                          kE2m1, kLowByte, static_cast<int32_t>(a_scale), kLowByte,
                                                          static_cast<int32_t>(b_scale));
}

/// A in e2m1 as there, B in e4m3 as in mfma_scaled_e4m3: each operand has the lanes' k of its own format.
__device__ inline f32x4 mfma_scaled_e2m1_e4m3(u32x4 a, uint32_t a_scale, i32x8 b, uint32_t b_scale, f32x4 accumulator) {
  constexpr int kE4m3 = 0, kE2m1 = 4, kLowByte = 0;
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(mfma_operand(a, u32x4{0, 0, 0, 0}), b, accumulator, kE2m1, kE4m3,
                                                          kLowByte, static_cast<int32_t>(a_scale), kLowByte,
                                                          static_cast<int32_t>(b_scale));
}

#endif  // __gfx950__

#if !defined(__gfx950__)

/// Eight e2m1 elements, the first in the lowest bits, as e4m3fnuz codes in memory order. A zero has no sign there.
__device__ inline u32x2 e4m3_of_e2m1(uint32_t codes) {
  constexpr uint32_t kLow = 0x44403800, kHigh = 0x54504C48;  // of 0, 0.5, 1, 1.5 and 2, 3, 4, 6
  const auto converted = [](uint32_t nibbles, uint32_t signs) {
    const uint32_t magnitudes = __builtin_amdgcn_perm(kHigh, kLow, nibbles & 0x07070707u);
    return magnitudes | (signs & 0x80808080u & (magnitudes + 0x7F7F7F7Fu));  // bit 7 of the sum: not zero
  };
  const uint32_t even = converted(codes, codes << 4), odd = converted(codes >> 4, codes);
  constexpr uint32_t kFirstPairs = 0x05010400, kLastPairs = 0x07030602;
  return {__builtin_amdgcn_perm(odd, even, kFirstPairs), __builtin_amdgcn_perm(odd, even, kLastPairs)};
}

#endif  // not __gfx950__

// 16 x 16 x 32 (or x 16) of bf16: lane l has row i = l % 16 of A (column i of B), k = 8 (l / 16) .. + 7 (4 (l / 16) .. + 3);
// register r of the result is row 4 (l / 16) + r of A, column i of B. gfx942 takes a lane's eight elements in two halves, so
// k comes in another order there; it is the same for both operands.
__device__ inline f32x4 mfma_k16(bf16x4 a, bf16x4 b, f32x4 accumulator) {
  using i16x4 = int16_t __attribute__((ext_vector_type(4)));
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(i16x4, a), __builtin_bit_cast(i16x4, b),
                                                   accumulator, 0, 0, 0);
}

__device__ inline f32x4 mfma_k32(bf16x8 a, bf16x8 b, f32x4 accumulator) {
#if defined(__gfx950__)
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(a, b, accumulator, 0, 0, 0);
#else
  // The halves are copied out first: clang 22 reads the low half where bit_cast is given the swizzle .hi itself.
  const bf16x4 a_low = a.lo, a_high = a.hi, b_low = b.lo, b_high = b.hi;
  return mfma_k16(a_high, b_high, mfma_k16(a_low, b_low, accumulator));
#endif
}

}  // namespace hf::dev
