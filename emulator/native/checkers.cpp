#include "checkers.h"

#include "smem.h"

namespace hfemu {
namespace {

std::string register_name(uint32_t r) {
  if (r < kAcc) return format("v%u", r);
  if (r < kVgprs) return format("a%u", r - kAcc);
  const uint32_t s = r - kSgprBase;
  switch (s) {
    case kVcc: return "vcc_lo";
    case kVcc + 1: return "vcc_hi";
    case kM0: return "m0";
    case kExec: return "exec_lo";
    case kExec + 1: return "exec_hi";
    default: return format("s%u", s);
  }
}

constexpr uint32_t kAllBits = ~0u;
constexpr uint32_t kNever = ~0u;  // undefined_at: nothing has read it yet

bool defined(const WaveShadow& s, uint32_t r, uint64_t lanes) {
  return r < kVgprs ? !(lanes & ~s.defined[r]) : s.sdefined[r - kSgprBase] == kAllBits;
}

void undefined(const Wave& w, const ExecInst& in, uint32_t r, uint32_t index, uint64_t lanes,
                            const char* use) {
  const WaveShadow& s = *w.shadow;
  const uint32_t from = s.undefined_at[r];
  std::string text = format("%s depends on %s, which was never written", use, register_name(r).c_str());
  if (from != kNever && from != index)
    text = format("%s depends on %s, whose value comes from a register, LDS or scratch that was never written, first read at %s",
                  use, register_name(r).c_str(), place(w, from).c_str());
  const uint64_t bad = r < kVgprs ? lanes & ~s.defined[r] : 0;
  report(w, in, FaultKind::uninitialised, text, bad ? std::countr_zero(bad) : -1);
}

uint64_t address_of(const Wave& w, const ExecInst& in) {
  if (in.inst->saddr.kind != OperandKind::none) return scalar_address(w, in);
  if (in.inst->srsrc.kind == OperandKind::none) return 0;
  const ScalarBuffer b = scalar_buffer(w, in);
  return b.base + b.offset;
}

// Whether `in` reads what the pending load at `from` reads, into the same registers.
bool repeats(const Wave& w, const ExecInst& in, uint32_t from, uint64_t address) {
  const ExecInst& earlier = w.code[from];
  return earlier.inst->op == in.inst->op && earlier.dst == in.dst && address != 0 && address_of(w, in) == address;
}

void apply_wait(WaveShadow& s, uint32_t imm) {
  const uint32_t vm = vmcnt_of(imm), lgkm = imm >> 8 & 15;
  if (vm < 63 && s.vm_issued - s.vm_done > vm) s.vm_done = s.vm_issued - vm;
  // Scalar loads return in any order, so while one is outstanding only a count of zero guarantees anything.
  const bool disorder = s.last_smem > s.lgkm_done || s.last_flat > s.lgkm_done;
  if (lgkm == 0) s.lgkm_done = s.lgkm_issued;
  else if (lgkm < 15 && !disorder && s.lgkm_issued - s.lgkm_done > lgkm) s.lgkm_done = s.lgkm_issued - lgkm;
}

}  // namespace

void check_scratch_access(Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access) {
  WaveShadow& s = *w.shadow;
  if (s.scratch_defined.empty()) return;
  const auto base = reinterpret_cast<uint64_t>(w.scratch);
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    uint8_t* bytes_of = &s.scratch_defined[a.at[l] - base];
    if (access == Access::load) {
      for (uint32_t b = 0; b < bytes; ++b)
        if (!bytes_of[b]) s.lds_undefined |= uint64_t{1} << l;
    } else {
      for (uint32_t b = 0; b < bytes; ++b) bytes_of[b] = s.defined[in.data + b / 4] >> l & 1;
    }
  }
}

std::string place(const Wave& w, uint32_t index) {
  const Inst& i = w.launch->program->insts[index];
  const std::string source = w.launch->program->source(i);
  return format("pc 0x%llx (%s)%s%s", static_cast<unsigned long long>(i.pc), instruction_text(i, nullptr).c_str(),
                source.empty() ? "" : " in ", source.c_str());
}

