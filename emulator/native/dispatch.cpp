// Grid -> work-groups -> waves -> host threads.
#include "dispatch.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "core.h"
#include "decode.h"
#include "host_mode.h"
#include "record.h"
#include "schedule.h"
#include "wave_init.h"

namespace hfemu {
namespace {

using Clock = std::chrono::steady_clock;

// Waves and LDS of one host thread; kept between launches because touching fresh memory costs more than a small launch.
struct Arena {
  Wave* waves = nullptr;
  uint32_t wave_count = 0;
  std::vector<uint8_t> lds, scratch;
  ~Arena() { std::free(waves); }
  void reserve(uint32_t count) {
    if (count <= wave_count) return;
    std::free(waves);
    waves = static_cast<Wave*>(std::aligned_alloc(alignof(Wave), sizeof(Wave) * count));
    for (uint32_t i = 0; i < count; ++i) {
      new (&waves[i]) Wave;
      poison_wave(waves[i], kAcc);
    }
    wave_count = count;
  }
};

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
  if (idle_arenas().size() < 8) idle_arenas().push_back(std::move(arena));
}

struct Shared {
  const LaunchRequest& request;
  Launch launch;
  WaveStart start;
  uint64_t groups = 0;
  uint32_t waves_per_group = 0, lds_bytes = 0;
  std::atomic<uint64_t> next{0};
  std::atomic<int64_t> budget{0};
  bool shared_budget = false;
  std::mutex fault_mutex;
  Fault fault;
  uint64_t stride = 1, shift = 0;  // order of the work-groups
  const TraceRequest* trace = nullptr;

  explicit Shared(const LaunchRequest& r) : request(r) {}
  void fail(const Fault& f) {
    const std::lock_guard lock(fault_mutex);
    if (fault.kind == FaultKind::none) fault = f;
    launch.stop = true;
  }
  uint64_t group_at(uint64_t i) const {
    if (launch.options.wave_order == WaveOrder::reverse) return groups - 1 - i;
    return launch.options.wave_order == WaveOrder::random ? (i * stride + shift) % groups : i;
  }
};

// Runs work-groups until none is left or the launch stops.
class Worker {
 public:
  Worker(Shared& shared, const PollRequest* poll) : shared_(shared), poll_(poll), arena_(take_arena()) {
    arena_->reserve(shared.waves_per_group);
    if (arena_->lds.size() < shared.lds_bytes + 64u) arena_->lds.assign(shared.lds_bytes + 64u, 0xBD);
    const size_t scratch = size_t{shared.launch.private_bytes} * kLanes * shared.waves_per_group;
    if (arena_->scratch.size() < scratch) arena_->scratch.assign(scratch, 0xBD);
    observer_ = Observer::create(shared.launch, *shared.trace, shared.waves_per_group, shared.lds_bytes);
    thread_.stats = observer_ ? observer_->stats() : nullptr;
    thread_.recorder = observer_ ? observer_->recorder() : nullptr;
    for (uint32_t i = 0; i < shared.waves_per_group; ++i) {
      Wave& w = arena_->waves[i];
      w.code = shared.launch.program->code.data();
      w.index = i;
      w.wg = &group_;
      w.thread = &thread_;
      w.launch = &shared.launch;
      w.scratch = arena_->scratch.data() + size_t{shared.launch.private_bytes} * kLanes * i;
    }
  }
  ~Worker() { return_arena(std::move(arena_)); }

  // False: stopped early because `until` passed (the caller may then start helpers).
  bool run(Clock::time_point until) {
    HostFloat host;
    thread_.host = &host;
    while (!shared_.launch.stop.load(std::memory_order_relaxed)) {
      const uint64_t i = shared_.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= shared_.groups) break;
      try {
        run_group(shared_.group_at(i));
      } catch (const FaultError& e) {
        host.round(0);
        shared_.fail(e.fault);
      }
      if (Clock::now() >= until) return false;
    }
    return true;
  }
  void finish() {
    if (observer_) observer_->finish();
  }

 private:
  void run_group(uint64_t flat) {
    if (thread_.recorder != nullptr && !thread_.recorder->choose(flat)) return;
    const uint32_t* grid = shared_.request.grid;
    group_.flat = static_cast<uint32_t>(flat);
    group_.id[0] = static_cast<uint32_t>(flat % grid[0]);
    group_.id[1] = static_cast<uint32_t>(flat / grid[0] % grid[1]);
    group_.id[2] = static_cast<uint32_t>(flat / (uint64_t{grid[0]} * grid[1]));
    group_.lds = arena_->lds.data();
    group_.lds_bytes = shared_.lds_bytes;
    group_.barriers = 0;
    const uint32_t count = shared_.waves_per_group;
    group_.waves = count;
    for (uint32_t i = 0; i < count; ++i) init_wave(arena_->waves[i], shared_.start);
    if (observer_) observer_->begin_group(group_, arena_->waves, count, shared_.trace);
    Scheduler scheduler(shared_.launch.options, flat, count);
    uint64_t executed = 0;
    uint32_t left = count;
    while (left) {
      bool ran = false;
      for (uint32_t turn = 0; turn < count; ++turn) {
        Wave& w = arena_->waves[scheduler.wave(turn)];
        if (w.state == WaveState::ended || w.state == WaveState::barrier) continue;
        ran = true;
        executed += slice(w, scheduler.quantum());
        if (w.state == WaveState::ended) --left;
      }
      scheduler.next_round();
      if (!ran) pass_barrier(count);
      check_progress(executed);
    }
    if (observer_) observer_->end_group(executed);
  }

