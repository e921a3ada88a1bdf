// Atomics on LDS. A work-group's LDS belongs to one host thread, so nothing here is atomic for the host.
//
// Facts (CDNA4 ISA, "Float Memory Atomics"): additions round to nearest. f32 and packed 16-bit additions flush
// denormals in and out as MODE says, f64 additions never do; minimum, maximum and compare-store compare with flushed
// inputs, the first two return a source as it is, the last flushes what it stores. An atomic's address is a multiple of
// its size on every alignment mode: a misaligned one is a memory violation.
#include "addressing.h"
#include "atomic_ops.h"
#include "lds.h"

namespace hfemu {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// data0 is the operand; cmpst compares with data0 and writes data1, mskor clears data0's bits and sets data1's, wrap
// subtracts data0 from a value of at least data0, and adds data1 to any other.
struct CompareStore {};
struct Wrap {};
struct MaskOr {};
template <class F> struct CompareStoreFloat {};

// Each 32-bit float's, or packed 16-bit float's, denormals as zeros of their sign.
template <class F, class T> T flushed_bits(T x) { return as_bits(flushed(from_bits<F>(x))); }
template <u32 exponent>
u32 flushed_pair(u32 x) {
  const u32 low = x & exponent ? 0xFFFF : 0x8000, high = x >> 16 & exponent ? 0xFFFF : 0x8000;
  return x & (low | high << 16);
}
constexpr u32 kHalfExponent = 0x7C00, kBrainExponent = 0x7F80;

template <class F, class T, class Flush>
T added(T old, T data, uint8_t denorm, Flush flush) {
  if (!(denorm & 1)) {
    old = flush(old);
    data = flush(data);
  }
  const T sum = F{}(old, data);
  return denorm & 2 ? sum : flush(sum);
}

template <class F, bool maximum, class T>
T extreme(T old, T data, uint8_t denorm) {
  if (denorm & 1) return FloatExtreme<F, maximum>{}(old, data);
  const T a = flushed_bits<F>(old), b = flushed_bits<F>(data);
  const T picked = FloatExtreme<F, maximum>{}(a, b);
  return picked == a ? old : picked == b ? data : picked;
}

template <class F, class T>
T compared(T old, T data0, T data1, uint8_t denorm) {
  if (denorm & 1) return from_bits<F>(old) == from_bits<F>(data0) ? data1 : old;
  return flushed(from_bits<F>(old)) == flushed(from_bits<F>(data0)) ? flushed_bits<F>(data1) : old;
}

template <class F> constexpr bool is_extreme = false;
template <class F, bool maximum> constexpr bool is_extreme<FloatExtreme<F, maximum>> = true;
template <class F, bool maximum, class T>
T extreme_of(FloatExtreme<F, maximum>, T old, T data, uint8_t denorm) { return extreme<F, maximum>(old, data, denorm); }

template <class F, class T>
T lds_result(T old, T data0, T data1, const Mode& m) {
  if constexpr (std::is_same_v<F, CompareStore>) return old == data0 ? data1 : old;
  else if constexpr (std::is_same_v<F, CompareStoreFloat<float>>) return compared<float>(old, data0, data1, m.denorm32);
  else if constexpr (std::is_same_v<F, CompareStoreFloat<double>>) return compared<double>(old, data0, data1, m.denorm64);
  else if constexpr (std::is_same_v<F, MaskOr>) return (old & ~data0) | data1;
  else if constexpr (std::is_same_v<F, Wrap>) return old >= data0 ? old - data0 : old + data1;
  else if constexpr (std::is_same_v<F, FloatAdd<float>>) return added<F>(old, data0, m.denorm32, flushed_bits<float, u32>);
  else if constexpr (std::is_same_v<F, PkAddF16>) return added<F>(old, data0, m.denorm64, flushed_pair<kHalfExponent>);
  else if constexpr (std::is_same_v<F, PkAddBf16>) return added<F>(old, data0, m.denorm64, flushed_pair<kBrainExponent>);
  else if constexpr (is_extreme<F>) return extreme_of(F{}, old, data0, sizeof(T) == 4 ? m.denorm32 : m.denorm64);
  else return F{}(old, data0);
}

void check_alignment(const Wave& w, const ExecInst& in, const u32* a, u64 exec, u32 bytes) {
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (a[l] % bytes)
      fault(w, in, FaultKind::memory, format("misaligned LDS atomic: address 0x%x is not a multiple of %u", a[l], bytes), l);
  }
}

template <class F, class T>
void lds_atomic(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  alignas(64) u32 a[kLanes];
  lds_addresses(w, in, in.offset, exec, a);
  check_lds(w, in, a, exec, sizeof(T), Access::atomic);
  check_alignment(w, in, a, exec, sizeof(T));
  const bool returns = in.inst->dst.kind != OperandKind::none;
  const bool two = in.inst->vdata2.kind != OperandKind::none;
  T old[kLanes];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    std::memcpy(&old[l], w.wg->lds + a[l], sizeof(T));
    const T now =
        lds_result<F, T>(old[l], lane_data<T>(w, in.data, l), two ? lane_data<T>(w, in.data2, l) : T{0}, w.mode);
    std::memcpy(w.wg->lds + a[l], &now, sizeof(T));
  }
  if (returns)
    for (u64 left = exec; left; left &= left - 1) set_lane<T>(w, in.dst, std::countr_zero(left), old[std::countr_zero(left)]);
}

