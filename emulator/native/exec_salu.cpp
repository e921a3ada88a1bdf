// Scalar arithmetic: each operation is one lambda (a, b, scc&) -> result; a bool result is a compare into SCC.
#include "exec.h"

namespace hfemu {
namespace {

template <class T>
inline T read_scalar(const Wave& w, const Source& s) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<T>(scalar_source(w, s));
  } else {
    if (s.kind == SourceKind::sgpr) return static_cast<T>(w.s[s.reg]);
    if (s.kind == SourceKind::constant) return static_cast<T>(s.row[0]);
    return static_cast<T>(scalar_source(w, s));
  }
}

template <class F> struct scalar_traits : scalar_traits<decltype(&F::operator())> {};
template <class C, class R, class... A> struct scalar_traits<R (C::*)(A...) const> {
  static constexpr int sources = static_cast<int>(sizeof...(A)) - 1;
  using result = R;
  template <int I> using arg = std::tuple_element_t<I, std::tuple<A..., void>>;
};

template <class F>
void scalar_op(Wave& w, const ExecInst& in) {
  using T = scalar_traits<F>;
  using A = typename T::template arg<0>;
  const F f{};
  uint32_t scc = w.scc;
  typename T::result r;
  if constexpr (T::sources == 1) {
    r = f(read_scalar<A>(w, in.src[0]), scc);
  } else {
    using B = typename T::template arg<1>;
    r = f(read_scalar<A>(w, in.src[0]), read_scalar<B>(w, in.src[1]), scc);
  }
  if constexpr (std::is_same_v<typename T::result, bool>) {
    w.scc = r;
  } else {
    w.scc = scc;
    if constexpr (sizeof(r) == 8) w.set_s64(in.dst, static_cast<uint64_t>(r));
    else w.s[in.dst] = static_cast<uint32_t>(r);
  }
}

// SOPK: the destination is also the first source, the immediate is the second.
template <class F>
void scalar_immediate(Wave& w, const ExecInst& in) {
  const F f{};
  const auto r = f(static_cast<int32_t>(w.s[in.dst]), in.inst->simm, w.scc);
  if constexpr (std::is_same_v<decltype(r), const bool>) w.scc = r;
  else w.s[in.dst] = static_cast<uint32_t>(r);
}

// s_movrel: M0 is added to the number of the source's or the destination's register.
uint16_t relative_register(const Wave& w, const ExecInst& in, const char* which, bool is_sgpr, uint16_t reg, uint32_t width) {
  if (!is_sgpr) unsupported(w, in, format("a relative %s that is not an SGPR", which));
  const uint64_t moved = uint64_t{reg} + w.s[kM0];
  constexpr uint64_t sgprs = 102;
  if (moved + width > sgprs)
    fault(w, in, FaultKind::unsupported,
          format("relative %s s%llu lies outside the SGPRs 0 to 101", which, static_cast<unsigned long long>(moved)));
  if (width == 2 && moved % 2)
    fault(w, in, FaultKind::unsupported,
          format("relative %s s%llu of a pair is odd", which, static_cast<unsigned long long>(moved)));
  return static_cast<uint16_t>(moved);
}
template <class T, bool destination>
void move_relative(Wave& w, const ExecInst& in) {
  constexpr uint32_t width = sizeof(T) / 4;
  ExecInst moved = in;
  if (destination)
    moved.dst = relative_register(w, in, "destination", in.inst->dst.kind == OperandKind::sgpr, in.dst, width);
  else
    moved.src[0].reg = relative_register(w, in, "source", in.src[0].kind == SourceKind::sgpr, in.src[0].reg, width);
  const T x = read_scalar<T>(w, moved.src[0]);
  std::memcpy(&w.s[moved.dst], &x, sizeof x);
}

template <class F>
void save_exec(Wave& w, const ExecInst& in) {
  const F f{};
  const uint64_t s = scalar_source(w, in.src[0]), old = w.exec();
  const uint64_t now = f(s, old);
  w.set_s64(in.dst, old);
  w.set_s64(kExec, now);
  w.scc = now != 0;
}

template <class F>
void write_exec(Wave& w, const ExecInst& in) {
  const F f{};
  const uint64_t now = f(scalar_source(w, in.src[0]), w.exec());
  w.set_s64(kExec, now);
  w.set_s64(in.dst, now);
  w.scc = now != 0;
}