  uint32_t slice(Wave& w, uint32_t quantum) {
    if (w.state == WaveState::sleeping) w.state = w.awake();
    uint32_t done = 0;
    if (observer_) {
      while (done < quantum && w.state <= WaveState::careful) {
        observer_->step(w);
        ++done;
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
    if (shared_.shared_budget && shared_.budget.fetch_sub(done, std::memory_order_relaxed) < done) out_of_budget();
    since_poll_ += done;
    return done;
  }

  // Every wave that has not ended waits.
  void pass_barrier(uint32_t count) {
    ++group_.barriers;
    if (observer_) observer_->barrier(group_);
    for (uint32_t i = 0; i < count; ++i)
      if (arena_->waves[i].state == WaveState::barrier) arena_->waves[i].state = arena_->waves[i].awake();
  }

  void check_progress(uint64_t executed) {
    if (!shared_.shared_budget && executed > kDefaultBudget) out_of_budget();
    if (since_poll_ < 50000) return;
    since_poll_ = 0;
    if (shared_.launch.stop.load(std::memory_order_acquire)) throw FaultError{shared_.fault};
    if (poll_ == nullptr || poll_->poll == nullptr) return;
    const auto now = Clock::now();
    if (now - last_poll_ < std::chrono::milliseconds(5)) return;
    last_poll_ = now;
    if (poll_->poll(poll_->context) != 0) throw FaultError{{FaultKind::aborted, "the launch was interrupted"}};
  }

  [[noreturn]] void out_of_budget() {
    const uint64_t budget = shared_.shared_budget ? shared_.launch.options.instruction_budget : kDefaultBudget;
    std::string text = format(
        "the instruction budget (%llu wave-instructions%s) is used up: the kernel deadlocks or needs a larger budget\n"
        "  kernel %s, work-group (%u, %u, %u); its waves:\n",
        static_cast<unsigned long long>(budget), shared_.shared_budget ? "" : " per work-group",
        shared_.request.kernel->name.c_str(), group_.id[0], group_.id[1], group_.id[2]);
    const Program& p = *shared_.launch.program;
    for (uint32_t i = 0; i < shared_.waves_per_group; ++i) {
      const Wave& w = arena_->waves[i];
      if (w.state == WaveState::ended) {
        text += format("  wave %u: ended\n", i);
        continue;
      }
      const uint32_t at = w.state == WaveState::barrier && w.pc ? w.pc - 1 : w.pc;
      text += format("  wave %u: %s at pc 0x%llx: %s\n", i,
                     w.state == WaveState::barrier ? "waits at a barrier" : "runs",
                     static_cast<unsigned long long>(p.insts[at].pc),
                     instruction_text(p.insts[at], nullptr).c_str());
    }
    throw FaultError{{FaultKind::deadlock, text}};
  }

  Shared& shared_;
  const PollRequest* poll_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Observer> observer_;
  Workgroup group_;
  ThreadState thread_;
  uint64_t since_poll_ = 0;
  Clock::time_point last_poll_ = Clock::now();
};

bool refuse(Fault* fault, const LaunchRequest& r, const std::string& why) {
  fault->kind = FaultKind::invalid_launch;
  fault->text = format("cannot launch %s: ", r.kernel->name.c_str()) + why;
  return false;
}

bool valid(const LaunchRequest& r, const Options& options, Fault* fault) {
  const uint64_t items = uint64_t{r.block[0]} * r.block[1] * r.block[2];
  if (r.code->arch != options.arch)
    return refuse(fault, r, format("it is code for %s and the emulated device is %s",
                                   r.code->arch == Arch::gfx942 ? "gfx942" : "gfx950",
                                   options.arch == Arch::gfx942 ? "gfx942" : "gfx950"));
  if (items == 0 || items > r.kernel->max_workgroup)
    return refuse(fault, r, format("block (%u, %u, %u) has %llu work-items; 1 to %u are possible", r.block[0], r.block[1],
                                   r.block[2], static_cast<unsigned long long>(items), r.kernel->max_workgroup));
  if (!r.grid[0] || !r.grid[1] || !r.grid[2])
    return refuse(fault, r, format("grid (%u, %u, %u) is empty", r.grid[0], r.grid[1], r.grid[2]));
  const uint64_t lds = uint64_t{r.kernel->lds_bytes} + r.dynamic_lds;
  const uint64_t limit = r.code->arch == Arch::gfx950 ? 160 * 1024 : 64 * 1024;
  if (lds > limit)
    return refuse(fault, r, format("it asks for %llu bytes of LDS; a work-group can have %llu",
                                   static_cast<unsigned long long>(lds), static_cast<unsigned long long>(limit)));
  if (r.kernel->properties >> 10 & 1) return refuse(fault, r, "it is wave32 code");
  if (const char* field = unmodelled_descriptor(*r.kernel))
    return refuse(fault, r, format("its kernel descriptor sets %s, which the emulator does not model", field));
  if (r.kernarg_bytes < r.kernel->kernarg_bytes)
    return refuse(fault, r, format("its kernarg segment has %u bytes, %zu were given", r.kernel->kernarg_bytes, r.kernarg_bytes));
  return true;
}

}  // namespace

bool run_launch(const LaunchRequest& request, const Options& options, const TraceRequest& trace,
                const PollRequest& poll, Fault* fault) {
  *fault = Fault{};
  if (!valid(request, options, fault)) return false;
  const auto began = Clock::now();
  const Program& program = program_of(*request.code);

  // The kernarg segment is 64-byte aligned and padded, as the runtime allocates it.
  std::vector<uint8_t> kernarg(request.kernarg_bytes + 128);
  const uint64_t kernarg_at = (reinterpret_cast<uint64_t>(kernarg.data()) + 63) & ~uint64_t{63};
  if (request.kernarg_bytes)
    std::memcpy(reinterpret_cast<void*>(kernarg_at), request.kernarg, request.kernarg_bytes);
  const DispatchPacket packet = make_packet(request, kernarg_at);

  Shared shared(request);
  Launch& launch = shared.launch;
  launch.program = &program;
  launch.kernel = request.kernel;
  launch.options = options;
  // Calls of unknown depth get room beyond what the compiler could count.
  launch.private_bytes = request.kernel->private_bytes + (request.kernel->dynamic_stack ? 16384 : 0);
  const uint64_t packet_at = reinterpret_cast<uint64_t>(&packet);
  launch.map = AddressMap::snapshot({{"kernel arguments", kernarg_at, (request.kernarg_bytes + 63) & ~uint64_t{63}, false},
                                     {"dispatch packet", packet_at, sizeof packet, false}});
  shared.start = {&request, kernarg_at, packet_at,
                  program.index_at(program.base + request.kernel->entry + (request.kernel->preload_dwords ? 256 : 0))};
  if (shared.start.entry == Program::kNoIndex) return refuse(fault, request, "its entry point is not an instruction");
  shared.groups = uint64_t{request.grid[0]} * request.grid[1] * request.grid[2];
  shared.waves_per_group = (request.block[0] * request.block[1] * request.block[2] + kLanes - 1) / kLanes;
  shared.lds_bytes = request.kernel->lds_bytes + request.dynamic_lds;
  shared.shared_budget = options.instruction_budget != 0;
  shared.budget = static_cast<int64_t>(options.instruction_budget);
  shared.trace = &trace;
  choose_group_order(options, shared.groups, &shared.stride, &shared.shift);
  const LaunchObservation observation(launch, request, trace);

  uint64_t threads = options.threads > 0 ? static_cast<uint64_t>(options.threads) : std::thread::hardware_concurrency();
  if (observation.single_thread()) threads = 1;
  threads = std::min(std::max<uint64_t>(threads, 1), shared.groups);
  {
    Worker self(shared, &poll);
    // A launch that is over in half a millisecond is not worth a thread.
    const auto patience = threads > 1 ? began + std::chrono::microseconds(500) : Clock::time_point::max();
    if (!self.run(patience)) {
      std::vector<std::thread> helpers;
      for (uint64_t i = 1; i < threads; ++i) {
        helpers.emplace_back([&shared] {
          Worker helper(shared, nullptr);
          helper.run(Clock::time_point::max());
          helper.finish();
        });
      }
      self.run(Clock::time_point::max());
      for (std::thread& helper : helpers) helper.join();
    }
    self.finish();
  }
  observation.finish(request, shared.groups, std::chrono::duration<double>(Clock::now() - began).count());
  *fault = shared.fault;
  return fault->kind == FaultKind::none;
}

std::string disassemble_kernel(LoadedCode& code, const KernelInfo& kernel) {
  const Program& p = program_of(code);
  uint64_t end = code.text_end;
  for (const uint64_t f : code.functions)
    if (f > kernel.entry && f < end) end = f;
  std::string s;
  for (uint32_t i = p.index_at(p.base + kernel.entry); i + 1 < p.insts.size() && p.insts[i].pc < end; ++i)
    s += format("%06llx: %s\n", static_cast<unsigned long long>(p.insts[i].pc),
                instruction_text(p.insts[i], reinterpret_cast<const uint8_t*>(p.base + p.insts[i].pc)).c_str());
  return s;
}

}  // namespace hfemu
