// Division of integers by a number that the host knows.
#pragma once

#include <cstdint>

#include "hipforge/device/hip.h"

namespace hf {

/// What an integer below 2^31 is divided by: the host prepares a factor, so that a quotient takes three scalar instructions
/// instead of twenty. With d of (2^(shift - 1), 2^shift] the factor is 2^(31 + shift) / d, rounded up: it is too large by less
/// than 1, which moves no quotient below 2^31 (Granlund and Montgomery).
struct Divisor {
  uint32_t value, factor, shift;

  __host__ static constexpr Divisor of(uint32_t value) {
    uint32_t shift = 0;
    while (value > uint64_t{1} << shift) ++shift;
    return {value, static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + value - 1) / value), shift};
  }
  __host__ __device__ __forceinline__ constexpr uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{2 * n} * factor >> 32) >> shift;
  }
};

constexpr uint32_t kLastDividend = 0x7FFFFFFF;
static_assert(Divisor::of(1).quotient(kLastDividend) == kLastDividend);
static_assert(Divisor::of(kLastDividend).quotient(kLastDividend) == 1);
static_assert(Divisor::of(kLastDividend).quotient(kLastDividend - 1) == 0);
static_assert(Divisor::of(3).quotient(kLastDividend - 2) == (kLastDividend - 2) / 3 && Divisor::of(7).quotient(6) == 0);
static_assert(Divisor::of(832).quotient(831) == 0 && Divisor::of(832).quotient(832 * 1000 - 1) == 999);

}  // namespace hf
