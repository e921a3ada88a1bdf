// v_cmp and v_cmpx: a comparison is one lambda; inactive lanes give 0 in the mask, cmpx also writes EXEC.
#include "exec.h"
#include "float_rules.h"

namespace hfemu {
namespace {

using u32 = uint32_t;

// The plain and the exec-writing form of one comparison.
template <class F>
void pair(OpTable& t, Op plain, Op writes_exec, F f) {
  t.lane(plain, f);
  t.lane(writes_exec, f).writes_exec = true;
}

template <class T> inline T value(T x) { return x; }
inline float value(Half x) { return x.value(); }

#define PAIR(name, suffix, ...) pair(t, Op::v_cmp_##name##_##suffix, Op::v_cmpx_##name##_##suffix, [] __VA_ARGS__)

#define FLOAT_COMPARES(suffix, T)                                                           \
  PAIR(f, suffix, (T, T) { return false; });                                               \
  PAIR(lt, suffix, (T a, T b) { return value(a) < value(b); });                            \
  PAIR(eq, suffix, (T a, T b) { return value(a) == value(b); });                           \
  PAIR(le, suffix, (T a, T b) { return value(a) <= value(b); });                           \
  PAIR(gt, suffix, (T a, T b) { return value(a) > value(b); });                            \
  PAIR(lg, suffix, (T a, T b) { return value(a) < value(b) || value(a) > value(b); });     \
  PAIR(ge, suffix, (T a, T b) { return value(a) >= value(b); });                           \
  PAIR(o, suffix, (T a, T b) { return value(a) == value(a) && value(b) == value(b); });    \
  PAIR(u, suffix, (T a, T b) { return value(a) != value(a) || value(b) != value(b); });    \
  PAIR(nge, suffix, (T a, T b) { return !(value(a) >= value(b)); });                       \
  PAIR(nlg, suffix, (T a, T b) { return !(value(a) < value(b) || value(a) > value(b)); }); \
  PAIR(ngt, suffix, (T a, T b) { return !(value(a) > value(b)); });                        \
  PAIR(nle, suffix, (T a, T b) { return !(value(a) <= value(b)); });                       \
  PAIR(neq, suffix, (T a, T b) { return value(a) != value(b); });                          \
  PAIR(nlt, suffix, (T a, T b) { return !(value(a) < value(b)); });                        \
  PAIR(tru, suffix, (T, T) { return true; })

#define INTEGER_COMPARES(suffix, T)                        \
  PAIR(f, suffix, (T, T) { return false; });               \
  PAIR(lt, suffix, (T a, T b) { return a < b; });          \
  PAIR(eq, suffix, (T a, T b) { return a == b; });         \
  PAIR(le, suffix, (T a, T b) { return a <= b; });         \
  PAIR(gt, suffix, (T a, T b) { return a > b; });          \
  PAIR(ne, suffix, (T a, T b) { return a != b; });         \
  PAIR(ge, suffix, (T a, T b) { return a >= b; });         \
  PAIR(t, suffix, (T, T) { return true; })

uint32_t half_class(Half x) {
  const uint16_t magnitude = x.bits & 0x7FFF;
  const bool negative = x.bits >> 15;
  if (magnitude > 0x7C00) return magnitude & 0x200 ? 2 : 1;
  if (magnitude == 0x7C00) return negative ? 1u << 2 : 1u << 9;
  if (magnitude == 0) return negative ? 1u << 5 : 1u << 6;
  if (magnitude < 0x400) return negative ? 1u << 4 : 1u << 7;
  return negative ? 1u << 3 : 1u << 8;
}

}  // namespace

void register_compare(OpTable& t) {
  FLOAT_COMPARES(f16, Half);
  FLOAT_COMPARES(f32, float);
  FLOAT_COMPARES(f64, double);
  INTEGER_COMPARES(i16, int16_t);
  INTEGER_COMPARES(u16, uint16_t);
  INTEGER_COMPARES(i32, int32_t);
  INTEGER_COMPARES(u32, uint32_t);
  INTEGER_COMPARES(i64, int64_t);
  INTEGER_COMPARES(u64, uint64_t);
  PAIR(class, f16, (Half a, u32 b) { return (half_class(a) & b) != 0; });
  PAIR(class, f32, (float a, u32 b) { return (class_bit(a) & b) != 0; });
  PAIR(class, f64, (double a, u32 b) { return (class_bit(a) & b) != 0; });
  for (const Op op : {Op::v_cmp_class_f16, Op::v_cmp_class_f32, Op::v_cmp_class_f64, Op::v_cmpx_class_f16,
                      Op::v_cmpx_class_f32, Op::v_cmpx_class_f64})
    t.entry(op).keeps_denormals = true;
}

}  // namespace hfemu
