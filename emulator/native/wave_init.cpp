// The state a wave starts with: SGPRs in property order, packed work-item ids, EXEC, MODE.
#include "wave_init.h"

#include "exec.h"

namespace hfemu {
namespace {

// A value that no kernel expects: a signaling NaN as f32, an address outside every allocation.
constexpr uint32_t kPoison = 0x7FBADBAD;

enum Property : uint32_t {
  private_segment_buffer = 1u << 0,
  dispatch_ptr = 1u << 1,
  queue_ptr = 1u << 2,
  kernarg_ptr = 1u << 3,
  dispatch_id = 1u << 4,
  flat_scratch_init = 1u << 5,
  private_segment_size = 1u << 6,
};

// COMPUTE_PGM_RSRC1 as MODE: FLOAT_MODE, DX10_CLAMP, IEEE_MODE and FP16_OVFL.
uint32_t descriptor_mode(const KernelInfo& k) {
  return (k.rsrc1 >> 12 & 0xFF) | (k.rsrc1 >> 21 & 1) << 8 | (k.rsrc1 >> 23 & 1) << 9 | (k.rsrc1 >> 26 & 1) << 23;
}

}  // namespace

const char* unmodelled_descriptor(const KernelInfo& k) {
  // Scratch needs no set-up on these architectures; both are for older ones.
  if (k.properties & private_segment_buffer) return "ENABLE_SGPR_PRIVATE_SEGMENT_BUFFER";
  if (k.properties & flat_scratch_init) return "ENABLE_SGPR_FLAT_SCRATCH_INIT";
  if (k.rsrc1 >> 20 & 1) return "PRIV";
  if (k.rsrc1 >> 22 & 1) return "DEBUG_MODE";
  if (k.rsrc1 >> 25 & 1) return "CDBG_USER";
  if (k.rsrc2 >> 13 & 3) return "ENABLE_EXCEPTION_ADDRESS_WATCH or ENABLE_EXCEPTION_MEMORY";
  if (k.rsrc2 >> 24 & 0x7F) return "ENABLE_EXCEPTION_IEEE_754_FP or ENABLE_EXCEPTION_INT_DIVIDE_BY_ZERO";
  return nullptr;
}

DispatchPacket make_packet(const LaunchRequest& r, uint64_t kernarg) {
  DispatchPacket p{};
  for (int i = 0; i < 3; ++i) {
    p.workgroup_size[i] = static_cast<uint16_t>(r.block[i]);
    p.grid_size[i] = r.grid[i] * r.block[i];
  }
  p.setup = 3;
  p.private_bytes = r.kernel->private_bytes;
  p.group_bytes = r.kernel->lds_bytes + r.dynamic_lds;
  p.kernarg = kernarg;
  return p;
}

void poison_wave(Wave& w, uint32_t registers) {
  for (uint32_t i = 0; i < registers && i < kAcc; ++i) splat(w.v[i], kPoison);
  for (uint32_t i = 0; i < registers && i < kAcc; ++i) splat(w.v[kAcc + i], kPoison);
}

void init_wave(Wave& w, const WaveStart& start) {
  const KernelInfo& k = *start.request->kernel;
  for (uint32_t& s : w.s) s = kPoison;
  uint32_t n = 0;
  const auto push = [&](uint32_t x) { w.s[n++] = x; };
  const auto push64 = [&](uint64_t x) {
    push(static_cast<uint32_t>(x));
    push(static_cast<uint32_t>(x >> 32));
  };
  if (k.properties & dispatch_ptr) push64(start.packet);
  if (k.properties & queue_ptr) push64(0);
  if (k.properties & kernarg_ptr) push64(start.kernarg);
  if (k.properties & dispatch_id) push64(1);
  if (k.properties & private_segment_size) push(k.private_bytes);
  for (uint32_t i = 0; i < k.preload_dwords && n < 128; ++i) {
    uint32_t x = 0;
    const uint64_t at = 4 * (uint64_t{k.preload_offset} + i);
    if (at + 4 <= start.request->kernarg_bytes)
      std::memcpy(&x, reinterpret_cast<const uint8_t*>(start.kernarg) + at, 4);
    push(x);
  }
  const uint32_t user = k.rsrc2 >> 1 & 31;
  if (n < user) n = user;
  for (int i = 0; i < 3; ++i)
    if (k.rsrc2 >> (7 + i) & 1) push(w.wg->id[i]);
  // The work-group information: first wave, the wave's number, the number of waves.
  if (k.rsrc2 >> 10 & 1) push(uint32_t{w.index == 0} << 31 | w.index << 20 | w.wg->waves);

  w.initial_sgprs = n;

  const uint32_t* block = start.request->block;
  const uint32_t items = block[0] * block[1] * block[2];
  const uint32_t first = w.index * kLanes;
  const uint32_t live = items - first < kLanes ? items - first : kLanes;
  for (uint32_t l = 0; l < kLanes; ++l) {
    const uint32_t item = first + l;
    w.v[0][l] = item % block[0] | (item / block[0] % block[1]) << 10 | (item / (block[0] * block[1])) << 20;
  }
  w.set_s64(kExec, live == kLanes ? kAllLanes : (uint64_t{1} << live) - 1);
  w.set_s64(kVcc, 0);
  w.scc = 0;
  w.pc = start.entry;
  w.priority = 0;
  w.mode.fnuz = start.request->code->arch == Arch::gfx942;
  set_mode_register(w, descriptor_mode(k));
}

}  // namespace hfemu