Checkers::Checkers(Launch& launch, uint32_t waves, uint32_t lds_bytes)
    : usage_(usage_of(*launch.program)),
      options_(launch.options),
      registers_(((launch.kernel->rsrc1 & 63) + 1) * 8),
      first_acc_(((launch.kernel->rsrc3 & 63) + 1) * 4),
      global_(launch.global_races) {
  for (uint32_t i = 0; i < waves; ++i) {
    shadows_.push_back(std::make_unique<WaveShadow>());
    pointers_.push_back(shadows_.back().get());
  }
  lds_.dwords.resize(lds_bytes / 4 + 1);
  lds_.waves = pointers_.data();
  lds_.usage = &usage_;
  lds_.orders = options_.check_races || global_ != nullptr;
  lds_.plain_flags = usage_.polls && lds_.orders;
}

void Checkers::begin_group(Workgroup& group, Wave* waves, uint32_t count) {
  lds_.begin_group();
  lds_.wave_count = count;
  group.shadow = &lds_;
  if (global_ != nullptr) global_->begin_group(group);
  for (uint32_t i = 0; i < count; ++i) {
    WaveShadow& s = *shadows_[i];
    s = WaveShadow{};
    std::memset(s.undefined_at, 0xFF, sizeof s.undefined_at);
    s.defined[0] = kAllLanes;
    for (uint32_t r = 0; r < waves[i].initial_sgprs; ++r) s.sdefined[r] = kAllBits;
    s.sdefined[kExec] = s.sdefined[kExec + 1] = kAllBits;
    if (options_.check_uninit) s.scratch_defined.assign(size_t{waves[i].launch->private_bytes} * kLanes, 0);
    waves[i].shadow = &s;
  }
}

// A register beyond those that the kernel descriptor requests belongs to another wave. Some code names VGPRs above its
// accum_offset; both kinds share one file, so only the file's size limits them.
void Checkers::check_range(const Wave& w, const ExecInst& in, const RegisterUse& u) {
  const uint32_t last = std::max<uint32_t>(u.vgprs, u.agprs ? u.agprs + first_acc_ : 0);
  if (last > registers_)
    report(w, in, FaultKind::uninitialised,
           format("%s is beyond the %u registers that the kernel descriptor asks for (accum_offset %u)",
                  u.vgprs > registers_ ? register_name(u.vgprs - 1u).c_str() : register_name(kAcc + u.agprs - 1u).c_str(),
                  registers_, first_acc_));
}

void Checkers::check_pending(const Wave& w, const ExecInst& in, const RegisterUse& u) {
  const WaveShadow& s = *w.shadow;
  if (s.vm_done == s.vm_issued && s.lgkm_done == s.lgkm_issued) return;
  const uint16_t* r = &usage_.registers[u.first];
  const uint32_t reads = u.addresses + u.reads;
  for (uint32_t k = 0; k < reads + u.writes; ++k) {
    const bool vm = s.pending_vm[r[k]] > s.vm_done, lgkm = s.pending_lgkm[r[k]] > s.lgkm_done;
    if (!vm && !lgkm) continue;
    const bool write = k >= reads;
    // The same load again returns the same value, in whichever order the two return.
    if (write && u.is_smem && lgkm && !vm && repeats(w, in, s.pending_from[r[k]], s.smem_address[r[k] - kSgprBase])) continue;
    // Loads of one kind return in order, so a second one may name the same destination.
    if (write && !u.is_flat && ((vm && !lgkm && u.counts_vm) || (lgkm && !vm && u.counts_lgkm && !u.is_smem))) continue;
    report(w, in, FaultKind::missing_wait,
           format("%s %s before s_waitcnt %s has waited for the load at %s", write ? "overwrites" : "reads",
                  register_name(r[k]).c_str(), vm && lgkm ? "vmcnt and lgkmcnt" : vm ? "vmcnt" : "lgkmcnt",
                  place(w, s.pending_from[r[k]]).c_str()));
    return;
  }
}

