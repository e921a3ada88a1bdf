// Decoded text -> prepared instructions: handlers chosen, operands resolved, branch targets turned into indices.
#include <algorithm>
#include <map>
#include <mutex>

#include "decode.h"
#include "exec.h"
#include "line_table.h"
#include "prepare.h"

namespace hfemu {

std::string Program::source(const Inst& inst) const { return lines ? lines->at(inst.pc) : std::string(); }

uint32_t Program::index_at(uint64_t host_address) const {
  const uint64_t at = host_address - base - text_begin;
  if (at % 4 || at / 4 >= index_of.size()) return kNoIndex;
  return index_of[at / 4];
}

namespace {

const uint32_t* row_or_splat(const Wave& w, const Source& s, RowBuffer& buffer) {
  if (s.kind == SourceKind::vgpr) return w.v[s.reg];
  if (s.kind == SourceKind::constant) return s.row;
  return s.kind == SourceKind::none ? nullptr : source_row(w, s, buffer);
}

// Lane operations without modifiers whose sources are rows already.
void run_rows(Wave& w, const ExecInst& in) {
  const uint32_t* rows[3];
  for (int i = 0; i < 3; ++i) rows[i] = in.src[i].kind == SourceKind::vgpr ? w.v[in.src[i].reg] : in.src[i].row;
  const uint64_t exec = w.exec();
  uint32_t* d = w.v[in.dst];
  if (exec == kAllLanes) [[likely]] {
    in.kernel(d, rows[0], rows[1], rows[2], w.mode);
    return;
  }
  RowBuffer out;
  in.kernel(out.x, rows[0], rows[1], rows[2], w.mode);
  for (int i = 0; i < in.dst_dwords; ++i) merge_row(d + i * kLanes, out.x + i * kLanes, exec);
}

// The same with scalar sources, which are spread first.
void run_mixed(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const uint32_t* rows[3];
  for (int i = 0; i < 3; ++i) rows[i] = row_or_splat(w, in.src[i], buffers[i]);
  const uint64_t exec = w.exec();
  uint32_t* d = w.v[in.dst];
  if (exec == kAllLanes) [[likely]] {
    in.kernel(d, rows[0], rows[1], rows[2], w.mode);
    return;
  }
  in.kernel(out.x, rows[0], rows[1], rows[2], w.mode);
  for (int i = 0; i < in.dst_dwords; ++i) merge_row(d + i * kLanes, out.x + i * kLanes, exec);
}

const uint32_t* const* staged_rows(const Wave& w, const ExecInst& in, RowBuffer* buffers, const uint32_t** rows) {
  const OpEntry& e = op_table().entry(in.inst->op);
  for (int i = 0; i < 3; ++i) rows[i] = i < e.sources ? stage_source(w, in, i, e.types[i + 1], buffers[i]) : nullptr;
  return rows;
}

void run_staged(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3], out;
  const uint32_t* rows[3];
  staged_rows(w, in, buffers, rows);
  in.kernel(out.x, rows[0], rows[1], rows[2], w.mode);
  write_result(w, in, in.result, out.x, op_table().entry(in.inst->op).preserves_high);
}

void run_compare(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3];
  alignas(64) uint32_t bytes[16];
  const uint32_t* rows[3];
  for (int i = 0; i < 3; ++i) rows[i] = row_or_splat(w, in.src[i], buffers[i]);
  in.kernel(bytes, rows[0], rows[1], rows[2], w.mode);
  write_mask(w, in, bytes);
}

void run_compare_staged(Wave& w, const ExecInst& in) {
  RowBuffer buffers[3];
  alignas(64) uint32_t bytes[16];
  const uint32_t* rows[3];
  staged_rows(w, in, buffers, rows);
  in.kernel(bytes, rows[0], rows[1], rows[2], w.mode);
  write_mask(w, in, bytes);
}

void run_unknown(Wave& w, const ExecInst& in) {
  unsupported(w, in, in.inst->op == Op::invalid ? "these bytes are no instruction of this architecture"
                                                : format("instruction %s", op_name(in.inst->op)));
}
void run_unsupported_operand(Wave& w, const ExecInst& in) {
  unsupported(w, in, format("%s on %s", in.inst->gds ? "the global data share" : "LDS_DIRECT or POPS_EXITING_WAVE_ID",
                            op_name(in.inst->op)));
}
void run_unsupported_modifier(Wave& w, const ExecInst& in) {
  unsupported(w, in, format("modifier on %s", op_name(in.inst->op)));
}

