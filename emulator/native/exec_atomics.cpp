// Atomics on global, flat, buffer and scalar addresses; those on LDS are in exec_lds_atomics.cpp.
//
// Work-groups run on several threads, so memory is updated with compare-and-swap. Float additions round to nearest and
// keep denormals, whatever MODE says: LLVM's memory-atomic-fadd-f32-denormal-support says so for both architectures
// (the CDNA4 ISA's table has f32 additions in L2 flush input denormals).
#include "addressing.h"
#include "atomic_ops.h"
#include "buffer.h"
#include "smem.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

// Compare-and-swap takes two data words: the new value first, then the one to compare with.
struct CompareSwap {};

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
void scalar_update(Wave& w, const ExecInst& in, u64 address) {
  check_scalar_extent(w, in, address, sizeof(T), Access::atomic);
  T data{}, compare{};
  std::memcpy(&data, &w.s[in.data], sizeof data);
  if constexpr (std::is_same_v<F, CompareSwap>) std::memcpy(&compare, &w.s[in.data + sizeof(T) / 4], sizeof compare);
  const T old = update_memory<F, T>(address, data, compare);
  if (in.inst->sc0) std::memcpy(&w.s[in.dst], &old, sizeof old);
}

template <class F, class T>
void scalar_atomic(Wave& w, const ExecInst& in) {
  scalar_update<F, T>(w, in, scalar_address(w, in));
}
// Wholly in range or not executed; then 0 is returned.
template <class F, class T>
void scalar_buffer_atomic(Wave& w, const ExecInst& in) {
  const ScalarBuffer b = scalar_buffer(w, in);
  if (b.offset + sizeof(T) <= b.size) {
    scalar_update<F, T>(w, in, b.base + b.offset);
  } else if (in.inst->sc0) {
    std::memset(&w.s[in.dst], 0, sizeof(T));
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

}  // namespace

void register_atomics(OpTable& t) {
  using C = OpClass;
  INTEGER_ATOMICS(global_atomic, global_atomic);
  INTEGER_ATOMICS(flat_atomic, flat_atomic);
  INTEGER_ATOMICS(buffer_atomic, buffer_atomic);
  INTEGER_ATOMICS(s_atomic, scalar_atomic);
  INTEGER_ATOMICS(s_buffer_atomic, scalar_buffer_atomic);
  FLOAT_ATOMICS(global_atomic, global_atomic);
  FLOAT_ATOMICS(flat_atomic, flat_atomic);
  FLOAT_ATOMICS(buffer_atomic, buffer_atomic);
}

}  // namespace hfemu
