// LDS operations of the tiles of an MX GEMM in assembler: loads from memory straight to LDS, waits and barriers; and loops over
// numbers that these instructions need at compile time.
#pragma once

#include <utility>

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"

#if defined(__gfx950__)

namespace hf::tiles {

template <class T>
__device__ inline __attribute__((address_space(3))) T* in_lds(uint32_t address) {
  return reinterpret_cast<__attribute__((address_space(3))) T*>(address);
}

// Loads to LDS at to + kAfter + the lane's number times the size, from lane_offset + rows + at. In assembler, because the
// compiler waits for all such loads before any read of LDS; the kernel waits for them itself, at its barriers. The second
// addition is also the wait state that a load to LDS needs after a change of M0.
template <int kAfter>
__device__ inline void load_b128_to_lds(uint32_t to, dev::Buffer from, uint32_t lane_offset, uint32_t rows, uint32_t at) {
  uint32_t wave_offset;
  asm volatile("s_add_u32 m0, %1, %2\n\ts_add_u32 %0, %5, %6\n\tbuffer_load_dwordx4 %3, %4, %0 offen lds"
               : "=&s"(wave_offset)
               : "s"(to), "n"(kAfter), "v"(lane_offset), "s"(from), "s"(rows), "s"(at)
               : "memory", "scc");
}
template <int kAfter>
__device__ inline void load_b32_to_lds(uint32_t to, dev::Buffer from, uint32_t lane_offset, uint32_t rows, uint32_t at) {
  uint32_t wave_offset;
  asm volatile("s_add_u32 m0, %1, %2\n\ts_add_u32 %0, %5, %6\n\tbuffer_load_dword %3, %4, %0 offen lds"
               : "=&s"(wave_offset)
               : "s"(to), "n"(kAfter), "v"(lane_offset), "s"(from), "s"(rows), "s"(at)
               : "memory", "scc");
}

// All but the last kLeft loads of the wave have arrived and its LDS reads are done; then all waves meet.
template <int kLeft>
__device__ inline void wait_and_meet() {
  asm volatile("s_waitcnt vmcnt(%0) lgkmcnt(0)\n\ts_barrier" : : "n"(kLeft) : "memory");
}

// All but the last kLeft LDS reads of the wave are done; then all waves meet.
template <int kLeft>
__device__ inline void meet_after_reads() {
  asm volatile("s_waitcnt lgkmcnt(%0)\n\ts_barrier" : : "n"(kLeft) : "memory");
}

namespace detail {
template <class What, int... i>
__device__ __forceinline__ void repeat(What what, std::integer_sequence<int, i...>) {
  (what(std::integral_constant<int, i>()), ...);
}
}  // namespace detail

// Calls what(std::integral_constant<int, i>()) for i < kCount.
template <int kCount, class What>
__device__ __forceinline__ void repeat(What what) {
  detail::repeat(what, std::make_integer_sequence<int, kCount>());
}

}  // namespace hf::tiles

#endif  // __gfx950__
