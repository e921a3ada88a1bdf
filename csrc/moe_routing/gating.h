// How a wave chooses the best experts, and the limits of the choice: topk_gating.cu and kernels that choose for themselves.
#pragma once

#include "hipforge/device/hip.h"
#include "hipforge/device/math.h"
#include "hipforge/device/wave.h"

namespace hf::gating {

constexpr int kMaxExperts = 512;
constexpr int kMaxChoices = 16;
constexpr int kMaxShared = 16;
constexpr float kLeastSum = 1e-20f;  // added to the sum that weights are divided by

constexpr uint32_t kNotThere = 0, kNanKey = 1;

// Orders as the floats do; -0 and 0 are one. No number has a key below 2.
__device__ inline uint32_t key_of(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value == 0.f ? 0.f : value);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return value != value ? kNanKey : ordered;
}

__device__ inline float value_of(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
  return key == kNanKey ? __builtin_nanf("") : __builtin_bit_cast(float, bits);
}

// The keys of a lane and whose they are, the largest first and equal ones by index.
template <int kPerLane>
struct Ranked {
  uint32_t keys[kPerLane], owners[kPerLane];

  // Sorts keys of which register j belongs to j * dev::kWaveSize + lane, by exchanges of neighbours.
  __device__ Ranked(const uint32_t (&unsorted)[kPerLane], uint32_t lane) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) keys[j] = unsorted[j], owners[j] = j * dev::kWaveSize + lane;
#pragma unroll
    for (int round = 0; round < kPerLane; ++round)
#pragma unroll
      for (int j = round % 2; j + 1 < kPerLane; j += 2) {
        const bool wrong = keys[j] < keys[j + 1];
        const uint32_t key = keys[j], owner = owners[j];
        keys[j] = wrong ? keys[j + 1] : key, owners[j] = wrong ? owners[j + 1] : owner;
        keys[j + 1] = wrong ? key : keys[j + 1], owners[j + 1] = wrong ? owner : owners[j + 1];
      }
  }

  // Takes the largest key of the wave out, the one of the lowest owner among equals, and returns the owner.
  __device__ uint32_t take_best(uint32_t lane) {
    const uint32_t best = dev::largest_of_wave(keys[0]);
    dev::LaneMask lanes = dev::lanes_with(keys[0] == best);
    if (kPerLane > 1 && (lanes & (lanes - 1)) != 0) {  // the same in all lanes
      const uint32_t lowest = ~dev::largest_of_wave(keys[0] == best ? ~owners[0] : 0);
      lanes = dev::lanes_with(keys[0] == best && owners[0] == lowest);
    }
    const uint32_t from = dev::lowest_bit(lanes), owner = dev::of_lane(owners[0], from);
    const bool own = lane == from;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const bool more = j + 1 < kPerLane;
      keys[j] = own ? (more ? keys[more ? j + 1 : j] : kNotThere) : keys[j];
      owners[j] = own && more ? owners[more ? j + 1 : j] : owners[j];
    }
    return owner;
  }
};

}  // namespace hf::gating
