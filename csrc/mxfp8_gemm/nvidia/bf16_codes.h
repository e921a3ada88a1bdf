// e4m3 codes as bf16 on sm_90: moved to the exponents and mantissas of pairs, and multiplied by powers of two.
#pragma once

#include "hipforge/device/hip.h"

namespace hf::mx_tiles {

/// Codes 0 and 2 of four, or 1 and 3, as two bf16 that are 2^-120 times their values; the NaN becomes 480 times that.
__device__ __forceinline__ uint32_t even_codes(uint32_t codes) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, 0xa280;" : "=r"(spread) : "r"(codes));  // each code below a byte of its sign
  return (spread << 4) & 0x87f087f0u;
}
__device__ __forceinline__ uint32_t odd_codes(uint32_t codes) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, 0xb391;" : "=r"(spread) : "r"(codes));
  return (spread << 4) & 0x87f087f0u;
}
__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factors) {
  uint32_t products;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(pair), "r"(factors));
  return products;
}
/// The larger size of each half; signs mean nothing.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t sizes;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(sizes) : "r"(a), "r"(b));
  return sizes;
}

}  // namespace hf::mx_tiles
