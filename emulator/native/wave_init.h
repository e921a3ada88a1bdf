#pragma once

#include "core.h"

namespace hfemu {

// The packet behind the dispatch pointer (hsa_kernel_dispatch_packet_t).
struct DispatchPacket {
  uint16_t header, setup, workgroup_size[3], reserved0;
  uint32_t grid_size[3], private_bytes, group_bytes;
  uint64_t kernel_object, kernarg, reserved1, completion_signal;
};
static_assert(sizeof(DispatchPacket) == 64);

DispatchPacket make_packet(const LaunchRequest& request, uint64_t kernarg);

struct WaveStart {
  const LaunchRequest* request = nullptr;
  uint64_t kernarg = 0, packet = 0;  // host addresses
  uint32_t entry = 0;                // index of the first instruction
};

// Null, or what a kernel descriptor requests that the emulator does not model.
const char* unmodelled_descriptor(const KernelInfo& kernel);

// Sets SGPRs, v0, EXEC, MODE and the PC; w.index and w.wg must be set. Other VGPRs keep what an earlier wave left.
void init_wave(Wave& w, const WaveStart& start);
void poison_wave(Wave& w, uint32_t registers);

}  // namespace hfemu
