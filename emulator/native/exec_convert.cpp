// Conversions from and to bf16 and the 8-, 6- and 4-bit floats, scaled and stochastic ones included; packed f16 too.
//
// Facts (CDNA4 ISA): a scale is the exponent field of an f32, 2^(e - 127); decoding multiplies by it, encoding divides.
// Encoding rounds to nearest even or stochastically, whatever MODE says; FP16_OVFL saturates 8-bit results; 4- and 6-bit
// results always saturate. Inputs of f32 and results of f16 obey MODE's denormal control. A stochastic conversion of several elements takes
// the next state of v_prng_b32 for each. Products of a decoded element and its scale are rounded once.
#include "exec.h"
#include "float_rules.h"
#include "formats.h"

namespace hfemu {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

#define LANE(name, ...) t.lane(Op::name, [] __VA_ARGS__)

// --- elements -----------------------------------------------------------------------------------------------------
// A small element: its width, its format under a mode, and its value.
struct Fp8 {
  static constexpr int bits = 8;
  static FloatFormat format(const Mode& m) { return fp8_format(m.fnuz); }
  static float value(u32 code, const Mode& m) {
    return m.fnuz ? decode_small<4, 3, 8, Specials::fnuz>(code) : decode_small<4, 3, 7, Specials::fn>(code);
  }
};
struct Bf8 {
  static constexpr int bits = 8;
  static FloatFormat format(const Mode& m) { return bf8_format(m.fnuz); }
  static float value(u32 code, const Mode& m) {
    return m.fnuz ? decode_small<5, 2, 16, Specials::fnuz>(code) : decode_small<5, 2, 15, Specials::ieee>(code);
  }
};
struct Fp6 {
  static constexpr int bits = 6;
  static FloatFormat format(const Mode&) { return e2m3; }
  static float value(u32 code, const Mode&) { return decode_small<2, 3, 1, Specials::finite>(code); }
};
struct Bf6 {
  static constexpr int bits = 6;
  static FloatFormat format(const Mode&) { return e3m2; }
  static float value(u32 code, const Mode&) { return decode_small<3, 2, 3, Specials::finite>(code); }
};
struct Fp4 {
  static constexpr int bits = 4;
  static FloatFormat format(const Mode&) { return e2m1; }
  static float value(u32 code, const Mode&) { return decode_small<2, 1, 1, Specials::finite>(code); }
};

// A wide element: its bits in a register as double, and back from a double with one rounding.
struct F32 {
  static constexpr int bits = 32;
  static double value(u32 code, const Mode& m) {
    const float x = bits_to_float(code);
    return m.denorm32 & 1 ? x : flushed(x);
  }
};
struct F16 {
  static constexpr int bits = 16;
  static constexpr FloatFormat format = f16_format;
  static double value(u32 code, const Mode&) { return decode(f16_format, code & 0xFFFF); }
  static u32 round(double x) { return encode(format, x); }
};
struct Bf16 {
  static constexpr int bits = 16;
  static constexpr FloatFormat format = bf16_format;
  static double value(u32 code, const Mode&) { return bf16_to_f32(code); }
  static u32 round(double x) { return encode(format, x); }
};

inline float scale_value(u32 scale) {
  const u32 e = scale_of_float(scale);
  return bits_to_float(e == 255 ? 0x7FC00000u : e == 0 ? 0x00400000u : e << 23);
}

template <class Small, class Wide>
u32 decode_scaled(u32 code, u32 scale, const Mode& m) {
  if constexpr (Wide::bits == 32) return float_to_bits(Small::value(code, m) * scale_value(scale));
  else return Wide::round(static_cast<double>(Small::value(code, m)) * decode_e8m0(scale_of_float(scale)));
}

// x / 2^(e - 127) without rounding; an e8m0 NaN makes it NaN.
inline double descale(double x, u32 scale) {
  const u32 e = scale_of_float(scale);
  return x * (e == 255 ? decode_e8m0(255) : power_of_two(127 - static_cast<int>(e)));
}

template <class Small, class Wide>
u32 encode_scaled(u32 bits, u32 scale, const Mode& m) {
  return encode(Small::format(m), descale(Wide::value(bits, m), scale), m.fp16_ovfl);
}

template <class Small, class Wide>
u32 encode_stochastic(u32 bits, u32 random, u32 scale, const Mode& m) {
  return encode(Small::format(m), descale(Wide::value(bits, m), scale), m.fp16_ovfl, Rounding::stochastic, random);
}

constexpr u32 kUnitScale = 0x3F800000;

// --- handlers that pick a byte of a source or of the destination -----------------------------------------------------
u32 source_byte(const Inst& inst) { return 8 * (inst.src[0].op_sel + 2 * inst.src[1].op_sel); }
u32 destination_byte(const Inst& inst) { return 8 * (inst.src[2].op_sel + 2 * inst.dst_op_sel); }

void write_byte(Wave& w, const ExecInst& in, u32* bytes) {
  const u32 shift = destination_byte(*in.inst);
  const u32* old = w.v[in.dst];
  for (int l = 0; l < kLanes; ++l) bytes[l] = (old[l] & ~(0xFFu << shift)) | (bytes[l] & 0xFF) << shift;
  write_rows(w, in.dst, bytes, 1, w.exec());
}

// v_cvt_sr_{fp8,bf8}_f32 and v_cvt_scalef32_sr_{fp8,bf8}_*: value, random bits [, scale].
template <class Small, class Wide>
void stochastic_byte(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const LaneType type = Wide::bits == 32 ? LaneType::b32 : LaneType::b16;
  const u32* value = stage_source(w, in, 0, type, buffers[0]);
  const u32* random = stage_source(w, in, 1, LaneType::b32, buffers[1]);
  const bool scaled = in.inst->num_src == 3;
  const u32* scale = scaled ? stage_source(w, in, 2, LaneType::b32, buffers[2]) : nullptr;
  for (int l = 0; l < kLanes; ++l)
    out.x[l] = encode_stochastic<Small, Wide>(value[l], random[l], scaled ? scale[l] : kUnitScale, w.mode);
  write_byte(w, in, out.x);
}

// v_cvt_sr_{f16,bf16}_f32: OPSEL[3] picks the destination half, the other half is kept.
template <class Wide>
void stochastic_half(Wave& w, const ExecInst& in) {
  RowBuffer buffers[2], out;
  const u32* value = stage_source(w, in, 0, LaneType::f32, buffers[0]);
  const u32* random = stage_source(w, in, 1, LaneType::b32, buffers[1]);
  for (int l = 0; l < kLanes; ++l)
    out.x[l] = encode(Wide::format, F32::value(value[l], w.mode), w.mode.fp16_ovfl, Rounding::stochastic, random[l]);
  write_result(w, in, LaneType::b16, out.x, true);
}

// v_cvt_scalef32_{f32,f16}_{fp8,bf8}: one byte of the source; an f16 result goes to the half that OPSEL[3] names.
template <class Small, class Wide>
void decode_byte(Wave& w, const ExecInst& in) {
  RowBuffer buffers[2], out;
  const u32* codes = source_row(w, in.src[0], buffers[0]);
  const u32* scale = stage_source(w, in, 1, LaneType::b32, buffers[1]);
  const u32 shift = source_byte(*in.inst);
  for (int l = 0; l < kLanes; ++l)
    out.x[l] = decode_scaled<Small, Wide>(codes[l] >> shift & 0xFF, scale[l], w.mode);
  write_result(w, in, Wide::bits == 16 ? LaneType::b16 : LaneType::f32, out.x, true);
}

// v_cvt_scalef32_pk_*_fp4: the two items of one byte.
template <class Wide>
void decode_fp4_pair(Wave& w, const ExecInst& in) {
  RowBuffer buffers[2], out;
  const u32* codes = source_row(w, in.src[0], buffers[0]);
  const u32* scale = stage_source(w, in, 1, LaneType::b32, buffers[1]);
  const u32 shift = source_byte(*in.inst);
  for (int l = 0; l < kLanes; ++l) {
    const u32 low = decode_scaled<Fp4, Wide>(codes[l] >> shift & 15, scale[l], w.mode);
    const u32 high = decode_scaled<Fp4, Wide>(codes[l] >> (shift + 4) & 15, scale[l], w.mode);
    out.x[l] = Wide::bits == 32 ? low : low | high << 16;
    if (Wide::bits == 32) out.x[kLanes + l] = high;
  }
  write_rows(w, in.dst, out.x, Wide::bits == 32 ? 2 : 1, w.exec());
}

// v_cvt_scalef32_pk_fp4_f32: two f32 operands and the scale.
void encode_fp4_pair_f32(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const u32* low = stage_source(w, in, 0, LaneType::f32, buffers[0]);
  const u32* high = stage_source(w, in, 1, LaneType::f32, buffers[1]);
  const u32* scale = stage_source(w, in, 2, LaneType::b32, buffers[2]);
  for (int l = 0; l < kLanes; ++l)
    out.x[l] = encode_scaled<Fp4, F32>(low[l], scale[l], w.mode) |
               encode_scaled<Fp4, F32>(high[l], scale[l], w.mode) << 4;
  write_byte(w, in, out.x);
}

// v_cvt_scalef32_pk_fp4_{f16,bf16}: one packed operand and the scale.
template <class Wide>
void encode_fp4_pair(Wave& w, const ExecInst& in) {
  RowBuffer buffers[2], out;
  const u32* pair = stage_source(w, in, 0, LaneType::b32, buffers[0]);
  const u32* scale = stage_source(w, in, 1, LaneType::b32, buffers[1]);
  for (int l = 0; l < kLanes; ++l)
    out.x[l] = encode_scaled<Fp4, Wide>(pair[l] & 0xFFFF, scale[l], w.mode) |
               encode_scaled<Fp4, Wide>(pair[l] >> 16, scale[l], w.mode) << 4;
  write_byte(w, in, out.x);
}

// v_cvt_scalef32_sr_pk_fp4_*: a pair (an f32 pair takes two registers), random bits, scale.
template <class Wide>
void stochastic_fp4_pair(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const u32* pair = stage_source(w, in, 0, Wide::bits == 32 ? LaneType::b64 : LaneType::b32, buffers[0]);
  const u32* random = stage_source(w, in, 1, LaneType::b32, buffers[1]);
  const u32* scale = stage_source(w, in, 2, LaneType::b32, buffers[2]);
  for (int l = 0; l < kLanes; ++l) {
    const u32 low = Wide::bits == 32 ? pair[l] : pair[l] & 0xFFFF;
    const u32 high = Wide::bits == 32 ? pair[kLanes + l] : pair[l] >> 16;
    out.x[l] = encode_stochastic<Fp4, Wide>(low, random[l], scale[l], w.mode) |
               encode_stochastic<Fp4, Wide>(high, next_random(random[l]), scale[l], w.mode) << 4;
  }
  write_byte(w, in, out.x);
}

// --- 32 items of 6 bits ----------------------------------------------------------------------------------------------
constexpr int kItems = 32, kSixBitRows = 6;

struct SixBitRows {
  u32 x[kSixBitRows][kLanes] = {};
  void put(int lane, int item, u32 code) {
    const int bit = 6 * item;
    x[bit / 32][lane] |= code << (bit % 32);
    if (bit % 32 > 26) x[bit / 32 + 1][lane] |= code >> (32 - bit % 32);
  }
};

// The registers of a wide source: these operands are never constants.
const Row* wide_source(const Wave& w, const ExecInst& in, int index) {
  if (in.src[index].kind != SourceKind::vgpr) unsupported(w, in, "a wide operand that is not a vector register");
  return w.v + in.src[index].reg;
}

template <class Wide>
u32 wide_item(const Row* rows, int item, int lane) {
  return Wide::bits == 32 ? rows[item][lane] : rows[item / 2][lane] >> (16 * (item % 2)) & 0xFFFF;
}

// v_cvt_scalef32_[sr_]pk32_{fp6,bf6}_*: 32 items, [random bits,] scale.
template <class Small, class Wide, bool stochastic>
void encode_32(Wave& w, const ExecInst& in) {
  RowBuffer buffers[2];
  SixBitRows out;
  const Row* items = wide_source(w, in, 0);
  const u32* random = stochastic ? stage_source(w, in, 1, LaneType::b32, buffers[0]) : nullptr;
  const u32* scale = stage_source(w, in, stochastic ? 2 : 1, LaneType::b32, buffers[1]);
  for (int l = 0; l < kLanes; ++l) {
    u32 state = stochastic ? random[l] : 0;
    for (int item = 0; item < kItems; ++item) {
      const u32 bits = wide_item<Wide>(items, item, l);
      out.put(l, item, stochastic ? encode_stochastic<Small, Wide>(bits, state, scale[l], w.mode)
                                  : encode_scaled<Small, Wide>(bits, scale[l], w.mode));
      state = next_random(state);
    }
  }
  write_rows(w, in.dst, out.x[0], kSixBitRows, w.exec());
}

// v_cvt_scalef32_2xpk16_{fp6,bf6}_f32: the items of the two sources alternate in the result.
template <class Small>
void encode_two_16(Wave& w, const ExecInst& in) {
  RowBuffer buffer;
  SixBitRows out;
  const Row* even = wide_source(w, in, 0);
  const Row* odd = wide_source(w, in, 1);
  const u32* scale = stage_source(w, in, 2, LaneType::b32, buffer);
  for (int l = 0; l < kLanes; ++l)
    for (int item = 0; item < kItems; ++item) {
      const Row* source = item % 2 == 0 ? even : odd;
      out.put(l, item, encode_scaled<Small, F32>(source[item / 2][l], scale[l], w.mode));
    }
  write_rows(w, in.dst, out.x[0], kSixBitRows, w.exec());
}

// v_cvt_scalef32_pk32_*_{fp6,bf6}: 32 items, scale.
template <class Small, class Wide>
void decode_32(Wave& w, const ExecInst& in) {
  constexpr int rows = kItems * Wide::bits / 32;
  RowBuffer buffer;
  u32 out[rows][kLanes] = {};
  const Row* packed = wide_source(w, in, 0);
  const u32* scale = stage_source(w, in, 1, LaneType::b32, buffer);
  for (int item = 0; item < kItems; ++item) {
    const int reg = 6 * item / 32, shift = 6 * item % 32;
    for (int l = 0; l < kLanes; ++l) {
      const u64 both = packed[reg][l] | u64{shift > 26 ? packed[reg + 1][l] : 0} << 32;
      const u32 value = decode_scaled<Small, Wide>(static_cast<u32>(both >> shift) & 63, scale[l], w.mode);
      if (Wide::bits == 32)
        out[item][l] = value;
      else
        out[item / 2][l] |= value << (16 * (item % 2));
    }
  }
  write_rows(w, in.dst, out[0], rows, w.exec());
}

// --- lane operations on pairs of bytes -------------------------------------------------------------------------------
template <class Small>
u64 unpack_f32(u32 pair, const Mode& m) {
  return float_to_bits(Small::value(pair & 0xFF, m)) | u64{float_to_bits(Small::value(pair >> 8 & 0xFF, m))} << 32;
}

template <class Small>
u64 unpack_scaled_f32(u16 pair, u32 scale, const Mode& m) {
  return decode_scaled<Small, F32>(pair & 0xFF, scale, m) | u64{decode_scaled<Small, F32>(pair >> 8, scale, m)} << 32;
}

template <class Small, class Wide>
u32 unpack_scaled_half(u16 pair, u32 scale, const Mode& m) {
  return decode_scaled<Small, Wide>(pair & 0xFF, scale, m) | decode_scaled<Small, Wide>(pair >> 8, scale, m) << 16;
}

template <class Small, class Wide>
u16 pack_scaled(u32 low, u32 high, u32 scale, const Mode& m) {
  return static_cast<u16>(encode_scaled<Small, Wide>(low, scale, m) | encode_scaled<Small, Wide>(high, scale, m) << 8);
}

// Selected halves of the destination are written, so these results keep the other half.
void register_unscaled(OpTable& t) {
  LANE(v_cvt_f32_fp8, (u32 a, const FormatMode& m) { return Fp8::value(a & 0xFF, m); });
  LANE(v_cvt_f32_bf8, (u32 a, const FormatMode& m) { return Bf8::value(a & 0xFF, m); });
  LANE(v_cvt_pk_f32_fp8, (u32 a, const FormatMode& m) { return unpack_f32<Fp8>(a, m); });
  LANE(v_cvt_pk_f32_bf8, (u32 a, const FormatMode& m) { return unpack_f32<Bf8>(a, m); });
  LANE(v_cvt_f32_bf16, (u16 a) { return bf16_to_f32(a); });
  LANE(v_cvt_pk_bf16_f32, (float a, float b) { return u32{f32_to_bf16(a)} | u32{f32_to_bf16(b)} << 16; });
  LANE(v_cvt_pk_f16_f32, (float a, float b, const Mode& m) {
    const auto one = [&](float x) {
      const u32 h = (m.round64 | m.fp16_ovfl) == 0 ? float_to_half(x) : double_to_half(static_cast<double>(x), m);
      return !(m.denorm64 & 2) && !(h & 0x7C00) ? h & 0x8000 : h;
    };
    return one(a) | one(b) << 16;
  });
  LANE(v_cvt_pk_fp8_f32, (float a, float b, const FormatMode& m) {
    return pack_scaled<Fp8, F32>(float_to_bits(a), float_to_bits(b), kUnitScale, m);
  }).preserves_high = true;
  LANE(v_cvt_pk_bf8_f32, (float a, float b, const FormatMode& m) {
    return pack_scaled<Bf8, F32>(float_to_bits(a), float_to_bits(b), kUnitScale, m);
  }).preserves_high = true;
  t.special(Op::v_cvt_sr_fp8_f32, OpClass::valu, stochastic_byte<Fp8, F32>);
  t.special(Op::v_cvt_sr_bf8_f32, OpClass::valu, stochastic_byte<Bf8, F32>);
  t.special(Op::v_cvt_sr_f16_f32, OpClass::valu, stochastic_half<F16>);
  t.special(Op::v_cvt_sr_bf16_f32, OpClass::valu, stochastic_half<Bf16>);
}

#define EIGHT_BIT_SCALED(small, Small)                                                                               \
  LANE(v_cvt_scalef32_pk_##small##_f32, (float a, float b, u32 scale, const FormatMode& m) {                               \
    return pack_scaled<Small, F32>(float_to_bits(a), float_to_bits(b), scale, m);                                    \
  }).preserves_high = true;                                                                                          \
  LANE(v_cvt_scalef32_pk_##small##_f16, (u32 pair, u32 scale, const FormatMode& m) {                                       \
    return pack_scaled<Small, F16>(pair & 0xFFFF, pair >> 16, scale, m);                                             \
  }).preserves_high = true;                                                                                          \
  LANE(v_cvt_scalef32_pk_##small##_bf16, (u32 pair, u32 scale, const FormatMode& m) {                                      \
    return pack_scaled<Small, Bf16>(pair & 0xFFFF, pair >> 16, scale, m);                                            \
  }).preserves_high = true;                                                                                          \
  LANE(v_cvt_scalef32_pk_f32_##small, (u16 pair, u32 scale, const FormatMode& m) {                                         \
    return unpack_scaled_f32<Small>(pair, scale, m);                                                                 \
  });                                                                                                                \
  LANE(v_cvt_scalef32_pk_f16_##small, (u16 pair, u32 scale, const FormatMode& m) {                                         \
    return unpack_scaled_half<Small, F16>(pair, scale, m);                                                           \
  });                                                                                                                \
  LANE(v_cvt_scalef32_pk_bf16_##small, (u16 pair, u32 scale, const FormatMode& m) {                                        \
    return unpack_scaled_half<Small, Bf16>(pair, scale, m);                                                          \
  });                                                                                                                \
  t.special(Op::v_cvt_scalef32_f32_##small, OpClass::valu, decode_byte<Small, F32>);                                 \
  t.special(Op::v_cvt_scalef32_f16_##small, OpClass::valu, decode_byte<Small, F16>);                                 \
  t.special(Op::v_cvt_scalef32_sr_##small##_f32, OpClass::valu, stochastic_byte<Small, F32>);                        \
  t.special(Op::v_cvt_scalef32_sr_##small##_f16, OpClass::valu, stochastic_byte<Small, F16>);                        \
  t.special(Op::v_cvt_scalef32_sr_##small##_bf16, OpClass::valu, stochastic_byte<Small, Bf16>)

#define SIX_BIT_SCALED(small, Small)                                                                                 \
  t.special(Op::v_cvt_scalef32_2xpk16_##small##_f32, OpClass::valu, encode_two_16<Small>);                           \
  t.special(Op::v_cvt_scalef32_pk32_##small##_f16, OpClass::valu, encode_32<Small, F16, false>);                     \
  t.special(Op::v_cvt_scalef32_pk32_##small##_bf16, OpClass::valu, encode_32<Small, Bf16, false>);                   \
  t.special(Op::v_cvt_scalef32_sr_pk32_##small##_f32, OpClass::valu, encode_32<Small, F32, true>);                   \
  t.special(Op::v_cvt_scalef32_sr_pk32_##small##_f16, OpClass::valu, encode_32<Small, F16, true>);                   \
  t.special(Op::v_cvt_scalef32_sr_pk32_##small##_bf16, OpClass::valu, encode_32<Small, Bf16, true>);                 \
  t.special(Op::v_cvt_scalef32_pk32_f32_##small, OpClass::valu, decode_32<Small, F32>);                              \
  t.special(Op::v_cvt_scalef32_pk32_f16_##small, OpClass::valu, decode_32<Small, F16>);                              \
  t.special(Op::v_cvt_scalef32_pk32_bf16_##small, OpClass::valu, decode_32<Small, Bf16>)

void register_scaled(OpTable& t) {
  EIGHT_BIT_SCALED(fp8, Fp8);
  EIGHT_BIT_SCALED(bf8, Bf8);
  SIX_BIT_SCALED(fp6, Fp6);
  SIX_BIT_SCALED(bf6, Bf6);
  t.special(Op::v_cvt_scalef32_pk_fp4_f32, OpClass::valu, encode_fp4_pair_f32);
  t.special(Op::v_cvt_scalef32_pk_fp4_f16, OpClass::valu, encode_fp4_pair<F16>);
  t.special(Op::v_cvt_scalef32_pk_fp4_bf16, OpClass::valu, encode_fp4_pair<Bf16>);
  t.special(Op::v_cvt_scalef32_sr_pk_fp4_f32, OpClass::valu, stochastic_fp4_pair<F32>);
  t.special(Op::v_cvt_scalef32_sr_pk_fp4_f16, OpClass::valu, stochastic_fp4_pair<F16>);
  t.special(Op::v_cvt_scalef32_sr_pk_fp4_bf16, OpClass::valu, stochastic_fp4_pair<Bf16>);
  t.special(Op::v_cvt_scalef32_pk_f32_fp4, OpClass::valu, decode_fp4_pair<F32>);
  t.special(Op::v_cvt_scalef32_pk_f16_fp4, OpClass::valu, decode_fp4_pair<F16>);
  t.special(Op::v_cvt_scalef32_pk_bf16_fp4, OpClass::valu, decode_fp4_pair<Bf16>);
}

}  // namespace

void register_convert(OpTable& table) {
  register_unscaled(table);
  register_scaled(table);
}

}  // namespace hfemu
