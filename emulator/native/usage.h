// Which registers an instruction reads and writes, for the register and wait checkers.
#pragma once

#include <vector>

#include "core.h"

namespace hfemu {

// One numbering for all files: VGPRs and AccVGPRs 0..511, SGPRs 512..639.
constexpr uint16_t kSgprBase = kVgprs;
constexpr uint16_t kRegisters = kVgprs + 128;

enum class Flow : uint8_t {
  none,        // nothing to propagate
  lanes,       // a result lane depends on the same lane of every vector source
  across,      // results depend on other lanes
  select,      // v_cndmask
  compare,     // sources must be defined
  matrix,
  to_scalar,   // readlane, readfirstlane
  write_lane,
  scalar,
  vector_load, lds_load, scalar_load,
  store,       // data is stored to memory: it must be defined
  private_store,
  branch,
};

struct RegisterUse {
  uint32_t first = 0;          // into UsageTable::registers: addresses, then other reads, then writes
  uint8_t addresses = 0, reads = 0, writes = 0;
  uint16_t vgprs = 0, agprs = 0;  // one more than the highest named, 0: none
  Flow flow = Flow::none;
  bool partial = false;        // some bits of the destination keep their value
  bool counts_vm = false, counts_lgkm = false, is_smem = false, is_flat = false;
  bool polls = false;          // reads LDS at one address until the value changes (polls.cpp)
  bool volatile_data = false;  // a volatile load whose value ends no loop (polls.cpp)
};

struct UsageTable {
  std::vector<RegisterUse> uses;  // by instruction index
  std::vector<uint16_t> registers;
  bool polls = false;             // any of them does
};

// Marks the instructions that poll.
void find_polls(const Program& program, UsageTable& table);

// Built on first use, then shared.
const UsageTable& usage_of(const Program& program);

}  // namespace hfemu
