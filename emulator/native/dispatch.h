// The executor's interface: loaded code + kernel + grid -> run. The loader fills LoadedCode and KernelInfo, the HIP
// runtime and the C API fill LaunchRequest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "inst.h"

namespace hfemu {

class LineTable;
struct Program;  // the decoded text, built by the executor on the first launch

// One code object after loading: segments mapped at one base, relocations applied. Addresses are host addresses, so
// s_getpc_b64 plus a literal reaches .rodata; Inst::pc is relative to `base`.
struct LoadedCode {
  Arch arch = Arch::gfx950;
  std::string name;                      // for messages
  const uint8_t* base = nullptr;         // host address of virtual address 0
  uint64_t text_begin = 0, text_end = 0;  // executable range, virtual addresses
  std::vector<uint64_t> functions;       // virtual addresses where decoding must start afresh (kernels, functions)
  std::shared_ptr<const LineTable> lines;  // null: the code object has none
  std::shared_ptr<Program> program;      // owned by the executor; leave empty
};

struct KernelInfo {
  std::string name;             // symbol without .kd
  uint64_t entry = 0;           // virtual address of the first instruction
  uint32_t rsrc1 = 0, rsrc2 = 0, rsrc3 = 0;
  uint32_t properties = 0;      // descriptor offset 56 (16 bits)
  uint32_t preload_dwords = 0;  // kernarg preload length and offset
  uint32_t preload_offset = 0;
  uint32_t kernarg_bytes = 0;   // from the metadata
  uint32_t lds_bytes = 0;       // static
  uint32_t private_bytes = 0;   // scratch per lane
  bool dynamic_stack = false;
  uint32_t max_workgroup = 1024;  // .max_flat_workgroup_size
  uint32_t vgprs = 0, sgprs = 0;  // unified VGPRs per lane and SGPRs per wave, from the metadata
};

// Work-groups of `threads` items that fit one CU at once, by registers, waves and LDS.
uint32_t groups_per_cu(const KernelInfo& kernel, Arch arch, uint32_t threads, uint64_t dynamic_lds);

struct LaunchRequest {
  LoadedCode* code = nullptr;         // program is filled in on first use; keep it alive during the call
  const KernelInfo* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1};       // work-groups
  uint32_t block[3] = {1, 1, 1};      // work-items
  const void* kernarg = nullptr;      // the whole segment, hidden arguments already in place
  size_t kernarg_bytes = 0;
  uint32_t dynamic_lds = 0;
};

enum class WaveOrder : uint8_t { forward, reverse, random };

// Some hand-written kernels pass data between waves without a barrier and rely on waves advancing together. AMD's own
// (attention, MLA decode, int8 GEMM) give right results at 16 instructions per turn and wrong ones at 48.
constexpr uint32_t kDefaultQuantum = 16;

struct Options {
  Arch arch = Arch::gfx950;  // of the emulated device
  int cu_count = 256;
  int threads = 0;           // 0: one per core
  bool check_memory = true;
  bool check_uninit = false;
  bool check_waits = false;
  bool check_races = false;
  bool check_global_races = false;
  bool check_strict = false;  // also what only another compiler could break
  uint32_t max_reports = 1;   // of checkers, before the launch stops
  WaveOrder wave_order = WaveOrder::forward;
  uint32_t quantum = kDefaultQuantum;  // instructions that a wave may execute in its turn
  uint64_t seed = 0;
  uint64_t instruction_budget = 0;  // wave-instructions per launch; 0: kDefaultBudget per work-group
};
constexpr uint64_t kDefaultBudget = uint64_t{1} << 28;

struct TraceRequest {
  void (*sink)(const char* line, void* context) = nullptr;  // null: no trace
  void* context = nullptr;
  std::string kernel;  // substring of the kernel's name; empty: every kernel
  uint32_t workgroup = 0, wave = 0, lane = 0;
};

using Poll = bool (*)();  // called every few milliseconds on the launching thread; true aborts; null: none

enum class FaultKind : uint8_t {
  none, unsupported, memory, lds, uninitialised, missing_wait, lds_race, global_race, deadlock, aborted, invalid_launch
};

struct Fault {
  FaultKind kind = FaultKind::none;
  std::string text;  // the whole report, several lines
};

// Runs the launch to its end on the calling thread and helpers. False: `fault` says why; memory may be half written.
bool run_launch(const LaunchRequest& request, const Options& options, const TraceRequest& trace,
                Poll poll, Fault* fault);

// Disassembly of the kernel's instructions, "address: text" per line, up to the next function.
std::string disassemble_kernel(LoadedCode& code, const KernelInfo& kernel);
// The source line of each of them, "file:line" or an empty line.
std::string source_lines_of_kernel(LoadedCode& code, const KernelInfo& kernel);

// Executes one instruction on given registers (op tests). `vgprs` is [512][64] (256 VGPR rows, then 256 AccVGPR rows),
// `sgprs` [128] (VCC 106, M0 124, EXEC 126); `mode` the MODE register; `scc` in and out; `private_bytes` of zeroed
// scratch per lane. Returns null, or the fault's text (valid until the thread's next call).
extern "C" const char* hfemu_exec_one(const uint8_t* code, uint64_t bytes, int32_t arch, uint32_t mode,
                                      uint32_t* sgprs, uint32_t* vgprs, uint32_t* scc, uint8_t* lds,
                                      uint32_t lds_bytes, uint32_t private_bytes);

}  // namespace hfemu