// Exchange at two addresses.
template <class T, int unit>
void lds_exchange2(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  alignas(64) u32 a[kLanes], b[kLanes];
  lds_addresses(w, in, in.offset * static_cast<int64_t>(sizeof(T)) * unit, exec, a);
  lds_addresses(w, in, int64_t{in.inst->offset1} * static_cast<int64_t>(sizeof(T)) * unit, exec, b);
  check_lds(w, in, a, exec, sizeof(T), Access::atomic);
  check_lds(w, in, b, exec, sizeof(T), Access::atomic);
  check_alignment(w, in, a, exec, sizeof(T));
  check_alignment(w, in, b, exec, sizeof(T));
  T first[kLanes], second[kLanes];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    const T x = lane_data<T>(w, in.data, l), y = lane_data<T>(w, in.data2, l);
    std::memcpy(&first[l], w.wg->lds + a[l], sizeof(T));
    std::memcpy(w.wg->lds + a[l], &x, sizeof(T));
    std::memcpy(&second[l], w.wg->lds + b[l], sizeof(T));
    std::memcpy(w.wg->lds + b[l], &y, sizeof(T));
  }
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    set_lane<T>(w, in.dst, l, first[l]);
    set_lane<T>(w, in.dst + sizeof(T) / 4, l, second[l]);
  }
}

// Each dword of the data that has its top bit set is written without it. The address's low three bits are dropped.
void conditional_exchange(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  alignas(64) u32 a[kLanes];
  lds_addresses(w, in, in.offset, exec, a);
  for (u32& at : a) at &= ~7u;
  check_lds(w, in, a, exec, 8, Access::atomic);
  u64 old[kLanes];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    std::memcpy(&old[l], w.wg->lds + a[l], 8);
    u64 now = old[l];
    const u64 data = lane_data<u64>(w, in.data, l);
    if (data >> 31 & 1) now = (now & 0xFFFFFFFF00000000) | (data & 0x7FFFFFFF);
    if (data >> 63) now = (now & 0xFFFFFFFF) | (data & 0x7FFFFFFF00000000);
    std::memcpy(w.wg->lds + a[l], &now, 8);
  }
  for (u64 left = exec; left; left &= left - 1) set_lane<u64>(w, in.dst, std::countr_zero(left), old[std::countr_zero(left)]);
}

// A DS operation with and without the returned value.
#define LDS_PAIR(stem, type, F, T)                                          \
  t.special(Op::ds_##stem##_##type, C::lds, &lds_atomic<F, T>);             \
  t.special(Op::ds_##stem##_rtn_##type, C::lds, &lds_atomic<F, T>)
// The pair on 32 and on 64 bits.
#define LDS_WIDTHS(stem, letter, F)   \
  LDS_PAIR(stem, letter##32, F, u32); \
  LDS_PAIR(stem, letter##64, F, u64)

}  // namespace

void register_lds_atomics(OpTable& t) {
  using C = OpClass;
  using MinF32 = FloatExtreme<float, false>;
  using MaxF32 = FloatExtreme<float, true>;
  using MinF64 = FloatExtreme<double, false>;
  using MaxF64 = FloatExtreme<double, true>;
  LDS_WIDTHS(add, u, Add);
  LDS_WIDTHS(sub, u, Sub);
  LDS_WIDTHS(rsub, u, Rsub);
  LDS_WIDTHS(inc, u, Inc);
  LDS_WIDTHS(dec, u, Dec);
  LDS_WIDTHS(min, i, Smin);
  LDS_WIDTHS(max, i, Smax);
  LDS_WIDTHS(min, u, Umin);
  LDS_WIDTHS(max, u, Umax);
  LDS_WIDTHS(and, b, And);
  LDS_WIDTHS(or, b, Or);
  LDS_WIDTHS(xor, b, Xor);
  LDS_WIDTHS(mskor, b, MaskOr);
  LDS_WIDTHS(cmpst, b, CompareStore);
  LDS_PAIR(cmpst, f32, CompareStoreFloat<float>, u32);
  LDS_PAIR(min, f32, MinF32, u32);
  LDS_PAIR(max, f32, MaxF32, u32);
  LDS_PAIR(add, f32, FloatAdd<float>, u32);
  LDS_PAIR(cmpst, f64, CompareStoreFloat<double>, u64);
  LDS_PAIR(min, f64, MinF64, u64);
  LDS_PAIR(max, f64, MaxF64, u64);
  LDS_PAIR(add, f64, FloatAdd<double>, u64);
  LDS_PAIR(pk_add, f16, PkAddF16, u32);
  LDS_PAIR(pk_add, bf16, PkAddBf16, u32);
  t.special(Op::ds_wrxchg_rtn_b32, C::lds, &lds_atomic<Swap, u32>);
  t.special(Op::ds_wrxchg_rtn_b64, C::lds, &lds_atomic<Swap, u64>);
  t.special(Op::ds_wrap_rtn_b32, C::lds, &lds_atomic<Wrap, u32>);
  t.special(Op::ds_wrxchg2_rtn_b32, C::lds, &lds_exchange2<u32, 1>);
  t.special(Op::ds_wrxchg2st64_rtn_b32, C::lds, &lds_exchange2<u32, 64>);
  t.special(Op::ds_wrxchg2_rtn_b64, C::lds, &lds_exchange2<u64, 1>);
  t.special(Op::ds_wrxchg2st64_rtn_b64, C::lds, &lds_exchange2<u64, 64>);
  t.special(Op::ds_condxchg32_rtn_b64, C::lds, &conditional_exchange);
}

}  // namespace hfemu
