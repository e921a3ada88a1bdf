// Matrix instructions as pure functions over register rows: no wave state, no decoding.
//
// MODE (CDNA3 ISA 7.3, CDNA4 ISA 7.4): rounding is always to nearest even; A and B of f32 obey FP_DENORM's single
// input bit; xf32, narrower and f64 operands, C and D keep their denormals. FP16_OVFL makes a finite f32 or i32 sum
// that overflows the largest value of its sign instead of an infinity or its low bits, except in the f8f6f4
// instructions; for the sparse instructions this is an assumption. There is no clamp bit.
#pragma once

#include <cstdint>

#include "inst.h"

namespace hfemu {

// Rows are registers, columns are lanes. `d` may overlap every operand: all are read before it is written.
using Row = uint32_t[64];

struct MatrixArgs {
  const Row* a = nullptr;
  const Row* b = nullptr;
  const Row* c = nullptr;
  Row* d = nullptr;
  uint8_t cbsz = 0, abid = 0, blgp = 0;
  // scaled form: one register each and the byte that holds the e8m0 scale; null when unscaled
  const Row* scale_a = nullptr;
  const Row* scale_b = nullptr;
  uint8_t scale_sel_a = 0, scale_sel_b = 0;
  const Row* index = nullptr;  // smfmac: sparse indices (src2); c is then d
  bool fnuz = false;           // 8-bit floats are e4m3fnuz/e5m2fnuz (gfx942)
  bool flush_f32 = false;      // MODE flushes f32 input denormals
  bool saturate = false;       // MODE.FP16_OVFL
};

using MatrixFn = void (*)(const MatrixArgs&);

// The function of an MFMA/SMFMAC mnemonic, or null if it is not implemented.
MatrixFn matrix_function(Op op);

// Null, or what is wrong with the modifiers of a matrix instruction: the ISA leaves a CBSZ beyond the blocks and an
// ABID beyond CBSZ's copies undefined, and defines no use of the fields for the operands that are refused here.
const char* matrix_modifier_fault(Op op, uint8_t cbsz, uint8_t abid, uint8_t blgp);

// Issue cycles (passes * 4) of one such instruction on `arch`, from the ISA documents; 0 if unknown.
int matrix_cycles(Op op, uint8_t cbsz, uint8_t blgp, Arch arch);

// Registers per lane of the A, B and C/D operands; a and b depend on the formats for f8f6f4. All zero for an unknown
// instruction and for a reserved format code.
struct MatrixShape { uint8_t m, n, k, blocks, a_regs, b_regs, cd_regs; bool sparse; };
MatrixShape matrix_shape(Op op, uint8_t cbsz, uint8_t blgp);

}  // namespace hfemu
