// How an instruction gets its behaviour: rows in an OpTable, filled by one register function per exec_*.cpp.
//
//   lane operation   table.lane<Op::v_add_f32>([](float a, float b) { return a + b; });
//     The lambda's types are the operand types: float, double, Half, (u)int16/32/64_t, Packed<Half>, Packed<(u)int16_t>;
//     a bool result is a compare mask. A trailing `const Mode&` parameter is filled in. neg, abs, op_sel, SDWA, DPP,
//     clamp, omod and EXEC are applied around it by the common stages.
//   anything else    table.special(Op::v_readlane_b32, OpClass::valu, handler);
//     Handlers read sources with stage_source and write with write_result (below), or handle registers themselves.
#pragma once

#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core.h"

namespace hfemu {

// --- lane values --------------------------------------------------------------------------------------------------
float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);    // nearest even
uint16_t double_to_half(double x);  // nearest even, one rounding
uint16_t double_to_half(double x, const Mode& mode);  // by MODE's rounding, saturating an overflow under FP16_OVFL

struct Half {
  uint16_t bits = 0;
  Half() = default;
  explicit Half(uint16_t raw) : bits(raw) {}
  float value() const { return half_to_float(bits); }
  static Half from(float x) { return Half(float_to_half(x)); }
  static Half from(double x) { return Half(double_to_half(x)); }
};

template <class T>
struct Packed {
  T lo, hi;
};

template <class T> struct lane_type_of;
template <> struct lane_type_of<uint16_t> { static constexpr LaneType value = LaneType::b16; };
template <> struct lane_type_of<int16_t> { static constexpr LaneType value = LaneType::b16; };
template <> struct lane_type_of<Half> { static constexpr LaneType value = LaneType::f16; };
template <> struct lane_type_of<uint32_t> { static constexpr LaneType value = LaneType::b32; };
template <> struct lane_type_of<int32_t> { static constexpr LaneType value = LaneType::b32; };
template <> struct lane_type_of<float> { static constexpr LaneType value = LaneType::f32; };
template <> struct lane_type_of<uint64_t> { static constexpr LaneType value = LaneType::b64; };
template <> struct lane_type_of<int64_t> { static constexpr LaneType value = LaneType::b64; };
template <> struct lane_type_of<double> { static constexpr LaneType value = LaneType::f64; };
template <> struct lane_type_of<bool> { static constexpr LaneType value = LaneType::mask; };
template <> struct lane_type_of<Packed<uint16_t>> { static constexpr LaneType value = LaneType::pk16; };
template <> struct lane_type_of<Packed<int16_t>> { static constexpr LaneType value = LaneType::pk16; };
template <> struct lane_type_of<Packed<Half>> { static constexpr LaneType value = LaneType::pkf16; };

template <class T>
inline T lane_load(const uint32_t* row, int l) {
  if constexpr (std::is_same_v<T, uint64_t> || std::is_same_v<T, int64_t> || std::is_same_v<T, double>) {
    return std::bit_cast<T>(uint64_t{row[l]} | uint64_t{row[l + kLanes]} << 32);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(row[l]);
  } else {
    return std::bit_cast<T>(static_cast<uint16_t>(row[l]));
  }
}

