// One decoded CDNA instruction. The decoder fills it, the disassembler prints it, the executor runs it.
#pragma once

#include <cstdint>

namespace hfemu {

enum class Arch : uint8_t { gfx942, gfx950 };

constexpr uint32_t kVcc = 106, kM0 = 124, kExec = 126;  // scalar operands: the low halves of vcc and exec, and m0

enum class Format : uint8_t {
  SOP1, SOP2, SOPK, SOPC, SOPP, SMEM,
  VOP1, VOP2, VOPC, VOP3, VOP3P, MAI,  // VOP3 covers the carry-out (sdst) form; MAI is MFMA/SMFMAC/accvgpr
  DS, FLAT, GLOBAL, SCRATCH, MUBUF,
};

// One enumerator per mnemonic without its _e32/_e64/_sdwa/_dpp suffix; rows live in isa.inc.
enum class Op : uint16_t {
  invalid = 0,
#define HFEMU_OP(name, ...) name,
#include "isa_ops.inc"
#undef HFEMU_OP
  count
};

// How an inline constant (integers -16..64, +-0.5..4, 1/(2 pi)) or literal is widened for an operand.
enum class ConstType : uint8_t { i32, f32, i64, f64, i16, f16, bf16, pk_i16, pk_f16, pk_bf16, pk_f32, none };

enum class OperandKind : uint8_t { none, sgpr, vgpr, agpr, imm, special };

enum class Special : uint16_t {
  shared_base, shared_limit, private_base, private_limit, pops_exiting, vccz, execz, scc, lds_direct, null_
};

// SDWA byte/word selectors, also used for plain "whole dword".
enum class Select : uint8_t { byte0, byte1, byte2, byte3, word0, word1, dword };

struct Operand {
  OperandKind kind = OperandKind::none;
  uint8_t dwords = 1;       // registers covered
  ConstType type = ConstType::i32;
  bool neg = false;         // VOP3/SDWA/DPP source modifiers; VOP3P: neg_lo
  bool neg_hi = false;      // VOP3P only
  bool abs = false;
  bool op_sel = false;      // VOP3 f16/VOP3P low half: take the high 16 bits (or the high register, for packed f32)
  bool op_sel_hi = false;   // VOP3P high half
  Select select = Select::dword;  // SDWA source
  bool sext = false;              // SDWA source
  uint16_t reg = 0;         // sgpr 0..127 (vcc 106, m0 124, exec 126), vgpr/agpr 0..255, or a Special
  // Value widened for `type`. 16-bit and 32-bit types use the low bits. Packed 16-bit types hold the 32-bit register
  // value from which op_sel/op_sel_hi pick halves, as the hardware forms it: integers sign-extended to 32 bits, f16 and
  // bf16 in the low half above zero, f32 for floating-point constants of pk_i16. pk_f32 has the value in both halves.
  uint64_t imm = 0;
  bool literal = false;     // from the instruction stream, not an inline constant (only the disassembler cares)
};

enum class DstUnused : uint8_t { pad, sext, preserve };

struct Inst {
  Op op = Op::invalid;
  Format format = Format::SOPP;
  uint8_t bytes = 4;        // encoded size: 4, 8, 12 or 16
  uint64_t pc = 0;          // address relative to the code object's load base

  Operand dst;              // vdst/sdst/vdata of loads; none for stores
  Operand dst2;             // carry/sdst of VOP3 and VOP2 carry forms, VOPC destination is `dst`
  // src0..src2; VOP2 carry-in and v_cndmask's mask are explicit as src[2], and so is the old destination of v_fmac,
  // v_mac, v_dot*c and v_pk_fmac. Implicit stay: SCC, EXEC, VCC of v_div_fmas, the old destination of s_cmov, s_bitset,
  // s_addk, s_mulk, v_writelane, v_swap, v_permlane*_swap, of smfmac, of DPP, d16 and op_sel writes. s_cmpk has its
  // register in src[0]. fmaak and fmamk are src[0] * src[1] + src[2]. Where op_sel[2] belongs to the destination (the
  // fp8 and fp4 conversions: byte = src[2].op_sel + 2 * dst_op_sel), it is src[2].op_sel although num_src is 2.
  Operand src[4];
  uint8_t num_src = 0;

  // output modifiers
  bool clamp = false;
  uint8_t omod = 0;         // 0 none, 1 *2, 2 *4, 3 /2
  bool dst_op_sel = false;  // VOP3 f16: write the high half
  uint8_t bitop3 = 0;       // truth table of v_bitop3

  // SDWA and DPP
  bool sdwa = false;
  Select dst_select = Select::dword;
  DstUnused dst_unused = DstUnused::pad;
  bool dpp = false;
  uint16_t dpp_ctrl = 0;
  uint8_t row_mask = 15, bank_mask = 15;
  bool bound_ctrl = false;  // true: an invalid source lane reads 0
  bool fetch_inactive = false;  // v_permlane*_swap in VOP3 only

  // memory: src[] are unused, operands are named
  Operand vaddr, saddr, vdata, srsrc, soffset;  // DS: vaddr, vdata (data0), vdata2 (data1)
  Operand vdata2;
  int64_t offset = 0;       // immediate offset (DS read2/write2: offset0)
  int32_t offset1 = 0;      // DS read2/write2
  bool offen = false, idxen = false, lds = false;
  bool sc0 = false, sc1 = false, nt = false;  // sc0 on an atomic: return the old value
  bool gds = false;

  // MAI
  uint8_t cbsz = 0, abid = 0, blgp = 0;
  bool scaled = false;      // the 16-byte form with e8m0 scale operands
  Operand scale_a, scale_b;
  uint8_t scale_sel_a = 0, scale_sel_b = 0;  // byte of the scale register

  int32_t simm = 0;         // SOPK/SOPP immediate, sign-extended; s_waitcnt raw; branch target in dwords
};

}  // namespace hfemu