bool has_modifiers(const Inst& i, const OpEntry& e) {
  if (i.sdwa || i.dpp || i.clamp || i.omod || i.dst_op_sel || e.preserves_high) return true;
  for (int s = 0; s < i.num_src; ++s) {
    const Operand& o = i.src[s];
    const LaneType type = s < 3 ? e.types[s + 1] : LaneType::none;
    const bool packed = type == LaneType::pk16 || type == LaneType::pkf16;
    if (o.neg || o.abs || o.neg_hi || o.op_sel || (packed && i.format == Format::VOP3P && !o.op_sel_hi)) return true;
  }
  return false;
}

// Encodings that decode but are for graphics or older chips: LDS or the order of pixel waves as an operand, GDS.
bool foreign_operands(const Inst& i) {
  if (i.gds) return true;
  for (const Operand& o : i.src) {
    const auto special = static_cast<Special>(o.reg);
    if (o.kind == OperandKind::special && (special == Special::lds_direct || special == Special::pops_exiting)) return true;
  }
  return false;
}

bool is_float(LaneType t) {
  return t == LaneType::f16 || t == LaneType::f32 || t == LaneType::f64 || t == LaneType::pkf16;
}

void choose_lane_handler(const OpEntry& e, const Inst& inst, ExecInst& x) {
  x.kernel = e.kernel;
  x.result = e.types[0];
  x.writes_exec = e.writes_exec;
  x.careful = &run_careful;
  if (inst.clamp && !is_float(e.types[0]) && e.types[0] != LaneType::mask) {
    if (e.saturating == nullptr) {
      x.fn = &run_unsupported_modifier;
      return;
    }
    x.kernel = e.saturating;
  }
  const bool compare = e.types[0] == LaneType::mask;
  x.plain = !has_modifiers(inst, e);
  if (compare) {
    x.fn = x.plain ? &run_compare : &run_compare_staged;
    return;
  }
  bool rows = true;
  for (int i = 0; i < e.sources; ++i)
    rows = rows && (x.src[i].kind == SourceKind::vgpr || x.src[i].kind == SourceKind::constant);
  x.fn = !x.plain ? &run_staged : rows ? &run_rows : &run_mixed;
}

}  // namespace

Source Preparer::source(const Operand& o) {
  Source s;
  s.dwords = o.dwords;
  switch (o.kind) {
    case OperandKind::none: break;
    case OperandKind::vgpr: s.kind = SourceKind::vgpr; s.reg = o.reg; break;
    case OperandKind::agpr: s.kind = SourceKind::vgpr; s.reg = static_cast<uint16_t>(o.reg + kAcc); break;
    case OperandKind::sgpr: s.kind = SourceKind::sgpr; s.reg = o.reg; break;
    case OperandKind::special: s.kind = SourceKind::special; s.reg = o.reg; break;
    case OperandKind::imm: s.kind = SourceKind::constant; s.row = constant(o.imm); break;
  }
  return s;
}

const uint32_t* Preparer::constant(uint64_t value) {
  const auto found = constants_.find(value);
  if (found != constants_.end()) return found->second;
  // 64-byte alignment lets the lane loops use aligned loads.
  program_.constants.push_back(std::make_unique<uint32_t[]>(2 * kLanes + 16));
  auto address = reinterpret_cast<uintptr_t>(program_.constants.back().get());
  auto* row = reinterpret_cast<uint32_t*>((address + 63) & ~uintptr_t{63});
  splat(row, static_cast<uint32_t>(value));
  splat(row + kLanes, static_cast<uint32_t>(value >> 32));
  constants_[value] = row;
  return row;
}

uint16_t Preparer::destination(const Operand& o) {
  return static_cast<uint16_t>(o.kind == OperandKind::agpr ? o.reg + kAcc : o.reg);
}

