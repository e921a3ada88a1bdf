#include "worker.h"

#include <algorithm>
#include <thread>

#include "core.h"
#include "host_mode.h"
#include "record.h"
#include "stats.h"

namespace hfemu {
namespace {

// Wave-instructions of a group before the first check whether it only waits, between such checks, and in one turn.
constexpr uint64_t kFirstLook = 1 << 14, kLook = 1 << 16, kTurn = 1 << 20;
// How long nothing may run before that counts as a deadlock: another launch, or the host, may still write the memory.
constexpr std::chrono::seconds kPatience{2};
constexpr size_t kIdleArenas = 8;

}  // namespace

// Waves, LDS and scratch of one resident group; kept between launches because touching fresh memory costs more than a
// small launch.
struct Arena {
  Wave* waves = nullptr;
  uint32_t wave_count = 0, rows = 0;
  std::vector<uint8_t> lds, scratch;
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(waves); }
  // Rows beyond what a kernel was granted stay untouched, so that many small groups fit into memory.
  void reserve(uint32_t count, uint32_t registers) {
    if (count <= wave_count && registers <= rows) return;
    std::free(waves);
    wave_count = std::max(wave_count, count);
    rows = std::max(rows, registers);
    waves = static_cast<Wave*>(std::aligned_alloc(alignof(Wave), sizeof(Wave) * wave_count));
    for (uint32_t i = 0; i < wave_count; ++i) {
      new (&waves[i]) Wave;
      poison_wave(waves[i], rows);
    }
  }
};

namespace {

std::mutex arenas_mutex;
std::vector<std::unique_ptr<Arena>>& idle_arenas() {
  static auto* arenas = new std::vector<std::unique_ptr<Arena>>();
  return *arenas;
}
std::unique_ptr<Arena> take_arena() {
  const std::lock_guard lock(arenas_mutex);
  auto& idle = idle_arenas();
  if (idle.empty()) return std::make_unique<Arena>();
  auto arena = std::move(idle.back());
  idle.pop_back();
  return arena;
}
void return_arena(std::unique_ptr<Arena> arena) {
  const std::lock_guard lock(arenas_mutex);
  if (idle_arenas().size() < kIdleArenas) idle_arenas().push_back(std::move(arena));
}

}  // namespace

void LaunchWork::fail(const Fault& f) {
  const std::lock_guard lock(mutex);
  if (fault.kind == FaultKind::none) fault = f;
  launch.stop = true;
}

void LaunchWork::add_threads(uint32_t count) {
  const std::lock_guard lock(mutex);
  threads += count;
}

uint64_t LaunchWork::group_at(uint64_t i) const {
  if (launch.options.wave_order == WaveOrder::reverse) return groups - 1 - i;
  return launch.options.wave_order == WaveOrder::random ? (i * stride + shift) % groups : i;
}

struct Worker::Resident {
  Workgroup group;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Observer> observer;
  std::optional<Scheduler> scheduler;
  uint64_t executed = 0;
  uint32_t left = 0;              // waves that have not ended
  bool waited = false;            // at the end of its last turn
  std::vector<WaveWait> waits;
  ~Resident() {
    if (arena) return_arena(std::move(arena));
  }
};

Worker::Worker(LaunchWork& work, Poll poll) : work_(work), poll_(poll) {
  if (work.launch.totals != nullptr) stats_ = std::make_unique<Stats>(work.launch);
  thread_.stats = stats_.get();
}
Worker::~Worker() = default;

void Worker::finish() {
  if (!stats_) return;
  const std::lock_guard lock(work_.launch.totals->mutex);
  work_.launch.totals->stats.merge(*stats_);
}

bool Worker::run(SteadyClock::time_point until) {
  HostFloat host;
  thread_.host = &host;
  while (!work_.launch.stop.load(std::memory_order_relaxed)) {
    try {
      Resident* r = choose();
      if (r == nullptr) break;
      if (take_turn(*r) == Pause::ended) retire();
    } catch (const FaultError& e) {
      host.round(0);
      work_.fail(e.fault);
    }
    if (SteadyClock::now() >= until) return false;
  }
  const std::lock_guard lock(work_.mutex);
  if (work_.deadlock) describe_residents();
  --work_.threads;
  return true;
}

// --- which group next -------------------------------------------------------------------------------------------------

Worker::Resident* Worker::choose() {
  while (!work_.launch.stop.load(std::memory_order_relaxed)) {
    if (visit_ > 0) {
      current_ = --visit_;
      return residents_[current_].get();
    }
    if (residents_.size() < work_.residents_per_thread)
      if (Resident* started = start_group()) return started;
    if (residents_.empty()) return nullptr;
    if (pass_progress_ == work_.progress) nothing_runs();
    pass_progress_ = work_.progress;
    visit_ = residents_.size();
  }
  return nullptr;
}

