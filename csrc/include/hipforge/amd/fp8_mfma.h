// Matrix instructions over e4m3 without block scales, in the architecture's own format (e4m3fnuz on gfx942, e4m3fn on
// gfx950). Operands are 16-byte chunks: lane l has i = l % kRows and g = l / kRows and holds k = 16 g .. 16 g + 15 of row i
// of A (column i of B). A dense instruction takes 8 bytes a lane, so a chunk feeds two; the order of k does not matter
// as long as both operands agree.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/vector.h"

namespace hf::dev {

using u32x2 = uint32_t __attribute__((ext_vector_type(2)));
using i32x2 = int32_t __attribute__((ext_vector_type(2)));
using f32x16 = float __attribute__((ext_vector_type(16)));

namespace detail {

__device__ inline int64_t half_chunk(u32x4 chunk, int half) {
  return static_cast<int64_t>(uint64_t{chunk[2 * half + 1]} << 32 | chunk[2 * half]);
}

}  // namespace detail

/// accumulator + A B over 64 k, 16 x 16. Result register r: row 4 (lane / 16) + r, column lane % 16.
__device__ inline f32x4 mfma_e4m3_16x16x64(u32x4 a, u32x4 b, f32x4 accumulator) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    accumulator = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(detail::half_chunk(a, half), detail::half_chunk(b, half),
                                                             accumulator, 0, 0, 0);
  return accumulator;
}

/// accumulator + A B over 32 k, 32 x 32. Result register r: row 8 (r / 4) + 4 (lane / 32) + r % 4, column lane % 32.
__device__ inline f32x16 mfma_e4m3_32x32x32(u32x4 a, u32x4 b, f32x16 accumulator) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    accumulator = __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(detail::half_chunk(a, half), detail::half_chunk(b, half),
                                                             accumulator, 0, 0, 0);
  return accumulator;
}

/// What the two sparse rows of a dense row keep of a chunk: positions {0, 1} of every four in the first two registers, for
/// the even lane of the pair that holds the row; {2, 3} in the last two, for the odd one.
__device__ inline u32x4 sparse_halves(u32x4 chunk) {
  constexpr uint32_t kLow = 0x05040100u, kHigh = 0x07060302u;
  return u32x4{__builtin_amdgcn_perm(chunk[1], chunk[0], kLow), __builtin_amdgcn_perm(chunk[3], chunk[2], kLow),
               __builtin_amdgcn_perm(chunk[1], chunk[0], kHigh), __builtin_amdgcn_perm(chunk[3], chunk[2], kHigh)};
}

/// Which chunk of A's 128 k the lane groups g = 0 .. 3 hold in fragment f = 0, 1 for the sparse instructions: one 64 k deep
/// takes a fragment at a time; one 128 k deep packs A in the order of k over the groups, other than B.
__device__ constexpr uint32_t sparse_chunk(uint32_t group, uint32_t fragment) {
#if defined(__gfx950__)
  return 2 * group + fragment;
#else
  return group + 4 * fragment;
#endif
}

/// accumulator + A B over 64 k for 8 dense rows, each spread over the sparse rows 2 r and 2 r + 1: lanes 2 r, 2 r + 1 of
/// every 16 hold the two sparse_halves of row r. Result registers 0 + 1: dense row 2 (lane / 16), 2 + 3: the next; column
/// lane % 16.
__device__ inline f32x4 smfmac_e4m3_8x16x64(u32x2 a, u32x4 b, f32x4 accumulator, uint32_t lane) {
  // Two 2-bit positions per group of four, for the four groups of a lane: (0, 1) or (2, 3).
  const int32_t index = lane & 1 ? 0xEEEE : 0x4444;
  return __builtin_amdgcn_smfmac_f32_16x16x64_fp8_fp8(__builtin_bit_cast(i32x2, a), __builtin_bit_cast(i32x4, b),
                                                      accumulator, index, 0, 0);
}

#if defined(__gfx950__)

// The deeper instructions take two chunks of either dense side: the k that a lane holds of the second chunk follow those of
// the first by 64 (by 32 for 32 x 32), as in the instructions for one chunk. The constant 0 as the scale of both sides
// selects the encoding without block scales.
constexpr int kE4m3 = 0, kNoByte = 0, kUnscaled = 0;

/// accumulator + A B over 128 k, 16 x 16: one instruction for two chunks of either side.
__device__ inline f32x4 mfma_e4m3_16x16x128(u32x4 a0, u32x4 a1, u32x4 b0, u32x4 b1, f32x4 accumulator) {
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(mfma_operand(a0, a1), mfma_operand(b0, b1), accumulator, kE4m3,
                                                          kE4m3, kNoByte, kUnscaled, kNoByte, kUnscaled);
}

/// accumulator + A B over 64 k, 32 x 32; the result as mfma_e4m3_32x32x32.
__device__ inline f32x16 mfma_e4m3_32x32x64(u32x4 a0, u32x4 a1, u32x4 b0, u32x4 b1, f32x16 accumulator) {
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(mfma_operand(a0, a1), mfma_operand(b0, b1), accumulator, kE4m3,
                                                         kE4m3, kNoByte, kUnscaled, kNoByte, kUnscaled);
}

/// accumulator + A B over 128 k for 8 dense rows; A's fragments in the order of sparse_chunk, all else as
/// smfmac_e4m3_8x16x64.
__device__ inline f32x4 smfmac_e4m3_8x16x128(u32x2 a0, u32x2 a1, u32x4 b0, u32x4 b1, f32x4 accumulator, uint32_t lane) {
  const int32_t index = lane & 1 ? 0xEEEEEEEE : 0x44444444;
  const i32x4 kept = {static_cast<int32_t>(a0[0]), static_cast<int32_t>(a0[1]), static_cast<int32_t>(a1[0]),
                      static_cast<int32_t>(a1[1])};
  return __builtin_amdgcn_smfmac_f32_16x16x128_fp8_fp8(kept, mfma_operand(b0, b1), accumulator, index, 0, 0);
}

#endif  // __gfx950__

}  // namespace hf::dev
