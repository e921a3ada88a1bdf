// Buffer resource descriptors: addresses and range checks, for buffer_* loads, stores, atomics and s_buffer_load.
#pragma once

#include "addressing.h"

namespace hfemu {

struct BufferDescriptor {
  uint64_t base = 0;
  uint32_t stride = 0, records = 0;
};

// The descriptor in in.sbase; swizzling and thread-id addressing are not supported and fault.
BufferDescriptor buffer_descriptor(const Wave& w, const ExecInst& in);

// Host addresses of the lanes; returns the active lanes whose whole access is in range. For each other active lane
// `partial` holds the number of leading dwords in range (raw buffers only), and its address repeats a valid lane's.
uint64_t buffer_addresses(const Wave& w, const ExecInst& in, const BufferDescriptor& d, uint64_t exec, uint32_t bytes,
                          LaneAddresses& a, uint32_t* partial);
void restore_addresses(const Wave& w, const ExecInst& in, const BufferDescriptor& d, LaneAddresses& a);

}  // namespace hfemu
