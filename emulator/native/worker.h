// One host thread of a launch: it starts work-groups, runs their waves in turns, and keeps those that wait resident.
//
// As many work-groups as the device holds at once (registers, LDS and waves of its compute units) may be resident, so
// that kernels whose groups wait for each other end whatever the order of the groups. A group runs until it ends, waits
// (waiting.h) or has had a long turn; then the thread starts the next one, and once the device is full or no group is
// left to start, goes through the resident ones, the newest first. Ordinary groups end in their first turn.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>

#include "schedule.h"
#include "stats.h"
#include "waiting.h"
#include "wave_init.h"

namespace hfemu {

using SteadyClock = std::chrono::steady_clock;

// What the threads of one launch share.
struct LaunchWork {
  const LaunchRequest& request;
  Launch launch;
  WaveStart start;
  uint64_t groups = 0;
  uint32_t waves_per_group = 0, lds_bytes = 0, registers = 0;  // registers: granted to a wave
  uint64_t residents_per_thread = 1;
  uint64_t stride = 1, shift = 0;  // order of the work-groups
  const TraceRequest* trace = nullptr;
  bool shared_budget = false;
  std::atomic<uint64_t> next{0};
  std::atomic<int64_t> budget{0};

  explicit LaunchWork(const LaunchRequest& r) : request(r) {}
  void fail(const Fault& f);
  void add_threads(uint32_t count);
  uint64_t group_at(uint64_t i) const;

  // --- deadlock: no thread has a group that can go on, and none has had one since `progress` last changed ---
  std::atomic<uint64_t> progress{0};
  std::atomic<bool> deadlock{false};
  std::mutex mutex;  // of what follows
  Fault fault;
  uint32_t threads = 1;                     // with groups of their own, or about to take some
  uint64_t quiet_progress = ~uint64_t{0};   // value of `progress` for which `quiet` threads found nothing to run
  uint32_t quiet = 0;
  SteadyClock::time_point quiet_since;
  uint64_t waiting_groups = 0;
  std::vector<std::pair<uint32_t, std::string>> waits;  // by group
};

class Worker {
 public:
  // `poll` is null but on the launching thread.
  Worker(LaunchWork& work, Poll poll);
  ~Worker();
  // Runs work-groups until none is left or the launch stops. False: stopped early because `until` passed; the caller may
  // then start helpers and call again.
  bool run(SteadyClock::time_point until);
  // Adds the counts to the launch's.
  void finish();

 private:
  struct Resident;
  enum class Pause : uint8_t { ended, waits, long_turn };

  Resident* choose();
  Resident* start_group();
  std::unique_ptr<Resident> make_resident();
  Pause take_turn(Resident& r);
  template <bool watched>
  void round(Resident& r);
  template <bool watched>
  uint32_t slice(Resident& r, Wave& w, uint32_t quantum);
  bool only_waits(Resident& r);
  void pass_barrier(Resident& r);
  void retire();
  void look_up();
  void poll();
  void nothing_runs();
  void describe_residents();
  [[noreturn]] void out_of_budget(const Resident& r);

  LaunchWork& work_;
  const Poll poll_;
  std::unique_ptr<Stats> stats_;
  ThreadState thread_;
  std::vector<std::unique_ptr<Resident>> residents_, spare_;
  size_t current_ = 0;                     // of the resident in its turn
  size_t visit_ = 0;                       // residents below it are still to be visited in this pass
  uint64_t pass_progress_ = ~uint64_t{0};
  uint64_t counted_quiet_ = ~uint64_t{0};  // `progress` for which this thread has been counted as quiet
  WaitWatch watch_;
  uint64_t since_poll_ = 0;
  SteadyClock::time_point last_poll_ = SteadyClock::now();
};

}  // namespace hfemu
