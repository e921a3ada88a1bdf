// Raw-buffer access: a 128-bit resource whose num_records is the exact size of a tensor. The hardware's range check
// returns 0 for a load past the end and drops a store there. The kernels use this for their tails: a lane that has
// nothing to load gets kOutOfRange as its offset and reads 0 without any memory traffic.
//
// The check is made per dword: offset + 4 > num_records gives 0 for that whole dword. A tensor whose size is not
// a multiple of 4 must therefore be read by bytes near its end.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/vector.h"

namespace hf::dev {

// Offsets are added as unsigned 32-bit numbers and num_records is at most 2^31 - 1, so this offset plus any offset
// inside a tensor is out of range and does not wrap.
constexpr uint32_t kOutOfRange = 0x80000000u;

// Word 3 of the resource: 32-bit data format, no swizzle. Stride 0 makes the range check count bytes.
constexpr int32_t kRawBufferFormat = 0x00027000;

using Buffer = __amdgpu_buffer_rsrc_t;

/// A resource over exactly `bytes` bytes at `base` (both the same in all lanes).
__device__ inline Buffer make_buffer(const void* base, uint32_t bytes) {
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(base), 0, static_cast<int32_t>(bytes), kRawBufferFormat);
}

/// 16 bytes at lane_offset (per lane) + wave_offset (the same in all lanes).
__device__ inline u32x4 load_b128(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_amdgcn_raw_buffer_load_b128(buffer, static_cast<int32_t>(lane_offset),
                                               static_cast<int32_t>(wave_offset), 0);
}

/// 8 and 4 bytes, in the same way.
__device__ inline u32x2 load_b64(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_amdgcn_raw_buffer_load_b64(buffer, static_cast<int32_t>(lane_offset),
                                              static_cast<int32_t>(wave_offset), 0);
}
__device__ inline uint32_t load_b32(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_amdgcn_raw_buffer_load_b32(buffer, static_cast<int32_t>(lane_offset),
                                              static_cast<int32_t>(wave_offset), 0);
}

/// Two bytes, zero-extended, at an even address.
__device__ inline uint32_t load_u16(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_amdgcn_raw_buffer_load_b16(buffer, static_cast<int32_t>(lane_offset),
                                              static_cast<int32_t>(wave_offset), 0);
}

/// One byte, zero-extended.
__device__ inline uint32_t load_u8(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_amdgcn_raw_buffer_load_b8(buffer, static_cast<int32_t>(lane_offset),
                                             static_cast<int32_t>(wave_offset), 0);
}

}  // namespace hf::dev
