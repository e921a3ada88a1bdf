// global_*, flat_* and scratch_* loads and stores, and global_load_lds_*. Atomics are in exec_atomics.cpp.
#include "addressing.h"
#include "exec.h"

namespace hfemu {

void fill_inactive(LaneAddresses& a, uint64_t exec) {
  if (exec == kAllLanes || exec == 0) return;
  const uint64_t first = a.at[std::countr_zero(exec)];
  for (int l = 0; l < kLanes; ++l) a.at[l] = (exec >> l & 1) ? a.at[l] : first;
}

void global_addresses(const Wave& w, const ExecInst& in, LaneAddresses& a, uint64_t exec) {
  const uint32_t* lo = w.v[in.address.reg];
  if (in.has_sbase) {
    const uint64_t base = w.s64(in.sbase) + static_cast<uint64_t>(in.offset);
    for (int l = 0; l < kLanes; ++l) a.at[l] = base + lo[l];
  } else {
    const uint32_t* hi = w.v[in.address.reg + 1];
    const uint64_t offset = static_cast<uint64_t>(in.offset);
    for (int l = 0; l < kLanes; ++l) a.at[l] = (uint64_t{lo[l]} | uint64_t{hi[l]} << 32) + offset;
  }
  fill_inactive(a, exec);
}

void scratch_addresses(const Wave& w, const ExecInst& in, LaneAddresses& a, uint64_t exec, uint32_t bytes) {
  uint32_t base = static_cast<uint32_t>(in.offset);
  if (in.has_sbase) base += w.s[in.sbase];
  const bool by_lane = in.address.kind == SourceKind::vgpr;
  const uint32_t* lane_offset = by_lane ? w.v[in.address.reg] : nullptr;
  for (int l = 0; l < kLanes; ++l) {
    const uint32_t offset = base + (by_lane ? lane_offset[l] : 0);
    a.at[l] = private_address(w, in, offset, bytes, l, exec);
  }
  fill_inactive(a, exec);
}

uint64_t private_address(const Wave& w, const ExecInst& in, uint32_t offset, uint32_t bytes, int lane, uint64_t exec) {
  const uint32_t size = w.launch->private_bytes;
  if ((exec >> lane & 1) && (offset >= size || bytes > size - offset)) {
    fault(w, in, FaultKind::memory,
          format("private (scratch) access of %u bytes at offset 0x%x, but a lane has %u bytes", bytes, offset, size),
          lane);
  }
  return reinterpret_cast<uint64_t>(w.scratch) + uint64_t{size} * static_cast<uint32_t>(lane) + offset;
}

namespace {

using u32 = uint32_t;
using u64 = uint64_t;

template <class T>
inline T read_as(u64 address) {
  T x;
  std::memcpy(&x, reinterpret_cast<const void*>(address), sizeof x);
  return x;
}

// How a load's bytes become registers; stores use dword1..4, byte, half and the d16 high forms.
template <int dwords>
void load_rows(Wave& w, const ExecInst& in, const LaneAddresses& a, u64 exec) {
  if (exec == kAllLanes) {
    u32* d = w.v[in.dst];
    if constexpr (dwords == 4)
      if (load_quads(d, [&](int l) { return reinterpret_cast<const uint8_t*>(a.at[l]); })) return;
    for (int l = 0; l < kLanes; ++l) {
      u32 x[dwords];
      std::memcpy(x, reinterpret_cast<const void*>(a.at[l]), sizeof x);
      for (int i = 0; i < dwords; ++i) d[i * kLanes + l] = x[i];
    }
    return;
  }
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    u32 x[dwords];
    std::memcpy(x, reinterpret_cast<const void*>(a.at[l]), sizeof x);
    for (int i = 0; i < dwords; ++i) w.v[in.dst + i][l] = x[i];
  }
}

template <int dwords>
void store_rows(Wave& w, const ExecInst& in, const LaneAddresses& a, u64 exec) {
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    u32 x[dwords];
    for (int i = 0; i < dwords; ++i) x[i] = w.v[in.data + i][l];
    std::memcpy(reinterpret_cast<void*>(a.at[l]), x, sizeof x);
  }
}

}  // namespace

