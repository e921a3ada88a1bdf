// W's elements in e2m1, two in a byte, for the products of mxfp8_gemm/nvidia/row_step.h.
//
//     a row's 64 bytes, 4 chunks, each a block of 32 k with its own scale
//    +----------------+----------------+----------------+----------------+    lane 4 g + t has word t of every chunk of row g,
//    | t0  t1  t2  t3 | t0  t1  t2  t3 | t0  t1  t2  t3 | t0  t1  t2  t3 |    8 codes: two mma.m16n8k16 a block and tile
//    +----------------+----------------+----------------+----------------+
//
// A code's sign and three bits are moved to where an f16 has its sign and the end of its exponent, all in its upper byte: that is the
// value over 2^14, with e2m1's subnormal as one of f16, which the tensor core takes as they are. The power goes into a block's
// factor. Upper bytes of the four even and of the four odd codes are made at once, and a register has two of either, so X's
// bytes are brought into that order before they become f16. Eight codes take 7 shifts and masks and 4 permutations.
#pragma once

#include "../../mxfp8_gemm/nvidia/row_step.h"

namespace hf::row_stream {

struct E2m1 {
  struct Lane {
    int at[4];
    __device__ __forceinline__ Lane(int g, int t) {
#pragma unroll
      for (int b = 0; b < 4; ++b) at[b] = chunk_at(g, b) + 4 * t;
    }
  };
  static constexpr int kLine = kStep / 2, kLaneBytes = 4;
  static constexpr uint32_t kLessened = 14;
  static_assert(kLine / 16 == kStep / kBlock, "a chunk is a block");

  /// The words of a warp, of 8 rows, meet no bank twice.
  static __device__ __forceinline__ int chunk_at(int row, int chunk) { return row * kLine + ((chunk ^ (row >> 1 & 3)) * 16); }
  static __device__ __forceinline__ uint2 ordered(uint2 bytes) {
    return make_uint2(__byte_perm(bytes.x, bytes.y, 0x6420), __byte_perm(bytes.x, bytes.y, 0x7531));
  }
  static __device__ __forceinline__ uint32_t usual(uint32_t scales) {
    return in_range(scales) & in_range(scales + kLessened * 0x01010101u);
  }
  static __device__ __forceinline__ void halves(const uint8_t* from, uint32_t (&w)[4]) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(from);
    constexpr uint32_t kSize = 0x0e0e0e0e, kSign = 0x80808080;
    const uint32_t even = (codes << 1 & kSize) | (codes << 4 & kSign), odd = (codes >> 3 & kSize) | (codes & kSign);
    w[0] = __byte_perm(even, 0, 0x1404), w[1] = __byte_perm(even, 0, 0x3424);
    w[2] = __byte_perm(odd, 0, 0x1404), w[3] = __byte_perm(odd, 0, 0x3424);
  }
};

}  // namespace hf::row_stream
