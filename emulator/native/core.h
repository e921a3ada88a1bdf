// The machine a handler sees: prepared instructions, wave, work-group and launch state.
//
// An ExecInst is an Inst prepared once per kernel: a direct handler, operands resolved to rows, scalars or constants,
// and branch targets as indices. Handlers live in exec_*.cpp, one file per instruction class (see exec.h).
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dispatch.h"
#include "inst.h"
#include "matrix.h"
#include "memory.h"

namespace hfemu {

constexpr int kLanes = 64;
constexpr int kVgprs = 512;     // 256 VGPRs, then 256 AccVGPRs
constexpr int kAcc = 256;       // row of a[0]
constexpr uint64_t kAllLanes = ~uint64_t{0};

struct Wave;
struct ExecInst;
struct Launch;
struct Workgroup;
struct ThreadState;
struct WaveShadow;
struct UsageTable;

// The modelled fields of a wave's MODE register, from rsrc1 or s_setreg; the others fault when they are set.
struct Mode {
  uint8_t round32 = 0, round64 = 0;    // 0 nearest-even, 1 up, 2 down, 3 toward zero; round64 is f16's too
  uint8_t denorm32 = 3, denorm64 = 3;  // bit 0 inputs kept, bit 1 outputs kept; denorm64 is f16's too
  bool dx10_clamp = true, ieee = true, fp16_ovfl = false;
  bool disable_perf = false;           // no effect: there are no hardware counters to stop
  bool vskip = false;                  // vector instructions are not executed
  uint8_t csp = 0;                     // entries on the fork/join stack
  bool fnuz = false;                   // 8-bit floats of gfx942; no field of MODE
  // The plain loop rounds to nearest and keeps denormals; any other mode needs the careful loop.
  bool plain_arithmetic() const { return (round32 | round64) == 0 && (denorm32 & denorm64) == 3; }
};
// The same, for lane operations whose loop is compiled once for each kind of 8-bit float.
struct FormatMode : Mode {};

using Handler = void (*)(Wave&, const ExecInst&);
// Rows of 64 dwords; a 64-bit value takes two rows. A compare writes 64 bytes of 0 or 0xFF instead.
using LaneKernel = void (*)(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, const Mode& mode);

enum class LaneType : uint8_t { none, b16, f16, b32, f32, b64, f64, pk16, pkf16, mask };

// The rounding mode that the host's registers must have while a handler runs. Handlers that round by themselves, and
// instructions that ignore MODE, need nearest-even.
enum class HostRounding : uint8_t { nearest, single, wide };

enum class OpClass : uint8_t {
  salu, smem, valu, valu_trans, mfma, lds, vmem_load, vmem_store, atomic, branch, barrier, waitcnt, other, count
};

enum class SourceKind : uint8_t { none, vgpr, constant, sgpr, special };

struct Source {
  SourceKind kind = SourceKind::none;
  uint8_t dwords = 1;
  uint16_t reg = 0;               // vgpr 0..511, sgpr 0..127, or a Special
  const uint32_t* row = nullptr;  // constants: splat rows (two for 64-bit operands)
};

// Where each lane of a DPP instruction reads.
struct DppPlan {
  uint8_t from[kLanes] = {};
  uint64_t inside = 0;   // lanes whose source lies inside the row or wave
  uint64_t enabled = 0;  // lanes the row and bank masks let through
};

struct alignas(64) ExecInst {
  Handler fn = nullptr;
  Handler careful = nullptr;      // instead of fn where MODE's rounding or denormals are not the default; null: fn knows
  LaneKernel kernel = nullptr;
  Source src[3];
  Source address;                 // memory: vaddr
  uint16_t dst = 0;               // vgpr 0..511 or sgpr
  uint8_t dst_dwords = 1;
  bool dst_is_vgpr = false;
  uint16_t dst2 = 0;              // carry-out or mask destination (sgpr)
  uint16_t data = 0, data2 = 0;   // memory: first VGPR of stored or loaded data
  uint16_t sbase = 0;             // memory: saddr or srsrc
  bool has_sbase = false;
  uint8_t bytes = 0;              // memory: bytes per lane of one access
  LaneType result = LaneType::none;
  bool plain = true;              // no source or output modifiers
  bool writes_exec = false;       // v_cmpx
  bool accumulates = false;       // src[2] is the destination
  HostRounding rounding = HostRounding::nearest;
  OpClass op_class = OpClass::other;
  uint32_t target = 0;            // branches: index of the target; s_waitcnt: the immediate
  int64_t offset = 0;
  const Inst* inst = nullptr;
  Source scale_a, scale_b;        // scaled MFMA
  bool sparse = false;            // SMFMAC: src[2] is the index
  MatrixFn matrix = nullptr;
  const DppPlan* dpp = nullptr;   // null: not a DPP instruction
};

// A kernel's text, decoded and prepared.
struct Program {
  Arch arch = Arch::gfx950;
  uint64_t base = 0;                // host address of virtual address 0
  uint64_t text_begin = 0;          // virtual
  std::vector<Inst> insts;
  std::vector<ExecInst> code;       // parallel to insts, plus a final entry that faults
  std::vector<uint32_t> index_of;   // text dword -> index, kNoIndex inside an instruction
  std::vector<std::unique_ptr<uint32_t[]>> constants;
  std::vector<std::unique_ptr<DppPlan>> dpp_plans;
  mutable std::shared_ptr<const UsageTable> usage;  // for the checkers, on first use
  static constexpr uint32_t kNoIndex = ~0u;