void load_lanes(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, u64 exec) {
  switch (shape) {
    case MemoryShape::dword1: return load_rows<1>(w, in, a, exec);
    case MemoryShape::dword2: return load_rows<2>(w, in, a, exec);
    case MemoryShape::dword3: return load_rows<3>(w, in, a, exec);
    case MemoryShape::dword4: return load_rows<4>(w, in, a, exec);
    default: break;
  }
  u32* d = w.v[in.dst];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    d[l] = load_small(shape, reinterpret_cast<const uint8_t*>(a.at[l]), d[l]);
  }
}

void store_lanes(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, u64 exec) {
  switch (shape) {
    case MemoryShape::dword1: return store_rows<1>(w, in, a, exec);
    case MemoryShape::dword2: return store_rows<2>(w, in, a, exec);
    case MemoryShape::dword3: return store_rows<3>(w, in, a, exec);
    case MemoryShape::dword4: return store_rows<4>(w, in, a, exec);
    default: break;
  }
  const u32* d = w.v[in.data];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    store_small(shape, reinterpret_cast<uint8_t*>(a.at[l]), d[l]);
  }
}

u32 load_small(MemoryShape shape, const uint8_t* p, u32 old) {
  u32 half = 0;
  if (shape_bytes(shape) == 2) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    half = h;
  }
  switch (shape) {
    case MemoryShape::ubyte: return *p;
    case MemoryShape::sbyte: return static_cast<u32>(static_cast<int8_t>(*p));
    case MemoryShape::ushort: return half;
    case MemoryShape::sshort: return static_cast<u32>(static_cast<int16_t>(half));
    case MemoryShape::ubyte_d16: return (old & 0xFFFF0000) | *p;
    case MemoryShape::ubyte_d16_hi: return (old & 0xFFFF) | u32{*p} << 16;
    case MemoryShape::sbyte_d16: return (old & 0xFFFF0000) | static_cast<uint16_t>(static_cast<int8_t>(*p));
    case MemoryShape::sbyte_d16_hi: return (old & 0xFFFF) | static_cast<u32>(static_cast<int8_t>(*p)) << 16;
    case MemoryShape::short_d16: return (old & 0xFFFF0000) | half;
    case MemoryShape::short_d16_hi: return (old & 0xFFFF) | half << 16;
    default: return old;
  }
}

void store_small(MemoryShape shape, uint8_t* p, u32 x) {
  if (shape == MemoryShape::ubyte_d16_hi || shape == MemoryShape::short_d16_hi) x >>= 16;
  const auto half = static_cast<uint16_t>(x);
  if (shape_bytes(shape) == 1) *p = static_cast<uint8_t>(x);
  else std::memcpy(p, &half, 2);
}

namespace {

template <MemoryShape shape>
void global_load(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  global_addresses(w, in, a, exec);
  check_global(w, in, a, exec, shape_bytes(shape), Access::load);
  load_lanes(w, in, shape, a, exec);
}

template <MemoryShape shape>
void global_store(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  global_addresses(w, in, a, exec);
  check_global(w, in, a, exec, shape_bytes(shape), Access::store);
  store_lanes(w, in, shape, a, exec);
}

template <MemoryShape shape, bool store>
void scratch_access(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  scratch_addresses(w, in, a, exec, shape_bytes(shape));
  if (observed_scratch(w)) note_scratch(w, in, a, exec, shape_bytes(shape), store ? Access::store : Access::load);
  if constexpr (store) store_lanes(w, in, shape, a, exec);
  else load_lanes(w, in, shape, a, exec);
}

template <MemoryShape shape, bool store>
void flat_access(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  global_addresses(w, in, a, exec);
  flat_translate(w, in, a, exec, shape_bytes(shape), store ? Access::store : Access::load);
  if constexpr (store) store_lanes(w, in, shape, a, exec);
  else load_lanes(w, in, shape, a, exec);
}

// LDS address of the first lane's data: M0 and the instruction offset; lanes follow at 4 or 16 bytes.
template <MemoryShape shape>
void global_load_lds(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  global_addresses(w, in, a, exec);
  check_global(w, in, a, exec, shape_bytes(shape), Access::load);
  store_to_lds(w, in, shape, a, exec, exec, (w.s[kM0] & 0x3FFFC) + static_cast<u32>(in.offset));
}
template <MemoryShape shape>
void scratch_load_lds(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  scratch_addresses(w, in, a, exec, shape_bytes(shape));
  if (observed_scratch(w)) note_scratch(w, in, a, exec, shape_bytes(shape), Access::load);
  store_to_lds(w, in, shape, a, exec, exec, (w.s[kM0] & 0x3FFFC) + static_cast<u32>(in.offset));
}

}  // namespace

