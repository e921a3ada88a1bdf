// The LDS queue between producer and consumer waves of one work-group.
//
//   flags[slot][part]   part 0 is the A tile of a k block, part 1 + l the l-th 16- or 32-column tile of B
//   block q of the work-group's run lives in slot q % qsize; its round is q / qsize
//   flag = 2 round      the part is free       (its producer may write)
//   flag = 2 round + 1  the part is filled     (its consumer may read)
//   flag = 2 round + 2  read, free for the next round
//
// Every part of a slot has one producer and one consumer at a time, and both visit slots in the order of q, so that the
// smallest block that is not finished can always advance: the queue cannot deadlock for any number of waves.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#include "hipforge/wave.h"

namespace hf::skinny {

// Only a test sets it, to see that the emulator notices each of the waits: 1 the producer's, 2 the consumer's, 3 the
// completion of LDS accesses before a signal.
#if !defined(HF_SKINNY_OMIT)
#define HF_SKINNY_OMIT 0
#endif
constexpr int kOmitted = HF_SKINNY_OMIT;
constexpr int kProducerWait = 1, kConsumerWait = 2, kDrain = 3;

/// Where block `q` is in the queue.
struct Place {
  uint32_t slot, free;  // `free` is the flag's value when the part may be written

  __device__ Place(uint32_t q, uint32_t qsize) : slot(q % qsize), free(2 * (q / qsize)) {}
  __device__ uint32_t filled() const { return free + 1; }
};

/// Waits until the flag has the value; what the other side did before its signal is visible then.
template <int kWhich>
__device__ inline void wait_for(const uint32_t* flag, uint32_t value) {
  if constexpr (kWhich == kOmitted) return;
  while (dev::uniform(__hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP)) != value)
    __builtin_amdgcn_s_sleep(1);
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

/// Hands the part over once this wave's LDS accesses are complete. Loads from global memory stay in flight.
__device__ inline void signal(uint32_t* flag, uint32_t lane) {
  if constexpr (kOmitted == kDrain)
    asm volatile("" ::: "memory");
  else
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  if (lane == 0) __hip_atomic_fetch_add(flag, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

}  // namespace hf::skinny
