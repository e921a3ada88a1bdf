// The operations of every atomic, f(old, data) -> new, and the lanes' operands.
#pragma once

#include <type_traits>

#include "exec.h"
#include "float_rules.h"
#include "formats.h"

namespace hfemu {

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
inline uint16_t add_half(uint16_t a, uint16_t b) { return float_to_half(half_to_float(a) + half_to_float(b)); }
inline uint16_t add_bf16(uint16_t a, uint16_t b) {
  const double sum = static_cast<double>(std::bit_cast<float>(uint32_t{a} << 16)) + std::bit_cast<float>(uint32_t{b} << 16);
  return static_cast<uint16_t>(encode(bf16_format, sum));
}
struct PkAddF16 {
  uint32_t operator()(uint32_t o, uint32_t x) const {
    return add_half(static_cast<uint16_t>(o), static_cast<uint16_t>(x)) |
           uint32_t{add_half(static_cast<uint16_t>(o >> 16), static_cast<uint16_t>(x >> 16))} << 16;
  }
};
struct PkAddBf16 {
  uint32_t operator()(uint32_t o, uint32_t x) const {
    return add_bf16(static_cast<uint16_t>(o), static_cast<uint16_t>(x)) |
           uint32_t{add_bf16(static_cast<uint16_t>(o >> 16), static_cast<uint16_t>(x >> 16))} << 16;
  }
};

template <class T>
inline T lane_data(const Wave& w, uint32_t reg, int l) {
  if constexpr (sizeof(T) == 8) return uint64_t{w.v[reg][l]} | uint64_t{w.v[reg + 1][l]} << 32;
  else return w.v[reg][l];
}
template <class T>
inline void set_lane(Wave& w, uint32_t reg, int l, T x) {
  w.v[reg][l] = static_cast<uint32_t>(x);
  if constexpr (sizeof(T) == 8) w.v[reg + 1][l] = static_cast<uint32_t>(x >> 32);
}

}  // namespace hfemu