void flat_translate(Wave& w, const ExecInst& in, LaneAddresses& a, u64 exec, u32 bytes, Access access) {
  u64 shared = 0, priv = 0;
  alignas(64) u32 lds[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const u32 high = static_cast<u32>(a.at[l] >> 32);
    shared |= u64{high == kSharedApertureHigh} << l;
    priv |= u64{high == kPrivateApertureHigh} << l;
  }
  shared &= exec;
  priv &= exec;
  const u64 global = exec & ~shared & ~priv;
  if (global) {
    LaneAddresses g = a;
    fill_inactive(g, global);
    check_global(w, in, g, global, bytes, access);
  }
  if (shared) {
    const u32 first = static_cast<u32>(a.at[std::countr_zero(shared)]);
    for (int l = 0; l < kLanes; ++l) lds[l] = (shared >> l & 1) ? static_cast<u32>(a.at[l]) : first;
    check_lds(w, in, lds, shared, bytes, access);
    for (int l = 0; l < kLanes; ++l)
      if (shared >> l & 1) a.at[l] = reinterpret_cast<u64>(w.wg->lds) + lds[l];
  }
  if (priv) {
    for (int l = 0; l < kLanes; ++l)
      if (priv >> l & 1) a.at[l] = private_address(w, in, static_cast<u32>(a.at[l]), bytes, l, exec);
    if (observed_scratch(w)) note_scratch(w, in, a, priv, bytes, access);
  }
  fill_inactive(a, exec);
}

namespace {

template <u32 bytes>
void copy_lanes(uint8_t* lds, const u32* to, const LaneAddresses& from, u64 exec, u64 valid) {
  if (valid == kAllLanes) {
    // Lanes read a few bytes of many rows, and the copies below are too many for the processor to see past a miss.
    for (int l = 0; l < kLanes; ++l) __builtin_prefetch(reinterpret_cast<const void*>(from.at[l]));
    for (int l = 0; l < kLanes; ++l) std::memcpy(lds + to[l], reinterpret_cast<const void*>(from.at[l]), bytes);
    return;
  }
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (valid >> l & 1) std::memcpy(lds + to[l], reinterpret_cast<const void*>(from.at[l]), bytes);
    else std::memset(lds + to[l], 0, bytes);
  }
}

}  // namespace

void store_to_lds(Wave& w, const ExecInst& in, MemoryShape shape, const LaneAddresses& a, u64 exec, u64 valid,
                  u32 base) {
  const u32 bytes = shape_bytes(shape) < 4 ? 4 : shape_bytes(shape), stride = bytes > 4 ? 16 : 4;
  alignas(64) u32 lds[kLanes];
  const u32 first = base + stride * static_cast<u32>(std::countr_zero(exec));
  for (u32 l = 0; l < kLanes; ++l) lds[l] = (exec >> l & 1) ? base + stride * l : first;
  check_lds(w, in, lds, exec, bytes, Access::store);
  if (bytes == 16) return copy_lanes<16>(w.wg->lds, lds, a, exec, valid);
  if (bytes == 12) return copy_lanes<12>(w.wg->lds, lds, a, exec, valid);
  if (shape == MemoryShape::dword1) return copy_lanes<4>(w.wg->lds, lds, a, exec, valid);
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    const u32 x = valid >> l & 1 ? load_small(shape, reinterpret_cast<const uint8_t*>(a.at[l]), 0) : 0;
    std::memcpy(w.wg->lds + lds[l], &x, 4);
  }
}

