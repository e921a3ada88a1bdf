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
#include "lds_shadow.h"
#include "usage.h"

namespace hfemu {

struct WaveShadow {
  uint64_t defined[kVgprs];        // lanes
  uint8_t sdefined[128];
  uint32_t undefined_at[kRegisters];  // instruction that first read the undefined value behind a register
  uint32_t pending_vm[kRegisters];    // sequence number of the load that will write a register, 0 none
  uint32_t pending_lgkm[kRegisters];
  uint32_t pending_from[kRegisters];  // index of that load
  uint32_t vm_issued = 0, vm_done = 0, lgkm_issued = 0, lgkm_done = 0, last_smem = 0, last_flat = 0;
  uint64_t lds_undefined = 0;      // lanes whose LDS read in progress met bytes never written

  Clock clock;                     // of the other waves; the own entries are the counters above
  uint32_t learned = 0;            // counts changes of `clock`
  struct Acquire {
    uint32_t seq, clock;           // takes effect when lgkm_done reaches seq
  };
  std::vector<Acquire> acquires;
  // The last clock released, and what it was made from.
  uint32_t released = ClockPool::kNone, released_from[5] = {};
};

class Checkers {
 public:
  Checkers(Launch& launch, uint32_t waves, uint32_t lds_bytes);
  void begin_group(Workgroup& group, Wave* waves, uint32_t count);
  // Around the execution of the instruction at `index`.
  void before(Wave& w, const ExecInst& in, uint32_t index);
  void after(Wave& w, const ExecInst& in, uint32_t index, uint64_t exec);
  void barrier() { lds_.barrier(); }  // every wave has arrived

 private:
  void check_pending(const Wave& w, const ExecInst& in, const RegisterUse& u);
  void check_defined(const Wave& w, const ExecInst& in, const RegisterUse& u, uint32_t index);
  void propagate(Wave& w, const ExecInst& in, const RegisterUse& u, uint32_t index, uint64_t exec);
  static bool propagate_halves(WaveShadow& s, const ExecInst& in, uint32_t index, uint64_t exec);
  static void propagate_matrix(WaveShadow& s, const ExecInst& in);

  const UsageTable& usage_;
  const Options options_;
  std::vector<std::unique_ptr<WaveShadow>> shadows_;
  std::vector<WaveShadow*> pointers_;
  LdsShadow lds_;
  uint64_t select_mask_ = 0;  // of the v_cndmask in progress
};

// Non-atomic accesses of different work-groups to the same byte, at least one a write. One host thread only.
class GlobalRaces {
 public:
  void access(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);

 private:
  struct Byte {
    uint32_t writer = 0, reader = 0;  // work-group + 1; kAtomic and kSeveral are flags
    uint32_t write_pc = 0, read_pc = 0;
  };
  struct Shadow {
    uint64_t begin = 0, end = 0;
    std::vector<Byte> bytes;
  };
  Shadow& shadow_of(const Launch& launch, uint64_t address);
  std::vector<std::unique_ptr<Shadow>> shadows_;
};

}  // namespace hfemu
