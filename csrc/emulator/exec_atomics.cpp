// Atomics on global, flat, buffer, scalar and LDS addresses: one functor per operation, used everywhere.
//
// Work-groups run on several threads, so global memory is updated with compare-and-swap; LDS belongs to one thread.
#include "addressing.h"
#include "buffer.h"
#include "exec.h"
#include "float_rules.h"
#include "formats.h"
#include "lds.h"
#include "smem.h"

namespace hfemu {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

// f(old, data) -> new
struct Swap { template <class T> T operator()(T, T x) const { return x; } };
struct Add { template <class T> T operator()(T o, T x) const { return o + x; } };
struct Sub { template <class T> T operator()(T o, T x) const { return o - x; } };
struct Rsub { template <class T> T operator()(T o, T x) const { return x - o; } };
struct And { template <class T> T operator()(T o, T x) const { return o & x; } };
struct Or { template <class T> T operator()(T o, T x) const { return o | x; } };
struct Xor { template <class T> T operator()(T o, T x) const { return o ^ x; } };
struct Umin { template <class T> T operator()(T o, T x) const { return x < o ? x : o; } };
struct Umax { template <class T> T operator()(T o, T x) const { return x > o ? x : o; } };
struct Smin {
  template <class T> T operator()(T o, T x) const {
    using S = std::make_signed_t<T>;
    return static_cast<S>(x) < static_cast<S>(o) ? x : o;
  }
};
struct Smax {
  template <class T> T operator()(T o, T x) const {
    using S = std::make_signed_t<T>;
    return static_cast<S>(x) > static_cast<S>(o) ? x : o;
  }
};
struct Inc { template <class T> T operator()(T o, T x) const { return o >= x ? 0 : o + 1; } };
struct Dec { template <class T> T operator()(T o, T x) const { return o == 0 || o > x ? x : o - 1; } };
template <class F>
struct FloatAdd {
  template <class T> T operator()(T o, T x) const { return as_bits(from_bits<F>(o) + from_bits<F>(x)); }
};
template <class F, bool maximum>
struct FloatExtreme {
  template <class T> T operator()(T o, T x) const { return as_bits(min_max<F, maximum>(from_bits<F>(o), from_bits<F>(x), false)); }
};
u16 add_half(u16 a, u16 b) { return float_to_half(half_to_float(a) + half_to_float(b)); }
u16 add_bf16(u16 a, u16 b) {
  const double sum = static_cast<double>(std::bit_cast<float>(u32{a} << 16)) + std::bit_cast<float>(u32{b} << 16);
  return static_cast<u16>(encode(bf16_format, sum));
}
struct PkAddF16 {
  u32 operator()(u32 o, u32 x) const {
    return add_half(static_cast<u16>(o), static_cast<u16>(x)) |
           u32{add_half(static_cast<u16>(o >> 16), static_cast<u16>(x >> 16))} << 16;
  }
};
struct PkAddBf16 {
  u32 operator()(u32 o, u32 x) const {
    return add_bf16(static_cast<u16>(o), static_cast<u16>(x)) |
           u32{add_bf16(static_cast<u16>(o >> 16), static_cast<u16>(x >> 16))} << 16;
  }
};
// Compare-and-swap takes two data words: the new value first, then the one to compare with.
struct CompareSwap {};

template <class T>
T lane_data(const Wave& w, u32 reg, int l) {
  if constexpr (sizeof(T) == 8) return u64{w.v[reg][l]} | u64{w.v[reg + 1][l]} << 32;
  else return w.v[reg][l];
}
template <class T>
void set_lane(Wave& w, u32 reg, int l, T x) {
  w.v[reg][l] = static_cast<u32>(x);
  if constexpr (sizeof(T) == 8) w.v[reg + 1][l] = static_cast<u32>(x >> 32);
}

template <class F, class T>
T update_memory(u64 address, T data, T compare) {
  auto* p = reinterpret_cast<T*>(address);
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  if constexpr (std::is_same_v<F, CompareSwap>) {
    T expected = compare;
    __atomic_compare_exchange_n(p, &expected, data, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
  } else {
    (void)compare;
    while (!__atomic_compare_exchange_n(p, &old, F{}(old, data), true, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    }
    return old;
  }
}

template <class F, class T>
void update_lanes(Wave& w, const ExecInst& in, const LaneAddresses& a, u64 exec) {
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (a.at[l] % sizeof(T))
      fault(w, in, FaultKind::memory,
            format("misaligned atomic: address 0x%llx is not a multiple of %zu",
                   static_cast<unsigned long long>(a.at[l]), sizeof(T)), l);
  }
  T old[kLanes];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    T compare{};
    if constexpr (std::is_same_v<F, CompareSwap>) compare = lane_data<T>(w, in.data + sizeof(T) / 4, l);
    old[l] = update_memory<F, T>(a.at[l], lane_data<T>(w, in.data, l), compare);
  }
  if (!in.inst->sc0) return;
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    set_lane<T>(w, in.dst, l, old[l]);
  }
}