template <class T>
inline void lane_store(uint32_t* row, int l, T x) {
  if constexpr (std::is_same_v<T, bool>) {
    reinterpret_cast<uint8_t*>(row)[l] = x ? 0xFF : 0;
  } else if constexpr (sizeof(T) == 8) {
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    row[l] = static_cast<uint32_t>(bits);
    row[l + kLanes] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (sizeof(T) == 4) {
    row[l] = std::bit_cast<uint32_t>(x);
  } else {
    row[l] = std::bit_cast<uint16_t>(x);
  }
}

// --- the table ----------------------------------------------------------------------------------------------------
struct OpEntry {
  Handler handler = nullptr;       // set: everything is up to it
  LaneKernel kernel = nullptr;
  LaneKernel saturating = nullptr;  // integer clamp
  LaneType types[4] = {LaneType::none, LaneType::none, LaneType::none, LaneType::none};  // result, sources
  uint8_t sources = 0;
  bool accumulates = false;        // the destination is also the last source
  bool writes_exec = false;         // a compare that also writes EXEC
  bool preserves_high = false;     // a 16-bit result keeps the destination's other half
  bool keeps_denormals = false;    // MODE's denormal control does not apply, or the operation applies it by itself
  HostRounding rounding = HostRounding::nearest;
  OpClass op_class = OpClass::other;
};

// The rounding field of MODE that a result of this type obeys.
constexpr HostRounding rounding_of(LaneType result) {
  return result == LaneType::f32 ? HostRounding::single
         : result == LaneType::f64 || result == LaneType::f16 || result == LaneType::pkf16 ? HostRounding::wide
                                                                                           : HostRounding::nearest;
}

template <class F> struct lane_traits : lane_traits<decltype(&F::operator())> {};
template <class C, class R, class... A> struct lane_traits<R (C::*)(A...) const> {
  static constexpr bool by_format = (std::is_same_v<A, const FormatMode&> || ...);
  static constexpr bool takes_mode = by_format || (std::is_same_v<A, const Mode&> || ...);
  static constexpr int sources = static_cast<int>(sizeof...(A)) - (takes_mode ? 1 : 0);
  using result = R;
  template <int I> using arg = std::tuple_element_t<I, std::tuple<A..., void, void, void>>;
};

// One loop per lambda. Rows are either the same register or disjoint, so a lane never reads what another one wrote.
template <class F, class M>
inline void lanes_of(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, const M m) {
  using T = lane_traits<F>;
  const F f{};
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) {
    typename T::result r;
    if constexpr (T::sources == 1) {
      using A = typename T::template arg<0>;
      if constexpr (T::takes_mode) r = f(lane_load<A>(a, l), m); else r = f(lane_load<A>(a, l));
    } else if constexpr (T::sources == 2) {
      using A = typename T::template arg<0>;
      using B = typename T::template arg<1>;
      if constexpr (T::takes_mode) r = f(lane_load<A>(a, l), lane_load<B>(b, l), m);
      else r = f(lane_load<A>(a, l), lane_load<B>(b, l));
    } else {
      using A = typename T::template arg<0>;
      using B = typename T::template arg<1>;
      using C = typename T::template arg<2>;
      if constexpr (T::takes_mode) r = f(lane_load<A>(a, l), lane_load<B>(b, l), lane_load<C>(c, l), m);
      else r = f(lane_load<A>(a, l), lane_load<B>(b, l), lane_load<C>(c, l));
    }
    lane_store(d, l, r);
  }
}

template <class F>
void lane_loop(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, const Mode& mode) {
  if constexpr (lane_traits<F>::by_format) {
    // Two loops, each for one kind of 8-bit float: a test inside would keep it from being vectorised.
    FormatMode m{mode};
    if (m.fnuz) {
      m.fnuz = true;
      lanes_of<F>(d, a, b, c, m);
    } else {
      m.fnuz = false;
      lanes_of<F>(d, a, b, c, m);
    }
  } else {
    lanes_of<F>(d, a, b, c, mode);
  }
}

template <class T> struct nan_rules;
template <> struct nan_rules<float> {
  static constexpr uint32_t quiet = 0x00400000, made = 0x7FC00000;
};
template <> struct nan_rules<double> {
  static constexpr uint64_t quiet = 0x0008000000000000, made = 0x7FF8000000000000;
};

// Arithmetic whose NaN results are the first NaN source made quiet, or the positive default: the host's choice
// depends on operand order and, for a fresh NaN, has the other sign.
template <class F>
void arithmetic_loop(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, const Mode& mode) {
  using T = lane_traits<F>;
  using R = typename T::result;
  constexpr int rows = sizeof(R) / 4;
  alignas(64) uint32_t out[rows * kLanes];
  lane_loop<F>(out, a, b, c, mode);
  int nans = 0;
  for (int l = 0; l < kLanes; ++l) nans |= lane_load<R>(out, l) != lane_load<R>(out, l);
  if (nans) [[unlikely]] {
    using Bits = std::conditional_t<sizeof(R) == 4, uint32_t, uint64_t>;
    const uint32_t* sources[3] = {a, b, c};
    for (int l = 0; l < kLanes; ++l) {
      if (lane_load<R>(out, l) == lane_load<R>(out, l)) continue;
      Bits bits = nan_rules<R>::made;
      for (int s = T::sources - 1; s >= 0; --s) {
        const R x = lane_load<R>(sources[s], l);
        if (x != x) bits = std::bit_cast<Bits>(x) | nan_rules<R>::quiet;
      }
      lane_store(out, l, std::bit_cast<R>(bits));
    }
  }
  std::memcpy(d, out, sizeof out);
}

class OpTable {
 public:
  // As lane(), for float and double arithmetic.
  template <class F>
  OpEntry& arithmetic(Op op, F) {
    return lane_with<F>(op, OpClass::valu, &arithmetic_loop<F>);
  }
  template <class F>
  OpEntry& lane(Op op, F, OpClass op_class = OpClass::valu) {
    return lane_with<F>(op, op_class, &lane_loop<F>);
  }
  // The clamped form of an integer operation already in the table.
  template <class F>
  void saturate(Op op, F) {
    entry(op).saturating = &lane_loop<F>;
  }
  OpEntry& special(Op op, OpClass op_class, Handler handler);
  OpEntry& entry(Op op) { return entries_[static_cast<size_t>(op)]; }
  const OpEntry& entry(Op op) const { return entries_[static_cast<size_t>(op)]; }

