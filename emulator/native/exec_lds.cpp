// ds_* reads, writes, lane permutations and transpose reads. LDS atomics are in exec_lds_atomics.cpp.
//
// Reads and writes may be misaligned: the HSA runtime sets SH_MEM_CONFIG.ALIGNMENT_MODE to UNALIGNED, which holds for
// LDS too (ISA, "Out-of-Range behavior"), and LLVM counts on it: gfx9 has unaligned-ds-access, and the amdhsa targets
// unaligned-access-mode, so clang emits ds_read_b128 and ds_read_b64 for packed data of any alignment.
#include "addressing.h"
#include "exec.h"
#include "lds.h"

namespace hfemu {

void lds_addresses(const Wave& w, const ExecInst& in, int64_t offset, uint64_t exec, uint32_t* a) {
  const uint32_t* base = w.v[in.address.reg];
  const uint32_t off = static_cast<uint32_t>(offset);
  for (int l = 0; l < kLanes; ++l) a[l] = base[l] + off;
  if (exec != kAllLanes) {
    const uint32_t first = a[std::countr_zero(exec)];
    for (int l = 0; l < kLanes; ++l) a[l] = (exec >> l & 1) ? a[l] : first;
  }
}

namespace {

using u32 = uint32_t;
using u64 = uint64_t;

struct alignas(64) LdsLanes {
  u32 at[kLanes];
};

template <int dwords>
void read_dwords(Wave& w, const LdsLanes& a, u64 exec, u32 reg) {
  const uint8_t* lds = w.wg->lds;
  if (exec == kAllLanes) {
    u32* d = w.v[reg];
    if constexpr (dwords == 4)
      if (load_quads(d, [&](int l) { return lds + a.at[l]; })) return;
    for (int l = 0; l < kLanes; ++l) {
      u32 x[dwords];
      std::memcpy(x, lds + a.at[l], sizeof x);
      for (int i = 0; i < dwords; ++i) d[i * kLanes + l] = x[i];
    }
    return;
  }
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    u32 x[dwords];
    std::memcpy(x, lds + a.at[l], sizeof x);
    for (int i = 0; i < dwords; ++i) w.v[reg + i][l] = x[i];
  }
}

template <int dwords>
void write_dwords(Wave& w, const LdsLanes& a, u64 exec, u32 reg) {
  uint8_t* lds = w.wg->lds;
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    u32 x[dwords];
    for (int i = 0; i < dwords; ++i) x[i] = w.v[reg + i][l];
    std::memcpy(lds + a.at[l], x, sizeof x);
  }
}

template <int dwords>
void read(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  lds_addresses(w, in, in.offset, exec, a.at);
  check_lds(w, in, a.at, exec, 4 * dwords, Access::load);
  read_dwords<dwords>(w, a, exec, in.dst);
}

template <int dwords>
void write(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  lds_addresses(w, in, in.offset, exec, a.at);
  check_lds(w, in, a.at, exec, 4 * dwords, Access::store);
  write_dwords<dwords>(w, a, exec, in.data);
}

// Two accesses whose offsets count elements (st64: 64 elements).
template <int dwords, int unit>
void read2(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a, b;
  lds_addresses(w, in, in.offset * 4 * dwords * unit, exec, a.at);
  lds_addresses(w, in, int64_t{in.inst->offset1} * 4 * dwords * unit, exec, b.at);
  check_lds(w, in, a.at, exec, 4 * dwords, Access::load);
  check_lds(w, in, b.at, exec, 4 * dwords, Access::load);
  // The destination may hold the addresses, but those are already read.
  read_dwords<dwords>(w, a, exec, in.dst);
  read_dwords<dwords>(w, b, exec, in.dst + dwords);
}

template <int dwords, int unit>
void write2(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a, b;
  lds_addresses(w, in, in.offset * 4 * dwords * unit, exec, a.at);
  lds_addresses(w, in, int64_t{in.inst->offset1} * 4 * dwords * unit, exec, b.at);
  check_lds(w, in, a.at, exec, 4 * dwords, Access::store);
  check_lds(w, in, b.at, exec, 4 * dwords, Access::store);
  write_dwords<dwords>(w, a, exec, in.data);
  write_dwords<dwords>(w, b, exec, in.data2);
}

template <MemoryShape shape>
void read_small(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  lds_addresses(w, in, in.offset, exec, a.at);
  check_lds(w, in, a.at, exec, shape_bytes(shape), Access::load);
  u32* d = w.v[in.dst];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    d[l] = load_small(shape, w.wg->lds + a.at[l], d[l]);
  }
}

