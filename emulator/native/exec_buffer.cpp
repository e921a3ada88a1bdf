// buffer_* loads, stores and LDS DMA: descriptor arithmetic and range rules around the global machinery.
#include "buffer.h"
#include "exec.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

}  // namespace

BufferDescriptor buffer_descriptor(const Wave& w, const ExecInst& in) {
  const u32* s = &w.s[in.sbase];
  BufferDescriptor d;
  d.base = (u64{s[0]} | u64{s[1]} << 32) & 0xFFFFFFFFFFFF;
  d.stride = s[1] >> 16 & 0x3FFF;
  d.records = s[2];
  const bool swizzle = s[1] >> 31, add_thread_id = s[3] >> 23 & 1;
  if (swizzle) unsupported(w, in, "swizzled buffer descriptor");
  if (add_thread_id) unsupported(w, in, "buffer descriptor that adds the thread id");
  return d;
}

u64 buffer_addresses(const Wave& w, const ExecInst& in, const BufferDescriptor& d, u64 exec, u32 bytes,
                     LaneAddresses& a, u32* partial) {
  const Inst& inst = *in.inst;
  const u32 soffset = static_cast<u32>(scalar_source(w, in.src[0]));
  const u64 fixed = static_cast<u64>(in.offset) + soffset;
  const u32* first = w.v[in.address.reg];
  u64 valid = 0;
  if (!inst.idxen) {
    // Bytes from the base, whatever the stride says.
    if (inst.offen) {
      for (int l = 0; l < kLanes; ++l) a.at[l] = fixed + first[l];
    } else {
      for (int l = 0; l < kLanes; ++l) a.at[l] = fixed;
    }
    u64 high = 0;
    for (int l = 0; l < kLanes; ++l) high = a.at[l] > high ? a.at[l] : high;
    if (high + bytes <= d.records) [[likely]] {
      valid = exec;
    } else {
      for (int l = 0; l < kLanes; ++l) {
        valid |= u64{a.at[l] + bytes <= d.records} << l;
        partial[l] = a.at[l] < d.records ? static_cast<u32>((d.records - a.at[l]) / 4) : 0;
      }
      valid &= exec;
    }
  } else {
    // Structured: the index is checked against the number of records, the offset against the stride.
    const u32* offsets = inst.offen ? w.v[in.address.reg + 1] : nullptr;
    for (int l = 0; l < kLanes; ++l) {
      const u64 offset = fixed + (offsets ? offsets[l] : 0);
      const bool inside = d.stride == 0 ? u64{first[l]} + offset + bytes <= d.records
                                        : first[l] < d.records;
      valid |= u64{inside} << l;
      partial[l] = 0;
      a.at[l] = u64{first[l]} * d.stride + offset;
    }
    valid &= exec;
  }
  for (int l = 0; l < kLanes; ++l) a.at[l] += d.base;
  fill_inactive(a, valid);
  return valid;
}

namespace {

// Lanes that are not wholly in range: each dword inside is moved, each one outside reads 0 or is dropped.
template <MemoryShape shape>
void load_outside(Wave& w, const ExecInst& in, const LaneAddresses& a, u64 outside, const u32* partial) {
  constexpr u32 bytes = shape_bytes(shape);
  constexpr int dwords = bytes >= 4 ? static_cast<int>(bytes / 4) : 1;
  for (u64 left = outside; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (bytes < 4) {
      const uint8_t zero[2] = {};
      w.v[in.dst][l] = load_small(shape, zero, w.v[in.dst][l]);
      continue;
    }
    for (int i = 0; i < dwords; ++i) {
      u32 x = 0;
      if (static_cast<u32>(i) < partial[l]) {
        LaneAddresses one;
        for (u64& at : one.at) at = a.at[l] + 4u * static_cast<u32>(i);
        check_global(w, in, one, u64{1} << l, 4, Access::load);
        std::memcpy(&x, reinterpret_cast<const void*>(one.at[0]), 4);
      }
      w.v[in.dst + i][l] = x;
    }
  }
}

template <MemoryShape shape>
void store_outside(Wave& w, const ExecInst& in, const LaneAddresses& a, u64 outside, const u32* partial) {
  constexpr u32 bytes = shape_bytes(shape);
  if (bytes <= 4) return;
  for (u64 left = outside; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    for (u32 i = 0; i < bytes / 4 && i < partial[l]; ++i) {
      LaneAddresses one;
      for (u64& at : one.at) at = a.at[l] + 4u * i;
      check_global(w, in, one, u64{1} << l, 4, Access::store);
      std::memcpy(reinterpret_cast<void*>(one.at[0]), &w.v[in.data + i][l], 4);
    }
  }
}

template <MemoryShape shape>
void buffer_load(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  const BufferDescriptor d = buffer_descriptor(w, in);
  LaneAddresses a;
  u32 partial[kLanes];
  const u64 valid = buffer_addresses(w, in, d, exec, shape_bytes(shape), a, partial);
  if (valid) check_global(w, in, a, valid, shape_bytes(shape), Access::load);
  if (in.inst->lds) {
    store_to_lds(w, in, shape, a, exec, valid,
                 (w.s[kM0] & (w.launch->program->arch == Arch::gfx950 ? 0x3FFFF : 0xFFFF)) + static_cast<u32>(in.offset));
    return;
  }
  LaneAddresses raw;
  if (valid != exec) restore_addresses(w, in, d, raw);  // before the destination overwrites the address register
  if (valid) load_lanes(w, in, shape, a, valid);
  if (valid != exec) load_outside<shape>(w, in, raw, exec & ~valid, partial);
}

template <MemoryShape shape>
void buffer_store(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  const BufferDescriptor d = buffer_descriptor(w, in);
  LaneAddresses a;
  u32 partial[kLanes];
  const u64 valid = buffer_addresses(w, in, d, exec, shape_bytes(shape), a, partial);
  if (valid) {
    check_global(w, in, a, valid, shape_bytes(shape), Access::store);
    store_lanes(w, in, shape, a, valid);
  }
  if (valid != exec) {
    LaneAddresses raw;
    restore_addresses(w, in, d, raw);
    store_outside<shape>(w, in, raw, exec & ~valid, partial);
  }
}

}  // namespace

