// The memory below a compute unit: L1 per CU, L2 per XCD, the fabric, the Infinity Cache (MALL) and HBM.
//
// A request reserves each pipe on its path, first come first served, at the time it arrives there; nothing is computed
// between requests. Times are cycles of the compute clock. Lines are 128 bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "machine.h"

namespace hftime {

constexpr uint64_t kLineBytes = 128;

struct Line {
  double ready = 0;  // when its data is there
};

// The number of sets is a power of two; `hash` is mix(line), whose low bits choose the set.
template <uint32_t ways>
class Cache {
 public:
  explicit Cache(uint64_t bytes) : sets_(std::bit_floor(std::max<uint64_t>(1, bytes / kLineBytes / ways))) {}
  // The line, or null; a hit counts as a use unless it is `unused`.
  Line* find(uint64_t line, uint64_t hash, bool unused = false) {
    Set& s = sets_[hash & (sets_.size() - 1)];
    for (uint32_t i = 0; i < ways; ++i)
      if (s.tags[i] == line) {
        if (!unused) s.used[i] = ++tick_;
        return &s.lines[i];
      }
    return nullptr;
  }
  // A line that is `first_out` is the next to be replaced in its set.
  Line* insert(uint64_t line, uint64_t hash, bool first_out = false) {
    Set& s = sets_[hash & (sets_.size() - 1)];
    uint32_t oldest = 0;
    for (uint32_t i = 1; i < ways; ++i)
      if (s.used[i] < s.used[oldest]) oldest = i;
    s.tags[oldest] = line;
    s.used[oldest] = first_out ? 0 : ++tick_;
    return &s.lines[oldest];
  }

 private:
  struct Set {
    uint64_t tags[ways];
    uint32_t used[ways] = {};
    Line lines[ways];
    Set() { std::fill_n(tags, ways, ~uint64_t{0}); }
  };
  uint32_t tick_ = 0;
  std::vector<Set> sets_;
};

inline uint64_t mix(uint64_t x) {
  x *= 0x9E3779B97F4A7C15;
  x ^= x >> 32;
  x *= 0x94D049BB133111EB;
  return x ^ x >> 29;
}

enum class Level : uint8_t { hbm, mall, l2 };

// How a line's source is seen from one XCD.
struct Origin {
  Level level = Level::hbm;
  double share = 1;  // of the HBM transfer that this XCD pays for
};

struct Traffic {
  uint64_t l1_hits = 0, l1_lines = 0, l2_hits = 0, l2_lines = 0, mall_lines = 0, hbm_lines = 0, stored_bytes = 0;
  double hbm_bytes = 0;  // one XCD's part of transfers that several share
};

// Shared by the XCDs.
class Device {
 public:
  Device(const Machine& m, uint32_t active_xcds, bool all_xcds);
  // The time at which a line's data leaves MALL or HBM for an XCD that asks at `t`.
  double fetch(uint64_t line, double t, Origin origin, Traffic& traffic);

 private:
  double transfer(uint64_t line, double t, double share);
  const bool all_xcds_;
  double hbm_cycles_, hbm_latency_, mall_latency_;
  std::vector<double> hbm_free_;  // by channel
  std::unordered_map<uint64_t, double> mall_;
};

class L2 {
 public:
  L2(const Machine& m, Device& device, uint32_t active_xcds);
  // The time at which the line is at the requester's L1.
  double load(uint64_t line, uint64_t hash, double t, Origin origin);
  // The time of the acknowledgement, when `bytes` of the line have left L2 for memory.
  double store(uint64_t line, uint64_t hash, double t, double bytes);
  double atomic(uint64_t line, uint64_t hash, double t, Origin origin);
  double drained() const { return drain_free_; }
  Traffic traffic;

 private:
  double& channel(uint64_t line);
  Device& device_;
  Cache<16> cache_;
  double latency_, line_cycles_, miss_extra_, fabric_cycles_, store_cycles_per_byte_, fabric_free_ = 0, drain_free_ = 0;
  std::vector<double> channel_free_;
};

}  // namespace hftime
