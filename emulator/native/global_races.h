// Global races: accesses of one byte by different work-groups, at least one a write, that nothing orders.
//
// Order between work-groups comes from device-scope accesses: atomics, loads and stores with sc1, scalar loads with glc. One that writes
// releases what its wave knows into the word, one that reads (or returns) acquires what the word holds. A release covers
//   stores   that a buffer_wbl2 sc1 of the group wrote back, once its wave has waited for it (s_waitcnt vmcnt);
//   loads    that are complete, if they are the wave's own;
//   both     of other waves of the group, as far as a barrier or an LDS flag told the wave of them: the waves of a group
//            share the path to memory, which keeps their accesses in order;
// and an acquire takes effect at the wave's next buffer_inv sc1, once it has waited for the value. LLVM's memory model for
// these processors compiles release and acquire at agent scope to these instructions; without the cache instructions a
// value may stay in the L2 of another die or come from a stale line.
// Volatile loads and stores carry the marks of system scope, but order nothing. Two signs show a volatile load: its value
// ends no loop, and no acquire follows it (polls.cpp). Such a load races with another group's store, unless the store was
// complete when its wave sent a signal that this wave has read: both bypass the caches. It does not race with
// read-modify-writes: reading a counter once is common.
// A load that begins a loop of compare-and-swap is part of that atomic operation: its value is only compared.
// Otherwise device-scope accesses do not race with each other, and neither do stores of different groups that write the value
// which is there already. Accesses of one group are not compared with each other.
//
// Work-groups run on one thread, one at a time; a group that waits gives way to the others (worker.h).
#pragma once

#include <array>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "access.h"
#include "clocks.h"

namespace hfemu {

class GlobalRaces {
 public:
  void begin_group(const Workgroup& group);
  void enter_group(const Workgroup& group);  // its accesses follow
  void end_group();                          // the one that was entered last
  void access(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);
  // Around each instruction: cache maintenance and waits before it, what its stores changed after it.
  void before(const Wave& w, const ExecInst& in);
  void after(const Wave& w, const ExecInst& in);

 private:
  // A dword, or one of its bytes once an access took part of it.
  struct Cell {
    uint32_t writer = 0;               // work-group + 1
    uint32_t write_seq = 0, write_pc = 0;
    uint32_t signals = 0;              // newest entry of the word's log
    uint32_t readers = 0;              // first of a list: since the last write
    uint32_t writers = 0;              // first of a list: device-scope writes that the last one does not follow
    uint32_t parts = 0;                // 0: whole
    uint8_t write_wave = 0, write_lane = 0;
    bool device = false;               // the last write
    bool modifies = false;             // the last write: a read-modify-write
  };
  struct Past {  // an access
    uint32_t group, seq, pc, next;
    uint8_t wave, lane;
    bool device;
    bool modifies;                     // a read-modify-write
    bool data;                         // a volatile load
  };
  struct Shadow {
    uint64_t begin = 0, end = 0;
    std::vector<Cell> dwords;
  };
  // What a release covers: of its own group by wave, of others through what that group's waves had acquired.
  struct Release {
    uint32_t group;
    uint32_t loads[kMaxWaves], stores[kMaxWaves], acquired[kMaxWaves];
  };
  struct Signal {
    uint32_t release, previous;
  };
  using Acquired = std::array<std::vector<uint32_t>, kMaxWaves>;  // signals, by wave
  struct Fact {
    uint32_t loads[kMaxWaves] = {}, stores[kMaxWaves] = {}, acquired[kMaxWaves] = {};
  };
  // What a wave knows of other groups so far; the rest of what it may know has yet to be visited.
  struct Knowledge {
    std::unordered_map<uint32_t, Fact> facts;  // by group
    std::unordered_set<uint32_t> visited;
    std::vector<uint32_t> open;
    uint32_t taken[kMaxWaves] = {};
  };
  struct Other {
    uint32_t group, wave, lane, seq, pc;
    bool writes, through;              // through: written past the caches
  };
  static Other other_of(const Past& p, bool writes) {
    return {p.group, p.wave, p.lane, p.seq, p.pc, writes, writes && p.device};
  }
  struct Conflict {
    Other other;
    uint64_t address;
    uint32_t bytes;
    int lane;
    uint8_t old[4];
  };
  struct Visit;

  Shadow& shadow_of(const Launch& launch, uint64_t address);
  void touch_dword(const Visit& v, Shadow& s, uint64_t address, uint32_t bytes, int lane);
  void touch(const Visit& v, Cell& cell, uint64_t address, uint32_t bytes, int lane);
  void remember(uint32_t& list, const Past& now);
  void forget(uint32_t& list);
  void copy_list(uint32_t& list);
  uint32_t release(const Wave& w);
  bool ordered(const Wave& w, const Other& other, bool without_invalidation = false);
  void follow(Knowledge& k, uint32_t group, Fact& fact, const uint32_t* acquired);
  void race(const Wave& w, const ExecInst& in, const char* what, const Other& other, uint64_t address,
                         int lane);

  std::vector<std::unique_ptr<Shadow>> shadows_;
  std::vector<std::array<Cell, 4>> parts_{1};
  std::vector<Past> past_{1};
  uint32_t free_past_ = 0;
  std::vector<Release> releases_{1};
  std::vector<Signal> signals_{1};
  std::unordered_map<uint32_t, Acquired> acquired_;  // by group
  std::vector<Conflict> conflicts_;
  // Of a group that has not ended, by wave: what it knows, its last release and what that was made of.
  struct Running {
    Knowledge knowledge[kMaxWaves], uninvalidated[kMaxWaves];  // the second: for accesses past the caches
    uint32_t released[kMaxWaves] = {}, released_done[kMaxWaves] = {}, released_learned[kMaxWaves] = {};
  };
  std::unordered_map<uint32_t, std::unique_ptr<Running>> running_;  // by group
  uint32_t group_ = 0;          // whose accesses are being added
  Running* now_ = nullptr;      // that group's
};

}  // namespace hfemu
