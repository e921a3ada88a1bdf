// Operations that look across lanes or at masks: carries, cndmask, readlane, mbcnt, permlane swaps, bitop3.
#include "exec.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

constexpr LaneType b32 = LaneType::b32;

// v_cndmask_b32: src[2] is the mask; the value sources may carry float modifiers.
void cndmask(Wave& w, const ExecInst& in) {
  const u64 mask = scalar_source(w, in.src[2]);
  if (in.plain) {
    RowBuffer x, y;
    const u32* a = source_row(w, in.src[0], x);
    const u32* b = source_row(w, in.src[1], y);
    u32* d = w.v[in.dst];
    const u64 exec = w.exec();
    // Written in two merges so that the destination may be either source.
    RowBuffer out;
    std::memcpy(out.x, a, sizeof(u32) * kLanes);
    merge_row(out.x, b, mask);
    merge_row(d, out.x, exec);
    return;
  }
  RowBuffer x, y, out;
  const u32* a = stage_source(w, in, 0, LaneType::f32, x);
  const u32* b = stage_source(w, in, 1, LaneType::f32, y);
  for (int l = 0; l < kLanes; ++l) out.x[l] = (mask >> l & 1) ? b[l] : a[l];
  write_result(w, in, b32, out.x);
}

// Carry chains: f(a, b, carry in, &carry out) -> sum.
template <class F, bool carry_in>
void carry_op(Wave& w, const ExecInst& in) {
  const F f{};
  RowBuffer x, y, out;
  const u32* a = stage_source(w, in, 0, b32, x);
  const u32* b = stage_source(w, in, 1, b32, y);
  const u64 carries = carry_in ? scalar_source(w, in.src[2]) : 0;
  alignas(64) u32 carry_bytes[16];
  auto* bytes = reinterpret_cast<uint8_t*>(carry_bytes);
  for (int l = 0; l < kLanes; ++l) {
    bool carry = false;
    out.x[l] = f(a[l], b[l], static_cast<u32>(carries >> l & 1), carry);
    bytes[l] = carry ? 0xFF : 0;
  }
  const u64 exec = w.exec();
  const u64 produced = pack_mask(carry_bytes) & exec & dpp_write_mask(w, in);
  write_result(w, in, b32, out.x);
  w.set_s64(in.dst2, produced);
}

template <bool is_signed>
void mad_64_32(Wave& w, const ExecInst& in) {
  RowBuffer x, y, z, out;
  const u32* a = source_row(w, in.src[0], x);
  const u32* b = source_row(w, in.src[1], y);
  const u32* c = source_row(w, in.src[2], z);
  alignas(64) u32 carry_bytes[16];
  auto* bytes = reinterpret_cast<uint8_t*>(carry_bytes);
  for (int l = 0; l < kLanes; ++l) {
    const u64 p = is_signed ? static_cast<u64>(int64_t{static_cast<int32_t>(a[l])} * static_cast<int32_t>(b[l]))
                            : u64{a[l]} * b[l];
    const u64 addend = lane_load<u64>(c, l), sum = p + addend;
    // The carry is the overflow of the operation's own signedness.
    const bool carry = is_signed ? ((p ^ sum) & (addend ^ sum)) >> 63 : sum < p;
    bytes[l] = carry ? 0xFF : 0;
    lane_store(out.x, l, sum);
  }
  if (in.inst->clamp) unsupported(w, in, "clamp on a 64-bit multiply-add");
  const u64 exec = w.exec();
  write_rows(w, in.dst, out.x, 2, exec);
  w.set_s64(in.dst2, pack_mask(carry_bytes) & exec);
}

void readlane(Wave& w, const ExecInst& in) {
  const u32 lane = static_cast<u32>(scalar_source(w, in.src[1])) & 63;
  RowBuffer x;
  w.s[in.dst] = source_row(w, in.src[0], x)[lane];
}

void readfirstlane(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  RowBuffer x;
  w.s[in.dst] = source_row(w, in.src[0], x)[exec ? std::countr_zero(exec) : 0];
}

void writelane(Wave& w, const ExecInst& in) {
  const u32 lane = static_cast<u32>(scalar_source(w, in.src[1])) & 63;
  w.v[in.dst][lane] = static_cast<u32>(scalar_source(w, in.src[0]));
}

template <bool high>
void mbcnt(Wave& w, const ExecInst& in) {
  RowBuffer x, y, out;
  const u32* a = stage_source(w, in, 0, b32, x);
  const u32* b = stage_source(w, in, 1, b32, y);
  for (int l = 0; l < kLanes; ++l) {
    const u64 below = (u64{1} << l) - 1;
    out.x[l] = b[l] + static_cast<u32>(std::popcount(a[l] & static_cast<u32>(high ? below >> 32 : below)));
  }
  write_result(w, in, b32, out.x);
}