void Checkers::check_defined(const Wave& w, const ExecInst& in, const RegisterUse& u, uint32_t index) {
  const WaveShadow& s = *w.shadow;
  const uint64_t exec = w.exec();
  const uint16_t* r = &usage_.registers[u.first];
  for (uint32_t k = 0; k < u.addresses; ++k)
    if (!defined(s, r[k], exec)) undefined(w, in, r[k], index, exec, "the address");
  const auto require = [&](const char* use) {
    for (uint32_t k = u.addresses; k < u.addresses + u.reads; ++k)
      if (!defined(s, r[k], exec)) undefined(w, in, r[k], index, exec, use);
  };
  switch (u.flow) {
    case Flow::compare: require("the comparison"); break;
    case Flow::store: require("the stored value"); break;
    case Flow::branch: require("the branch"); break;
    case Flow::scalar: {
      const bool jumps = in.op_class == OpClass::branch;
      const bool to_exec = in.inst->dst.kind == OperandKind::sgpr && (in.dst == kExec || in.dst == kExec + 1);
      if (scalar_.known && (to_exec || scalar_.to_exec)) {
        const uint64_t needed = in.dst_dwords == 2 ? kAllLanes : uint64_t{kAllBits};
        if ((scalar_.defined & needed) == needed) break;
      }
      if (jumps || to_exec || scalar_.to_exec) require(jumps ? "the jump" : "EXEC");
      break;
    }
    default: break;
  }
}

bool Checkers::wholly_defined(const WaveShadow& s, const RegisterUse& u) const {
  const uint16_t* r = &usage_.registers[u.first];
  for (uint32_t k = 0; k < uint32_t{u.addresses} + u.reads; ++k)
    if (!defined(s, r[k], 0)) return false;
  return true;
}

void Checkers::before(Wave& w, const ExecInst& in, uint32_t index) {
  const RegisterUse& u = usage_.uses[index];
  WaveShadow& s = *w.shadow;
  if (in.op_class == OpClass::waitcnt) {
    apply_wait(s, static_cast<uint32_t>(in.inst->simm));
    if (!s.acquires.empty()) apply_acquires(lds_, s);
  } else if (options_.check_waits) {
    check_pending(w, in, u);
  }
  if (global_ != nullptr) [[unlikely]] global_->before(w, in);
  if (options_.check_uninit) {
    if (std::max<uint32_t>(u.vgprs, u.agprs + first_acc_) > registers_) [[unlikely]] check_range(w, in, u);
    scalar_ = u.flow == Flow::scalar && !wholly_defined(s, u) ? scalar_result(w, in) : ScalarResult{};
    check_defined(w, in, u, index);
    // The mask of a v_cndmask, for the propagation after it has run.
    if (u.flow == Flow::select && in.src[2].kind == SourceKind::sgpr) select_mask_ = w.s64(in.src[2].reg);
  }
  if (!u.counts_vm && !u.counts_lgkm) return;
  const uint16_t* written = &usage_.registers[u.first + u.addresses + u.reads];
  if (u.counts_vm && ++s.vm_issued - s.vm_done > 63) s.vm_done = s.vm_issued - 63;
  if (u.counts_lgkm) {
    ++s.lgkm_issued;
    if (u.is_smem) s.last_smem = s.lgkm_issued;
    if (u.is_flat) s.last_flat = s.lgkm_issued;
  }
  for (uint32_t k = 0; k < u.writes; ++k) {
    if (u.counts_vm) s.pending_vm[written[k]] = s.vm_issued;
    if (u.counts_lgkm) s.pending_lgkm[written[k]] = s.lgkm_issued;
    if (u.is_smem) s.smem_address[written[k] - kSgprBase] = address_of(w, in);
    s.pending_from[written[k]] = index;
  }
}

void Checkers::after(Wave& w, const ExecInst& in, uint32_t index, uint64_t exec) {
  if (options_.check_uninit) propagate(w, in, usage_.uses[index], index, exec);
  if (!lds_.conflicts.empty()) [[unlikely]] resolve_conflicts(w, in);
  if (global_ != nullptr) [[unlikely]] global_->after(w, in);
}