template <class F, class T>
void global_atomic(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  global_addresses(w, in, a, exec);
  check_global(w, in, a, exec, sizeof(T), Access::atomic);
  update_lanes<F, T>(w, in, a, exec);
}

template <class F, class T>
void flat_atomic(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  LaneAddresses a;
  global_addresses(w, in, a, exec);
  flat_translate(w, in, a, exec, sizeof(T), Access::atomic);
  update_lanes<F, T>(w, in, a, exec);
}

template <class F, class T>
void buffer_atomic(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  const BufferDescriptor d = buffer_descriptor(w, in);
  LaneAddresses a;
  u32 partial[kLanes];
  const u64 valid = buffer_addresses(w, in, d, exec, sizeof(T), a, partial);
  if (valid) {
    check_global(w, in, a, valid, sizeof(T), Access::atomic);
    update_lanes<F, T>(w, in, a, valid);
  }
  // Out of range: nothing is changed and 0 is returned.
  if (in.inst->sc0)
    for (u64 left = exec & ~valid; left; left &= left - 1) set_lane<T>(w, in.dst, std::countr_zero(left), T{0});
}

template <class F, class T>
void scalar_atomic(Wave& w, const ExecInst& in) {
  const u64 address = scalar_address(w, in);
  check_scalar_extent(w, in, address, sizeof(T), Access::atomic);
  T data{}, compare{};
  std::memcpy(&data, &w.s[in.data], sizeof data);
  if constexpr (std::is_same_v<F, CompareSwap>) std::memcpy(&compare, &w.s[in.data + sizeof(T) / 4], sizeof compare);
  const T old = update_memory<F, T>(address, data, compare);
  if (in.inst->sc0) std::memcpy(&w.s[in.dst], &old, sizeof old);
}

// LDS: data0 is the operand; cmpst compares with data0 and writes data1, mskor clears data0's bits and sets data1's,
// wrap takes data0 off what has reached it and otherwise adds data1.
struct CompareStore {};
struct Wrap {};
struct MaskOr {};
template <class F> struct CompareStoreFloat {};

template <class F, class T>
T lds_result(T old, T data0, T data1) {
  if constexpr (std::is_same_v<F, CompareStore>) return old == data0 ? data1 : old;
  else if constexpr (std::is_same_v<F, CompareStoreFloat<float>>) return from_bits<float>(old) == from_bits<float>(data0) ? data1 : old;
  else if constexpr (std::is_same_v<F, CompareStoreFloat<double>>) return from_bits<double>(old) == from_bits<double>(data0) ? data1 : old;
  else if constexpr (std::is_same_v<F, MaskOr>) return (old & ~data0) | data1;
  else if constexpr (std::is_same_v<F, Wrap>) return old >= data0 ? old - data0 : old + data1;
  else return F{}(old, data0);
}

