// Order of work-groups and waves, and the observer that runs waves with counters, checks or a trace.
#pragma once

#include <memory>
#include <numeric>

#include "core.h"

namespace hfemu {

inline uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

class Scheduler {
 public:
  Scheduler(const Options& options, uint64_t group, uint32_t waves)
      : order_(options.wave_order), waves_(waves), quantum_(options.quantum), state_(mix(options.seed ^ mix(group))) {}
  uint32_t wave(uint32_t turn) const {
    if (order_ == WaveOrder::reverse) return waves_ - 1 - turn;
    return order_ == WaveOrder::random ? (turn * step_ + start_) % waves_ : turn;
  }
  uint32_t quantum() {
    if (order_ != WaveOrder::random) return quantum_;
    state_ = mix(state_);
    return 1 + static_cast<uint32_t>(state_ % quantum_);
  }
  void next_round() {
    if (order_ != WaveOrder::random) return;
    state_ = mix(state_);
    start_ = static_cast<uint32_t>(state_ % waves_);
    step_ = 1 + static_cast<uint32_t>(state_ >> 32) % waves_;
    while (std::gcd(step_, waves_) != 1) ++step_;
  }

 private:
  WaveOrder order_;
  uint32_t waves_, quantum_, start_ = 0, step_ = 1;
  uint64_t state_;
};

// Work-group i of the random order is (i * stride + shift) % groups.
inline void choose_group_order(const Options& options, uint64_t groups, uint64_t* stride, uint64_t* shift) {
  const uint64_t x = mix(options.seed);
  *shift = x % groups;
  *stride = 1 + (x >> 20) % groups;
  while (std::gcd(*stride, groups) != 1) ++*stride;
}

// Runs the waves of one resident work-group after another instruction by instruction: counters, register checks, trace.
class Observer {
 public:
  virtual ~Observer() = default;
  // Null when nothing is to be observed: waves then run in the plain loop. `stats` are the host thread's, or null.
  static std::unique_ptr<Observer> create(Launch& launch, const TraceRequest& trace, uint32_t waves,
                                          uint32_t lds_bytes, Stats* stats);
  virtual GroupRecorder* recorder() = 0;
  virtual void begin_group(Workgroup& group, Wave* waves, uint32_t count, const TraceRequest* trace) = 0;
  virtual void enter_group(const Workgroup& group) = 0;  // its next instructions follow
  virtual void step(Wave& w) = 0;
  virtual void barrier(Workgroup& group) = 0;  // every wave has arrived
  virtual void end_group(uint64_t executed) = 0;
};

// The launch's side: what the thread's open collectors and the options ask for.
class LaunchObservation {
 public:
  LaunchObservation(Launch& launch, const LaunchRequest& request, const TraceRequest& trace);
  ~LaunchObservation();
  LaunchObservation(const LaunchObservation&) = delete;
  LaunchObservation& operator=(const LaunchObservation&) = delete;
  bool single_thread() const;
  void finish(const LaunchRequest& request, uint64_t groups, double seconds) const;

 private:
  Launch& launch_;
  bool tracing_ = false;
};

}  // namespace hfemu
