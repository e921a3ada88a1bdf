// A wave's vector clock: for every wave, the position in that wave's counters up to which its memory accesses are
// known.
//
// An access is known by its wave and its place in the counter that completes it: lgkmcnt for LDS operations (DS and
// FLAT), vmcnt for LDS DMA and global memory. Those counters are the vector clock: wave v's access with sequence number
// n lies before everything that wave w does from now on if w's clock has at least n for v.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace hfemu {

constexpr uint32_t kMaxWaves = 16;  // of a work-group: 1024 work-items

struct Clock {
  uint32_t lgkm[kMaxWaves] = {}, vm[kMaxWaves] = {};                // complete: s_waitcnt has waited for them
  uint32_t lgkm_issued[kMaxWaves] = {}, vm_issued[kMaxWaves] = {};  // issued, complete or not
  // For races between work-groups (global_races.h): stores that a buffer_wbl2 covers, signals of other groups that were
  // read, and those that a buffer_inv has followed.
  uint32_t written_back[kMaxWaves] = {}, signals_read[kMaxWaves] = {}, acquired[kMaxWaves] = {};

  void join(const Clock& o) {
    const auto maximum = [](uint32_t* a, const uint32_t* b) {
      for (uint32_t i = 0; i < kMaxWaves; ++i) a[i] = std::max(a[i], b[i]);
    };
    maximum(lgkm, o.lgkm);
    maximum(vm, o.vm);
    maximum(lgkm_issued, o.lgkm_issued);
    maximum(vm_issued, o.vm_issued);
    maximum(written_back, o.written_back);
    maximum(signals_read, o.signals_read);
    maximum(acquired, o.acquired);
  }
};

// The clocks that releases have left in words. A clock never changes; words and waves hold its number. After a barrier
// every wave has acquired all earlier releases, so their clocks are dropped.
class ClockPool {
 public:
  static constexpr uint32_t kNone = 0;

  uint32_t add(const Clock& c) {
    clocks_.push_back(c);
    return first_ + static_cast<uint32_t>(clocks_.size()) - 1;
  }
  // Null: none, or older than the last barrier.
  const Clock* find(uint32_t id) const { return id < first_ ? nullptr : &clocks_[id - first_]; }
  // The clock that a read-modify-write leaves in the word: its own release and those that it read.
  uint32_t join(uint32_t a, uint32_t b) {
    if (a == b || find(a) == nullptr) return b;
    uint32_t& known = joins_[uint64_t{a} << 32 | b];
    if (known == kNone) {
      Clock c = *find(a);
      c.join(*find(b));
      known = add(c);
    }
    return known;
  }
  void forget() {
    first_ += static_cast<uint32_t>(clocks_.size());
    clocks_.clear();
    joins_.clear();
  }

 private:
  std::vector<Clock> clocks_;
  std::unordered_map<uint64_t, uint32_t> joins_;
  uint32_t first_ = 1;
};

}  // namespace hfemu
