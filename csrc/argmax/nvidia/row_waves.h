// argmax on sm_90: the largest of chunks by the instruction that gives a NaN where there is one; a row in a cluster of blocks.
#pragma once

#include "hipforge/nvidia/vector.h"
#include "mxfp8_gemm/nvidia/tma.h"

namespace {

constexpr uint32_t kMostBlocks = 8, kMostWaves = 64;  // of a row
constexpr int64_t kEnoughBlocks = 132;                // multiprocessors of an H100

/// The larger of each element of two words.
__device__ inline uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t word;
  if constexpr (__is_same(Input, float))
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  else if constexpr (__is_same(Input, hf::dev::f16))
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

/// The largest element of chunks, -inf before the first.
class Largest {
 public:
  __device__ void add(const Chunk& chunk) {
    const auto more = __builtin_bit_cast(hf::dev::u32x4, chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) words_[i] = larger(words_[i], more[i]);
  }
  __device__ uint32_t key() const {
    const uint32_t word = larger(larger(words_[0], words_[1]), larger(words_[2], words_[3]));
    const auto elements = __builtin_bit_cast(hf::dev::Vector<Input, kCount>, word);
    return max(key_of(elements[0]), key_of(elements[kCount - 1]));
  }

 private:
  static constexpr int kCount = 4 / sizeof(Input);  // of a word
  static constexpr uint32_t kNone = kCount == 2 ? kMinusInfinity * 0x10001u : kMinusInfinity;
  uint32_t words_[4] = {kNone, kNone, kNone, kNone};
};

/// The waves of a row, in the blocks of a cluster. Keys go to every block as stores that its barrier counts: a meeting of the
/// cluster after them would wait for all memory and empty L1, in which the row is.
class RowWaves {
 public:
  __device__ RowWaves(uint32_t blocks, uint32_t total) : blocks_(blocks) {
    __shared__ alignas(8) uint64_t barrier;
    barrier_ = hf::shared_address(&barrier);
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      hf::init_barrier(barrier_, 1);
      hf::barriers_ready();
    }
    __cluster_barrier_arrive_relaxed();
    __cluster_barrier_wait();
    if (threadIdx.x == 0) hf::arrive_expecting(barrier_, static_cast<int>(total * sizeof(uint32_t)));
  }
  /// The waves' keys, each written by its wave, are then in `keys` of every block.
  __device__ void exchange(uint32_t* keys, uint32_t wave, uint32_t key, uint32_t lane) const {
    if (blocks_ == 1) {
      if (lane == 0) keys[wave] = key;
      return __syncthreads();
    }
    if (lane < blocks_) {
      const uint32_t to = hf::address_in(hf::shared_address(keys + wave), static_cast<int>(lane));
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(key),
                   "r"(hf::address_in(barrier_, static_cast<int>(lane)))
                   : "memory");
    }
    hf::wait_phase(barrier_, 0);
  }

 private:
  uint32_t blocks_, barrier_;
};

inline void in_one_cluster(hf::Launch& at, uint32_t blocks) { at.cluster = blocks; }

}  // namespace
