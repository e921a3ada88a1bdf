// Address generation and data movement common to global, flat, scratch, buffer and LDS-DMA instructions.
#pragma once

#include "access.h"
#include "core.h"

namespace hfemu {

// What one lane moves. Stores use ubyte, ushort, their d16_hi forms and the dwords.
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

// Moves checked lanes between in.dst / in.data and memory.
void load_lanes(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, uint64_t exec);
void store_lanes(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, uint64_t exec);
uint32_t load_small(MemoryShape shape, const uint8_t* p, uint32_t old);
void store_small(MemoryShape shape, uint8_t* p, uint32_t x);

// LDS DMA: lane l's data goes to LDS at base + l * (4, or 16 for the wide forms); lanes outside `valid` write zeros.
void store_to_lds(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, uint64_t exec,
                  uint64_t valid, uint32_t base);

}  // namespace hfemu
