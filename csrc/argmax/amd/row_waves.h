// argmax on AMD's GPUs: elements as integers, because gfx942 has no maximum that gives a NaN, and neither has one of bf16. From
// +0 on the largest number is the largest signed integer; of negative numbers alone it is the smallest unsigned one. A NaN with
// a sign is above -inf unsigned. A row is one work-group's.
#pragma once

#include "hipforge/amd/vector.h"

namespace {

constexpr uint32_t kMostBlocks = 1, kMostWaves = kWavesOfBlock;  // of a row
constexpr int64_t kEnoughBlocks = 1;

template <int kBytes> struct Integers { using Signed = int16_t; using Unsigned = uint16_t; };
template <> struct Integers<4> { using Signed = int32_t; using Unsigned = uint32_t; };

/// combine(x, y) of all elements of a chunk but the last step: two are left.
template <class V, class Combine>
__device__ inline auto two_of(V v, Combine combine) {
  const auto half = combine(v.lo, v.hi);
  if constexpr (kChunk > 4) {
    return combine(half.lo, half.hi);
  } else {
    return half;
  }
}

/// The largest element of chunks, -inf before the first.
class Largest {
 public:
  __device__ void add(const Chunk& chunk) {
    signed_most_ = __builtin_elementwise_max(signed_most_, __builtin_bit_cast(Signed, chunk));
    least_ = __builtin_elementwise_min(least_, __builtin_bit_cast(Unsigned, chunk));
    most_ = __builtin_elementwise_max(most_, __builtin_bit_cast(Unsigned, chunk));
  }
  __device__ uint32_t key() const {
    const auto larger = [](auto a, auto b) { return __builtin_elementwise_max(a, b); };
    const auto signed_most = two_of(signed_most_, larger);
    const auto least = two_of(least_, [](auto a, auto b) { return __builtin_elementwise_min(a, b); });
    const auto most = two_of(most_, larger);
    uint32_t keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const One number = signed_most[i] >= 0 ? static_cast<One>(signed_most[i]) : least[i];
      const uint32_t key = key_of(__builtin_bit_cast(Input, number));
      keys[i] = most[i] > kNone ? kNanKey : key;
    }
    return max(keys[0], keys[1]);
  }

 private:
  using One = Integers<sizeof(Input)>::Unsigned;
  using Unsigned = hf::dev::Vector<One, kChunk>;
  using Signed = hf::dev::Vector<Integers<sizeof(Input)>::Signed, kChunk>;

  static constexpr One kNone = kMinusInfinity;
  Unsigned least_ = Unsigned(kNone), most_ = Unsigned(kNone);
  Signed signed_most_ = __builtin_bit_cast(Signed, least_);
};

/// The waves of a row.
struct RowWaves {
  __device__ RowWaves(uint32_t, uint32_t) {}
  /// The waves' keys, each written by its wave, are then in `keys`.
  __device__ void exchange(uint32_t* keys, uint32_t wave, uint32_t key, uint32_t lane) const {
    if (lane == 0) keys[wave] = key;
    __syncthreads();
  }
};

inline void in_one_cluster(hf::Launch&, uint32_t) {}

}  // namespace