void swap(Wave& w, const ExecInst& in) {
  RowBuffer d, s;
  u32* a = w.v[in.dst];
  u32* b = w.v[in.src[0].reg];
  std::memcpy(d.x, a, sizeof(Row));
  std::memcpy(s.x, b, sizeof(Row));
  const u64 exec = w.exec();
  merge_row(a, s.x, exec);
  merge_row(b, d.x, exec);
}

// Blocks of `width` lanes: odd blocks of the destination trade places with the even blocks below them of the source.
template <int width>
void permlane_swap(Wave& w, const ExecInst& in) {
  RowBuffer d, s;
  u32* a = w.v[in.dst];
  u32* b = w.v[in.src[0].reg];
  std::memcpy(d.x, a, sizeof(Row));
  std::memcpy(s.x, b, sizeof(Row));
  for (int l = 0; l < kLanes; ++l) {
    if (l / width % 2) {
      const int even = l - width;
      d.x[l] = b[even];
      s.x[even] = a[l];
    }
  }
  // An inactive lane neither gives up its old value nor takes one.
  const u64 exec = w.exec();
  merge_row(a, d.x, exec);
  merge_row(b, s.x, exec);
}

template <LaneType type>
void bitop3(Wave& w, const ExecInst& in) {
  RowBuffer x, y, z, out;
  const u32* a = stage_source(w, in, 0, type, x);
  const u32* b = stage_source(w, in, 1, type, y);
  const u32* c = stage_source(w, in, 2, type, z);
  const u32 table = in.inst->bitop3;
  u32 minterm[8];
  for (int i = 0; i < 8; ++i) minterm[i] = (table >> i & 1) ? ~0u : 0;
  for (int l = 0; l < kLanes; ++l) {
    const u32 p = a[l], q = b[l], r = c[l];
    out.x[l] = (minterm[0] & ~p & ~q & ~r) | (minterm[1] & ~p & ~q & r) | (minterm[2] & ~p & q & ~r) |
               (minterm[3] & ~p & q & r) | (minterm[4] & p & ~q & ~r) | (minterm[5] & p & ~q & r) |
               (minterm[6] & p & q & ~r) | (minterm[7] & p & q & r);
    if (type == LaneType::b16) out.x[l] &= 0xFFFF;
  }
  write_result(w, in, type, out.x, type == LaneType::b16);
}

#define CARRY(name, carry_in, ...) \
  t.special(Op::name, OpClass::valu, &carry_op<decltype([] __VA_ARGS__), carry_in>)

}  // namespace

void register_lane_ops(OpTable& t) {
  t.special(Op::v_cndmask_b32, OpClass::valu, &cndmask);
  CARRY(v_add_co_u32, false, (u32 a, u32 b, u32, bool& c) { const u32 r = a + b; c = r < a; return r; });
  CARRY(v_sub_co_u32, false, (u32 a, u32 b, u32, bool& c) { c = a < b; return a - b; });
  CARRY(v_subrev_co_u32, false, (u32 a, u32 b, u32, bool& c) { c = b < a; return b - a; });
  CARRY(v_addc_co_u32, true, (u32 a, u32 b, u32 k, bool& c) {
    const u64 r = u64{a} + b + k;
    c = r >> 32;
    return static_cast<u32>(r);
  });
  CARRY(v_subb_co_u32, true, (u32 a, u32 b, u32 k, bool& c) { c = a < u64{b} + k; return a - b - k; });
  CARRY(v_subbrev_co_u32, true, (u32 a, u32 b, u32 k, bool& c) { c = b < u64{a} + k; return b - a - k; });
  t.special(Op::v_mad_u64_u32, OpClass::valu, &mad_64_32<false>);
  t.special(Op::v_mad_i64_i32, OpClass::valu, &mad_64_32<true>);
  t.special(Op::v_readlane_b32, OpClass::valu, &readlane);
  t.special(Op::v_readfirstlane_b32, OpClass::valu, &readfirstlane);
  t.special(Op::v_writelane_b32, OpClass::valu, &writelane);
  t.special(Op::v_mbcnt_lo_u32_b32, OpClass::valu, &mbcnt<false>);
  t.special(Op::v_mbcnt_hi_u32_b32, OpClass::valu, &mbcnt<true>);
  t.special(Op::v_swap_b32, OpClass::valu, &swap);
  t.special(Op::v_permlane16_swap_b32, OpClass::valu, &permlane_swap<16>);
  t.special(Op::v_permlane32_swap_b32, OpClass::valu, &permlane_swap<32>);
  t.special(Op::v_bitop3_b32, OpClass::valu, &bitop3<LaneType::b32>);
  t.special(Op::v_bitop3_b16, OpClass::valu, &bitop3<LaneType::b16>);
}

}  // namespace hfemu