template <class F, class T>
void lds_atomic(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  alignas(64) u32 a[kLanes];
  lds_addresses(w, in, in.offset, exec, a);
  check_lds(w, in, a, exec, sizeof(T), Access::atomic);
  const bool returns = in.inst->dst.kind != OperandKind::none;
  const bool two = in.inst->vdata2.kind != OperandKind::none;
  T old[kLanes];
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    std::memcpy(&old[l], w.wg->lds + a[l], sizeof(T));
    const T now = lds_result<F, T>(old[l], lane_data<T>(w, in.data, l), two ? lane_data<T>(w, in.data2, l) : T{0});
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

#define INTEGER_ATOMICS(prefix, handler)                                  \
  t.special(Op::prefix##_swap, C::atomic, &handler<Swap, u32>);           \
  t.special(Op::prefix##_cmpswap, C::atomic, &handler<CompareSwap, u32>); \
  t.special(Op::prefix##_add, C::atomic, &handler<Add, u32>);             \
  t.special(Op::prefix##_sub, C::atomic, &handler<Sub, u32>);             \
  t.special(Op::prefix##_smin, C::atomic, &handler<Smin, u32>);           \
  t.special(Op::prefix##_umin, C::atomic, &handler<Umin, u32>);           \
  t.special(Op::prefix##_smax, C::atomic, &handler<Smax, u32>);           \
  t.special(Op::prefix##_umax, C::atomic, &handler<Umax, u32>);           \
  t.special(Op::prefix##_and, C::atomic, &handler<And, u32>);             \
  t.special(Op::prefix##_or, C::atomic, &handler<Or, u32>);               \
  t.special(Op::prefix##_xor, C::atomic, &handler<Xor, u32>);             \
  t.special(Op::prefix##_inc, C::atomic, &handler<Inc, u32>);             \
  t.special(Op::prefix##_dec, C::atomic, &handler<Dec, u32>);             \
  t.special(Op::prefix##_swap_x2, C::atomic, &handler<Swap, u64>);        \
  t.special(Op::prefix##_cmpswap_x2, C::atomic, &handler<CompareSwap, u64>); \
  t.special(Op::prefix##_add_x2, C::atomic, &handler<Add, u64>);          \
  t.special(Op::prefix##_sub_x2, C::atomic, &handler<Sub, u64>);          \
  t.special(Op::prefix##_smin_x2, C::atomic, &handler<Smin, u64>);        \
  t.special(Op::prefix##_umin_x2, C::atomic, &handler<Umin, u64>);        \
  t.special(Op::prefix##_smax_x2, C::atomic, &handler<Smax, u64>);        \
  t.special(Op::prefix##_umax_x2, C::atomic, &handler<Umax, u64>);        \
  t.special(Op::prefix##_and_x2, C::atomic, &handler<And, u64>);          \
  t.special(Op::prefix##_or_x2, C::atomic, &handler<Or, u64>);            \
  t.special(Op::prefix##_xor_x2, C::atomic, &handler<Xor, u64>);          \
  t.special(Op::prefix##_inc_x2, C::atomic, &handler<Inc, u64>);          \
  t.special(Op::prefix##_dec_x2, C::atomic, &handler<Dec, u64>)

#define FLOAT_ATOMICS(prefix, handler)                                                       \
  t.special(Op::prefix##_add_f32, C::atomic, &handler<FloatAdd<float>, u32>);                \
  t.special(Op::prefix##_add_f64, C::atomic, &handler<FloatAdd<double>, u64>);               \
  t.special(Op::prefix##_min_f64, C::atomic, &handler<FloatExtreme<double, false>, u64>);    \
  t.special(Op::prefix##_max_f64, C::atomic, &handler<FloatExtreme<double, true>, u64>);     \
  t.special(Op::prefix##_pk_add_f16, C::atomic, &handler<PkAddF16, u32>);                    \
  t.special(Op::prefix##_pk_add_bf16, C::atomic, &handler<PkAddBf16, u32>)

// A DS operation with and without the returned value.
#define LDS_PAIR(stem, type, F, T)                                          \
  t.special(Op::ds_##stem##_##type, C::lds, &lds_atomic<F, T>);             \
  t.special(Op::ds_##stem##_rtn_##type, C::lds, &lds_atomic<F, T>)

void lds_atomics(OpTable& t) {
  using C = OpClass;
  LDS_PAIR(add, u32, Add, u32);
  LDS_PAIR(sub, u32, Sub, u32);
  LDS_PAIR(rsub, u32, Rsub, u32);
  LDS_PAIR(inc, u32, Inc, u32);
  LDS_PAIR(dec, u32, Dec, u32);
  LDS_PAIR(min, i32, Smin, u32);
  LDS_PAIR(max, i32, Smax, u32);
  LDS_PAIR(min, u32, Umin, u32);
  LDS_PAIR(max, u32, Umax, u32);
  LDS_PAIR(and, b32, And, u32);
  LDS_PAIR(or, b32, Or, u32);
  LDS_PAIR(xor, b32, Xor, u32);
  LDS_PAIR(mskor, b32, MaskOr, u32);
  LDS_PAIR(cmpst, b32, CompareStore, u32);
  LDS_PAIR(cmpst, f32, CompareStoreFloat<float>, u32);
  using MinF32 = FloatExtreme<float, false>;
  using MaxF32 = FloatExtreme<float, true>;
  using MinF64 = FloatExtreme<double, false>;
  using MaxF64 = FloatExtreme<double, true>;
  LDS_PAIR(min, f32, MinF32, u32);
  LDS_PAIR(max, f32, MaxF32, u32);
  LDS_PAIR(add, f32, FloatAdd<float>, u32);
  LDS_PAIR(add, u64, Add, u64);
  LDS_PAIR(sub, u64, Sub, u64);
  LDS_PAIR(rsub, u64, Rsub, u64);
  LDS_PAIR(inc, u64, Inc, u64);
  LDS_PAIR(dec, u64, Dec, u64);
  LDS_PAIR(min, i64, Smin, u64);
  LDS_PAIR(max, i64, Smax, u64);
  LDS_PAIR(min, u64, Umin, u64);
  LDS_PAIR(max, u64, Umax, u64);
  LDS_PAIR(and, b64, And, u64);
  LDS_PAIR(or, b64, Or, u64);
  LDS_PAIR(xor, b64, Xor, u64);
  LDS_PAIR(mskor, b64, MaskOr, u64);
  LDS_PAIR(cmpst, b64, CompareStore, u64);
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
}

}  // namespace

void register_atomics(OpTable& t) {
  using C = OpClass;
  INTEGER_ATOMICS(global_atomic, global_atomic);
  INTEGER_ATOMICS(flat_atomic, flat_atomic);
  INTEGER_ATOMICS(buffer_atomic, buffer_atomic);
  INTEGER_ATOMICS(s_atomic, scalar_atomic);
  FLOAT_ATOMICS(global_atomic, global_atomic);
  FLOAT_ATOMICS(flat_atomic, flat_atomic);
  FLOAT_ATOMICS(buffer_atomic, buffer_atomic);
  lds_atomics(t);
}

}  // namespace hfemu
