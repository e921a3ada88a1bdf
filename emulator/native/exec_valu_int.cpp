// Integer and bitwise vector operations: one row each.
#include <algorithm>
#include <limits>

#include "exec.h"

namespace hfemu {
namespace {

using u16 = uint16_t;
using i16 = int16_t;
using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

#define LANE(name, ...) t.lane(Op::name, [] __VA_ARGS__)
#define SATURATE(name, ...) t.saturate(Op::name, [] __VA_ARGS__)

inline i32 sext24(u32 x) { return static_cast<i32>(x << 8) >> 8; }
inline u32 low24(u32 x) { return x & 0xFFFFFF; }
template <class T, class W>
inline T saturate(W x) {
  return static_cast<T>(x < W{std::numeric_limits<T>::min()}   ? W{std::numeric_limits<T>::min()}
                        : x > W{std::numeric_limits<T>::max()} ? W{std::numeric_limits<T>::max()}
                                                               : x);
}
template <class T>
inline T median(T a, T b, T c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}
inline u32 byte_of(u32 x, int i) { return x >> (8 * i) & 0xFF; }
inline u32 distance(u32 a, u32 b) { return a > b ? a - b : b - a; }

// v_perm_b32's bytes: 0-3 the second source, 4-7 the first, 8-11 a sign, 12 zero, 13 and above all ones.
inline u32 perm_byte(u64 both, u32 sel) {
  if (sel < 8) return static_cast<u32>(both >> (8 * sel)) & 0xFF;
  if (sel < 12) return (both >> (16 * (sel - 8) + 15) & 1) ? 0xFF : 0;
  return sel == 12 ? 0 : 0xFF;
}

void add_and_multiply(OpTable& t) {
  LANE(v_add_u32, (u32 a, u32 b) { return a + b; });
  SATURATE(v_add_u32, (u32 a, u32 b) { return saturate<u32>(u64{a} + b); });
  LANE(v_sub_u32, (u32 a, u32 b) { return a - b; });
  SATURATE(v_sub_u32, (u32 a, u32 b) { return a > b ? a - b : 0u; });
  LANE(v_subrev_u32, (u32 a, u32 b) { return b - a; });
  SATURATE(v_subrev_u32, (u32 a, u32 b) { return b > a ? b - a : 0u; });
  LANE(v_add_i32, (u32 a, u32 b) { return a + b; });
  SATURATE(v_add_i32, (i32 a, i32 b) { return saturate<i32>(i64{a} + b); });
  LANE(v_sub_i32, (u32 a, u32 b) { return a - b; });
  SATURATE(v_sub_i32, (i32 a, i32 b) { return saturate<i32>(i64{a} - b); });
  LANE(v_mul_lo_u32, (u32 a, u32 b) { return a * b; });
  LANE(v_mul_hi_u32, (u32 a, u32 b) { return u32(u64{a} * b >> 32); });
  LANE(v_mul_hi_i32, (i32 a, i32 b) { return u32(i64{a} * b >> 32); });
  LANE(v_mul_i32_i24, (u32 a, u32 b) { return u32(i64{sext24(a)} * sext24(b)); });
  LANE(v_mul_u32_u24, (u32 a, u32 b) { return u32(u64{low24(a)} * low24(b)); });
  LANE(v_mul_hi_i32_i24, (u32 a, u32 b) { return u32(i64{sext24(a)} * sext24(b) >> 32); });
  LANE(v_mul_hi_u32_u24, (u32 a, u32 b) { return u32(u64{low24(a)} * low24(b) >> 32); });
  LANE(v_mad_i32_i24, (u32 a, u32 b, u32 c) { return u32(i64{sext24(a)} * sext24(b)) + c; });
  SATURATE(v_mad_i32_i24, (u32 a, u32 b, i32 c) { return saturate<i32>(i64{sext24(a)} * sext24(b) + c); });
  LANE(v_mad_u32_u24, (u32 a, u32 b, u32 c) { return low24(a) * low24(b) + c; });
  SATURATE(v_mad_u32_u24, (u32 a, u32 b, u32 c) { return saturate<u32>(u64{low24(a)} * low24(b) + c); });
  LANE(v_mad_u32_u16, (u16 a, u16 b, u32 c) { return u32{a} * b + c; });
  SATURATE(v_mad_u32_u16, (u16 a, u16 b, u32 c) { return saturate<u32>(u64{a} * b + c); });
  LANE(v_mad_i32_i16, (i16 a, i16 b, u32 c) { return u32(i32{a} * b) + c; });
  SATURATE(v_mad_i32_i16, (i16 a, i16 b, i32 c) { return saturate<i32>(i64{a} * b + c); });
  LANE(v_add3_u32, (u32 a, u32 b, u32 c) { return a + b + c; });
  LANE(v_lshl_add_u32, (u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; });
  LANE(v_add_lshl_u32, (u32 a, u32 b, u32 c) { return (a + b) << (c & 31); });
  // The hardware keeps three bits of the shift amount; amounts above 4 are not meant to occur.
  LANE(v_lshl_add_u64, (u64 a, u32 b, u64 c) { return (a << (b & 7)) + c; });
  LANE(v_xad_u32, (u32 a, u32 b, u32 c) { return (a ^ b) + c; });
  LANE(v_lshl_or_b32, (u32 a, u32 b, u32 c) { return a << (b & 31) | c; });
  LANE(v_and_or_b32, (u32 a, u32 b, u32 c) { return (a & b) | c; });
  LANE(v_or3_b32, (u32 a, u32 b, u32 c) { return a | b | c; });
}

void minmax(OpTable& t) {
  LANE(v_min_i32, (i32 a, i32 b) { return a < b ? a : b; });
  LANE(v_max_i32, (i32 a, i32 b) { return a > b ? a : b; });
  LANE(v_min_u32, (u32 a, u32 b) { return a < b ? a : b; });
  LANE(v_max_u32, (u32 a, u32 b) { return a > b ? a : b; });
  LANE(v_min3_i32, (i32 a, i32 b, i32 c) { return std::min(std::min(a, b), c); });
  LANE(v_min3_u32, (u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); });
  LANE(v_max3_i32, (i32 a, i32 b, i32 c) { return std::max(std::max(a, b), c); });
  LANE(v_max3_u32, (u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); });
  LANE(v_med3_i32, (i32 a, i32 b, i32 c) { return median(a, b, c); });
  LANE(v_med3_u32, (u32 a, u32 b, u32 c) { return median(a, b, c); });
  t.lane(Op::v_min3_i16, [](i16 a, i16 b, i16 c) { return std::min(std::min(a, b), c); }).preserves_high = true;
  t.lane(Op::v_min3_u16, [](u16 a, u16 b, u16 c) { return std::min(std::min(a, b), c); }).preserves_high = true;
  t.lane(Op::v_max3_i16, [](i16 a, i16 b, i16 c) { return std::max(std::max(a, b), c); }).preserves_high = true;
  t.lane(Op::v_max3_u16, [](u16 a, u16 b, u16 c) { return std::max(std::max(a, b), c); }).preserves_high = true;
  t.lane(Op::v_med3_i16, [](i16 a, i16 b, i16 c) { return median(a, b, c); }).preserves_high = true;
  t.lane(Op::v_med3_u16, [](u16 a, u16 b, u16 c) { return median(a, b, c); }).preserves_high = true;
  LANE(v_min_i16, (i16 a, i16 b) { return std::min(a, b); });
  LANE(v_max_i16, (i16 a, i16 b) { return std::max(a, b); });
  LANE(v_min_u16, (u16 a, u16 b) { return std::min(a, b); });
  LANE(v_max_u16, (u16 a, u16 b) { return std::max(a, b); });
}