// Bit set and clear change one bit of the destination.
template <class T, bool set>
void bit_set(Wave& w, const ExecInst& in) {
  const uint32_t bit = static_cast<uint32_t>(scalar_source(w, in.src[0])) & (sizeof(T) * 8 - 1);
  T d = sizeof(T) == 8 ? static_cast<T>(w.s64(in.dst)) : static_cast<T>(w.s[in.dst]);
  d = set ? d | T{1} << bit : d & ~(T{1} << bit);
  if (sizeof(T) == 8) w.set_s64(in.dst, d);
  else w.s[in.dst] = static_cast<uint32_t>(d);
}

template <class T>
void conditional_move(Wave& w, const ExecInst& in) {
  if (!w.scc) return;
  const uint64_t x = scalar_source(w, in.src[0]);
  if (sizeof(T) == 8) w.set_s64(in.dst, x);
  else w.s[in.dst] = static_cast<uint32_t>(x);
}

template <class T>
T bfe_unsigned(T x, uint32_t field) {
  const uint32_t offset = field & (sizeof(T) * 8 - 1), width = field >> 16 & 127;
  const T y = x >> offset;
  return width == 0 ? 0 : width >= sizeof(T) * 8 ? y : y & ((T{1} << width) - 1);
}

template <class T, class U>
T bfe_signed(T x, uint32_t field) {
  const uint32_t offset = field & (sizeof(T) * 8 - 1), width = field >> 16 & 127, bits = sizeof(T) * 8;
  if (width == 0) return 0;
  if (width >= bits) return x >> offset;
  const U y = static_cast<U>(x >> offset) << (bits - width);
  return static_cast<T>(y) >> (bits - width);
}

template <class T>
T reverse_bits(T x) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) r |= (x >> i & 1) << (sizeof(T) * 8 - 1 - i);
  return r;
}

template <class T>
T whole_quads(T x) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; i += 4)
    if (x >> i & 15) r |= T{15} << i;
  return r;
}

template <class T>
T quad_mask(T x) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 2; ++i)
    if (x >> (4 * i) & 15) r |= T{1} << i;
  return r;
}

using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

#define SCALAR(name, ...) t.special(Op::name, OpClass::salu, &scalar_op<decltype([] __VA_ARGS__)>)
#define IMMEDIATE(name, ...) t.special(Op::name, OpClass::salu, &scalar_immediate<decltype([] __VA_ARGS__)>)
#define SAVE_EXEC(name, expr) \
  t.special(Op::name, OpClass::salu, &save_exec<decltype([](u64 s, u64 e) -> u64 { return expr; })>)
#define WRITE_EXEC(name, expr) \
  t.special(Op::name, OpClass::salu, &write_exec<decltype([](u64 s, u64 e) -> u64 { return expr; })>)
