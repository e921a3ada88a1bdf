// Memory that several GPUs write and read while kernels run.
#pragma once

#include "hipforge/nvidia/hip.h"
#include "hipforge/nvidia/vector.h"

namespace hf::dev {

/// 16 bytes as two units of 8: each is written, and read, by all GPUs as a whole. Nothing orders one unit and another.
__device__ inline void store_units(void* to, const u32x4& words) {
  uint64_t low, high;
  asm("mov.b64 %0, {%1, %2};" : "=l"(low) : "r"(words[0]), "r"(words[1]));
  asm("mov.b64 %0, {%1, %2};" : "=l"(high) : "r"(words[2]), "r"(words[3]));
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}
__device__ inline u32x4 load_units(const void* from) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  u32x4 words;
  asm("mov.b64 {%0, %1}, %2;" : "=r"(words[0]), "=r"(words[1]) : "l"(low));
  asm("mov.b64 {%0, %1}, %2;" : "=r"(words[2]), "=r"(words[3]) : "l"(high));
  return words;
}

/// Ends the launch with an error.
__device__ inline void give_up() { __trap(); }

}  // namespace hf::dev
