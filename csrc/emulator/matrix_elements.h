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

template <int kExponentBits, int kMantissaBits, int kBias, Specials kSpecials>
inline void decode_codes(const uint32_t* __restrict codes, double* __restrict out) {
  for (int lane = 0; lane < kMatrixLanes; ++lane)
    out[lane] = decode_small<kExponentBits, kMantissaBits, kBias, kSpecials>(codes[lane]);
}

inline void decode_f32(const uint32_t* __restrict codes, double* __restrict out) {
  for (int lane = 0; lane < kMatrixLanes; ++lane) out[lane] = bits_to_float(codes[lane]);
}

// xf32 keeps ten mantissa bits of an f32. Rounding to nearest even is an assumption: the ISA documents do not say.
inline void decode_xf32(const uint32_t* __restrict codes, double* __restrict out) {
  for (int lane = 0; lane < kMatrixLanes; ++lane) {
    const uint32_t bits = codes[lane];
    const bool finite = (bits & 0x7F800000u) != 0x7F800000u;
    const uint32_t rounded = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
    out[lane] = bits_to_float(finite ? rounded : bits);
  }
}

inline void decode_bf16(const uint32_t* __restrict codes, double* __restrict out) {
  for (int lane = 0; lane < kMatrixLanes; ++lane) out[lane] = bits_to_float(codes[lane] << 16);
}

inline void decode_i8(const uint32_t* __restrict codes, double* __restrict out) {
  for (int lane = 0; lane < kMatrixLanes; ++lane) out[lane] = static_cast<int8_t>(codes[lane]);
}

using DecodeFn = void (*)(const uint32_t* __restrict codes, double* __restrict out);

inline DecodeFn decoder_of(Element e, bool fnuz) {
  switch (e) {
    case Element::f32: return decode_f32;
    case Element::xf32: return decode_xf32;
    case Element::f16: return decode_codes<5, 10, 15, Specials::ieee>;
    case Element::bf16: return decode_bf16;
    case Element::i8: return decode_i8;
    case Element::fp8: return fnuz ? decode_codes<4, 3, 8, Specials::fnuz> : decode_codes<4, 3, 7, Specials::fn>;
    case Element::bf8: return fnuz ? decode_codes<5, 2, 16, Specials::fnuz> : decode_codes<5, 2, 15, Specials::ieee>;
    case Element::fp6: return decode_codes<2, 3, 1, Specials::finite>;
    case Element::bf6: return decode_codes<3, 2, 3, Specials::finite>;
    case Element::fp4: return decode_codes<2, 1, 1, Specials::finite>;
    default: return nullptr;
  }
}

// One item of all lanes as doubles. f64 items are register pairs and need no code of their own.
inline void load_item(const Row* regs, Element e, DecodeFn decoder, int item, double* __restrict out) {
  if (e == Element::f64) {
    const uint32_t* low = regs[2 * item];
    const uint32_t* high = regs[2 * item + 1];
    for (int lane = 0; lane < kMatrixLanes; ++lane)
      out[lane] = bits_to_double(static_cast<uint64_t>(high[lane]) << 32 | low[lane]);
    return;
  }
  alignas(64) uint32_t codes[kMatrixLanes];
  extract_codes(regs, element_bits(e), item, codes);
  decoder(codes, out);
}

}  // namespace hfemu