void bits(OpTable& t) {
  LANE(v_mov_b32, (u32 a) { return a; });
  LANE(v_mov_b64, (u64 a) { return a; });
  LANE(v_not_b32, (u32 a) { return ~a; });
  LANE(v_and_b32, (u32 a, u32 b) { return a & b; });
  LANE(v_or_b32, (u32 a, u32 b) { return a | b; });
  LANE(v_xor_b32, (u32 a, u32 b) { return a ^ b; });
  LANE(v_xnor_b32, (u32 a, u32 b) { return ~(a ^ b); });
  LANE(v_lshlrev_b32, (u32 a, u32 b) { return b << (a & 31); });
  LANE(v_lshrrev_b32, (u32 a, u32 b) { return b >> (a & 31); });
  LANE(v_ashrrev_i32, (u32 a, i32 b) { return b >> (a & 31); });
  LANE(v_lshlrev_b64, (u32 a, u64 b) { return b << (a & 63); });
  LANE(v_lshrrev_b64, (u32 a, u64 b) { return b >> (a & 63); });
  LANE(v_ashrrev_i64, (u32 a, i64 b) { return b >> (a & 63); });
  LANE(v_bfe_u32, (u32 a, u32 b, u32 c) { return a >> (b & 31) & ((1u << (c & 31)) - 1); });
  LANE(v_bfe_i32, (i32 a, u32 b, u32 c) {
    const u32 width = c & 31, up = (32 - width) & 31;
    const i32 r = static_cast<i32>(static_cast<u32>(a >> (b & 31)) << up) >> up;
    return width ? r : 0;
  });
  LANE(v_bfi_b32, (u32 a, u32 b, u32 c) { return (a & b) | (~a & c); });
  LANE(v_bfm_b32, (u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); });
  LANE(v_bfrev_b32, (u32 a) {
    a = (a & 0x55555555) << 1 | (a >> 1 & 0x55555555);
    a = (a & 0x33333333) << 2 | (a >> 2 & 0x33333333);
    a = (a & 0x0F0F0F0F) << 4 | (a >> 4 & 0x0F0F0F0F);
    a = (a & 0x00FF00FF) << 8 | (a >> 8 & 0x00FF00FF);
    return a << 16 | a >> 16;
  });
  LANE(v_ffbh_u32, (u32 a) { return a ? u32(std::countl_zero(a)) : ~0u; });
  LANE(v_ffbl_b32, (u32 a) { return a ? u32(std::countr_zero(a)) : ~0u; });
  LANE(v_ffbh_i32, (i32 a) { const u32 x = u32(a ^ (a >> 31)); return x ? u32(std::countl_zero(x)) : ~0u; });
  LANE(v_bcnt_u32_b32, (u32 a, u32 b) { return u32(std::popcount(a)) + b; });
  LANE(v_alignbit_b32, (u32 a, u32 b, u32 c) { return u32((u64{a} << 32 | b) >> (c & 31)); });
  LANE(v_alignbyte_b32, (u32 a, u32 b, u32 c) { return u32((u64{a} << 32 | b) >> (8 * (c & 3))); });
  LANE(v_perm_b32, (u32 a, u32 b, u32 c) {
    const u64 both = u64{a} << 32 | b;
    return perm_byte(both, c & 0xFF) | perm_byte(both, c >> 8 & 0xFF) << 8 | perm_byte(both, c >> 16 & 0xFF) << 16 |
           perm_byte(both, c >> 24) << 24;
  });
  LANE(v_cvt_pk_u16_u32, (u32 a, u32 b) { return saturate<u16>(a) | u32{saturate<u16>(b)} << 16; });
  LANE(v_cvt_pk_i16_i32, (i32 a, i32 b) { return u32{u16(saturate<i16>(a))} | u32{u16(saturate<i16>(b))} << 16; });
  LANE(v_sat_pk_u8_i16, (u32 a) {
    const u32 lo = u32(std::clamp<i32>(i16(a), 0, 255)), hi = u32(std::clamp<i32>(i16(a >> 16), 0, 255));
    return lo | hi << 8;
  });
  // Shift each source right arithmetically, saturate to a byte; the other half of the destination is kept.
  t.lane(Op::v_ashr_pk_i8_i32, [](i32 a, i32 b, u32 c) {
     const i32 x = std::clamp(a >> (c & 31), -128, 127), y = std::clamp(b >> (c & 31), -128, 127);
     return u16((x & 0xFF) | (y & 0xFF) << 8);
   }).preserves_high = true;
  t.lane(Op::v_ashr_pk_u8_i32, [](i32 a, i32 b, u32 c) {
     const i32 x = std::clamp(a >> (c & 31), 0, 255), y = std::clamp(b >> (c & 31), 0, 255);
     return u16(x | y << 8);
   }).preserves_high = true;
  LANE(v_prng_b32, (u32 a) { return a << 1 ^ (a >> 31 ? 197u : 0u); });
}

