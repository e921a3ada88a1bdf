// Wave-level helpers (wave64): lane exchange inside a quad, and sums over the wave that reduce several values at once.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"

namespace hf::dev {

constexpr int kWaveSize = 64;
constexpr int kWaveRow = 16;  // lanes that a DPP row operation spans

/// A value known to be the same in all lanes, as a scalar register.
__device__ inline uint32_t uniform(uint32_t value) { return __builtin_amdgcn_readfirstlane(value); }

/// The same value (of one lane, or of the whole wave), opaque to the optimiser, so that computations from it stay at their
/// uses. Otherwise the compiler hoists the invariants of all branches out of loops, at the cost of registers.
__device__ inline uint32_t lane_value_here(uint32_t value) {
  asm volatile("" : "+v"(value));
  return value;
}
__device__ inline float lane_float_here(float value) {
  asm volatile("" : "+v"(value));
  return value;
}
__device__ inline f32x4 lane_vector_here(f32x4 value) {
  asm volatile("" : "+v"(value));
  return value;
}
__device__ inline uint32_t wave_value_here(uint32_t value) {
  asm volatile("" : "+s"(value));
  return value;
}

/// Puts a value that is the same in all lanes, such as a kernel's argument, into scalar registers here. The compiler would
/// load it where it is used and wait for it there; behind a kernel's first vector loads that wait costs nothing.
template <class T>
__device__ inline void wave_value_loaded_here(T value) {
  if constexpr (sizeof(T) < sizeof(uint32_t)) {
    asm volatile("" : : "s"(uint32_t{value}));
  } else {
    asm volatile("" : : "s"(value));
  }
}
template <class... T>
__device__ inline void wave_values_loaded_here(T... values) {
  (wave_value_loaded_here(values), ...);
}

/// The value held by the even (kOdd = false) or odd lane of each pair of neighbouring lanes. Usually costs nothing: the
/// compiler folds the DPP quad permutation into the instruction that uses the result.
template <bool kOdd>
__device__ inline uint32_t from_pair_lane(uint32_t value) {
  constexpr int kQuadPerm = kOdd ? (1 | 1 << 2 | 3 << 4 | 3 << 6) : (0 | 0 << 2 | 2 << 4 | 2 << 6);
  return __builtin_amdgcn_mov_dpp(static_cast<int32_t>(value), kQuadPerm, 0xF, 0xF, true);
}

/// A word at an address that is the same in all lanes and that the kernel never writes, loaded by the scalar unit. The compiler
/// uses the scalar unit by itself only where it can prove both.
__device__ inline int32_t load_constant(const int32_t* address) {
  using Constant = const __attribute__((address_space(4))) int32_t;
  return *reinterpret_cast<Constant*>(reinterpret_cast<uintptr_t>(address));
}

/// The kernel's only argument, read from memory where it is needed, because the loops fill the scalar registers until then.
template <class T>
using Late = __attribute__((address_space(4))) T;
template <class T>
__device__ inline const Late<T>& arguments_here() {
  auto* arguments = (const Late<T>*)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *arguments;
}

/// The lane's index in its wave, computed where it is used: neither it nor threadIdx occupies a register until then.
__device__ inline uint32_t lane_index() {
  const uint32_t all = wave_value_here(~0u);
  return __builtin_amdgcn_mbcnt_hi(all, __builtin_amdgcn_mbcnt_lo(all, 0));
}

/// The value that lane `lane` (per lane, modulo 64) holds; every lane must be active.
__device__ inline uint32_t from_lane(uint32_t value, uint32_t lane) {
  return __builtin_amdgcn_ds_bpermute(static_cast<int32_t>(4 * lane), static_cast<int32_t>(value));
}

/// The 32-bit value that lane `lane`, the same for all, holds, as a scalar.
template <class T>
__device__ inline T of_lane(T value, uint32_t lane) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int32_t, value), static_cast<int32_t>(lane)));
}

/// The value of the other lane of each pair of neighbours.
__device__ inline uint32_t from_pair_partner(uint32_t value) {
  constexpr int kSwapPair = 1 | 0 << 2 | 3 << 4 | 2 << 6;
  return __builtin_amdgcn_mov_dpp(static_cast<int32_t>(value), kSwapPair, 0xF, 0xF, true);
}