std::unique_ptr<Worker::Resident> Worker::make_resident() {
  auto r = std::make_unique<Resident>();
  const uint32_t count = work_.waves_per_group, private_bytes = work_.launch.private_bytes;
  r->arena = take_arena();
  Arena& arena = *r->arena;
  arena.reserve(count, work_.registers);
  if (arena.lds.size() < work_.lds_bytes + 64u) arena.lds.assign(work_.lds_bytes + 64u, 0xBD);
  const size_t scratch = size_t{private_bytes} * kLanes * count;
  if (arena.scratch.size() < scratch) arena.scratch.assign(scratch, 0xBD);
  r->observer = Observer::create(work_.launch, *work_.trace, count, work_.lds_bytes, stats_.get());
  for (uint32_t i = 0; i < count; ++i) {
    Wave& w = arena.waves[i];
    w.code = work_.launch.program->code.data();
    w.index = i;
    w.wg = &r->group;
    w.thread = &thread_;
    w.launch = &work_.launch;
    w.shadow = nullptr;  // an earlier launch's, of a wave that is used again
    w.scratch = arena.scratch.data() + size_t{private_bytes} * kLanes * i;
  }
  return r;
}

Worker::Resident* Worker::start_group() {
  if (spare_.empty()) {
    if (work_.next.load(std::memory_order_relaxed) >= work_.groups) return nullptr;
    spare_.push_back(make_resident());
  }
  GroupRecorder* recorder = spare_.back()->observer ? spare_.back()->observer->recorder() : nullptr;
  uint64_t flat;
  do {
    const uint64_t i = work_.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= work_.groups) return nullptr;
    flat = work_.group_at(i);
  } while (recorder != nullptr && !recorder->choose(flat));
  ++work_.progress;
  residents_.push_back(std::move(spare_.back()));
  spare_.pop_back();
  current_ = residents_.size() - 1;
  Resident& r = *residents_.back();

  const uint32_t* grid = work_.request.grid;
  const uint32_t count = work_.waves_per_group;
  Workgroup& group = r.group;
  group.flat = static_cast<uint32_t>(flat);
  group.id[0] = static_cast<uint32_t>(flat % grid[0]);
  group.id[1] = static_cast<uint32_t>(flat / grid[0] % grid[1]);
  group.id[2] = static_cast<uint32_t>(flat / (uint64_t{grid[0]} * grid[1]));
  group.lds = r.arena->lds.data();
  group.lds_bytes = work_.lds_bytes;
  group.barriers = 0;
  group.waves = count;
  for (uint32_t w = 0; w < count; ++w) init_wave(r.arena->waves[w], work_.start);
  r.scheduler.emplace(work_.launch.options, flat, count);
  r.executed = 0;
  r.left = count;
  r.waited = false;
  if (r.observer) r.observer->begin_group(group, r.arena->waves, count, work_.trace);
  return &r;
}

void Worker::retire() {
  ++work_.progress;
  Resident& r = *residents_[current_];
  if (r.observer) r.observer->end_group(r.executed);
  spare_.push_back(std::move(residents_[current_]));
  residents_.erase(residents_.begin() + static_cast<std::ptrdiff_t>(current_));
}

// --- running one ------------------------------------------------------------------------------------------------------

Worker::Pause Worker::take_turn(Resident& r) {
  if (r.observer) {
    thread_.recorder = r.observer->recorder();
    r.observer->enter_group(r.group);
  }
  if (r.waited && only_waits(r)) return Pause::waits;
  const uint64_t began = r.executed;
  while (r.left) {
    const uint64_t until = r.executed < kFirstLook ? kFirstLook : r.executed + kLook;
    while (r.left && r.executed < until) round<false>(r);
    if (r.left == 0) break;
    if (only_waits(r)) return Pause::waits;
    if (r.left && r.executed - began >= kTurn) return Pause::long_turn;
  }
  return Pause::ended;
}

// A turn of every wave.
template <bool watched>
void Worker::round(Resident& r) {
  bool ran = false;
  for (uint32_t turn = 0; turn < r.group.waves; ++turn) {
    Wave& w = r.arena->waves[r.scheduler->wave(turn)];
    if (w.state == WaveState::ended || w.state == WaveState::barrier) continue;
    ran = true;
    r.executed += slice<watched>(r, w, r.scheduler->quantum());
    if (w.state == WaveState::ended) --r.left;
  }
  r.scheduler->next_round();
  if (!ran) pass_barrier(r);
  if (!work_.shared_budget && r.executed > kDefaultBudget) out_of_budget(r);
  look_up();
}

