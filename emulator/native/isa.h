// The instruction table: one Row per mnemonic, indexed by Op. Decoder and disassembler read nothing else.
#pragma once

#include <cstdint>

#include "inst.h"

namespace hfemu::isa {

enum class Encoding : uint8_t {
  none, SOP1, SOP2, SOPK, SOPC, SOPP, SMEM, VOP1, VOP2, VOPC, VOP3, VOP3P, MAI, DS, FLAT, GLOBAL, SCRATCH, MUBUF
};

// Registers an operand covers and how constants are widened for it. isa_*.inc use these names.
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

enum Flag : uint64_t {
  gfx942_only = 1ull << 0,
  gfx950_only = 1ull << 1,
  // vector ALU
  e32_only = 1ull << 2,       // no VOP3 encoding, no suffix in the mnemonic
  reads_dst = 1ull << 3,      // the old destination is src[2]
  carry_out = 1ull << 4,      // second destination: VCC, or an SGPR pair in VOP3
  carry_in = 1ull << 5,       // src[2] is VCC, or an SGPR pair in VOP3
  literal_mul = 1ull << 6,    // the trailing dword is src[1] (fmamk) or the only source (s_setreg_imm32)
  literal_add = 1ull << 7,    // fmaak: the trailing dword is src[2]
  sgpr_dst = 1ull << 8,       // v_readlane, v_readfirstlane
  accvgpr_src = 1ull << 9,    // src[0] is an AccVGPR
  accvgpr_dst = 1ull << 10,
  op_sel = 1ull << 11,        // VOP3 with op_sel bits
  dst_byte = 1ull << 12,      // op_sel[2] and [3] choose the destination byte though there are two sources
  fetch_control = 1ull << 13,  // VOP3's op_sel bits are fetch_inactive and bound_ctrl
  bitop = 1ull << 14,         // the modifier bits hold a truth table
  mix = 1ull << 15,           // fma_mix: neg_hi means abs, op_sel_hi selects f16 over f32
  no_op_sel = 1ull << 16,     // VOP3P without op_sel (dot4, dot8)
  no_dst_sel = 1ull << 17,    // SDWA without a destination selector (fp8 to f32)
  sparse = 1ull << 18,        // smfmac: src[2] is the index
  f8f6f4 = 1ull << 19,        // A and B sizes follow cbsz and blgp
  scaled_prefix = 1ull << 20,  // the 16-byte form; the opcode is that of its second half
  // SOPK and SOPP: what the immediate is
  imm_none = 1ull << 21,
  imm_branch = 1ull << 22,
  imm_hwreg = 1ull << 23,
  imm_waitcnt = 1ull << 24,
  imm_message = 1ull << 25,
  imm_gpr_idx = 1ull << 26,
  imm_optional = 1ull << 27,  // printed only if not zero
  imm_hex = 1ull << 28,
  // memory
  atomic = 1ull << 29,        // returns the old value into dst if sc0
  two_offsets = 1ull << 30,   // DS read2/write2
  to_lds = 1ull << 31,        // the loaded data goes to LDS
  buffer = 1ull << 32,        // SMEM with a buffer resource as base
  gws = 1ull << 33,           // global wave sync, always printed with gds
};

struct Row {
  Op op = Op::invalid;
  Encoding encoding = Encoding::none;
  uint16_t opcode = 0;
  Type dst, src[3];  // memory: dst, vaddr or sbase, vdata, vdata2
  uint64_t flags = 0;
  const char* name = "";

  constexpr bool has(uint64_t f) const { return (flags & f) != 0; }
};

const Row& row(Op op);

// The row of `opcode` in `encoding` on `arch`, or null.
const Row* find(Encoding encoding, unsigned opcode, Arch arch);

}  // namespace hfemu::isa
