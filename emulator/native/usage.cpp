#include "usage.h"

#include <algorithm>
#include <mutex>

#include "exec.h"

namespace hfemu {
namespace {

class Builder {
 public:
  explicit Builder(UsageTable& table) : t_(table) {}

  RegisterUse build(const ExecInst& in) {
    const Inst& i = *in.inst;
    RegisterUse u;
    u.first = static_cast<uint32_t>(t_.registers.size());
    const bool memory = is_memory(i.format);
    if (memory) {
      for (const Operand* o : {&i.vaddr, &i.saddr, &i.srsrc, &i.soffset}) u.addresses += add(*o);
      if (i.lds || i.op == Op::ds_read_addtid_b32 || i.op == Op::ds_write_addtid_b32) u.addresses += add_sgpr(kM0, 1);
      u.reads += add(i.vdata);
      u.reads += add(i.vdata2);
    } else {
      for (int s = 0; s < i.num_src; ++s) u.reads += add(i.src[s]);
      for (const Operand* o : {&i.scale_a, &i.scale_b}) u.reads += add(*o);
      u.reads += implicit_reads(i);
    }
    u.writes += add(i.dst);
    u.writes += add(i.dst2);
    if (swaps(i.op)) u.writes += add(i.src[0]);
    for (uint32_t k = u.first; k < t_.registers.size(); ++k) {
      const uint16_t r = t_.registers[k];
      if (r < kAcc) u.vgprs = std::max<uint16_t>(u.vgprs, static_cast<uint16_t>(r + 1));
      else if (r < kVgprs) u.agprs = std::max<uint16_t>(u.agprs, static_cast<uint16_t>(r - kAcc + 1));
    }
    u.flow = flow_of(in);
    u.partial = partial_write(i, op_table().entry(i.op));
    const bool vector_memory = i.format == Format::FLAT || i.format == Format::GLOBAL || i.format == Format::SCRATCH ||
                               i.format == Format::MUBUF;
    u.counts_vm = vector_memory && i.op != Op::buffer_inv && i.op != Op::buffer_wbl2;
    u.is_flat = i.format == Format::FLAT;
    u.is_smem = i.format == Format::SMEM && (i.dst.kind != OperandKind::none);
    u.counts_lgkm = u.is_flat || u.is_smem || (i.format == Format::DS && i.op != Op::ds_nop);
    return u;
  }

 private:
  static bool is_memory(Format f) {
    switch (f) {
      case Format::SMEM: case Format::DS: case Format::FLAT: case Format::GLOBAL: case Format::SCRATCH:
      case Format::MUBUF: return true;
      default: return false;
    }
  }
  uint8_t add_sgpr(uint32_t reg, uint32_t count) {
    for (uint32_t k = 0; k < count; ++k) t_.registers.push_back(static_cast<uint16_t>(kSgprBase + reg + k));
    return static_cast<uint8_t>(count);
  }
  uint8_t add(const Operand& o) {
    uint32_t base;
    switch (o.kind) {
      case OperandKind::vgpr: base = o.reg; break;
      case OperandKind::agpr: base = o.reg + kAcc; break;
      case OperandKind::sgpr: base = kSgprBase + o.reg; break;
      default: return 0;
    }
    for (uint32_t k = 0; k < o.dwords; ++k) t_.registers.push_back(static_cast<uint16_t>(base + k));
    return o.dwords;
  }
  uint8_t implicit_reads(const Inst& i) {
    switch (i.op) {
      case Op::s_cbranch_vccz: case Op::s_cbranch_vccnz: case Op::v_div_fmas_f32: case Op::v_div_fmas_f64:
        return add_sgpr(kVcc, 2);
      case Op::s_addk_i32: case Op::s_mulk_i32: case Op::s_bitset0_b32: case Op::s_bitset1_b32:
      case Op::s_bitset0_b64: case Op::s_bitset1_b64: return add(i.dst);
      case Op::v_swap_b32: case Op::v_permlane16_swap_b32: case Op::v_permlane32_swap_b32: return add(i.dst);
      default: return 0;
    }
  }
  static bool swaps(Op op) {
    return op == Op::v_swap_b32 || op == Op::v_permlane16_swap_b32 || op == Op::v_permlane32_swap_b32;
  }
  static bool partial_write(const Inst& i, const OpEntry& e) {
    if (e.preserves_high || i.dst_op_sel) return true;
    if (i.sdwa && i.dst_select != Select::dword && i.dst_unused == DstUnused::preserve) return true;
    return i.op == Op::v_fma_mixlo_f16 || i.op == Op::v_fma_mixhi_f16;
  }
  static Flow flow_of(const ExecInst& in) {
    const Inst& i = *in.inst;
    switch (i.op) {
      case Op::v_cndmask_b32: return Flow::select;
      case Op::v_readlane_b32: case Op::v_readfirstlane_b32: return Flow::to_scalar;
      case Op::v_writelane_b32: return Flow::write_lane;
      case Op::v_swap_b32: case Op::v_permlane16_swap_b32: case Op::v_permlane32_swap_b32: return Flow::across;
      case Op::ds_bpermute_b32: case Op::ds_permute_b32: case Op::ds_swizzle_b32: return Flow::across;
      default: break;
    }
    switch (i.format) {
      case Format::SOP1: case Format::SOP2: case Format::SOPK: case Format::SOPC: return Flow::scalar;
      case Format::SOPP: return Flow::branch;
      case Format::SMEM: return i.dst.kind != OperandKind::none ? Flow::scalar_load : Flow::store;
      case Format::VOPC: return Flow::compare;
      case Format::DS: return i.dst.kind != OperandKind::none ? Flow::lds_load : Flow::none;
      case Format::SCRATCH: return i.dst.kind != OperandKind::none ? Flow::vector_load : Flow::private_store;
      case Format::FLAT: case Format::GLOBAL: case Format::MUBUF:
        return i.vdata.kind != OperandKind::none ? Flow::store : Flow::vector_load;
      case Format::MAI: return in.matrix != nullptr ? Flow::matrix : Flow::lanes;
      default: break;
    }
    if (in.result == LaneType::mask) return Flow::compare;
    return i.dpp ? Flow::across : Flow::lanes;
  }

  UsageTable& t_;
};

}  // namespace

const UsageTable& usage_of(const Program& program) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (!program.usage) {
    auto table = std::make_shared<UsageTable>();
    Builder builder(*table);
    for (const ExecInst& in : program.code) table->uses.push_back(builder.build(in));
    find_polls(program, *table);
    program.usage = table;
  }
  return *program.usage;
}

}  // namespace hfemu
