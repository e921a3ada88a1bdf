// The emulator library's C interface for Python and for the argument binding. HIP entry points are in hip_runtime.cpp.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)

extern "C" {

// A named range that kernels launched from this thread may access; nested calls stack.
typedef struct hfemu_extent {
  const char* name;   // argument name, for faults and per-tensor counters
  uint64_t base;      // host address
  uint64_t bytes;     // exact: one byte past it is a fault
  uint32_t writable;
  uint32_t reserved;
} hfemu_extent;

typedef struct hfemu_options {
  const char* arch;        // "gfx950" or "gfx942"
  int32_t cu_count;
  int32_t threads;         // 0: one per core
  int32_t check_memory;    // 1: every access inside a live extent or allocation
  int32_t check_uninit;    // 1: reads of registers or LDS never written
  int32_t check_waits;     // 1: results land only when s_waitcnt says so
  int32_t check_races;     // 1: LDS races between waves
  int32_t check_global_races;  // 1: races between work-groups in global memory
  int32_t check_strict;    // 1: also unwaited LDS reads before a barrier
  int32_t max_reports;     // of checkers, one per instruction, before the launch stops; at least 1
  int32_t wave_order;      // 0 forward, 1 reverse, 2 seeded random
  int32_t quantum;         // instructions of one wave before the next one's turn, 1 to 4096
  uint64_t seed;
  uint64_t instruction_budget;  // wave-instructions per launch, 0: the default bound
} hfemu_options;

void hfemu_get_options(hfemu_options* out);
int hfemu_set_options(const hfemu_options* options);  // 0, or an error (see hfemu_last_error)

void hfemu_push_extents(const hfemu_extent* extents, int32_t count);
void hfemu_pop_extents(void);

// Why this thread's last call failed, or null; the pointer lives until the next call on the thread. A launch's fault
// stays until the next launch; another HIP call's failure until hipGetLastError has taken it.
const char* hfemu_last_error(void);
void hfemu_clear_error(void);  // and HIP's last error

// From now on launches run Python's pending signal handlers every few milliseconds. If a handler raises, the launch ends
// and the exception is left set on the launching thread: a caller of a module entry checks PyErr_Occurred() first thing
// after it holds the GIL again; a caller of hfemu_launch asks hfemu_restore_exception(), which needs the GIL and returns 1
// with the exception set. Returns 0, or 1 if there is no CPython in the process.
int32_t hfemu_poll_python(void);
int32_t hfemu_restore_exception(void);

// Code objects. `image` is an ELF, an offload bundle or a compressed bundle; the result is a handle >= 1, or 0.
int64_t hfemu_load(const void* image, uint64_t bytes, const char* arch);
void hfemu_unload(int64_t handle);
// Launch with explicit kernel arguments already laid out (kernarg bytes without the hidden block).
int32_t hfemu_launch(int64_t handle, const char* kernel, const uint32_t grid[3], const uint32_t block[3],
                     const void* kernarg, uint64_t kernarg_bytes, uint64_t dynamic_lds);  // a hipError_t

// The stream that ops called from this thread use, as torch's current stream is on a GPU; null until set.
void hfemu_set_stream(void* stream);
void* hfemu_stream(void);
int32_t hfemu_capturing(void);  // whether that stream is capturing
// hipGraphLaunch for Python, with signal handlers' exceptions as after hfemu_launch; a hipError_t.
int32_t hfemu_graph_launch(void* executable, void* stream);
// What each node of a recorded hipGraph_t does, one per line: a kernel's name or a call's; owned by the library.
const char* hfemu_graph_nodes(void* graph);

// Counters: begin returns a collector id; end returns its JSON, owned by the library until the next end on the thread.
int64_t hfemu_counters_begin(int32_t per_pc);
const char* hfemu_counters_end(int64_t collector);

// Every mnemonic that decodes and has (executable 1) or has not (0) a handler, one per line; owned by the library.
const char* hfemu_mnemonics(int32_t executable);

// Disassembly of a loaded kernel (llvm-objdump spelling), one instruction per line; owned by the library.
const char* hfemu_disassemble(int64_t handle, const char* kernel);
// The source line of each of its instructions, "file:line" or empty, one per line; owned by the library.
const char* hfemu_source_lines(int64_t handle, const char* kernel);
// Disassembly of raw bytes, for tests of the decoder.
const char* hfemu_disassemble_bytes(const void* code, uint64_t bytes, const char* arch);

// Trace: print each instruction and the registers it touches for one lane of one work-group to a callback.
typedef void (*hfemu_trace_sink)(const char* line, void* context);
void hfemu_set_trace(hfemu_trace_sink sink, void* context, const char* kernel, uint32_t workgroup, uint32_t wave,
                     uint32_t lane);

// Recording: which instructions the waves of chosen work-groups executed and which memory they touched.
enum hfemu_unit {
  HFEMU_SALU, HFEMU_SMEM, HFEMU_VALU, HFEMU_TRANSCENDENTAL, HFEMU_MATRIX, HFEMU_LDS, HFEMU_VMEM_LOAD, HFEMU_VMEM_STORE,
  HFEMU_ATOMIC, HFEMU_BRANCH, HFEMU_BARRIER, HFEMU_WAITCNT, HFEMU_NOP, HFEMU_END, HFEMU_OTHER
};
typedef struct hfemu_instruction {
  uint64_t pc;              // relative to the code object's load base
  const char* text;         // disassembly
  uint32_t first_register;  // into hfemu_recorded_launch::registers: those read, then those written
  uint16_t reads, writes;
  uint16_t matrix_cycles;   // of the matrix pipe, from the ISA documents
  uint8_t bytes;            // encoded size
  uint8_t unit;             // hfemu_unit
  uint8_t lane_bytes;       // memory: bytes per lane
  uint8_t counters;         // 1: counts in vmcnt, 2: in lgkmcnt, 4: to LDS
  int32_t immediate;        // s_waitcnt, s_nop, s_sleep, s_setprio
} hfemu_instruction;
typedef struct hfemu_recorded_launch {
  const char* kernel;
  const char* arch;
  uint32_t grid[3], block[3];
  uint64_t groups;
  uint32_t waves;           // per work-group
  uint32_t groups_per_cu;   // that fit one compute unit at once
  uint32_t lds_bytes, vgprs;
  const hfemu_instruction* instructions;
  uint64_t instruction_count;
  const uint16_t* registers;  // 0-511 VGPRs and AccVGPRs, from 512 SGPRs
  const hfemu_extent* extents;
  uint64_t extent_count;
} hfemu_recorded_launch;
// `accesses` has, for every executed instruction of a memory unit in order: the number n of accesses, then n times a
// header and its words. Header: bits 0-1 kind (0 load, 1 store, 2 atomic, 3 LDS), bits 2-15 count, bits 16-31 extent
// (0xFFFF: none). Global accesses have `count` words: 64-byte sectors, relative to the extent's first byte rounded down
// to 64, ascending; LDS accesses have none and `count` is the cycles that the banks need.
typedef struct hfemu_recorded_wave {
  const uint32_t* instructions;  // indices
  uint64_t instruction_count;
  const uint32_t* accesses;
  uint64_t words;
} hfemu_recorded_wave;
typedef struct hfemu_recorder {
  void* context;
  void (*begin)(void* context, const hfemu_recorded_launch* launch);
  // How many instructions of each wave to execute and record; 0: skip the work-group; -1: execute without recording.
  int64_t (*choose)(void* context, uint64_t group);
  void (*group)(void* context, uint64_t group, const hfemu_recorded_wave* waves);  // one call at a time
  void (*end)(void* context);
  int32_t skip_matrix;       // do not compute matrix products: nothing but values may depend on them
} hfemu_recorder;
// Launches from this thread are recorded until it is set to null.
void hfemu_set_recorder(const hfemu_recorder* recorder);
}

#pragma GCC visibility pop
