// Operand elements of the matrix instructions: from 64 lanes of packed registers to 64 doubles per item.
//
// Every element value is exact in double; so is every product of two elements of at most 32 bits.
#pragma once

#include <cstdint>

#include "formats.h"
#include "matrix.h"

namespace hfemu {

enum class Element : uint8_t { f64, f32, xf32, f16, bf16, i8, fp8, bf8, fp6, bf6, fp4, f8f6f4, i32 };

constexpr int element_bits(Element e) {
  switch (e) {
    case Element::f64: return 64;
    case Element::f32:
    case Element::xf32:
    case Element::i32: return 32;
    case Element::f16:
    case Element::bf16: return 16;
    case Element::fp6:
    case Element::bf6: return 6;
    case Element::fp4: return 4;
    default: return 8;
  }
}

// The element that a CBSZ or BLGP value names in an f8f6f4 instruction; f8f6f4 itself for the reserved values.
constexpr Element element_of_format(uint8_t code) {
  constexpr Element names[] = {Element::fp8, Element::bf8, Element::fp6, Element::bf6, Element::fp4};
  return code < 5 ? names[code] : Element::f8f6f4;
}

inline constexpr int kMatrixLanes = 64;

// k of item `j` of lane group `g`. A lane that holds more than 16 bytes of 8- or 16-bit items holds them as 16-byte
// chunks, and each chunk's groups are interleaved; everything else is contiguous per lane.
constexpr int k_of_item(int bits, int items_per_lane, int groups, int g, int j) {
  const int chunk = bits >= 8 && items_per_lane * bits > 128 ? 128 / bits : items_per_lane;
  return chunk * g + j % chunk + chunk * groups * (j / chunk);
}

// Item `item` of every lane, where items of `bits` are packed little-endian over consecutive registers.
inline void extract_codes(const Row* regs, int bits, int item, uint32_t* __restrict codes) {
  const int first = item * bits, reg = first / 32, shift = first % 32;
  const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
  const uint32_t* low = regs[reg];
  if (shift + bits <= 32) {
    for (int lane = 0; lane < kMatrixLanes; ++lane) codes[lane] = low[lane] >> shift & mask;
  } else {  // only 6-bit items cross a register boundary
    const uint32_t* high = regs[reg + 1];
    for (int lane = 0; lane < kMatrixLanes; ++lane)
      codes[lane] = (low[lane] >> shift | high[lane] << (32 - shift)) & mask;
  }
}

// One element type: its value from its code.
template <int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
struct SmallFloat {
  static double value(uint32_t code) { return decode_small<kExponentBits, kMantissaBits, kBias, kSpecials>(code); }
};
struct SingleFloat {
  static double value(uint32_t code) { return bits_to_float(code); }
};
struct FlushedSingle {
  static double value(uint32_t code) { return bits_to_float(code & 0x7F800000u ? code : code & 0x80000000u); }
};
struct BrainFloat {
  static double value(uint32_t code) { return bits_to_float(code << 16); }
};
struct SignedByte {
  static double value(uint32_t code) { return static_cast<int8_t>(code); }
};
// xf32 keeps ten mantissa bits of an f32. Rounding to nearest even is an assumption: the ISA documents do not say.
struct ReducedFloat {
  static double value(uint32_t code) {
    const bool finite = (code & 0x7F800000u) != 0x7F800000u;
    const uint32_t rounded = (code + 0xFFF + (code >> 13 & 1)) & ~0x1FFFu;
    return bits_to_float(finite ? rounded : code);
  }
};

// Decodes one item of all lanes: `edge` lanes at a time go to out, out + stride, out + 2 * stride, ...
using DecodeFn = void (*)(const uint32_t* __restrict codes, double* __restrict out, int stride);

template <class E, int kEdge>
void decode_item(const uint32_t* __restrict codes, double* __restrict out, int stride) {
  for (int group = 0; group < kMatrixLanes / kEdge; ++group)
    for (int i = 0; i < kEdge; ++i) out[group * stride + i] = E::value(codes[group * kEdge + i]);
}

template <class E>
DecodeFn decoder_for_edge(int edge) {
  return edge == 32 ? decode_item<E, 32> : edge == 16 ? decode_item<E, 16> : decode_item<E, 4>;
}

inline DecodeFn decoder_of(Element e, bool fnuz, bool flush_f32, int edge) {
  switch (e) {
    case Element::f32: return flush_f32 ? decoder_for_edge<FlushedSingle>(edge) : decoder_for_edge<SingleFloat>(edge);
    case Element::xf32: return decoder_for_edge<ReducedFloat>(edge);
    case Element::f16: return decoder_for_edge<SmallFloat<5, 10, 15, Specials::ieee>>(edge);
    case Element::bf16: return decoder_for_edge<BrainFloat>(edge);
    case Element::i8: return decoder_for_edge<SignedByte>(edge);
    case Element::fp8:
      return fnuz ? decoder_for_edge<SmallFloat<4, 3, 8, Specials::fnuz>>(edge)
                  : decoder_for_edge<SmallFloat<4, 3, 7, Specials::fn>>(edge);
    case Element::bf8:
      return fnuz ? decoder_for_edge<SmallFloat<5, 2, 16, Specials::fnuz>>(edge)
                  : decoder_for_edge<SmallFloat<5, 2, 15, Specials::ieee>>(edge);
    case Element::fp6: return decoder_for_edge<SmallFloat<2, 3, 1, Specials::finite>>(edge);
    case Element::bf6: return decoder_for_edge<SmallFloat<3, 2, 3, Specials::finite>>(edge);
    case Element::fp4: return decoder_for_edge<SmallFloat<2, 1, 1, Specials::finite>>(edge);
    default: return nullptr;
  }
}

}  // namespace hfemu
