// Checks beyond memory extents: undefined registers and LDS, missing waits, LDS races, global races.
//
// Definedness is tracked per lane of a register (not per bit) and follows values through arithmetic; it is reported
// where it matters: addresses, compares and branches, EXEC, and data stored to memory. A write of part of a register
// makes it defined, so halves are never reported wrongly.
// Loads land at once but are marked pending until s_waitcnt has counted them; any use before that is reported.
// The rules of races are in lds_shadow.h and global_races.h.
#pragma once

#include <memory>
#include <vector>

#include "access.h"
#include "core.h"
#include "global_races.h"
#include "lds_shadow.h"
#include "usage.h"

namespace hfemu {

struct WaveShadow {
  uint64_t defined[kVgprs];        // lanes
  uint32_t sdefined[128];          // bits
  uint32_t undefined_at[kRegisters];  // instruction that first read the undefined value behind a register
  uint32_t pending_vm[kRegisters];    // sequence number of the load that will write a register, 0 none
  uint32_t pending_lgkm[kRegisters];
  uint32_t pending_from[kRegisters];  // index of that load
  uint32_t vm_issued = 0, vm_done = 0, lgkm_issued = 0, lgkm_done = 0, last_smem = 0, last_flat = 0;
  uint64_t smem_address[128] = {};    // of the scalar load that will write a register
  std::vector<uint8_t> scratch_defined;  // by lane and byte
  uint64_t lds_undefined = 0;      // lanes whose LDS read in progress met bytes never written

  Clock clock;                     // of the other waves; the own entries are the counters above
  uint32_t learned = 0;            // counts changes of `clock`
  struct Acquire {
    uint32_t seq, from;            // takes effect when lgkm_done reaches seq
  };
  std::vector<Acquire> acquires;   // of LDS words
  std::vector<Acquire> signals;    // of global memory; effective when vm_done reaches seq
  uint32_t write_back[kMaxWaves] = {};  // what a buffer_wbl2 covers once it is waited for
  bool writing_back = false;
  // The last clock released, and what it was made from.
  uint32_t released = ClockPool::kNone, released_from[5] = {};
};

// Of a logical operation with an operand that is not wholly defined.
struct ScalarResult {
  bool known = false;              // false: no such operation
  bool to_exec = false;            // the result goes to EXEC, and EXEC's old value to the destination
  uint64_t defined = 0;            // bits
};
ScalarResult scalar_result(const Wave& w, const ExecInst& in);

class Checkers {
 public:
  Checkers(Launch& launch, uint32_t waves, uint32_t lds_bytes);
  void begin_group(Workgroup& group, Wave* waves, uint32_t count);
  // Around the execution of the instruction at `index`.
  void before(Wave& w, const ExecInst& in, uint32_t index);
  void after(Wave& w, const ExecInst& in, uint32_t index, uint64_t exec);
  void barrier() { lds_.barrier(); }  // every wave has arrived

 private:
  void check_range(const Wave& w, const ExecInst& in, const RegisterUse& u);
  void check_pending(const Wave& w, const ExecInst& in, const RegisterUse& u);
  void check_defined(const Wave& w, const ExecInst& in, const RegisterUse& u, uint32_t index);
  bool wholly_defined(const WaveShadow& s, const RegisterUse& u) const;
  void propagate(Wave& w, const ExecInst& in, const RegisterUse& u, uint32_t index, uint64_t exec);
  static bool propagate_halves(WaveShadow& s, const ExecInst& in, uint32_t index, uint64_t exec);
  static void propagate_matrix(WaveShadow& s, const ExecInst& in);

  const UsageTable& usage_;
  const Options options_;
  const uint32_t registers_;  // granted to a wave: VGPRs and AccVGPRs together
  const uint32_t first_acc_;  // of them, the first AccVGPR
  std::vector<std::unique_ptr<WaveShadow>> shadows_;
  std::vector<WaveShadow*> pointers_;
  GlobalRaces* const global_;  // null: not asked for
  LdsShadow lds_;
  uint64_t select_mask_ = 0;  // of the v_cndmask in progress
  ScalarResult scalar_;       // of the instruction in progress
};

// Scratch keeps undefined values undefined, and bytes that were never written are.
void check_scratch_access(Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);
// "pc 0x1c (ds_read_b32 v0, v1)"
std::string place(const Wave& w, uint32_t index);
// The count that an s_waitcnt immediate demands of vmcnt; 63: none.
inline uint32_t vmcnt_of(uint32_t imm) { return (imm & 15) | (imm >> 10 & 0x30); }

}  // namespace hfemu
