// Scalar memory: loads into SGPRs, s_buffer_load, stores, time counters. Scalar atomics are in exec_atomics.cpp.
#include <chrono>

#include "access.h"
#include "exec.h"
#include "smem.h"

namespace hfemu {

uint64_t scalar_address(const Wave& w, const ExecInst& in) {
  const uint64_t offset = static_cast<uint64_t>(in.offset) + static_cast<uint32_t>(scalar_source(w, in.src[0]));
  return (w.s64(in.sbase) + offset) & ~uint64_t{3};
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

// num_records counts bytes, or strides where there is one; a dword outside reads 0.
template <int dwords>
void buffer_load(Wave& w, const ExecInst& in) {
  const u32* s = &w.s[in.sbase];
  const u64 base = (u64{s[0]} | u64{s[1]} << 32) & 0xFFFFFFFFFFFF;
  const u32 stride = s[1] >> 16 & 0x3FFF;
  const u64 size = stride ? u64{stride} * s[2] : s[2];
  const u64 offset =
      (static_cast<u64>(in.offset) + static_cast<u32>(scalar_source(w, in.src[0]))) & ~u64{3};
  u32 x[dwords] = {};
  for (u32 i = 0; i < dwords; ++i) {
    if (offset + 4 * i + 4 > size) continue;
    check_scalar_extent(w, in, base + offset + 4 * i, 4, Access::load);
    std::memcpy(&x[i], reinterpret_cast<const void*>(base + offset + 4 * i), 4);
  }
  std::memcpy(&w.s[in.dst], x, sizeof x);
}

template <int dwords>
void store(Wave& w, const ExecInst& in) {
  const u64 address = scalar_address(w, in);
  check_scalar_extent(w, in, address, 4 * dwords, Access::store);
  std::memcpy(reinterpret_cast<void*>(address), &w.s[in.data], 4 * dwords);
}

void time(Wave& w, const ExecInst& in) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  w.set_s64(in.dst, static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
}

void no_operation(Wave&, const ExecInst&) {}

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
  for (const Op op : {Op::s_dcache_inv, Op::s_dcache_wb, Op::s_dcache_inv_vol, Op::s_dcache_wb_vol})
    t.special(op, OpClass::smem, &no_operation);
}

}  // namespace hfemu