ExecInst Preparer::prepare(const Inst& inst) {
  ExecInst x;
  x.inst = &inst;
  const OpEntry& e = op_table().entry(inst.op);
  x.op_class = e.op_class;
  x.rounding = e.rounding;
  if (inst.dpp) {
    program_.dpp_plans.push_back(std::make_unique<DppPlan>(plan_dpp(inst)));
    x.dpp = program_.dpp_plans.back().get();
  }
  for (int i = 0; i < 3 && i < inst.num_src; ++i) x.src[i] = source(inst.src[i]);
  // SOPK compares name their register as a source only.
  const Operand& dst = inst.dst.kind == OperandKind::none && inst.format == Format::SOPK ? inst.src[0] : inst.dst;
  x.dst = destination(dst);
  x.dst_dwords = dst.dwords;
  x.dst_is_vgpr = dst.kind == OperandKind::vgpr || dst.kind == OperandKind::agpr;
  x.dst2 = destination(inst.dst2);
  x.accumulates = e.accumulates;
  if (e.accumulates && inst.num_src < e.sources) x.src[e.sources - 1] = source(inst.dst);
  switch (inst.format) {
    case Format::SMEM: case Format::DS: case Format::FLAT: case Format::GLOBAL: case Format::SCRATCH:
    case Format::MUBUF: {
      x.address = source(inst.vaddr);
      x.data = destination(inst.vdata);
      x.data2 = destination(inst.vdata2);
      const Operand& base = inst.srsrc.kind != OperandKind::none ? inst.srsrc : inst.saddr;
      x.has_sbase = base.kind == OperandKind::sgpr;
      x.sbase = base.reg;
      x.src[0] = source(inst.soffset);
      x.offset = inst.offset;
      if (base.kind != OperandKind::none && base.kind != OperandKind::sgpr) {
        x.fn = &run_unsupported_modifier;
        return x;
      }
      break;
    }
    case Format::MAI:
      x.matrix = matrix_function(inst.op);
      x.sparse = x.matrix && matrix_shape(inst.op, inst.cbsz, inst.blgp).sparse;
      x.scale_a = source(inst.scale_a);
      x.scale_b = source(inst.scale_b);
      break;
    default: break;
  }
  if (foreign_operands(inst) && (e.handler != nullptr || e.kernel != nullptr)) {
    x.fn = &run_unsupported_operand;
  } else if (e.handler != nullptr) {
    x.plain = !has_modifiers(inst, e);
    x.fn = e.handler;
  } else if (e.kernel != nullptr) {
    choose_lane_handler(e, inst, x);
  } else {
    x.fn = &run_unknown;
  }
  return x;
}

namespace {

void decode_text(const LoadedCode& code, Program& p) {
  const uint64_t begin = code.text_begin, end = code.text_end;
  p.index_of.assign((end - begin) / 4, Program::kNoIndex);
  std::vector<uint64_t> starts = code.functions;
  starts.push_back(end);
  std::sort(starts.begin(), starts.end());
  size_t next_start = 0;
  for (uint64_t pc = begin; pc + 4 <= end;) {
    while (starts[next_start] <= pc && starts[next_start] < end) ++next_start;
    const uint64_t limit = std::max(starts[next_start], pc + 4);
    Inst inst;
    if (!decode(code.base + pc, limit - pc, pc, code.arch, inst)) {
      inst = Inst{};
      inst.pc = pc;
      inst.bytes = 4;
    }
    p.index_of[(pc - begin) / 4] = static_cast<uint32_t>(p.insts.size());
    p.insts.push_back(inst);
    pc += inst.bytes;
  }
  // Running past the end hits an invalid instruction.
  Inst last;
  last.pc = end;
  p.insts.push_back(last);
}

bool is_branch(const Inst& i) {
  switch (i.op) {
    case Op::s_branch: case Op::s_cbranch_scc0: case Op::s_cbranch_scc1: case Op::s_cbranch_vccz:
    case Op::s_cbranch_vccnz: case Op::s_cbranch_execz: case Op::s_cbranch_execnz: case Op::s_call_b64:
    case Op::s_cbranch_i_fork: return true;
    default: return false;
  }
}

std::mutex program_mutex;

}  // namespace

Program& program_of(LoadedCode& code) {
  const std::lock_guard lock(program_mutex);
  if (code.program) return *code.program;
  auto p = std::make_shared<Program>();
  p->arch = code.arch;
  p->base = reinterpret_cast<uint64_t>(code.base);
  p->text_begin = code.text_begin;
  p->lines = code.lines;
  decode_text(code, *p);
  Preparer preparer(*p);
  p->code.reserve(p->insts.size());
  for (const Inst& inst : p->insts) {
    ExecInst x = preparer.prepare(inst);
    if (is_branch(inst)) {
      const uint64_t to = inst.pc + 4 + static_cast<uint64_t>(int64_t{inst.simm} * 4);
      const uint32_t index = p->index_at(p->base + to);
      x.target = index == Program::kNoIndex ? static_cast<uint32_t>(p->insts.size() - 1) : index;
    }
    p->code.push_back(x);
  }
  code.program = p;
  return *code.program;
}

}  // namespace hfemu
