// The instruction table: one Row per mnemonic, indexed by Op. Decoder and disassembler read nothing else.
#pragma once

#include <cstdint>

#include "inst.h"

namespace hfemu::isa {

enum class Encoding : uint8_t {
  none, SOP1, SOP2, SOPK, SOPC, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3P, MAI, DS, FLAT, GLOBAL, SCRATCH, MUBUF
};

// Registers an operand covers and how constants are widened for it. The names are the vocabulary of isa_*.inc.
struct Type {
  uint8_t dwords = 0;
  ConstType constant = ConstType::none;
  bool sign_extend = false;  // 64-bit signed integers: a 32-bit literal is sign-extended, else zero-extended
};

constexpr Type none{};
constexpr Type b32{1, ConstType::i32}, f32{1, ConstType::f32};
constexpr Type b64{2, ConstType::i64}, i64{2, ConstType::i64, true}, f64{2, ConstType::f64};
constexpr Type b16{1, ConstType::i16}, f16{1, ConstType::f16}, bf16{1, ConstType::bf16};
constexpr Type pk_b16{1, ConstType::pk_i16}, pk_f16{1, ConstType::pk_f16}, pk_bf16{1, ConstType::pk_bf16};
constexpr Type pk_f32{2, ConstType::pk_f32};
// Wide operands; a constant (the C operand of an MFMA) is one element, the same in every register.
constexpr Type b96{3, ConstType::i32}, b128{4, ConstType::i32}, b192{6, ConstType::i32}, b256{8, ConstType::i32};
constexpr Type b512{16, ConstType::i32}, b1024{32, ConstType::i32};
constexpr Type f32x4{4, ConstType::f32}, f32x16{16, ConstType::f32}, f32x32{32, ConstType::f32};
constexpr Type f64x4{8, ConstType::f64};

enum Flag : uint32_t {
  gfx942_only = 1u << 0,
  gfx950_only = 1u << 1,
  // vector ALU
  e32_only = 1u << 2,       // no VOP3 encoding, no suffix in the mnemonic
  reads_dst = 1u << 3,      // the old destination is src[2]
  carry_out = 1u << 4,      // second destination: VCC, or an SGPR pair in VOP3
  carry_in = 1u << 5,       // src[2] is VCC, or an SGPR pair in VOP3
  literal_mul = 1u << 6,    // fmamk: the trailing dword is src[1]
  literal_add = 1u << 7,    // fmaak: the trailing dword is src[2]
  sgpr_dst = 1u << 8,       // v_readlane, v_readfirstlane
  accvgpr_src = 1u << 9,    // src[0] is an AccVGPR
  accvgpr_dst = 1u << 10,
  op_sel = 1u << 11,        // VOP3 with op_sel bits
  bitop = 1u << 12,         // the modifier bits hold a truth table
  mix = 1u << 13,           // fma_mix: neg_hi means abs, op_sel_hi selects f16 over f32
  no_op_sel = 1u << 14,     // VOP3P without op_sel (dot4, dot8)
  is_class = 1u << 15,      // v_cmp_class: f32/f64/f16 tests without clamp
  sparse = 1u << 16,        // smfmac: src[2] is the index
  f8f6f4 = 1u << 17,        // A and B sizes follow cbsz and blgp
  scaled_prefix = 1u << 18,  // the 16-byte form, opcode of its second half
  // SOPK and SOPP: what the immediate is
  imm_none = 1u << 19,
  imm_branch = 1u << 20,
  imm_hwreg = 1u << 21,
  imm_waitcnt = 1u << 22,
  imm_message = 1u << 23,
  imm_gpr_idx = 1u << 24,
  imm_optional = 1u << 25,  // printed only if not zero
  imm_hex = 1u << 26,
  // memory
  atomic = 1u << 27,        // returns the old value into dst if sc0
  store = 1u << 28,
  two_offsets = 1u << 29,   // DS read2/write2
  to_lds = 1u << 30,        // the loaded data goes to LDS
  buffer = 1u << 31,        // SMEM with a buffer resource as base
};

struct Row {
  Op op = Op::invalid;
  Encoding encoding = Encoding::none;
  uint16_t opcode = 0;
  Type dst, src[3];  // memory: dst, vaddr or sbase, vdata, vdata2
  uint32_t flags = 0;
  const char* name = "";

  constexpr bool has(uint32_t f) const { return (flags & f) != 0; }
};

const Row& row(Op op);

// The row of `opcode` in `encoding` on `arch`, or null.
const Row* find(Encoding encoding, unsigned opcode, Arch arch);

}  // namespace hfemu::isa