void Checkers::propagate(Wave& w, const ExecInst& in, const RegisterUse& u, uint32_t index, uint64_t exec) {
  WaveShadow& s = *w.shadow;
  const uint16_t* r = &usage_.registers[u.first];
  const uint32_t reads = u.addresses + u.reads;
  const uint16_t* written = r + reads;
  uint64_t lanes = kAllLanes;  // defined in every source
  bool scalars = true;
  uint32_t origin = index;
  const auto look = [&](uint32_t from) {
    for (uint32_t k = from; k < reads; ++k) {
      const bool vector = r[k] < kVgprs;
      if (vector ? (exec & ~s.defined[r[k]]) == 0 : s.sdefined[r[k] - kSgprBase] == kAllBits) continue;
      if (vector) lanes &= s.defined[r[k]];
      else scalars = false;
      if (s.undefined_at[r[k]] != kNever) origin = s.undefined_at[r[k]];
    }
  };
  switch (u.flow) {
    case Flow::none: case Flow::private_store: case Flow::branch: return;
    case Flow::store: case Flow::compare: break;  // results are defined
    case Flow::vector_load:
    case Flow::lds_load:
      lanes = ~s.lds_undefined;
      s.lds_undefined = 0;
      break;
    case Flow::scalar_load: break;
    case Flow::matrix: propagate_matrix(s, in); return;
    case Flow::across: {
      // Values cross lanes: the result is undefined only if a source holds nothing defined at all.
      bool any = true;
      for (uint32_t k = u.addresses; k < reads; ++k) {
        const bool some = r[k] < kVgprs ? s.defined[r[k]] != 0 : s.sdefined[r[k] - kSgprBase] != 0;
        if (!some && s.undefined_at[r[k]] != kNever) origin = s.undefined_at[r[k]];
        any = any && some;
      }
      lanes = any ? kAllLanes : 0;
      break;
    }
    case Flow::select: {
      const uint64_t mask = select_mask_;
      const auto of = [&](int i) {
        const Source& src = in.src[i];
        if (src.kind == SourceKind::vgpr) return s.defined[src.reg];
        return src.kind == SourceKind::sgpr && s.sdefined[src.reg] != kAllBits ? uint64_t{0} : kAllLanes;
      };
      look(0);
      lanes = (of(0) & ~mask) | (of(1) & mask);
      if (in.src[2].kind == SourceKind::sgpr)
        lanes &= s.sdefined[in.src[2].reg] | uint64_t{s.sdefined[in.src[2].reg + 1]} << 32;
      scalars = true;
      break;
    }
    case Flow::to_scalar: {
      const uint32_t from = r[0];
      const bool ok = from >= kVgprs || s.defined[from] != 0;
      s.sdefined[in.dst] = ok ? kAllBits : 0;
      if (!ok) s.undefined_at[kSgprBase + in.dst] = s.undefined_at[from] == kNever ? index : s.undefined_at[from];
      return;
    }
    case Flow::write_lane: s.defined[in.dst] = kAllLanes; return;
    case Flow::lanes:
      if (propagate_halves(s, in, index, exec)) return;
      [[fallthrough]];
    case Flow::scalar: look(0); break;
  }
  if (!scalars) lanes = 0;
  if (u.partial) lanes = kAllLanes;
  for (uint32_t k = 0; k < u.writes; ++k) {
    const uint32_t d = written[k];
    if (d < kVgprs) {
      s.defined[d] = (s.defined[d] & ~exec) | (lanes & exec);
      s.undefined_at[d] = exec & ~lanes ? origin : kNever;
    } else {
      const bool ok = u.flow != Flow::scalar || scalars;
      s.sdefined[d - kSgprBase] = ok ? kAllBits : 0;
      if (scalar_.known && !scalar_.to_exec) s.sdefined[d - kSgprBase] = static_cast<uint32_t>(scalar_.defined >> 32 * k);
      s.undefined_at[d] = s.sdefined[d - kSgprBase] == kAllBits ? kNever : origin;
    }
  }
}

