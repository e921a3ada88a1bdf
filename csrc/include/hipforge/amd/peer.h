// Memory that several GPUs write and read while kernels run: fine-grained, as torch's symmetric memory is.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"

namespace hf::dev {

/// 16 bytes as two units of 8: each is written, and read, by all GPUs as a whole. Nothing orders one unit and another.
__device__ inline void store_units(void* to, const u32x4& words) {
  using Unit = __attribute__((address_space(1))) uint64_t;
  Unit* const units = (Unit*)to;
  for (int i = 0; i < 2; ++i) {
    const uint64_t unit = uint64_t{words[2 * i + 1]} << 32 | words[2 * i];
    __hip_atomic_store(units + i, unit, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
}
__device__ inline u32x4 load_units(const void* from) {
  using Unit = const __attribute__((address_space(1))) uint64_t;
  Unit* const units = (Unit*)from;
  u32x4 words;
  for (int i = 0; i < 2; ++i) {
    const uint64_t unit = __hip_atomic_load(units + i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    words[2 * i] = static_cast<uint32_t>(unit);
    words[2 * i + 1] = static_cast<uint32_t>(unit >> 32);
  }
  return words;
}

/// Ends the launch with an error. __builtin_trap, which does not return, would leave the masks of the lanes around it undefined.
__device__ inline void give_up() { asm volatile("s_trap 2"); }

}  // namespace hf::dev