/// The lanes for which `condition` holds.
using LaneMask = uint64_t;
__device__ inline LaneMask lanes_with(bool condition) { return __builtin_amdgcn_ballot_w64(condition); }

/// How many lanes of `mask` come before this one, and how many it has.
__device__ inline uint32_t lanes_before(LaneMask mask) {
  return __builtin_amdgcn_mbcnt_hi(static_cast<uint32_t>(mask >> 32), __builtin_amdgcn_mbcnt_lo(static_cast<uint32_t>(mask), 0));
}
__device__ inline uint32_t lane_count(LaneMask mask) { return static_cast<uint32_t>(__builtin_popcountll(mask)); }

/// LDS that a lane of the wave wrote before is seen by the others after.
__device__ inline void wave_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront"); }

/// Moves the values of the lanes that keep theirs to the front, in order, and sets `count` to how many there are (the
/// same in all lanes). Lanes from `count` on receive a meaningless value.
__device__ inline uint32_t kept_to_front(uint32_t value, bool keep, uint32_t lane, uint32_t& count) {
  const LaneMask kept = lanes_with(keep);
  const uint32_t before = lanes_before(kept);
  count = lane_count(kept);
  const uint32_t place = keep ? before : count + lane - before;  // a permutation, so that no lane is written twice
  return __builtin_amdgcn_ds_permute(static_cast<int32_t>(4 * place), static_cast<int32_t>(value));
}

namespace detail {

// value + (value rotated right by kLanes inside each row of 16 lanes)
template <int kLanes>
__device__ inline float add_row_rotated(float value) {
  constexpr int kRowRor = 0x120 + kLanes;
  const int32_t rotated = __builtin_amdgcn_mov_dpp(__builtin_bit_cast(int32_t, value), kRowRor, 0xF, 0xF, true);
  return value + __builtin_bit_cast(float, rotated);
}

}  // namespace detail

/// The sum over each row of 16 lanes, in all lanes of the row.
__device__ inline float row_sum(float value) {
  value = detail::add_row_rotated<8>(value);
  value = detail::add_row_rotated<4>(value);
  value = detail::add_row_rotated<2>(value);
  return detail::add_row_rotated<1>(value);
}

/// combine(x, y) over the four lanes that share lane % 16, in all of them; `combine` is associative and commutative.
template <class Combine>
__device__ inline float column_combined(float value, Combine combine) {
#if defined(__gfx950__)
  const auto bits = [](float x) { return __builtin_bit_cast(uint32_t, x); };
  const auto both = [&](auto swapped) {  // copied out first: see add_pair
    const uint32_t first = swapped[0], second = swapped[1];
    return combine(__builtin_bit_cast(float, first), __builtin_bit_cast(float, second));
  };
  value = both(__builtin_amdgcn_permlane16_swap(bits(value), bits(value), false, false));
  return both(__builtin_amdgcn_permlane32_swap(bits(value), bits(value), false, false));
#else
  constexpr int kXor16 = 16 << 10 | 0x1F;  // ds_swizzle: the lane of its half wave whose index differs in bit 4
  value = combine(value, __builtin_bit_cast(float, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int32_t, value), kXor16)));
  return combine(value, __builtin_bit_cast(float, from_lane(__builtin_bit_cast(uint32_t, value), lane_index() ^ 32)));
#endif
}