// 64-bit results whose halves depend on different registers: compilers leave an addend's high half undefined where only
// the low result matters, and a packed f32 operation is two independent ones.
bool Checkers::propagate_halves(WaveShadow& s, const ExecInst& in, uint32_t index, uint64_t exec) {
  const Inst& i = *in.inst;
  bool packed = false;
  switch (i.op) {
    case Op::v_pk_fma_f32: case Op::v_pk_mul_f32: case Op::v_pk_add_f32: case Op::v_pk_mov_b32: packed = true; break;
    case Op::v_mad_u64_u32: case Op::v_mad_i64_i32: case Op::v_lshl_add_u64: case Op::v_mov_b64:
    case Op::v_lshlrev_b64: break;
    default: return false;
  }
  uint64_t lanes[2] = {kAllLanes, kAllLanes};
  uint32_t origin[2] = {index, index};
  const auto depend = [&](int half, const Source& src, uint32_t which) {
    const bool vector = src.kind == SourceKind::vgpr;
    if (!vector && src.kind != SourceKind::sgpr) return;
    const uint32_t r = vector ? src.reg + which : kSgprBase + src.reg + which;
    const uint64_t ok = vector ? s.defined[r] : s.sdefined[r - kSgprBase] == kAllBits ? kAllLanes : 0;
    if (!(exec & ~ok)) return;
    lanes[half] &= ok;
    if (s.undefined_at[r] != kNever) origin[half] = s.undefined_at[r];
  };
  for (int k = 0; k < i.num_src && k < 3; ++k) {
    const Source& src = in.src[k];
    if (packed) {
      if (i.op == Op::v_pk_mov_b32) {
        depend(k, src, i.src[k].op_sel);
      } else {
        depend(0, src, i.src[k].op_sel);
        depend(1, src, i.src[k].op_sel_hi);
      }
      continue;
    }
    depend(0, src, 0);
    depend(1, src, 0);
    if (src.dwords == 2) depend(1, src, 1);
  }
  for (uint32_t h = 0; h < 2; ++h) {
    s.defined[in.dst + h] = (s.defined[in.dst + h] & ~exec) | (lanes[h] & exec);
    s.undefined_at[in.dst + h] = exec & ~lanes[h] ? origin[h] : kNever;
  }
  if (i.dst2.kind == OperandKind::sgpr) s.sdefined[in.dst2] = s.sdefined[in.dst2 + 1] = kAllBits;
  return true;
}

// An undefined element of A makes its row of D undefined, one of B its column, one of C its own element.
void Checkers::propagate_matrix(WaveShadow& s, const ExecInst& in) {
  const Inst& i = *in.inst;
  const auto gather = [&](const Source& src, uint32_t count) {
    uint64_t bad = 0;
    if (src.kind == SourceKind::vgpr)
      for (uint32_t k = 0; k < count; ++k) bad |= ~s.defined[src.reg + k];
    return bad;
  };
  const uint64_t bad_a = gather(in.src[0], i.src[0].dwords) | gather(in.scale_a, 1);
  const uint64_t bad_b = gather(in.src[1], i.src[1].dwords) | gather(in.scale_b, 1);
  const MatrixShape shape = matrix_shape(i.op, i.cbsz, i.blgp);
  const uint32_t edge = shape.m;
  const bool known = (edge == 16 || edge == 32) && shape.blocks <= 1 && shape.m == shape.n &&
                     in.dst_dwords == edge * edge / kLanes;
  uint64_t rows = 0, columns = 0;
  for (uint32_t l = 0; l < kLanes && edge; ++l) {
    rows |= (bad_a >> l & 1) << (l % edge);
    columns |= (bad_b >> l & 1) << (l % edge);
  }
  uint64_t d[32];
  for (uint32_t k = 0; k < in.dst_dwords && k < 32; ++k) {
    uint64_t ok = in.src[2].kind == SourceKind::vgpr && !in.sparse ? s.defined[in.src[2].reg + k] : kAllLanes;
    if (in.sparse) ok = s.defined[in.dst + k];
    if (bad_a | bad_b) {
      if (!known) ok = 0;
      for (uint32_t l = 0; l < kLanes && known; ++l) {
        const uint32_t row = edge == 16 ? 4 * (l / 16) + k : 8 * (k / 4) + 4 * (l / 32) + k % 4;
        if ((rows >> row & 1) || (columns >> (l % edge) & 1)) ok &= ~(uint64_t{1} << l);
      }
    }
    d[k] = ok;
  }
  for (uint32_t k = 0; k < in.dst_dwords && k < 32; ++k) s.defined[in.dst + k] = d[k];
}

}  // namespace hfemu
