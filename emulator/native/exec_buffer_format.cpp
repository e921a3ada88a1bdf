// buffer_load_format_* and buffer_store_format_*: elements of the descriptor's data format, as 32-bit or d16 components.
//
// Facts (CDNA3 and CDNA4 ISA, "Buffer Resource" and "Range checking"): word 3 has DST_SEL x, y, z, w in bits 0, 3, 6, 9,
// the number format in bits 14:12 and the data format in bits 18:15. DST_SEL picks a component or a constant 0 or 1 for
// each loaded register. An element is in range as a whole or not at all; a load outside gives zeros, but ones where
// DST_SEL says 1. Elements are aligned to their size, at most to a dword.
// What the documents leave open faults: formats that no table has, integers that their field cannot hold, stores of
// fewer components than the format has or through a DST_SEL that reorders. f16 results round to nearest (assumed).
#include <cmath>

#include "buffer.h"
#include "exec.h"
#include "formats.h"

namespace hfemu {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;

enum class Number : uint8_t { unorm = 0, snorm = 1, uscaled = 2, sscaled = 3, uint = 4, sint = 5, floating = 7 };

// Components from the low bits up.
struct DataFormat {
  uint8_t components = 0;
  uint8_t bits[4] = {};
  constexpr u32 bytes() const { return (bits[0] + bits[1] + bits[2] + bits[3]) / 8u; }
};
constexpr DataFormat kDataFormats[] = {
    {}, {1, {8}}, {1, {16}}, {2, {8, 8}}, {1, {32}}, {2, {16, 16}}, {3, {11, 11, 10}}, {3, {10, 11, 11}},
    {4, {2, 10, 10, 10}}, {4, {10, 10, 10, 2}}, {4, {8, 8, 8, 8}}, {2, {32, 32}}, {4, {16, 16, 16, 16}},
    {3, {32, 32, 32}}, {4, {32, 32, 32, 32}}, {},
};
constexpr FloatFormat kSmall11{5, 6, 15, Specials::ieee}, kSmall10{5, 5, 15, Specials::ieee};

struct Typed {
  DataFormat data;
  Number number;
  u32 select[4];
  bool integer() const { return number == Number::uint || number == Number::sint; }
};

Typed typed_format(const Wave& w, const ExecInst& in) {
  const u32 word = w.s[in.sbase + 3], data = word >> 15 & 15, number = word >> 12 & 7;
  Typed f{kDataFormats[data], static_cast<Number>(number), {word & 7, word >> 3 & 7, word >> 6 & 7, word >> 9 & 7}};
  const u32 widest = f.data.bits[0] > f.data.bits[1] ? f.data.bits[0] : f.data.bits[1];
  const bool small_float = widest == 10 || widest == 11;
  const bool known = number == 7 ? widest >= 16 || (small_float && f.data.components == 3)
                                 : number != 6 && (widest < 32 || f.integer()) && f.data.components != 3;
  if (f.data.components == 0 || !(known || (widest == 32 && f.integer())))
    unsupported(w, in, format("a buffer descriptor with data format %u and number format %u", data, number));
  for (const u32 s : f.select)
    if (s == 2 || s == 3) unsupported(w, in, format("a buffer descriptor with DST_SEL %u", s));
  return f;
}

u64 field_mask(u32 bits) { return (u64{1} << bits) - 1; }
int64_t signed_field(u64 x, u32 bits) { return static_cast<int64_t>(x << (64 - bits)) >> (64 - bits); }

// One component as its register: an f32, or the integer itself.
u32 component_in(const Typed& f, u64 raw, u32 bits) {
  const double top = static_cast<double>(field_mask(bits)), half = static_cast<double>(field_mask(bits - 1));
  const auto single = [](double x) { return float_to_bits(static_cast<float>(x)); };
  switch (f.number) {
    case Number::unorm: return single(static_cast<double>(raw) / top);
    case Number::snorm: return single(std::fmax(static_cast<double>(signed_field(raw, bits)) / half, -1.0));
    case Number::uscaled: return single(static_cast<double>(raw));
    case Number::sscaled: return single(static_cast<double>(signed_field(raw, bits)));
    case Number::uint: return static_cast<u32>(raw);
    case Number::sint: return static_cast<u32>(signed_field(raw, bits));
    case Number::floating: break;
  }
  if (bits == 32) return static_cast<u32>(raw);
  return single(decode(bits == 16 ? f16_format : bits == 11 ? kSmall11 : kSmall10, static_cast<u32>(raw)));
}

u64 component_out(const Wave& w, const ExecInst& in, const Typed& f, u32 x, u32 bits, int lane) {
  const double value = bits_to_float(x), top = static_cast<double>(field_mask(bits)), half = static_cast<double>(field_mask(bits - 1));
  const auto nearest = [&](double y, double low, double high) {
    return static_cast<u64>(static_cast<int64_t>(std::nearbyint(y != y ? 0.0 : std::fmin(std::fmax(y, low), high)))) & field_mask(bits);
  };
  switch (f.number) {
    case Number::unorm: return nearest(value * top, 0, top);
    case Number::snorm: return nearest(value * half, -half, half);
    case Number::uscaled: return nearest(std::trunc(value), 0, top);
    case Number::sscaled: return nearest(std::trunc(value), -half - 1, half);
    case Number::uint:
    case Number::sint: {
      const bool fits = f.number == Number::uint ? (x & ~field_mask(bits)) == 0
                                                 : signed_field(x, bits) == static_cast<int32_t>(x);
      if (!fits)
        fault(w, in, FaultKind::unsupported, format("a typed store of 0x%x, which %u bits cannot hold", x, bits), lane);
      return x & field_mask(bits);
    }
    case Number::floating: break;
  }
  if (bits == 32) return x;
  return encode(bits == 16 ? f16_format : bits == 11 ? kSmall11 : kSmall10, bits == 16 ? value : std::fmax(value, 0.0));
}

// A register between its 32-bit and its d16 form.
u32 narrow(const Wave& w, const ExecInst& in, const Typed& f, u32 x, int lane) {
  if (!f.integer()) return float_to_half(bits_to_float(x));
  const bool fits = f.number == Number::uint ? x >> 16 == 0 : static_cast<int16_t>(x) == static_cast<int32_t>(x);
  if (!fits) fault(w, in, FaultKind::unsupported, format("a d16 load of 0x%x, which 16 bits cannot hold", x), lane);
  return x & 0xFFFF;
}
u32 widen(const Typed& f, u32 half) {
  if (!f.integer()) return float_to_bits(half_to_float(static_cast<uint16_t>(half)));
  return f.number == Number::uint ? half : static_cast<u32>(static_cast<int16_t>(half));
}

enum class Packing : uint8_t { dwords, d16, d16_hi };

u64 typed_addresses(Wave& w, const ExecInst& in, const Typed& f, u64 exec, Access access, LaneAddresses& a) {
  if (in.inst->lds) unsupported(w, in, "a typed load to LDS");
  const BufferDescriptor d = buffer_descriptor(w, in);
  u32 partial[kLanes];
  const u64 valid = buffer_addresses(w, in, d, exec, f.data.bytes(), a, partial);
  const u32 unit = f.data.bytes() < 4 ? f.data.bytes() : 4;
  for (u64 left = valid; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (a.at[l] % unit)
      fault(w, in, FaultKind::memory, format("misaligned typed access: address 0x%llx is not a multiple of %u",
                                             static_cast<unsigned long long>(a.at[l]), unit), l);
  }
  if (valid) check_global(w, in, a, valid, f.data.bytes(), access);
  return valid;
}

template <int components, Packing packing>
void load_format(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  const Typed f = typed_format(w, in);
  LaneAddresses a;
  const u64 valid = typed_addresses(w, in, f, exec, Access::load, a);
  const u32 one = f.integer() ? 1u : float_to_bits(1.0f);
  for (u64 left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    u32 read[4] = {0, 0, 0, (valid >> l & 1) ? one : 0};
    if (valid >> l & 1) {
      uint8_t bytes[16] = {};
      std::memcpy(bytes, reinterpret_cast<const void*>(a.at[l]), f.data.bytes());
      u32 at = 0;
      for (int i = 0; i < f.data.components; at += f.data.bits[i++]) {
        u32 word;
        std::memcpy(&word, bytes + at / 32 * 4, 4);
        read[i] = component_in(f, word >> at % 32 & field_mask(f.data.bits[i]), f.data.bits[i]);
      }
    }
    for (int i = 0; i < components; ++i) {
      const u32 x = f.select[i] >= 4 ? read[f.select[i] - 4] : f.select[i] ? one : 0;
      if (packing == Packing::dwords) {
        w.v[in.dst + i][l] = x;
        continue;
      }
      const int shift = packing == Packing::d16_hi || i % 2 ? 16 : 0;
      u32& to = w.v[in.dst + i / 2][l];
      to = (to & (shift ? 0xFFFF : 0xFFFF0000)) | narrow(w, in, f, x, l) << shift;
    }
  }
}

template <int components, Packing packing>
void store_format(Wave& w, const ExecInst& in) {
  const u64 exec = w.exec();
  if (exec == 0) return;
  const Typed f = typed_format(w, in);
  if (components < f.data.components)
    unsupported(w, in, format("storing %d of the %d components of a data format", components, f.data.components));
  for (u32 i = 0; i < f.data.components; ++i)
    if (f.select[i] != 4 + i) unsupported(w, in, format("a store through DST_SEL %u for component %u", f.select[i], i));
  LaneAddresses a;
  const u64 valid = typed_addresses(w, in, f, exec, Access::store, a);
  for (u64 left = valid; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    u32 words[4] = {};
    u32 at = 0;
    for (int i = 0; i < f.data.components; at += f.data.bits[i++]) {
      const u32 row = packing == Packing::dwords ? w.v[in.data + i][l] : w.v[in.data + i / 2][l];
      const u32 x = packing == Packing::dwords ? row
                                               : widen(f, packing == Packing::d16_hi || i % 2 ? row >> 16 : row & 0xFFFF);
      words[at / 32] |= static_cast<u32>(component_out(w, in, f, x, f.data.bits[i], l)) << at % 32;
    }
    std::memcpy(reinterpret_cast<void*>(a.at[l]), words, f.data.bytes());
  }
}

#define TYPED(suffix, components, packing)                                                                       \
  t.special(Op::buffer_load_format_##suffix, OpClass::vmem_load, &load_format<components, Packing::packing>);    \
  t.special(Op::buffer_store_format_##suffix, OpClass::vmem_store, &store_format<components, Packing::packing>)

}  // namespace

void register_buffer_format(OpTable& t) {
  TYPED(x, 1, dwords);
  TYPED(xy, 2, dwords);
  TYPED(xyz, 3, dwords);
  TYPED(xyzw, 4, dwords);
  TYPED(d16_x, 1, d16);
  TYPED(d16_xy, 2, d16);
  TYPED(d16_xyz, 3, d16);
  TYPED(d16_xyzw, 4, d16);
  TYPED(d16_hi_x, 1, d16_hi);
}

}  // namespace hfemu