template <MemoryShape shape>
void write_small(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  lds_addresses(w, in, in.offset, exec, a.at);
  check_lds(w, in, a.at, exec, shape_bytes(shape), Access::store);
  const u32* d = w.v[in.data];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    store_small(shape, w.wg->lds + a.at[l], d[l]);
  }
}

// addtid: the address is M0[15:0] + offset + 4 * lane.
template <bool is_store>
void add_thread_id(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  for (u32 l = 0; l < kLanes; ++l) {
    const u32 lane = (exec >> l & 1) ? l : static_cast<u32>(std::countr_zero(exec));
    a.at[l] = (w.s[kM0] & 0xFFFF) + static_cast<u32>(in.offset) + 4 * lane;
  }
  check_lds(w, in, a.at, exec, 4, is_store ? Access::store : Access::load);
  if (is_store) write_dwords<1>(w, a, exec, in.data);
  else read_dwords<1>(w, a, exec, in.dst);
}

// In each group of 16 lanes, output item j of lane t is item t % n of lane (16 / n) * j + t / n, n items per lane.
template <int bits>
void read_transposed(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  constexpr int n = 64 / bits;
  LdsLanes a;
  lds_addresses(w, in, in.offset, exec, a.at);
  check_lds(w, in, a.at, exec, 8, Access::load);
  u64 loaded[kLanes];
  for (int l = 0; l < kLanes; ++l) std::memcpy(&loaded[l], w.wg->lds + a.at[l], 8);
  RowBuffer out;
  constexpr u64 item_mask = bits == 64 ? ~u64{0} : (u64{1} << bits) - 1;
  for (int l = 0; l < kLanes; ++l) {
    const int group = l & ~15, t = l & 15;
    u64 x = 0;
    for (int j = 0; j < n; ++j) {
      // 4-bit items: 16 of them, so each lane takes one item from every lane of the group.
      const int from = group + (16 / n) * j + t / n;
      x |= (loaded[from] >> (bits * (t % n)) & item_mask) << (bits * j);
    }
    lane_store(out.x, l, x);
  }
  write_rows(w, in.dst, out.x, 2, exec);
}

// 6-bit items, 16 per lane in 96 bits.
void read_transposed_6(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  lds_addresses(w, in, in.offset, exec, a.at);
  check_lds(w, in, a.at, exec, 12, Access::load);
  uint8_t items[kLanes][16];
  for (int l = 0; l < kLanes; ++l) {
    uint8_t raw[16] = {};
    std::memcpy(raw, w.wg->lds + a.at[l], 12);
    for (int j = 0; j < 16; ++j) {
      const int bit = 6 * j;
      const u32 pair = raw[bit / 8] | u32{raw[bit / 8 + 1]} << 8;
      items[l][j] = pair >> (bit % 8) & 63;
    }
  }
  u32 out[3][kLanes];
  for (int l = 0; l < kLanes; ++l) {
    uint8_t raw[16] = {};
    for (int j = 0; j < 16; ++j) {
      const u32 x = u32{items[(l & ~15) + j][l & 15]} << (6 * j % 8);
      raw[6 * j / 8] |= static_cast<uint8_t>(x);
      raw[6 * j / 8 + 1] |= static_cast<uint8_t>(x >> 8);
    }
    for (int i = 0; i < 3; ++i) std::memcpy(&out[i][l], raw + 4 * i, 4);
  }
  for (int i = 0; i < 3; ++i) merge_row(w.v[in.dst + i], out[i], exec);
}

// Backward permute: each lane reads another lane's value; an inactive source gives 0.
void bpermute(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  const u32* index = w.v[in.address.reg];
  const u32* data = w.v[in.data];
  RowBuffer out;
  const u32 offset = static_cast<u32>(in.offset);
  for (int l = 0; l < kLanes; ++l) {
    const u32 from = (index[l] + offset) >> 2 & 63;
    out.x[l] = (exec >> from & 1) ? data[from] : 0;
  }
  merge_row(w.v[in.dst], out.x, exec);
}

// Forward permute: each active lane sends; the highest sender wins and lanes nobody sends to get 0.
void permute(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  const u32* index = w.v[in.address.reg];
  const u32* data = w.v[in.data];
  RowBuffer out;
  std::memset(out.x, 0, sizeof(Row));
  const u32 offset = static_cast<u32>(in.offset);
  for (int l = 0; l < kLanes; ++l)
    if (exec >> l & 1) out.x[(index[l] + offset) >> 2 & 63] = data[l];
  merge_row(w.v[in.dst], out.x, exec);
}

