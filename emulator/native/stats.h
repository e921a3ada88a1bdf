// Counts of one host thread during one launch, and their sum over the launch's threads.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "access.h"
#include "core.h"

namespace hfemu {

struct LineCount {
  uint64_t lines64 = 0, lines128 = 0, accesses = 0, bytes = 0;
};

// One extent's traffic; the bitmaps have a bit per byte, allocated on the first touch.
struct TensorCount {
  uint64_t loaded = 0, stored = 0;
  std::vector<uint64_t> loaded_bits, stored_bits;
};

class Stats {
 public:
  explicit Stats(const Launch& launch);

  void instruction(uint32_t index, uint32_t active_lanes) {
    ++count_[index];
    lanes_[index] += active_lanes;
  }
  void global(uint32_t index, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);
  void scalar(uint32_t index, uint64_t address, uint32_t bytes, Access access);
  void lds(uint32_t index, const uint32_t* a, uint64_t exec, uint32_t bytes);
  void scratch(uint32_t index, uint64_t exec, uint32_t bytes);
  void merge(const Stats& other);

  // Totals, read by the collectors.
  std::vector<uint64_t> count_, lanes_, bytes_, conflicts_;
  std::map<uint32_t, TensorCount> tensors_;  // by extent
  LineCount lines_;
  uint64_t scalar_bytes_ = 0, scratch_bytes_ = 0, lds_bytes_ = 0, lds_accesses_ = 0, lds_conflicts_ = 0;
  uint64_t bytes_loaded_ = 0, bytes_stored_ = 0;
  uint32_t lds_banks_ = 0;

 private:
  void span(uint64_t begin, uint64_t end, Access access);

  const AddressMap& map_;
  const AddressMap::Piece* last_piece_ = nullptr;
  TensorCount* last_tensor_ = nullptr;
};

struct LaunchTotals {
  std::mutex mutex;
  Stats stats;
  explicit LaunchTotals(const Launch& launch) : stats(launch) {}
};

// LDS banks, each four bytes wide: 32 on gfx942 (LLVM's LDSBankCount of gfx9), 64 on gfx950: AMD's Triton backend counts
// 64 there (triton-lang/triton pull request 6065), and so do AMD's kernels, which give bank = address / 4 % 64 and 256
// bytes per cycle (ROCm/rocm-libraries pull request 10102).
constexpr uint32_t lds_banks(Arch arch) { return arch == Arch::gfx950 ? 64 : 32; }

// Cycles beyond the conflict-free number that the banks need for one LDS access.
uint32_t lds_conflict_cycles(const uint32_t* a, uint64_t exec, uint32_t bytes, uint32_t banks);

}  // namespace hfemu