 private:
  // Not inline, like special(): hundreds of copies in one register function are a fifth of the emulator's compile time.
  OpEntry& lane(Op op, OpClass op_class, LaneKernel kernel, int sources, LaneType result, LaneType a, LaneType b,
                LaneType c);
  template <class F>
  OpEntry& lane_with(Op op, OpClass op_class, LaneKernel kernel) {
    return lane(op, op_class, kernel, lane_traits<F>::sources, type<F, -1>(), type<F, 0>(), type<F, 1>(), type<F, 2>());
  }
  // The type of F's result (-1) or of one of its sources.
  template <class F, int I>
  static constexpr LaneType type() {
    using T = lane_traits<F>;
    if constexpr (I < 0) return lane_type_of<typename T::result>::value;
    else if constexpr (I < T::sources) return lane_type_of<typename T::template arg<I>>::value;
    else return LaneType::none;
  }
  OpEntry entries_[static_cast<size_t>(Op::count)];
};

void register_salu(OpTable& table);
void register_control(OpTable& table);
void register_mode(OpTable& table);
void register_valu_int(OpTable& table);
void register_valu_float(OpTable& table);
void register_valu_half(OpTable& table);
void register_compare(OpTable& table);
void register_lane_ops(OpTable& table);
void register_packed(OpTable& table);
void register_convert(OpTable& table);
void register_matrix(OpTable& table);
void register_scalar_memory(OpTable& table);
void register_global(OpTable& table);
void register_buffer(OpTable& table);
void register_lds(OpTable& table);
void register_atomics(OpTable& table);
void register_lds_atomics(OpTable& table);
void register_buffer_format(OpTable& table);
const OpTable& op_table();

// --- operand stages -----------------------------------------------------------------------------------------------
struct alignas(64) RowBuffer {
  uint32_t x[2 * kLanes];
};

// Source lanes of a DPP control, once per instruction.
DppPlan plan_dpp(const Inst& inst);

uint32_t special_value(const Wave& w, uint16_t special, bool high);
// A scalar source's bits (sgpr, constant or special; one lane's worth).
uint64_t scalar_source(const Wave& w, const Source& s);

inline void splat(uint32_t* row, uint32_t x) {
  for (int l = 0; l < kLanes; ++l) row[l] = x;
}

// The handler of instructions that change nothing here: waits, hints, cache maintenance.
inline void no_operation(Wave&, const ExecInst&) {}

// A source without modifiers as rows; scalars are spread into `buffer`.
inline const uint32_t* source_row(const Wave& w, const Source& s, RowBuffer& buffer) {
  if (s.kind == SourceKind::vgpr) return w.v[s.reg];
  if (s.kind == SourceKind::constant) return s.row;
  const uint64_t x = scalar_source(w, s);
  splat(buffer.x, static_cast<uint32_t>(x));
  if (s.dwords == 2) splat(buffer.x + kLanes, static_cast<uint32_t>(x >> 32));
  return buffer.x;
}

// Denormals of `type` as zeros of their sign: `row` itself, or `buffer` filled. Rows of non-float types stay.
const uint32_t* flush_denormals(const uint32_t* row, LaneType type, RowBuffer& buffer);
// Whether MODE keeps denormals of `type` in inputs, in outputs.
inline bool keeps_inputs(const Mode& m, LaneType type) { return (type == LaneType::f32 ? m.denorm32 : m.denorm64) & 1; }
inline bool keeps_outputs(const Mode& m, LaneType type) { return (type == LaneType::f32 ? m.denorm32 : m.denorm64) & 2; }
// The lane operation of `in` between those two: ExecInst::careful of lane operations.
void run_careful(Wave& w, const ExecInst& in);

// A source with every modifier of its Operand applied (DPP and SDWA too); `index` is 0..2.
const uint32_t* stage_source(const Wave& w, const ExecInst& in, int index, LaneType type, RowBuffer& buffer);
// Lanes a DPP instruction may write; all lanes otherwise.
uint64_t dpp_write_mask(const Wave& w, const ExecInst& in);
// Output modifiers, SDWA destination, op_sel destination and EXEC; `rows` is overwritten.
void write_result(Wave& w, const ExecInst& in, LaneType type, uint32_t* rows, bool preserves_high = false);
// The mask of a comparison: EXEC's lanes only, and EXEC itself for v_cmpx.
void write_mask(Wave& w, const ExecInst& in, const uint32_t* bytes);

// d[l] = x[l] where the mask has a one.
void merge_row(uint32_t* d, const uint32_t* x, uint64_t mask);
inline void write_rows(Wave& w, uint32_t reg, const uint32_t* rows, int count, uint64_t mask) {
  for (int i = 0; i < count; ++i) merge_row(w.v[reg + i], rows + i * kLanes, mask);
}

// 64 bytes of 0 or 0xFF as a bit mask.
uint64_t pack_mask(const uint32_t* bytes);

}  // namespace hfemu