void swizzle(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  // ds_swizzle keeps its source in the address field.
  const u32* data = w.v[in.address.reg];
  const u32 pattern = static_cast<u32>(in.offset);
  RowBuffer out;
  for (u32 l = 0; l < kLanes; ++l) {
    u32 from;
    if (pattern & 0x8000) {
      if ((pattern & 0xF000) >= 0xE000) unsupported(w, in, "fft or rotate mode of ds_swizzle");
      from = (l & ~3u) | (pattern >> (2 * (l & 3)) & 3);  // quad permute
    } else {
      const u32 in_group = l & 31;
      const u32 and_mask = pattern & 31, or_mask = pattern >> 5 & 31, xor_mask = pattern >> 10 & 31;
      from = (l & 32) | (((in_group & and_mask) | or_mask) ^ xor_mask);
    }
    out.x[l] = (exec >> from & 1) ? data[from] : 0;
  }
  merge_row(w.v[in.dst], out.x, exec);
}

// Append and consume: one counter in LDS, moved by the number of active lanes; every lane gets the old value.
template <bool append>
void append_consume(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LdsLanes a;
  for (u32& at : a.at) at = (w.s[kM0] >> 16) + static_cast<u32>(in.offset);
  check_lds(w, in, a.at, exec, 4, Access::atomic);
  u32 old;
  std::memcpy(&old, w.wg->lds + a.at[0], 4);
  const u32 count = static_cast<u32>(std::popcount(exec));
  const u32 now = append ? old + count : old - count;
  std::memcpy(w.wg->lds + a.at[0], &now, 4);
  RowBuffer out;
  splat(out.x, old);
  merge_row(w.v[in.dst], out.x, exec);
}

}  // namespace

void register_lds(OpTable& t) {
  using S = MemoryShape;
  const auto lds = [&](Op op, Handler h) { t.special(op, OpClass::lds, h); };
  lds(Op::ds_read_b32, &read<1>);
  lds(Op::ds_read_b64, &read<2>);
  lds(Op::ds_read_b96, &read<3>);
  lds(Op::ds_read_b128, &read<4>);
  lds(Op::ds_write_b32, &write<1>);
  lds(Op::ds_write_b64, &write<2>);
  lds(Op::ds_write_b96, &write<3>);
  lds(Op::ds_write_b128, &write<4>);
  lds(Op::ds_read2_b32, &read2<1, 1>);
  lds(Op::ds_read2_b64, &read2<2, 1>);
  lds(Op::ds_read2st64_b32, &read2<1, 64>);
  lds(Op::ds_read2st64_b64, &read2<2, 64>);
  lds(Op::ds_write2_b32, &write2<1, 1>);
  lds(Op::ds_write2_b64, &write2<2, 1>);
  lds(Op::ds_write2st64_b32, &write2<1, 64>);
  lds(Op::ds_write2st64_b64, &write2<2, 64>);
  lds(Op::ds_read_u8, &read_small<S::ubyte>);
  lds(Op::ds_read_i8, &read_small<S::sbyte>);
  lds(Op::ds_read_u16, &read_small<S::ushort>);
  lds(Op::ds_read_i16, &read_small<S::sshort>);
  lds(Op::ds_read_u8_d16, &read_small<S::ubyte_d16>);
  lds(Op::ds_read_u8_d16_hi, &read_small<S::ubyte_d16_hi>);
  lds(Op::ds_read_i8_d16, &read_small<S::sbyte_d16>);
  lds(Op::ds_read_i8_d16_hi, &read_small<S::sbyte_d16_hi>);
  lds(Op::ds_read_u16_d16, &read_small<S::short_d16>);
  lds(Op::ds_read_u16_d16_hi, &read_small<S::short_d16_hi>);
  lds(Op::ds_write_b8, &write_small<S::ubyte>);
  lds(Op::ds_write_b16, &write_small<S::ushort>);
  lds(Op::ds_write_b8_d16_hi, &write_small<S::ubyte_d16_hi>);
  lds(Op::ds_write_b16_d16_hi, &write_small<S::short_d16_hi>);
  lds(Op::ds_read_addtid_b32, &add_thread_id<false>);
  lds(Op::ds_write_addtid_b32, &add_thread_id<true>);
  lds(Op::ds_read_b64_tr_b16, &read_transposed<16>);
  lds(Op::ds_read_b64_tr_b8, &read_transposed<8>);
  lds(Op::ds_read_b64_tr_b4, &read_transposed<4>);
  lds(Op::ds_read_b96_tr_b6, &read_transposed_6);
  lds(Op::ds_bpermute_b32, &bpermute);
  lds(Op::ds_permute_b32, &permute);
  lds(Op::ds_swizzle_b32, &swizzle);
  lds(Op::ds_append, &append_consume<true>);
  lds(Op::ds_consume, &append_consume<false>);
  lds(Op::ds_nop, &no_operation);
}

}  // namespace hfemu