void sixteen_bit(OpTable& t) {
  LANE(v_add_u16, (u16 a, u16 b) { return u16(a + b); });
  SATURATE(v_add_u16, (u16 a, u16 b) { return saturate<u16>(u32(a) + b); });
  LANE(v_sub_u16, (u16 a, u16 b) { return u16(a - b); });
  SATURATE(v_sub_u16, (u16 a, u16 b) { return u16(a > b ? a - b : 0); });
  LANE(v_subrev_u16, (u16 a, u16 b) { return u16(b - a); });
  SATURATE(v_subrev_u16, (u16 a, u16 b) { return u16(b > a ? b - a : 0); });
  t.lane(Op::v_add_i16, [](u16 a, u16 b) { return u16(a + b); }).preserves_high = true;
  SATURATE(v_add_i16, (i16 a, i16 b) { return saturate<i16>(i32{a} + b); });
  t.lane(Op::v_sub_i16, [](u16 a, u16 b) { return u16(a - b); }).preserves_high = true;
  SATURATE(v_sub_i16, (i16 a, i16 b) { return saturate<i16>(i32{a} - b); });
  LANE(v_mul_lo_u16, (u16 a, u16 b) { return u16(u32{a} * b); });
  LANE(v_lshlrev_b16, (u16 a, u16 b) { return u16(b << (a & 15)); });
  LANE(v_lshrrev_b16, (u16 a, u16 b) { return u16(b >> (a & 15)); });
  LANE(v_ashrrev_i16, (u16 a, i16 b) { return u16(b >> (a & 15)); });
  t.lane(Op::v_mad_u16, [](u16 a, u16 b, u16 c) { return u16(u32{a} * b + c); }).preserves_high = true;
  SATURATE(v_mad_u16, (u16 a, u16 b, u16 c) { return saturate<u16>(u64{a} * b + c); });
  t.lane(Op::v_mad_i16, [](u16 a, u16 b, u16 c) { return u16(u32{a} * b + c); }).preserves_high = true;
  SATURATE(v_mad_i16, (i16 a, i16 b, i16 c) { return saturate<i16>(i64{a} * b + c); });
  LANE(v_mad_legacy_u16, (u16 a, u16 b, u16 c) { return u16(u32{a} * b + c); });
  LANE(v_mad_legacy_i16, (u16 a, u16 b, u16 c) { return u16(u32{a} * b + c); });
}