// The raw form's addresses again, without the substitution for lanes that are out of range.
void restore_addresses(const Wave& w, const ExecInst& in, const BufferDescriptor& d, LaneAddresses& a) {
  const u64 fixed = d.base + static_cast<u64>(in.offset) + static_cast<u32>(scalar_source(w, in.src[0]));
  const u32* first = w.v[in.address.reg];
  for (int l = 0; l < kLanes; ++l) a.at[l] = fixed + (in.inst->offen && !in.inst->idxen ? first[l] : 0);
}

void register_buffer(OpTable& t) {
  using S = MemoryShape;
  using C = OpClass;
  t.special(Op::buffer_load_ubyte, C::vmem_load, &buffer_load<S::ubyte>);
  t.special(Op::buffer_load_sbyte, C::vmem_load, &buffer_load<S::sbyte>);
  t.special(Op::buffer_load_ushort, C::vmem_load, &buffer_load<S::ushort>);
  t.special(Op::buffer_load_sshort, C::vmem_load, &buffer_load<S::sshort>);
  t.special(Op::buffer_load_dword, C::vmem_load, &buffer_load<S::dword1>);
  t.special(Op::buffer_load_dwordx2, C::vmem_load, &buffer_load<S::dword2>);
  t.special(Op::buffer_load_dwordx3, C::vmem_load, &buffer_load<S::dword3>);
  t.special(Op::buffer_load_dwordx4, C::vmem_load, &buffer_load<S::dword4>);
  t.special(Op::buffer_load_ubyte_d16, C::vmem_load, &buffer_load<S::ubyte_d16>);
  t.special(Op::buffer_load_ubyte_d16_hi, C::vmem_load, &buffer_load<S::ubyte_d16_hi>);
  t.special(Op::buffer_load_sbyte_d16, C::vmem_load, &buffer_load<S::sbyte_d16>);
  t.special(Op::buffer_load_sbyte_d16_hi, C::vmem_load, &buffer_load<S::sbyte_d16_hi>);
  t.special(Op::buffer_load_short_d16, C::vmem_load, &buffer_load<S::short_d16>);
  t.special(Op::buffer_load_short_d16_hi, C::vmem_load, &buffer_load<S::short_d16_hi>);
  t.special(Op::buffer_store_byte, C::vmem_store, &buffer_store<S::ubyte>);
  t.special(Op::buffer_store_byte_d16_hi, C::vmem_store, &buffer_store<S::ubyte_d16_hi>);
  t.special(Op::buffer_store_short, C::vmem_store, &buffer_store<S::ushort>);
  t.special(Op::buffer_store_short_d16_hi, C::vmem_store, &buffer_store<S::short_d16_hi>);
  t.special(Op::buffer_store_dword, C::vmem_store, &buffer_store<S::dword1>);
  t.special(Op::buffer_store_dwordx2, C::vmem_store, &buffer_store<S::dword2>);
  t.special(Op::buffer_store_dwordx3, C::vmem_store, &buffer_store<S::dword3>);
  t.special(Op::buffer_store_dwordx4, C::vmem_store, &buffer_store<S::dword4>);
  // Cache maintenance: memory is coherent here.
  t.special(Op::buffer_inv, C::other, &no_operation);
  t.special(Op::buffer_wbl2, C::other, &no_operation);
}

}  // namespace hfemu
