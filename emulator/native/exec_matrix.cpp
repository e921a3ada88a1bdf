// MFMA and SMFMAC on the register file: what a matrix function takes and gives.
#include "exec.h"
#include "formats.h"
#include "matrix.h"

namespace hfemu {
namespace {

// A source's registers: its own, or `buffer` filled with a constant. E8M0 bytes come from a register as they are; an
// inline constant stands for the exponent field of that float, in whichever byte the instruction selects.
const Row* rows_of(const Wave& w, const Source& s, Row* buffer, uint32_t count, bool is_scale = false) {
  if (s.kind == SourceKind::vgpr) return &w.v[s.reg];
  const uint64_t x = scalar_source(w, s);
  // A constant is one element, the same in every register; f64 elements take two.
  for (uint32_t i = 0; i < count; ++i)
    splat(buffer[i], is_scale ? scale_of_float(static_cast<uint32_t>(x)) * 0x01010101u
                              : static_cast<uint32_t>(s.dwords == 2 && i % 2 ? x >> 32 : x));
  return buffer;
}

void multiply(Wave& w, const ExecInst& in) {
  const Inst& inst = *in.inst;
  if (const char* wrong = matrix_modifier_fault(inst.op, inst.cbsz, inst.abid, inst.blgp)) unsupported(w, in, wrong);
  alignas(64) Row a[8], b[8], c[32], scale_a[1], scale_b[1];
  MatrixArgs args;
  args.a = rows_of(w, in.src[0], a, inst.src[0].dwords);
  args.b = rows_of(w, in.src[1], b, inst.src[1].dwords);
  args.d = &w.v[in.dst];
  args.cbsz = inst.cbsz;
  args.abid = inst.abid;
  args.blgp = inst.blgp;
  args.fnuz = w.mode.fnuz;
  args.flush_f32 = !(w.mode.denorm32 & 1);
  args.saturate = w.mode.fp16_ovfl;
  if (in.sparse) {
    args.index = rows_of(w, in.src[2], c, 1);
    args.c = args.d;
  } else {
    args.c = rows_of(w, in.src[2], c, in.dst_dwords);
  }
  if (inst.scaled) {
    args.scale_a = rows_of(w, in.scale_a, scale_a, 1, true);
    args.scale_b = rows_of(w, in.scale_b, scale_b, 1, true);
    args.scale_sel_a = inst.scale_sel_a;
    args.scale_sel_b = inst.scale_sel_b;
  }
  in.matrix(args);
}

void copy_register(Wave& w, const ExecInst& in) {
  RowBuffer x;
  merge_row(w.v[in.dst], source_row(w, in.src[0], x), w.exec());
}

}  // namespace

void register_matrix(OpTable& t) {
  // Every mnemonic the matrix functions know; the rest stay without a handler and fault.
  for (size_t i = 0; i < static_cast<size_t>(Op::count); ++i) {
    const Op op = static_cast<Op>(i);
    if (matrix_function(op) != nullptr) t.special(op, OpClass::mfma, &multiply);
  }
  t.special(Op::v_accvgpr_read_b32, OpClass::valu, &copy_register);
  t.special(Op::v_accvgpr_write_b32, OpClass::valu, &copy_register);
  t.special(Op::v_accvgpr_mov_b32, OpClass::valu, &copy_register);
}

}  // namespace hfemu
