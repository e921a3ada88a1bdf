// The decoder's inside: one object per instruction. Its methods follow the encodings: operands and the scalar formats in
// decode.cpp, the vector and matrix formats in decode_vector.cpp, the memory formats in decode_memory.cpp.
#pragma once

#include "decode.h"
#include "isa.h"

namespace hfemu {

constexpr unsigned kSdwa = 249, kDpp = 250, kLiteral = 255, kVgpr = 256;
constexpr unsigned kScaledPrefix = 0xD3AC;

constexpr uint32_t bits(uint32_t word, unsigned high, unsigned low) {
  return (word >> low) & ((1ull << (high - low + 1)) - 1);
}
constexpr bool bit(uint32_t word, unsigned n) { return ((word >> n) & 1) != 0; }
constexpr int32_t sign_extend(uint32_t value, unsigned width) {
  uint32_t sign = 1u << (width - 1);
  return static_cast<int32_t>((value ^ sign) - sign);
}

class Decoder {
 public:
  Decoder(const uint8_t* code, size_t avail, Arch arch, Inst& out)
      : code_(code), avail_(avail), arch_(arch), inst_(out) {}
  // False: not an instruction. The result is in the Inst that the constructor was given.
  bool run();

 private:
  using Encoding = isa::Encoding;
  using Row = isa::Row;
  using Type = isa::Type;

  bool word(unsigned index, uint32_t& out) const;
  bool select(Encoding encoding, Format format, unsigned opcode);
  bool source(unsigned field, const Type& type, Operand& out);
  bool special(unsigned field, const Type& type, Operand& out) const;
  bool literal(const Type& type, Operand& out);
  static Operand sgpr(unsigned reg, const Type& type);
  static Operand vgpr(unsigned reg, const Type& type, bool acc = false);
  bool add_source(unsigned field, const Type& type);
  void add_source(const Operand& o);

  bool sop1();
  bool sop2();
  bool sopc();
  bool sopk();
  bool sopp();

  bool vop1();
  bool vop2();
  bool vopc();
  void vector_destination(unsigned reg);
  void implicit_operands();
  bool first_source();
  bool has_second_source() const;
  bool sdwa();
  bool sdwa_source(unsigned field, const Type& type, unsigned selected, unsigned modifiers);
  static bool dpp_control_exists(unsigned c, bool wide);
  bool dpp();
  bool vop3();
  bool vop3p();
  bool scaled_mfma();
  static Type f8f6f4_type(unsigned format);
  bool mai();

  bool smem();
  bool ds();
  bool flat();
  bool mubuf();

  const uint8_t* code_;
  size_t avail_;
  Arch arch_;
  Inst& inst_;
  const Row* row_ = nullptr;
  uint32_t w0_ = 0, w1_ = 0;
  uint32_t literal_ = 0;
  unsigned second_source_field_ = 0;
  bool has_literal_ = false;
  bool extended_ = false;  // SDWA or DPP
};

}  // namespace hfemu