  std::shared_ptr<const LineTable> lines;  // null: none
  // "kernel.cu:42", or empty.
  std::string source(const Inst& inst) const;

  uint64_t host_pc(uint32_t index) const { return base + insts[index].pc; }
  // Index of the instruction at a host address, kNoIndex if there is none.
  uint32_t index_at(uint64_t host_address) const;
};
// Decodes and prepares on first use, under a lock.
Program& program_of(LoadedCode& code);

// careful: running with VGPR indexing, VSKIP or a floating-point mode that the plain loop does not have. sleeping: gives
// way until its next turn.
enum class WaveState : uint8_t { running, careful, sleeping, barrier, ended };

struct alignas(64) Wave {
  Row v[kVgprs];
  alignas(64) uint32_t s[128];
  const ExecInst* code = nullptr;
  uint32_t pc = 0;                 // index of the next instruction
  uint32_t scc = 0;
  WaveState state = WaveState::running;
  bool indexing = false;           // MODE.GPR_IDX_EN
  uint8_t priority = 0;            // of s_setprio; only STATUS shows it
  uint32_t index = 0;              // within the work-group
  Mode mode;
  Workgroup* wg = nullptr;
  ThreadState* thread = nullptr;
  Launch* launch = nullptr;
  WaveShadow* shadow = nullptr;    // null: no register or wait checks
  uint8_t* scratch = nullptr;      // lane l's private memory: scratch + l * launch->private_bytes
  uint32_t initial_sgprs = 0;      // SGPRs the dispatch has set

  uint64_t s64(uint32_t reg) const {
    uint64_t x;
    std::memcpy(&x, &s[reg], 8);
    return x;
  }
  void set_s64(uint32_t reg, uint64_t x) { std::memcpy(&s[reg], &x, 8); }
  uint64_t exec() const { return s64(kExec); }
  // The next action of a wave that can advance.
  WaveState awake() const {
    return indexing || mode.vskip || !mode.plain_arithmetic() ? WaveState::careful : WaveState::running;
  }
};

// --- MODE (exec_mode.cpp) ---------------------------------------------------------------------------------------------
uint32_t mode_register(const Wave& w);
// Null, or the name of a field set in `bits` that is not modelled.
const char* unmodelled_mode(uint32_t bits);
void set_mode_register(Wave& w, uint32_t bits);
// Executes, or under VSKIP skips, one instruction of a wave in the careful state.
void step_careful(Wave& w);
// VSKIP makes the wave step over `in`.
bool skips(const Wave& w, const ExecInst& in);

struct LdsShadow;
class Stats;
class GroupRecorder;
class HostFloat;

struct Workgroup {
  uint32_t id[3] = {0, 0, 0};
  uint32_t flat = 0;               // index in the grid, x fastest
  uint8_t* lds = nullptr;
  uint32_t lds_bytes = 0;
  uint32_t waves = 1;
  LdsShadow* shadow = nullptr;     // null: no LDS checks
  uint32_t barriers = 0;           // passed so far: the epoch of race checks
};

// The state of one host thread while it runs work-groups.
struct ThreadState {
  AddressMap::Run last[2];         // recently hit runs, most recent first
  AddressMap::Run last_scalar;
  Stats* stats = nullptr;          // null: nothing is counted
  GroupRecorder* recorder = nullptr;  // null: nothing is recorded
  HostFloat* host = nullptr;       // the host's rounding mode while waves run
};

class GlobalRaces;
struct LaunchTotals;
struct LaunchRecording;

struct Launch {
  const Program* program = nullptr;
  const KernelInfo* kernel = nullptr;
  Options options;
  AddressMap map;
  uint32_t private_bytes = 0;
  GlobalRaces* global_races = nullptr;
  LaunchTotals* totals = nullptr;  // null: no collector is open
  LaunchRecording* recording = nullptr;  // null: no recorder is set
  std::atomic<bool> stop{false};
  std::mutex reports_mutex;
  std::vector<std::pair<const Inst*, Fault>> reports;
};

struct FaultError {
  Fault fault;
};
// Throws a FaultError whose text has the reason, kernel, PC, disassembly, work-group, wave and (lane >= 0) lane.
[[noreturn]] void fault(const Wave& w, const ExecInst& in, FaultKind kind, const std::string& reason, int lane = -1);
// Reports a checker's finding. Throws like fault(), unless the options allow more reports: then the report is kept, one
// per instruction, and the launch continues.
void report(const Wave& w, const ExecInst& in, FaultKind kind, const std::string& reason, int lane = -1);
[[noreturn]] void unsupported(const Wave& w, const ExecInst& in, const std::string& what);

std::string instruction_text(const Inst& inst, const uint8_t* bytes);
// Instructions around `index`, that one marked.
std::string listing_around(const Program& p, uint32_t index, uint32_t before, uint32_t after);

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));

}  // namespace hfemu
