// Address generation and data movement common to global, flat, scratch, buffer and LDS-DMA instructions.
#pragma once

#include "access.h"
#include "core.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace hfemu {

// The data of one lane. Stores use ubyte, ushort, their d16_hi forms and the dwords.
enum class MemoryShape : uint8_t {
  ubyte, sbyte, ushort, sshort, dword1, dword2, dword3, dword4,
  ubyte_d16, ubyte_d16_hi, sbyte_d16, sbyte_d16_hi, short_d16, short_d16_hi,
};

constexpr uint32_t shape_bytes(MemoryShape s) {
  switch (s) {
    case MemoryShape::ubyte: case MemoryShape::sbyte: case MemoryShape::ubyte_d16: case MemoryShape::ubyte_d16_hi:
    case MemoryShape::sbyte_d16: case MemoryShape::sbyte_d16_hi: return 1;
    case MemoryShape::ushort: case MemoryShape::sshort: case MemoryShape::short_d16: case MemoryShape::short_d16_hi:
      return 2;
    case MemoryShape::dword1: return 4;
    case MemoryShape::dword2: return 8;
    case MemoryShape::dword3: return 12;
    case MemoryShape::dword4: return 16;
  }
  return 4;
}

// 64-bit addresses of a GLOBAL or FLAT instruction.
void global_addresses(const Wave& w, const ExecInst& in, LaneAddresses& a, uint64_t exec);
// Host addresses of a SCRATCH instruction, checked against the lane's private segment.
void scratch_addresses(const Wave& w, const ExecInst& in, LaneAddresses& a, uint64_t exec, uint32_t bytes);
uint64_t private_address(const Wave& w, const ExecInst& in, uint32_t offset, uint32_t bytes, int lane, uint64_t exec);
// Resolves the generic apertures to host addresses; every kind of lane is checked.
void flat_translate(Wave& w, const ExecInst& in, LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);

// Transposes the 16 bytes at `at(lane)` of all lanes into four registers; false: not on this CPU.
template <class At>
inline bool load_quads(uint32_t* d, At at) {
#if defined(__AVX512F__)
  for (int first = 0; first < kLanes; first += 16) {
    // Lanes i, i + 4, i + 8 and i + 12.
    const auto every_fourth = [&](int i) {
      const auto lane = [&](int j) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(first + i + j))); };
      const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(0)), lane(4), 1);
      const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(8)), lane(12), 1);
      return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    const __m512i x0 = every_fourth(0), x1 = every_fourth(1), x2 = every_fourth(2), x3 = every_fourth(3);
    const __m512i low01 = _mm512_unpacklo_epi32(x0, x1), low23 = _mm512_unpacklo_epi32(x2, x3);
    const __m512i high01 = _mm512_unpackhi_epi32(x0, x1), high23 = _mm512_unpackhi_epi32(x2, x3);
    _mm512_store_si512(d + first, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(d + first + kLanes, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(d + first + 2 * kLanes, _mm512_unpacklo_epi64(high01, high23));
    _mm512_store_si512(d + first + 3 * kLanes, _mm512_unpackhi_epi64(high01, high23));
  }
  return true;
#elif defined(__SSE2__)
  for (int l = 0; l < kLanes; l += 4) {
    const auto lane = [&](int i) { return _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(l + i)))); };
    __m128 x0 = lane(0), x1 = lane(1), x2 = lane(2), x3 = lane(3);
    _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
    float* to = reinterpret_cast<float*>(d) + l;
    _mm_store_ps(to, x0);
    _mm_store_ps(to + kLanes, x1);
    _mm_store_ps(to + 2 * kLanes, x2);
    _mm_store_ps(to + 3 * kLanes, x3);
  }
  return true;
#else
  return false;
#endif
}

// Moves checked lanes between in.dst / in.data and memory.
void load_lanes(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, uint64_t exec);
void store_lanes(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, uint64_t exec);
uint32_t load_small(MemoryShape shape, const uint8_t* p, uint32_t old);
void store_small(MemoryShape shape, uint8_t* p, uint32_t x);

// LDS DMA: lane l's data goes to LDS at base + l * (4, or 16 for the wide forms); lanes outside `valid` write zeros.
void store_to_lds(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, uint64_t exec,
                  uint64_t valid, uint32_t base);

}  // namespace hfemu
