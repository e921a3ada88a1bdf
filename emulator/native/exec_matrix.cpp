// MFMA and SMFMAC: operands are copied out of the register file, so that the destination may overlap any of them.
#include "exec.h"
#include "formats.h"
#include "matrix.h"

namespace hfemu {
namespace {

// E8M0 bytes come from a register as they are; an inline constant stands for the exponent field of that float, in
// whichever byte the instruction selects.
void copy_scale(const Wave& w, const Source& s, Row& to) {
  if (s.kind == SourceKind::vgpr) {
    std::memcpy(to, w.v[s.reg], sizeof(Row));
  } else {
    splat(to, scale_of_float(static_cast<uint32_t>(scalar_source(w, s))) * 0x01010101u);
  }
}

void multiply(Wave& w, const ExecInst& in) {
  const Inst& inst = *in.inst;
  alignas(64) Row a[8], b[8], c[32];
  const auto copy = [&](const Source& s, Row* to, uint32_t count) {
    if (s.kind == SourceKind::vgpr) {
      std::memcpy(to, w.v[s.reg], sizeof(Row) * count);
    } else {
      // A constant is one element, the same in every register; f64 elements take two.
      const uint64_t x = scalar_source(w, s);
      for (uint32_t i = 0; i < count; ++i)
        splat(to[i], static_cast<uint32_t>(s.dwords == 2 && i % 2 ? x >> 32 : x));
    }
  };
  if (const char* wrong = matrix_modifier_fault(inst.op, inst.cbsz, inst.abid, inst.blgp)) unsupported(w, in, wrong);
  MatrixArgs args;
  copy(in.src[0], a, inst.src[0].dwords);
  copy(in.src[1], b, inst.src[1].dwords);
  args.a = a;
  args.b = b;
  args.d = &w.v[in.dst];
  args.cbsz = inst.cbsz;
  args.abid = inst.abid;
  args.blgp = inst.blgp;
  args.fnuz = w.mode.fnuz;
  args.flush_f32 = !(w.mode.denorm32 & 1);
  args.saturate = w.mode.fp16_ovfl;
  alignas(64) Row index[1], scale_a[1], scale_b[1];
  if (in.sparse) {
    copy(in.src[2], index, 1);
    args.index = index;
    args.c = &w.v[in.dst];
  } else if (in.src[2].kind == SourceKind::vgpr && in.src[2].reg == in.dst) {
    args.c = &w.v[in.dst];
  } else {
    copy(in.src[2], c, in.dst_dwords);
    args.c = c;
  }
  if (inst.scaled) {
    copy_scale(w, in.scale_a, scale_a[0]);
    copy_scale(w, in.scale_b, scale_b[0]);
    args.scale_a = scale_a;
    args.scale_b = scale_b;
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
