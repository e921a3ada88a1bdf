// The end of a computation whose K (or keys) several work-groups share, in one launch: each leaves its part in a workspace,
// and the last of them to arrive adds all parts in their order. No work-group waits for another, so the launch ends in any
// order of work-groups; results do not depend on which one was last.
//
//   parts   0   1   2   3        each: stores its part past the caches, waits until that is complete, meets a partner
//            \ /     \ /         a meeting: exchange the word of the pair with the launch's number. Who finds that number
//             x       x          there came second: it puts 0 back and goes on to the next pair.
//              \     /
//                 x              who comes second here has every part before it
//
// The words need no initialisation and need not be kept between launches: fresh memory holds this launch's 64-bit number only
// by chance (2^-64), and a launch leaves zeros, so a captured graph may replay it. Every launch in flight has its own workspace
// from the caller's allocator, so several streams may run the same operation.
//
// The L2 caches of different dies are not coherent: parts are stored with sc1 (through to memory), read with sc0 sc1 (not from
// a cache), and a wave's stores are complete once it has waited for them. So no cache has to be written back or invalidated.
#pragma once

#include <time.h>

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace hf::dev {

/// Words that `parts` work-groups need to meet; a power of two.
constexpr uint32_t meeting_words(uint32_t parts) { return parts - 1; }

/// 16 bytes at lane_offset + wave_offset, to where every work-group of the device can read them with load_part.
__device__ inline void store_part(f32x4 values, Buffer to, uint32_t lane_offset, uint32_t wave_offset) {
  constexpr int kSc1 = 16;
  __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(u32x4, values), to, static_cast<int32_t>(lane_offset),
                                         static_cast<int32_t>(wave_offset), kSc1);
}

__device__ inline f32x4 load_part(Buffer from, uint32_t lane_offset, uint32_t wave_offset) {
  constexpr int kSc0Sc1 = 17;
  return __builtin_bit_cast(f32x4, __builtin_amdgcn_raw_buffer_load_b128(from, static_cast<int32_t>(lane_offset),
                                                                       static_cast<int32_t>(wave_offset), kSc0Sc1));
}

/// Whether this work-group is the last of 2^log2_parts; the same in all its threads, which all call it after their
/// store_part. `words`: meeting_words of them; `leads`: of one thread; `told`: LDS that no thread still uses.
__device__ inline bool is_last_group(uint64_t* words, uint32_t part, uint32_t log2_parts, uint64_t number, bool leads,
                                     uint32_t* told) {
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
  __syncthreads();
  if (leads) {
    uint32_t last = 1;
    for (uint32_t pairs = 1u << log2_parts >> 1; pairs != 0; pairs >>= 1) {
      part /= 2;
      if (__hip_atomic_exchange(words + part, number, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) != number) {
        last = 0;
        break;
      }
      __hip_atomic_store(words + part, uint64_t{0}, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
      words += pairs;
    }
    *told = last;
  }
  __syncthreads();
  return uniform(*told) != 0;
}

}  // namespace hf::dev

namespace hf {

/// A number that no other launch of any process is likely to have, never 0.
inline uint64_t launch_number() {
  static uint64_t next = [] {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
  }();
  uint64_t x = __atomic_fetch_add(&next, 0x9E3779B97F4A7C15, __ATOMIC_RELAXED);  // splitmix64
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  x ^= x >> 31;
  return x | 1;
}

/// The workspace of work-groups that share K: at least `bytes` of float32 at a multiple of 16 bytes. `splits` work-groups share
/// it; `name` is the caller's name for that number.
inline uint8_t* check_split_workspace(const OptionalTensor& workspace, uint64_t bytes, int64_t splits,
                                      const char* name = "k_splits") {
  const uint64_t count = bytes / sizeof(float);
  HF_CHECK(workspace.has_value(), name, " = ", splits, " needs a workspace: float32 [", count, "]; got None");
  const Tensor given = *workspace;
  HF_CHECK(given.numel() >= static_cast<int64_t>(count), "workspace must be float32 [", count, "] or longer; got ", given);
  check_operand(given, "workspace", HF_F32, {"count"}, "", kAligned);
  return reinterpret_cast<uint8_t*>(given.data<float>());
}

}  // namespace hf