// Bitwise operations in both widths; SCC says whether the result is not zero.
#define LOGICAL(base, expr)                                                                                   \
  SCALAR(base##_b32, (u32 a, u32 b, u32& scc) -> u32 { const u32 r = expr; scc = r != 0; return r; });      \
  SCALAR(base##_b64, (u64 a, u64 b, u32& scc) -> u64 { const u64 r = expr; scc = r != 0; return r; })
#define COMPARE(suffix, op)                                                  \
  SCALAR(s_cmp_##suffix##_i32, (i32 a, i32 b, u32&) -> bool { return a op b; });   \
  SCALAR(s_cmp_##suffix##_u32, (u32 a, u32 b, u32&) -> bool { return a op b; });   \
  IMMEDIATE(s_cmpk_##suffix##_i32, (i32 a, i32 k, u32&) -> bool { return a op k; }); \
  IMMEDIATE(s_cmpk_##suffix##_u32, (i32 a, i32 k, u32&) -> bool { return u32(a) op (u32(k) & 0xFFFF); })

void arithmetic(OpTable& t) {
  SCALAR(s_add_u32, (u32 a, u32 b, u32& scc) { const u32 r = a + b; scc = r < a; return r; });
  SCALAR(s_sub_u32, (u32 a, u32 b, u32& scc) { scc = a < b; return a - b; });
  SCALAR(s_add_i32, (u32 a, u32 b, u32& scc) { const u32 r = a + b; scc = ((a ^ r) & (b ^ r)) >> 31; return r; });
  SCALAR(s_sub_i32, (u32 a, u32 b, u32& scc) { const u32 r = a - b; scc = ((a ^ b) & (a ^ r)) >> 31; return r; });
  SCALAR(s_addc_u32, (u32 a, u32 b, u32& scc) { const u64 r = u64{a} + b + scc; scc = r >> 32; return u32(r); });
  SCALAR(s_subb_u32, (u32 a, u32 b, u32& scc) { const u64 s = u64{b} + scc; scc = a < s; return u32(a - s); });
  SCALAR(s_min_i32, (i32 a, i32 b, u32& scc) { scc = a < b; return a < b ? a : b; });
  SCALAR(s_min_u32, (u32 a, u32 b, u32& scc) { scc = a < b; return a < b ? a : b; });
  SCALAR(s_max_i32, (i32 a, i32 b, u32& scc) { scc = a > b; return a > b ? a : b; });
  SCALAR(s_max_u32, (u32 a, u32 b, u32& scc) { scc = a > b; return a > b ? a : b; });
  SCALAR(s_mul_i32, (u32 a, u32 b, u32&) { return a * b; });
  SCALAR(s_mul_hi_u32, (u32 a, u32 b, u32&) { return u32(u64{a} * b >> 32); });
  SCALAR(s_mul_hi_i32, (i32 a, i32 b, u32&) { return u32(i64{a} * b >> 32); });
  SCALAR(s_absdiff_i32, (u32 a, u32 b, u32& scc) {
    u32 r = a - b;
    if (r >> 31) r = 0 - r;
    scc = r != 0;
    return r;
  });
  SCALAR(s_lshl1_add_u32, (u32 a, u32 b, u32& scc) { const u64 r = (u64{a} << 1) + b; scc = r > 0xFFFFFFFF; return u32(r); });
  SCALAR(s_lshl2_add_u32, (u32 a, u32 b, u32& scc) { const u64 r = (u64{a} << 2) + b; scc = r > 0xFFFFFFFF; return u32(r); });
  SCALAR(s_lshl3_add_u32, (u32 a, u32 b, u32& scc) { const u64 r = (u64{a} << 3) + b; scc = r > 0xFFFFFFFF; return u32(r); });
  SCALAR(s_lshl4_add_u32, (u32 a, u32 b, u32& scc) { const u64 r = (u64{a} << 4) + b; scc = r > 0xFFFFFFFF; return u32(r); });
  SCALAR(s_abs_i32, (u32 a, u32& scc) { const u32 r = a >> 31 ? 0 - a : a; scc = r != 0; return r; });
  IMMEDIATE(s_addk_i32, (i32 a, i32 k, u32& scc) {
    const u32 r = u32(a) + u32(k);
    scc = ((u32(a) ^ r) & (u32(k) ^ r)) >> 31;
    return i32(r);
  });
  IMMEDIATE(s_mulk_i32, (i32 a, i32 k, u32&) { return i32(u32(a) * u32(k)); });
  IMMEDIATE(s_movk_i32, (i32, i32 k, u32&) { return k; });
  IMMEDIATE(s_cmovk_i32, (i32 a, i32 k, u32& scc) { return scc ? k : a; });
}

void bitwise(OpTable& t) {
  LOGICAL(s_and, a & b);
  LOGICAL(s_or, a | b);
  LOGICAL(s_xor, a ^ b);
  LOGICAL(s_andn2, a & ~b);
  LOGICAL(s_orn2, a | ~b);
  LOGICAL(s_nand, ~(a & b));
  LOGICAL(s_nor, ~(a | b));
  LOGICAL(s_xnor, ~(a ^ b));
  SCALAR(s_not_b32, (u32 a, u32& scc) { scc = ~a != 0; return ~a; });
  SCALAR(s_not_b64, (u64 a, u32& scc) { scc = ~a != 0; return ~a; });
  SCALAR(s_lshl_b32, (u32 a, u32 b, u32& scc) { const u32 r = a << (b & 31); scc = r != 0; return r; });
  SCALAR(s_lshl_b64, (u64 a, u32 b, u32& scc) { const u64 r = a << (b & 63); scc = r != 0; return r; });
  SCALAR(s_lshr_b32, (u32 a, u32 b, u32& scc) { const u32 r = a >> (b & 31); scc = r != 0; return r; });
  SCALAR(s_lshr_b64, (u64 a, u32 b, u32& scc) { const u64 r = a >> (b & 63); scc = r != 0; return r; });
  SCALAR(s_ashr_i32, (i32 a, u32 b, u32& scc) { const i32 r = a >> (b & 31); scc = r != 0; return r; });
  SCALAR(s_ashr_i64, (i64 a, u32 b, u32& scc) { const i64 r = a >> (b & 63); scc = r != 0; return r; });
  SCALAR(s_bfm_b32, (u32 a, u32 b, u32&) { return ((1u << (a & 31)) - 1) << (b & 31); });
  SCALAR(s_bfm_b64, (u32 a, u32 b, u32&) { return ((u64{1} << (a & 63)) - 1) << (b & 63); });
  SCALAR(s_bfe_u32, (u32 a, u32 b, u32& scc) { const u32 r = bfe_unsigned(a, b); scc = r != 0; return r; });
  SCALAR(s_bfe_u64, (u64 a, u32 b, u32& scc) { const u64 r = bfe_unsigned(a, b); scc = r != 0; return r; });
  SCALAR(s_bfe_i32, (i32 a, u32 b, u32& scc) { const i32 r = bfe_signed<i32, u32>(a, b); scc = r != 0; return r; });
  SCALAR(s_bfe_i64, (i64 a, u32 b, u32& scc) { const i64 r = bfe_signed<i64, u64>(a, b); scc = r != 0; return r; });
  SCALAR(s_pack_ll_b32_b16, (u32 a, u32 b, u32&) { return (a & 0xFFFF) | b << 16; });
  SCALAR(s_pack_lh_b32_b16, (u32 a, u32 b, u32&) { return (a & 0xFFFF) | (b & 0xFFFF0000); });
  SCALAR(s_pack_hh_b32_b16, (u32 a, u32 b, u32&) { return a >> 16 | (b & 0xFFFF0000); });
  SCALAR(s_brev_b32, (u32 a, u32&) { return reverse_bits(a); });
  SCALAR(s_brev_b64, (u64 a, u32&) { return reverse_bits(a); });
  SCALAR(s_bcnt0_i32_b32, (u32 a, u32& scc) { const u32 r = u32(std::popcount(~a)); scc = r != 0; return r; });
  SCALAR(s_bcnt0_i32_b64, (u64 a, u32& scc) { const u32 r = u32(std::popcount(~a)); scc = r != 0; return r; });
  SCALAR(s_bcnt1_i32_b32, (u32 a, u32& scc) { const u32 r = u32(std::popcount(a)); scc = r != 0; return r; });
  SCALAR(s_bcnt1_i32_b64, (u64 a, u32& scc) { const u32 r = u32(std::popcount(a)); scc = r != 0; return r; });
  SCALAR(s_ff0_i32_b32, (u32 a, u32&) { return ~a ? u32(std::countr_zero(~a)) : ~0u; });
  SCALAR(s_ff0_i32_b64, (u64 a, u32&) { return ~a ? u32(std::countr_zero(~a)) : ~0u; });
  SCALAR(s_ff1_i32_b32, (u32 a, u32&) { return a ? u32(std::countr_zero(a)) : ~0u; });
  SCALAR(s_ff1_i32_b64, (u64 a, u32&) { return a ? u32(std::countr_zero(a)) : ~0u; });
  SCALAR(s_flbit_i32_b32, (u32 a, u32&) { return a ? u32(std::countl_zero(a)) : ~0u; });
  SCALAR(s_flbit_i32_b64, (u64 a, u32&) { return a ? u32(std::countl_zero(a)) : ~0u; });
  SCALAR(s_flbit_i32, (i32 a, u32&) { const u32 x = u32(a ^ (a >> 31)); return x ? u32(std::countl_zero(x)) : ~0u; });
  SCALAR(s_flbit_i32_i64, (i64 a, u32&) { const u64 x = u64(a ^ (a >> 63)); return x ? u32(std::countl_zero(x)) : ~0u; });
  SCALAR(s_sext_i32_i8, (u32 a, u32&) { return i32(int8_t(a)); });
  SCALAR(s_sext_i32_i16, (u32 a, u32&) { return i32(int16_t(a)); });
  SCALAR(s_wqm_b32, (u32 a, u32& scc) { const u32 r = whole_quads(a); scc = r != 0; return r; });
  SCALAR(s_wqm_b64, (u64 a, u32& scc) { const u64 r = whole_quads(a); scc = r != 0; return r; });
  SCALAR(s_quadmask_b32, (u32 a, u32& scc) { const u32 r = quad_mask(a); scc = r != 0; return r; });
  SCALAR(s_quadmask_b64, (u64 a, u32& scc) { const u64 r = quad_mask(a); scc = r != 0; return r; });
  SCALAR(s_bitreplicate_b64_b32, (u32 a, u32&) {
    u64 r = 0;
    for (int i = 0; i < 32; ++i) r |= u64{(a >> i & 1) * 3u} << (2 * i);
    return r;
  });
  t.special(Op::s_bitset0_b32, OpClass::salu, &bit_set<u32, false>);
  t.special(Op::s_bitset0_b64, OpClass::salu, &bit_set<u64, false>);
  t.special(Op::s_bitset1_b32, OpClass::salu, &bit_set<u32, true>);
  t.special(Op::s_bitset1_b64, OpClass::salu, &bit_set<u64, true>);
}

void moves(OpTable& t) {
  SCALAR(s_mov_b32, (u32 a, u32&) { return a; });
  SCALAR(s_mov_b64, (u64 a, u32&) { return a; });
  t.special(Op::s_movrels_b32, OpClass::salu, &move_relative<uint32_t, false>);
  t.special(Op::s_movrels_b64, OpClass::salu, &move_relative<uint64_t, false>);
  t.special(Op::s_movreld_b32, OpClass::salu, &move_relative<uint32_t, true>);
  t.special(Op::s_movreld_b64, OpClass::salu, &move_relative<uint64_t, true>);
  t.special(Op::s_cmov_b32, OpClass::salu, &conditional_move<u32>);
  t.special(Op::s_cmov_b64, OpClass::salu, &conditional_move<u64>);
  SCALAR(s_cselect_b32, (u32 a, u32 b, u32& scc) { return scc ? a : b; });
  SCALAR(s_cselect_b64, (u64 a, u64 b, u32& scc) { return scc ? a : b; });
  SAVE_EXEC(s_and_saveexec_b64, s & e);
  SAVE_EXEC(s_or_saveexec_b64, s | e);
  SAVE_EXEC(s_xor_saveexec_b64, s ^ e);
  SAVE_EXEC(s_andn2_saveexec_b64, s & ~e);
  SAVE_EXEC(s_orn2_saveexec_b64, s | ~e);
  SAVE_EXEC(s_nand_saveexec_b64, ~(s & e));
  SAVE_EXEC(s_nor_saveexec_b64, ~(s | e));
  SAVE_EXEC(s_xnor_saveexec_b64, ~(s ^ e));
  SAVE_EXEC(s_andn1_saveexec_b64, ~s & e);
  SAVE_EXEC(s_orn1_saveexec_b64, ~s | e);
  WRITE_EXEC(s_andn1_wrexec_b64, ~s & e);
  WRITE_EXEC(s_andn2_wrexec_b64, s & ~e);
}

void compares(OpTable& t) {
  COMPARE(eq, ==);
  COMPARE(lg, !=);
  COMPARE(gt, >);
  COMPARE(ge, >=);
  COMPARE(lt, <);
  COMPARE(le, <=);
  SCALAR(s_cmp_eq_u64, (u64 a, u64 b, u32&) -> bool { return a == b; });
  SCALAR(s_cmp_lg_u64, (u64 a, u64 b, u32&) -> bool { return a != b; });
  SCALAR(s_bitcmp0_b32, (u32 a, u32 b, u32&) -> bool { return !(a >> (b & 31) & 1); });
  SCALAR(s_bitcmp1_b32, (u32 a, u32 b, u32&) -> bool { return a >> (b & 31) & 1; });
  SCALAR(s_bitcmp0_b64, (u64 a, u32 b, u32&) -> bool { return !(a >> (b & 63) & 1); });
  SCALAR(s_bitcmp1_b64, (u64 a, u32 b, u32&) -> bool { return a >> (b & 63) & 1; });
}

}  // namespace

void register_salu(OpTable& t) {
  arithmetic(t);
  bitwise(t);
  moves(t);
  compares(t);
}

}  // namespace hfemu