#define LOADS(prefix, handler)                                                      \
  t.special(Op::prefix##_ubyte, C::vmem_load, &handler<S::ubyte>);                  \
  t.special(Op::prefix##_sbyte, C::vmem_load, &handler<S::sbyte>);                  \
  t.special(Op::prefix##_ushort, C::vmem_load, &handler<S::ushort>);                \
  t.special(Op::prefix##_sshort, C::vmem_load, &handler<S::sshort>);                \
  t.special(Op::prefix##_dword, C::vmem_load, &handler<S::dword1>);                 \
  t.special(Op::prefix##_dwordx2, C::vmem_load, &handler<S::dword2>);               \
  t.special(Op::prefix##_dwordx3, C::vmem_load, &handler<S::dword3>);               \
  t.special(Op::prefix##_dwordx4, C::vmem_load, &handler<S::dword4>);               \
  t.special(Op::prefix##_ubyte_d16, C::vmem_load, &handler<S::ubyte_d16>);          \
  t.special(Op::prefix##_ubyte_d16_hi, C::vmem_load, &handler<S::ubyte_d16_hi>);    \
  t.special(Op::prefix##_sbyte_d16, C::vmem_load, &handler<S::sbyte_d16>);          \
  t.special(Op::prefix##_sbyte_d16_hi, C::vmem_load, &handler<S::sbyte_d16_hi>);    \
  t.special(Op::prefix##_short_d16, C::vmem_load, &handler<S::short_d16>);          \
  t.special(Op::prefix##_short_d16_hi, C::vmem_load, &handler<S::short_d16_hi>)
#define STORES(prefix, handler)                                                     \
  t.special(Op::prefix##_byte, C::vmem_store, &handler<S::ubyte>);                  \
  t.special(Op::prefix##_byte_d16_hi, C::vmem_store, &handler<S::ubyte_d16_hi>);    \
  t.special(Op::prefix##_short, C::vmem_store, &handler<S::ushort>);                \
  t.special(Op::prefix##_short_d16_hi, C::vmem_store, &handler<S::short_d16_hi>);   \
  t.special(Op::prefix##_dword, C::vmem_store, &handler<S::dword1>);                \
  t.special(Op::prefix##_dwordx2, C::vmem_store, &handler<S::dword2>);              \
  t.special(Op::prefix##_dwordx3, C::vmem_store, &handler<S::dword3>);              \
  t.special(Op::prefix##_dwordx4, C::vmem_store, &handler<S::dword4>)

namespace {
template <MemoryShape shape> void flat_load(Wave& w, const ExecInst& in) { flat_access<shape, false>(w, in); }
template <MemoryShape shape> void flat_store(Wave& w, const ExecInst& in) { flat_access<shape, true>(w, in); }
template <MemoryShape shape> void scratch_load(Wave& w, const ExecInst& in) { scratch_access<shape, false>(w, in); }
template <MemoryShape shape> void scratch_store(Wave& w, const ExecInst& in) { scratch_access<shape, true>(w, in); }
}  // namespace

void register_global(OpTable& t) {
  using S = MemoryShape;
  using C = OpClass;
  LOADS(global_load, global_load);
  STORES(global_store, global_store);
  LOADS(flat_load, flat_load);
  STORES(flat_store, flat_store);
  LOADS(scratch_load, scratch_load);
  STORES(scratch_store, scratch_store);
  t.special(Op::scratch_load_lds_ubyte, C::vmem_load, &scratch_load_lds<S::ubyte>);
  t.special(Op::scratch_load_lds_sbyte, C::vmem_load, &scratch_load_lds<S::sbyte>);
  t.special(Op::scratch_load_lds_ushort, C::vmem_load, &scratch_load_lds<S::ushort>);
  t.special(Op::scratch_load_lds_sshort, C::vmem_load, &scratch_load_lds<S::sshort>);
  t.special(Op::scratch_load_lds_dword, C::vmem_load, &scratch_load_lds<S::dword1>);
  t.special(Op::global_load_lds_ubyte, C::vmem_load, &global_load_lds<S::ubyte>);
  t.special(Op::global_load_lds_sbyte, C::vmem_load, &global_load_lds<S::sbyte>);
  t.special(Op::global_load_lds_ushort, C::vmem_load, &global_load_lds<S::ushort>);
  t.special(Op::global_load_lds_sshort, C::vmem_load, &global_load_lds<S::sshort>);
  t.special(Op::global_load_lds_dword, C::vmem_load, &global_load_lds<S::dword1>);
  t.special(Op::global_load_lds_dwordx3, C::vmem_load, &global_load_lds<S::dword3>);
  t.special(Op::global_load_lds_dwordx4, C::vmem_load, &global_load_lds<S::dword4>);
}

}  // namespace hfemu
