// Does a work-group only wait for others? And if all do: which wave waits for what.
//
// A wave waits if it comes back to the same instruction with the same registers and scratch while no wave of its group
// has stored anything: until another group stores, it will repeat this. The waves of a group are watched one after
// another while all of them run in their usual turns, so watching changes no schedule. A loop that reads the clock or
// counts its iterations never repeats a state and counts as advancing.
#pragma once

#include "core.h"

namespace hfemu {

// The last memory read in a waiting wave's loop.
struct WaveWait {
  uint32_t instruction = ~0u;  // index; ~0: its loop reads nothing, or it stands at a barrier
  bool global = false;         // `address` is a host address, else an offset in LDS
  uint64_t address = 0;        // the first active lane's
};

class WaitWatch {
 public:
  // `rows`: how many VGPRs, and how many AccVGPRs, the kernel can name.
  void begin(const Wave* waves, uint32_t count, uint32_t rows);
  bool open() const { return verdict_ == Verdict::open; }
  bool waits() const { return verdict_ == Verdict::waits; }
  // Around every instruction of the group while it is watched.
  void before(const Wave& w, const ExecInst& in);
  void after(const Wave& w, const ExecInst& in);
  void barrier_passed() { verdict_ = Verdict::advances; }
  // After each round of turns.
  void round();
  const std::vector<WaveWait>& found() const { return found_; }

 private:
  enum class Verdict : uint8_t { open, waits, advances };
  void next_wave();
  uint64_t hash_of(const Wave& w) const;

  const Wave* waves_ = nullptr;
  uint32_t count_ = 0, rows_ = 0;
  Verdict verdict_ = Verdict::open;
  // The wave that is watched, and its state when it was at `pc_` first.
  uint32_t current_ = 0, steps_ = 0, hashes_ = 0, circles_ = 0;
  bool anchored_ = false;
  uint32_t pc_ = 0, scc_ = 0, sgprs_[128] = {};
  uint64_t hash_ = 0;
  std::vector<WaveWait> found_;
};

// "  work-group (0, 1, 0)\n    waves 0-3 read 4 bytes at ...\n"
std::string describe_waits(const Launch& launch, const Workgroup& group, const Wave* waves, uint32_t count,
                           const std::vector<WaveWait>& found);

}  // namespace hfemu
