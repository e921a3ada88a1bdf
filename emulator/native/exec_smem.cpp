// Scalar memory: loads and stores, plain, through a buffer descriptor and in scratch; time counters. Scalar atomics are in exec_atomics.cpp.
#include <chrono>

#include "access.h"
#include "exec.h"
#include "smem.h"

namespace hfemu {

uint64_t scalar_address(const Wave& w, const ExecInst& in) {
  const uint64_t offset = static_cast<uint64_t>(in.offset) + static_cast<uint32_t>(scalar_source(w, in.src[0]));
  return (w.s64(in.sbase) + offset) & ~uint64_t{3};
}

ScalarBuffer scalar_buffer(const Wave& w, const ExecInst& in) {
  const uint32_t* s = &w.s[in.sbase];
  ScalarBuffer b;
  b.base = (uint64_t{s[0]} | uint64_t{s[1]} << 32) & 0xFFFFFFFFFFFF;
  // num_records counts bytes, or strides where there is one.
  const uint32_t stride = s[1] >> 16 & 0x3FFF;
  b.size = stride ? uint64_t{stride} * s[2] : s[2];
  b.offset = (static_cast<uint64_t>(in.offset) + static_cast<uint32_t>(scalar_source(w, in.src[0]))) & ~uint64_t{3};
  return b;
}

namespace {

using u32 = uint32_t;
using u64 = uint64_t;

template <int dwords>
void load(Wave& w, const ExecInst& in) {
  const u64 address = scalar_address(w, in);
  check_scalar_extent(w, in, address, 4 * dwords, Access::load);
  u32 x[dwords];
  std::memcpy(x, reinterpret_cast<const void*>(address), sizeof x);
  std::memcpy(&w.s[in.dst], x, sizeof x);
}

// A dword outside the range reads 0 and is not written.
template <int dwords>
void buffer_load(Wave& w, const ExecInst& in) {
  const ScalarBuffer b = scalar_buffer(w, in);
  u32 x[dwords] = {};
  for (u32 i = 0; i < dwords; ++i) {
    if (b.offset + 4 * i + 4 > b.size) continue;
    check_scalar_extent(w, in, b.base + b.offset + 4 * i, 4, Access::load);
    std::memcpy(&x[i], reinterpret_cast<const void*>(b.base + b.offset + 4 * i), 4);
  }
  std::memcpy(&w.s[in.dst], x, sizeof x);
}
template <int dwords>
void buffer_store(Wave& w, const ExecInst& in) {
  const ScalarBuffer b = scalar_buffer(w, in);
  for (u32 i = 0; i < dwords; ++i) {
    if (b.offset + 4 * i + 4 > b.size) continue;
    check_scalar_extent(w, in, b.base + b.offset + 4 * i, 4, Access::store);
    std::memcpy(reinterpret_cast<void*>(b.base + b.offset + 4 * i), &w.s[in.data + i], 4);
  }
}

template <int dwords>
void store(Wave& w, const ExecInst& in) {
  const u64 address = scalar_address(w, in);
  check_scalar_extent(w, in, address, 4 * dwords, Access::store);
  std::memcpy(reinterpret_cast<void*>(address), &w.s[in.data], 4 * dwords);
}

// s_scratch_*: the register offset counts 64-byte blocks.
u64 scratch_address(const Wave& w, const ExecInst& in) {
  const u64 blocks = static_cast<u32>(scalar_source(w, in.src[0]));
  return (w.s64(in.sbase) + static_cast<u64>(in.offset) + 64 * blocks) & ~u64{3};
}
template <int dwords>
void scratch_load(Wave& w, const ExecInst& in) {
  const u64 address = scratch_address(w, in);
  check_scalar_extent(w, in, address, 4 * dwords, Access::load);
  std::memcpy(&w.s[in.dst], reinterpret_cast<const void*>(address), 4 * dwords);
}
template <int dwords>
void scratch_store(Wave& w, const ExecInst& in) {
  const u64 address = scratch_address(w, in);
  check_scalar_extent(w, in, address, 4 * dwords, Access::store);
  std::memcpy(reinterpret_cast<void*>(address), &w.s[in.data], 4 * dwords);
}

void time(Wave& w, const ExecInst& in) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  w.set_s64(in.dst, static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
}

}  // namespace

void register_scalar_memory(OpTable& t) {
  t.special(Op::s_load_dword, OpClass::smem, &load<1>);
  t.special(Op::s_load_dwordx2, OpClass::smem, &load<2>);
  t.special(Op::s_load_dwordx4, OpClass::smem, &load<4>);
  t.special(Op::s_load_dwordx8, OpClass::smem, &load<8>);
  t.special(Op::s_load_dwordx16, OpClass::smem, &load<16>);
  t.special(Op::s_buffer_load_dword, OpClass::smem, &buffer_load<1>);
  t.special(Op::s_buffer_load_dwordx2, OpClass::smem, &buffer_load<2>);
  t.special(Op::s_buffer_load_dwordx4, OpClass::smem, &buffer_load<4>);
  t.special(Op::s_buffer_load_dwordx8, OpClass::smem, &buffer_load<8>);
  t.special(Op::s_buffer_load_dwordx16, OpClass::smem, &buffer_load<16>);
  t.special(Op::s_store_dword, OpClass::smem, &store<1>);
  t.special(Op::s_store_dwordx2, OpClass::smem, &store<2>);
  t.special(Op::s_store_dwordx4, OpClass::smem, &store<4>);
  t.special(Op::s_memtime, OpClass::smem, &time);
  t.special(Op::s_memrealtime, OpClass::smem, &time);
  t.special(Op::s_scratch_load_dword, OpClass::smem, &scratch_load<1>);
  t.special(Op::s_scratch_load_dwordx2, OpClass::smem, &scratch_load<2>);
  t.special(Op::s_scratch_load_dwordx4, OpClass::smem, &scratch_load<4>);
  t.special(Op::s_scratch_store_dword, OpClass::smem, &scratch_store<1>);
  t.special(Op::s_scratch_store_dwordx2, OpClass::smem, &scratch_store<2>);
  t.special(Op::s_scratch_store_dwordx4, OpClass::smem, &scratch_store<4>);
  t.special(Op::s_buffer_store_dword, OpClass::smem, &buffer_store<1>);
  t.special(Op::s_buffer_store_dwordx2, OpClass::smem, &buffer_store<2>);
  t.special(Op::s_buffer_store_dwordx4, OpClass::smem, &buffer_store<4>);
  // No caches or translations are modelled. On hardware a discarded line may have been evicted to memory before, so a
  // program cannot rely on losing it.
  for (const Op op : {Op::s_dcache_inv, Op::s_dcache_wb, Op::s_dcache_inv_vol, Op::s_dcache_wb_vol,
                      Op::s_dcache_discard, Op::s_dcache_discard_x2, Op::s_atc_probe, Op::s_atc_probe_buffer})
    t.special(op, OpClass::smem, &no_operation);
}

}  // namespace hfemu
