#include "record.h"

#include <algorithm>

#include "disasm.h"
#include "stats.h"
#include "usage.h"

namespace hfemu {
namespace {

thread_local hfemu_recorder installed{};

bool is_quarter_rate(Op op) {
  switch (op) {
    case Op::v_mul_lo_u32: case Op::v_mul_hi_u32: case Op::v_mul_hi_i32: case Op::v_mad_u64_u32: case Op::v_mad_i64_i32:
      return true;
    default: return false;
  }
}

hfemu_unit unit_of(const ExecInst& in) {
  switch (in.inst->op) {
    case Op::s_nop: case Op::s_sleep: case Op::v_nop: return HFEMU_NOP;
    case Op::s_endpgm: return HFEMU_END;
    default: break;
  }
  if (is_quarter_rate(in.inst->op)) return HFEMU_TRANSCENDENTAL;
  switch (in.op_class) {
    case OpClass::salu: return HFEMU_SALU;
    case OpClass::smem: return HFEMU_SMEM;
    case OpClass::valu: return HFEMU_VALU;
    case OpClass::valu_trans: return HFEMU_TRANSCENDENTAL;
    case OpClass::mfma: return HFEMU_MATRIX;
    case OpClass::lds: return HFEMU_LDS;
    case OpClass::vmem_load: return HFEMU_VMEM_LOAD;
    case OpClass::vmem_store: return HFEMU_VMEM_STORE;
    case OpClass::atomic: return in.inst->format == Format::DS ? HFEMU_LDS : HFEMU_ATOMIC;
    case OpClass::branch: return HFEMU_BRANCH;
    case OpClass::barrier: return HFEMU_BARRIER;
    case OpClass::waitcnt: return HFEMU_WAITCNT;
    default: return HFEMU_OTHER;
  }
}

bool has_accesses(uint8_t unit) {
  return unit == HFEMU_SMEM || unit == HFEMU_LDS || unit == HFEMU_VMEM_LOAD || unit == HFEMU_VMEM_STORE ||
         unit == HFEMU_ATOMIC;
}

uint8_t lane_bytes_of(const Inst& i, const std::string& text) {
  if (i.vdata.kind != OperandKind::none || i.dst.kind != OperandKind::none) {
    const int second = i.vdata2.kind != OperandKind::none ? i.vdata2.dwords : 0;
    const int dwords = (i.vdata.kind != OperandKind::none ? i.vdata : i.dst).dwords + second;
    return static_cast<uint8_t>(std::min(4 * dwords, 255));
  }
  const size_t at = text.find("dwordx");  // to LDS: only the mnemonic has the width
  return at == std::string::npos ? 4 : static_cast<uint8_t>(4 * (text[at + 6] - '0'));
}

void describe(LaunchRecording& r, const Program& program) {
  const UsageTable& usage = usage_of(program);
  r.registers = usage.registers;
  r.texts.reserve(program.insts.size());
  for (size_t i = 0; i < program.insts.size(); ++i) {
    const ExecInst& in = program.code[i];
    const Inst& inst = program.insts[i];
    const RegisterUse& u = usage.uses[i];
    r.texts.push_back(instruction_text(inst, nullptr));
    hfemu_instruction out{};
    out.pc = inst.pc;
    out.text = r.texts.back().c_str();
    out.first_register = u.first;
    out.reads = static_cast<uint16_t>(u.addresses + u.reads);
    out.writes = u.writes;
    out.bytes = inst.bytes;
    out.unit = static_cast<uint8_t>(unit_of(in));
    if (out.unit == HFEMU_MATRIX)
      out.matrix_cycles = static_cast<uint16_t>(matrix_cycles(inst.op, inst.cbsz, inst.blgp, program.arch));
    if (has_accesses(out.unit)) out.lane_bytes = lane_bytes_of(inst, r.texts.back());
    out.counters = static_cast<uint8_t>(u.counts_vm | u.counts_lgkm << 1 | inst.lds << 2);
    out.immediate = inst.simm;
    r.instructions.push_back(out);
  }
}

}  // namespace

void set_recorder(const hfemu_recorder* recorder) { installed = recorder != nullptr ? *recorder : hfemu_recorder{}; }

LaunchRecording* begin_recording(const Launch& launch, const LaunchRequest& request) {
  if (installed.choose == nullptr) return nullptr;
  auto* r = new LaunchRecording{installed, launch, {}, {}, {}, {}, {}};
  describe(*r, *launch.program);
  for (const Extent& e : launch.map.extents())
    r->extents.push_back({e.name.c_str(), e.base, e.bytes, e.writable, 0});
  const uint32_t threads = request.block[0] * request.block[1] * request.block[2];
  hfemu_recorded_launch out{};
  out.kernel = request.kernel->name.c_str();
  out.arch = launch.program->arch == Arch::gfx950 ? "gfx950" : "gfx942";
  std::copy_n(request.grid, 3, out.grid);
  std::copy_n(request.block, 3, out.block);
  out.groups = uint64_t{request.grid[0]} * request.grid[1] * request.grid[2];
  out.waves = (threads + kLanes - 1) / kLanes;
  out.groups_per_cu = groups_per_cu(*request.kernel, launch.program->arch, threads, request.dynamic_lds);
  out.lds_bytes = request.kernel->lds_bytes + request.dynamic_lds;
  out.vgprs = request.kernel->vgprs;
  out.instructions = r->instructions.data();
  out.instruction_count = r->instructions.size();
  out.registers = r->registers.data();
  out.extents = r->extents.data();
  out.extent_count = r->extents.size();
  r->recorder.begin(r->recorder.context, &out);
  return r;
}

void end_recording(LaunchRecording* recording) {
  if (recording == nullptr) return;
  recording->recorder.end(recording->recorder.context);
  delete recording;
}

bool GroupRecorder::choose(uint64_t group) {
  const int64_t wanted = recording_.recorder.choose(recording_.recorder.context, group);
  group_ = group;
  recording_group_ = wanted > 0;
  limit_ = static_cast<uint64_t>(std::max<int64_t>(wanted, 0));
  for (Stream& s : waves_) {
    s.instructions.clear();
    s.accesses.clear();
  }
  return wanted != 0;
}

bool GroupRecorder::before(const Wave& w, const ExecInst& in, uint32_t index) {
  in_memory_ = false;
  if (recording_group_) {
    Stream& s = waves_[w.index];
    s.instructions.push_back(index);
    if (has_accesses(recording_.instructions[index].unit)) {
      in_memory_ = true;
      s.count_at = s.accesses.size();
      s.accesses.push_back(0);
    }
  }
  return in.op_class == OpClass::mfma && recording_.recorder.skip_matrix != 0;
}

void GroupRecorder::after(Wave& w) {
  if (recording_group_ && waves_[w.index].instructions.size() >= limit_) w.state = WaveState::ended;
}

void GroupRecorder::end_group() {
  if (!recording_group_) return;
  std::vector<hfemu_recorded_wave> out;
  for (const Stream& s : waves_)
    out.push_back({s.instructions.data(), s.instructions.size(), s.accesses.data(), s.accesses.size()});
  const std::lock_guard lock(recording_.mutex);
  recording_.recorder.group(recording_.recorder.context, group_, out.data());
}

uint32_t GroupRecorder::extent_of(uint64_t address) {
  if (last_piece_ == nullptr || address < last_piece_->begin || address >= last_piece_->end) {
    last_piece_ = recording_.launch.map.piece(address);
    if (last_piece_ == nullptr) return 0xFFFF;
  }
  return last_piece_->extent;
}

void GroupRecorder::add(const Wave& w, uint32_t kind, uint64_t address, const uint64_t* sectors, uint32_t count) {
  Stream& s = waves_[w.index];
  const uint32_t extent = extent_of(address);
  const uint64_t base = extent == 0xFFFF ? 0 : recording_.extents[extent].base / 64;
  ++s.accesses[s.count_at];
  s.accesses.push_back(kind | count << 2 | extent << 16);
  for (uint32_t i = 0; i < count; ++i) s.accesses.push_back(static_cast<uint32_t>(sectors[i] - base));
}

void GroupRecorder::global(const Wave& w, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access) {
  if (!in_memory_) return;
  uint64_t sectors[2 * kLanes];
  uint32_t count = 0;
  for (uint64_t left = exec; left; left &= left - 1) {
    const uint64_t at = a.at[std::countr_zero(left)];
    for (uint64_t sector = at / 64; sector <= (at + bytes - 1) / 64; ++sector)
      if (count == 0 || sectors[count - 1] != sector) sectors[count++] = sector;
  }
  if (!std::is_sorted(sectors, sectors + count)) std::sort(sectors, sectors + count);
  count = static_cast<uint32_t>(std::unique(sectors, sectors + count) - sectors);
  add(w, static_cast<uint32_t>(access), a.at[std::countr_zero(exec)], sectors, count);
}

void GroupRecorder::scalar(const Wave& w, uint64_t address, uint32_t bytes, Access access) {
  if (!in_memory_) return;
  const uint64_t sectors[2] = {address / 64, (address + bytes - 1) / 64};
  add(w, static_cast<uint32_t>(access), address, sectors, sectors[0] == sectors[1] ? 1 : 2);
}

void GroupRecorder::lds(const Wave& w, const uint32_t* a, uint64_t exec, uint32_t bytes) {
  if (!in_memory_) return;
  const uint32_t banks = lds_banks(recording_.launch.program->arch);
  const uint32_t dwords = std::max<uint32_t>(1, bytes / 4);
  // Without conflicts a group of lanes that could use every bank once takes a cycle.
  const uint32_t cycles = std::max<uint32_t>(1, kLanes * dwords / banks) + lds_conflict_cycles(a, exec, bytes, banks);
  Stream& s = waves_[w.index];
  ++s.accesses[s.count_at];
  s.accesses.push_back(3u | std::min<uint32_t>(cycles, 0x3FFF) << 2 | 0xFFFFu << 16);
}

}  // namespace hfemu

void hfemu_set_recorder(const hfemu_recorder* recorder) { hfemu::set_recorder(recorder); }