// Sums of absolute differences of bytes; the masked one skips positions where b has a zero byte.
inline u32 difference(u32 a, u32 b) {
  u32 sum = 0;
  for (int i = 0; i < 4; ++i) sum += distance(byte_of(a, i), byte_of(b, i));
  return sum;
}
inline u32 masked_difference(u32 a, u32 b) {
  u32 sum = 0;
  for (int i = 0; i < 4; ++i) sum += byte_of(b, i) ? distance(byte_of(a, i), byte_of(b, i)) : 0;
  return sum;
}
template <class F>
inline u64 four_positions(u64 a, u64 c, F at) {
  u64 r = 0;
  for (int i = 0; i < 4; ++i) r |= ((c >> (16 * i)) + at(static_cast<u32>(a >> (8 * i))) & 0xFFFF) << (16 * i);
  return r;
}
// v_mqsad_u32_u8: the third source and the result have four registers.
void mqsad_u32(Wave& w, const ExecInst& in) {
  if (in.inst->clamp) unsupported(w, in, "clamp on v_mqsad_u32_u8");
  RowBuffer x, y;
  const u32* a = source_row(w, in.src[0], x);
  const u32* b = source_row(w, in.src[1], y);
  alignas(64) u32 out[4][kLanes];
  for (int i = 0; i < 4; ++i)
    for (int l = 0; l < kLanes; ++l) {
      const u32 addend = in.src[2].kind == SourceKind::vgpr ? w.v[in.src[2].reg + i][l] : 0;
      out[i][l] = addend + masked_difference(static_cast<u32>(lane_load<u64>(a, l) >> (8 * i)), b[l]);
    }
  if (in.src[2].kind != SourceKind::vgpr) unsupported(w, in, "a third source that is not a vector register");
  write_rows(w, in.dst, out[0], 4, w.exec());
}

void differences(OpTable& t) {
  LANE(v_sad_u8, (u32 a, u32 b, u32 c) { return c + difference(a, b); });
  LANE(v_sad_hi_u8, (u32 a, u32 b, u32 c) { return c + (difference(a, b) << 16); });
  LANE(v_sad_u16, (u32 a, u32 b, u32 c) {
    return distance(a & 0xFFFF, b & 0xFFFF) + distance(a >> 16, b >> 16) + c;
  });
  LANE(v_sad_u32, (u32 a, u32 b, u32 c) { return distance(a, b) + c; });
  LANE(v_msad_u8, (u32 a, u32 b, u32 c) { return c + masked_difference(a, b); });
  // Four positions of the four bytes of b along the eight of a.
  LANE(v_qsad_pk_u16_u8, (u64 a, u32 b, u64 c) {
    return four_positions(a, c, [b](u32 x) { return difference(x, b); });
  });
  LANE(v_mqsad_pk_u16_u8, (u64 a, u32 b, u64 c) {
    return four_positions(a, c, [b](u32 x) { return masked_difference(x, b); });
  });
  t.special(Op::v_mqsad_u32_u8, OpClass::valu, &mqsad_u32);
  LANE(v_lerp_u8, (u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 4; ++i) r |= ((byte_of(a, i) + byte_of(b, i) + (byte_of(c, i) & 1)) >> 1) << (8 * i);
    return r;
  });
}

}  // namespace

void register_valu_int(OpTable& t) {
  add_and_multiply(t);
  minmax(t);
  bits(t);
  sixteen_bit(t);
  differences(t);
}

}  // namespace hfemu