template <bool watched>
uint32_t Worker::slice(Resident& r, Wave& w, uint32_t quantum) {
  if (w.state == WaveState::sleeping) w.state = w.awake();
  uint32_t done = 0;
  if (watched || r.observer) {
    while (done < quantum && w.state <= WaveState::careful) {
      const ExecInst& in = w.code[w.pc];
      if constexpr (watched) watch_.before(w, in);
      if (r.observer) {
        r.observer->step(w);
      } else if (w.state == WaveState::careful) {
        step_careful(w);
      } else {
        ++w.pc;
        in.fn(w, in);
      }
      ++done;
      if constexpr (watched) watch_.after(w, in);
    }
  } else {
    const ExecInst* code = w.code;
    while (done < quantum && w.state == WaveState::running) {
      const ExecInst& in = code[w.pc];
      ++w.pc;
      in.fn(w, in);
      ++done;
    }
    while (done < quantum && w.state == WaveState::careful) {
      step_careful(w);
      ++done;
    }
  }
  thread_.host->round(0);
  if (work_.shared_budget && work_.budget.fetch_sub(done, std::memory_order_relaxed) < done) out_of_budget(r);
  since_poll_ += done;
  return done;
}

bool Worker::only_waits(Resident& r) {
  watch_.begin(r.arena->waves, r.group.waves, work_.registers);
  while (r.left && watch_.open()) {
    round<true>(r);
    watch_.round();
  }
  r.waited = r.left != 0 && watch_.waits();
  if (r.waited) r.waits = watch_.found();
  else ++work_.progress;
  return r.waited;
}

// Every wave that has not ended waits.
void Worker::pass_barrier(Resident& r) {
  ++r.group.barriers;
  if (r.observer) r.observer->barrier(r.group);
  watch_.barrier_passed();
  for (uint32_t i = 0; i < r.group.waves; ++i) {
    Wave& w = r.arena->waves[i];
    if (w.state == WaveState::barrier) w.state = w.awake();
  }
}

// --- the end of the launch --------------------------------------------------------------------------------------------

// At intervals: has another thread, or the caller, ended the launch?
void Worker::look_up() {
  if (since_poll_ < 50000) return;
  since_poll_ = 0;
  if (work_.launch.stop.load(std::memory_order_acquire)) throw FaultError{work_.fault};
  poll();
}

void Worker::poll() {
  if (poll_ == nullptr) return;
  const auto now = SteadyClock::now();
  if (now - last_poll_ < std::chrono::milliseconds(5)) return;
  last_poll_ = now;
  if (poll_()) throw FaultError{{FaultKind::aborted, "the launch was interrupted"}};
}

// A pass over the resident groups found that all of them wait, and none can be started.
void Worker::nothing_runs() {
  {
    const std::lock_guard lock(work_.mutex);
    if (work_.progress != pass_progress_) return;
    const auto now = SteadyClock::now();
    if (work_.quiet_progress != pass_progress_) {
      work_.quiet_progress = pass_progress_;
      work_.quiet = 0;
      work_.quiet_since = now;
    }
    if (counted_quiet_ != pass_progress_) {
      counted_quiet_ = pass_progress_;
      ++work_.quiet;
    }
    if (work_.quiet >= work_.threads && now - work_.quiet_since >= kPatience) {
      work_.deadlock = true;
      work_.launch.stop = true;
      return;
    }
  }
  poll();
  // A budget that the user has set is to be used up, not waited for.
  if (!work_.shared_budget) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Under the lock, once `deadlock` is set.
void Worker::describe_residents() {
  work_.waiting_groups += residents_.size();
  for (const auto& r : residents_)
    work_.waits.emplace_back(r->group.flat,
                             describe_waits(work_.launch, r->group, r->arena->waves, r->group.waves, r->waits));
}

void Worker::out_of_budget(const Resident& r) {
  const uint64_t budget = work_.shared_budget ? work_.launch.options.instruction_budget : kDefaultBudget;
  std::string text = format(
      "the instruction budget (%llu wave-instructions%s) is used up: the kernel deadlocks or needs a larger budget\n"
      "  kernel %s, work-group (%u, %u, %u); its waves:\n",
      static_cast<unsigned long long>(budget), work_.shared_budget ? "" : " per work-group",
      work_.request.kernel->name.c_str(), r.group.id[0], r.group.id[1], r.group.id[2]);
  const Program& p = *work_.launch.program;
  for (uint32_t i = 0; i < r.group.waves; ++i) {
    const Wave& w = r.arena->waves[i];
    if (w.state == WaveState::ended) {
      text += format("  wave %u: ended\n", i);
      continue;
    }
    const uint32_t at = w.state == WaveState::barrier && w.pc ? w.pc - 1 : w.pc;
    text += format("  wave %u: %s at pc 0x%llx: %s\n", i,
                   w.state == WaveState::barrier ? "waits at a barrier" : "runs",
                   static_cast<unsigned long long>(p.insts[at].pc), instruction_text(p.insts[at], nullptr).c_str());
  }
  throw FaultError{{FaultKind::deadlock, text}};
}

}  // namespace hfemu
