// Loads that are guarded by the size of a tensor: past its end they give 0 without reading.
#pragma once

#include "hipforge/nvidia/hip.h"
#include "hipforge/nvidia/vector.h"

namespace hf::dev {

/// An offset that is past the end of every tensor, also with an offset inside one added.
constexpr uint32_t kOutOfRange = 0x80000000u;

struct Buffer {
  const char* base;
  uint32_t bytes;
};

__device__ inline Buffer make_buffer(const void* base, uint32_t bytes) { return {static_cast<const char*>(base), bytes}; }

namespace detail {
template <class T>
__device__ inline T load_guarded(Buffer buffer, uint32_t offset) {
  return offset + static_cast<uint32_t>(sizeof(T)) <= buffer.bytes ? *reinterpret_cast<const T*>(buffer.base + offset) : T{};
}
}  // namespace detail

/// 16, 4 and 2 bytes at lane_offset + wave_offset, a multiple of as many.
__device__ inline u32x4 load_b128(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return detail::load_guarded<u32x4>(buffer, lane_offset + wave_offset);
}
__device__ inline uint32_t load_b32(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return detail::load_guarded<uint32_t>(buffer, lane_offset + wave_offset);
}
__device__ inline uint32_t load_u16(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return detail::load_guarded<uint16_t>(buffer, lane_offset + wave_offset);
}

}  // namespace hf::dev
