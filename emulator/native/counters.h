// What did a kernel do? Collectors on the launching thread gather every launch between begin and end.
//
// JSON of a collector (numbers are totals over its launches):
//   launches, workgroups, waves, seconds (host wall time, not a model), wave_instructions,
//   active_lanes        sum over VALU/LDS/VMEM wave-instructions of active lanes; lane_slots: 64 * their number
//   by_class            {salu, smem, valu, valu_trans, mfma, lds, vmem_load, vmem_store, atomic, branch, barrier,
//                        waitcnt, other} -> wave-instructions
//   by_mnemonic         mnemonic -> wave-instructions
//   bytes_loaded, bytes_stored   global memory (vector and scalar), atomics count in both directions
//   tensors             name -> {bytes, loaded, stored, unique_loaded, unique_stored}
//   lines64, lines128   per-access cache lines of vector loads and stores:
//                       {accesses, bytes, lines, efficiency = bytes / (lines * line size)}
//   scalar_bytes, scratch_bytes
//   lds_bytes, lds_accesses, lds_bank_conflicts (extra cycles beyond the conflict-free number; banks: lds_banks)
//   mfma_count, mfma_cycles
//   kernels             [{name, grid, block, lds_bytes, launches, wave_instructions, seconds}]
//   per_pc              when asked: [{kernel, pc, text, count, lanes, bytes}]
#pragma once

#include <cstdint>
#include <string>

namespace hfemu {

int64_t counters_begin(bool per_pc);
// The collector's JSON; an empty string if the id is not open on this thread.
std::string counters_end(int64_t id);

}  // namespace hfemu