/// combine(x, y) over each kLanes neighbouring lanes (a power of two), in all of them; `combine` is associative and
/// commutative, the order of its uses fixed. The lanes of a group are active or not as one. T has 32 bits.
template <int kLanes, class T, class Combine>
__device__ inline T lanes_combined(T value, Combine combine) {
  static_assert(kLanes >= 1 && kLanes <= kWaveSize && (kLanes & (kLanes - 1)) == 0 && sizeof(T) == 4);
  constexpr int kSwapOne = 1 | 0 << 2 | 3 << 4 | 2 << 6, kSwapTwo = 2 | 3 << 2 | 0 << 4 | 1 << 6;
  constexpr int kHalfRowMirror = 0x141, kRowMirror = 0x140;  // lanes that agree in fours and eights meet the others
  constexpr int kXor16 = 16 << 10 | 0x1F;                    // ds_swizzle
  const auto bits = [](T x) { return __builtin_bit_cast(int32_t, x); };
  const auto with = [&](int32_t other) { return combine(value, __builtin_bit_cast(T, other)); };
  if constexpr (kLanes >= 2) value = with(__builtin_amdgcn_mov_dpp(bits(value), kSwapOne, 0xF, 0xF, true));
  if constexpr (kLanes >= 4) value = with(__builtin_amdgcn_mov_dpp(bits(value), kSwapTwo, 0xF, 0xF, true));
  if constexpr (kLanes >= 8) value = with(__builtin_amdgcn_mov_dpp(bits(value), kHalfRowMirror, 0xF, 0xF, true));
  if constexpr (kLanes >= 16) value = with(__builtin_amdgcn_mov_dpp(bits(value), kRowMirror, 0xF, 0xF, true));
  if constexpr (kLanes >= 32) value = with(__builtin_amdgcn_ds_swizzle(bits(value), kXor16));
  if constexpr (kLanes == 64) value = with(static_cast<int32_t>(from_lane(static_cast<uint32_t>(bits(value)), lane_index() ^ 32)));
  return value;
}

/// The largest value of the wave, as a scalar.
__device__ inline uint32_t largest_of_wave(uint32_t value) {
  const auto larger_of = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  value = lanes_combined<16>(value, larger_of);  // rows by scalars: lanes_combined would wait for LDS
  return larger_of(larger_of(of_lane(value, 0), of_lane(value, 16)), larger_of(of_lane(value, 32), of_lane(value, 48)));
}

/// The sum over the wave, in all its lanes; the order is fixed.
__device__ inline float wave_sum(float value) {
  return column_combined(row_sum(value), [](float x, float y) { return x + y; });
}

#if defined(__gfx950__)

namespace detail {

// The elements are copied out first: given an element of a vector, clang 22's bit_cast reads element 0.
template <class Pair>
__device__ inline float add_pair(Pair swapped) {
  const uint32_t first = swapped[0], second = swapped[1];
  return __builtin_bit_cast(float, first) + __builtin_bit_cast(float, second);
}

__device__ inline float add_half_waves(float low, float high) {
  return add_pair(__builtin_amdgcn_permlane32_swap(__builtin_bit_cast(uint32_t, low),
                                                   __builtin_bit_cast(uint32_t, high), false, false));
}

__device__ inline float add_row_pairs(float even, float odd) {
  return add_pair(__builtin_amdgcn_permlane16_swap(__builtin_bit_cast(uint32_t, even),
                                                   __builtin_bit_cast(uint32_t, odd), false, false));
}

}  // namespace detail

/// Which of the kCount values summed by wave_sums a lane receives.
template <int kCount>
__device__ inline int wave_sums_index(int lane) {
  if constexpr (kCount == 1) return 0;
  if constexpr (kCount == 2) return lane / 32;
  const int row = lane / kWaveRow;
  return 4 * (lane % kWaveRow) + 2 * (row & 1) + (row >> 1);
}

/// Sums kCount per-lane values (a power of two, at most 64) over the wave at once; the lane whose wave_sums_index is v
/// receives the total of values[v]. Swapping halves between two registers lets one addition serve two values, so four
/// values cost 10 instructions instead of 24. The order of additions is fixed.
template <int kCount>
__device__ inline float wave_sums(const float (&values)[kCount], int lane) {
  static_assert(kCount >= 1 && kCount <= kWaveSize && (kCount & (kCount - 1)) == 0);
  constexpr int kHalves = kCount >= 2 ? kCount / 2 : 1;
  float half[kHalves];
#pragma unroll
  for (int i = 0; i < kHalves; ++i)
    half[i] = detail::add_half_waves(values[2 * i % kCount], values[(2 * i + 1) % kCount]);

  constexpr int kRows = kCount >= 4 ? kCount / 4 : 1;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float sum = row_sum(detail::add_row_pairs(half[2 * i % kHalves], half[(2 * i + 1) % kHalves]));
    total = (i == 0 || lane % kWaveRow == i) ? sum : total;
  }
  return total;
}

#endif  // __gfx950__

}  // namespace hf::dev
