// The instruction-by-instruction loop: counts, register and wait checks, trace.
#include "access.h"
#include "checkers.h"
#include "collect.h"
#include "record.h"
#include "schedule.h"
#include "stats.h"
#include "trace.h"

namespace hfemu {
namespace {

uint32_t index_of(const Wave& w, const ExecInst& in) { return static_cast<uint32_t>(in.inst - w.launch->program->insts.data()); }

bool checks_registers(const Options& o) {
  return o.check_uninit || o.check_waits || o.check_races || o.check_global_races;
}

class FullObserver final : public Observer {
 public:
  FullObserver(Launch& launch, uint32_t waves, uint32_t lds_bytes, Stats* stats) : launch_(launch), stats_(stats) {
    if (launch.recording != nullptr) recorder_ = std::make_unique<GroupRecorder>(*launch.recording, waves);
    if (checks_registers(launch.options)) checkers_ = std::make_unique<Checkers>(launch, waves, lds_bytes);
  }
  GroupRecorder* recorder() override { return recorder_.get(); }

  void begin_group(Workgroup& group, Wave* waves, uint32_t count, const TraceRequest* trace) override {
    if (checkers_) checkers_->begin_group(group, waves, count);
    tracing_ = trace->sink != nullptr && trace->workgroup == group.flat && trace_applies(*trace, launch_);
    trace_ = trace;
  }

  void enter_group(const Workgroup& group) override {
    if (launch_.global_races != nullptr) launch_.global_races->enter_group(group);
  }

  void step(Wave& w) override {
    const ExecInst& in = w.code[w.pc];
    if (skips(w, in)) {
      ++w.pc;
      return;
    }
    const uint64_t exec = w.exec();
    if (stats_) stats_->instruction(w.pc, static_cast<uint32_t>(std::popcount(exec)));
    const bool traced = tracing_ && w.index == trace_->wave;
    const uint32_t index = w.pc;
    if (recorder_ && recorder_->before(w, in, index)) {
      ++w.pc;
      return;
    }
    if (checkers_) checkers_->before(w, in, index);
    if (w.state == WaveState::careful) {
      step_careful(w);
    } else {
      ++w.pc;
      in.fn(w, in);
    }
    if (checkers_) checkers_->after(w, in, index, exec);
    if (traced) trace_instruction(w, in, exec, *trace_);
    if (recorder_) recorder_->after(w);
  }

  void barrier(Workgroup& group) override {
    if (group.shadow != nullptr) checkers_->barrier();
  }
  void end_group(uint64_t) override {
    if (recorder_) recorder_->end_group();
    if (launch_.global_races != nullptr) launch_.global_races->end_group();
  }

 private:
  Launch& launch_;
  Stats* stats_;
  std::unique_ptr<Checkers> checkers_;
  std::unique_ptr<GroupRecorder> recorder_;
  const TraceRequest* trace_ = nullptr;
  bool tracing_ = false;
};

}  // namespace

std::unique_ptr<Observer> Observer::create(Launch& launch, const TraceRequest& trace, uint32_t waves,
                                           uint32_t lds_bytes, Stats* stats) {
  const bool traced = trace.sink != nullptr && trace_applies(trace, launch);
  if (launch.totals == nullptr && launch.recording == nullptr && !traced && !checks_registers(launch.options))
    return nullptr;
  return std::make_unique<FullObserver>(launch, waves, lds_bytes, stats);
}

LaunchObservation::LaunchObservation(Launch& launch, const LaunchRequest& request, const TraceRequest& trace)
    : launch_(launch) {
  launch.recording = begin_recording(launch, request);
  tracing_ = trace.sink != nullptr && trace_applies(trace, launch);
  if (collecting()) launch.totals = new LaunchTotals(launch);
  if (launch.options.check_global_races) launch.global_races = new GlobalRaces;
}
LaunchObservation::~LaunchObservation() {
  end_recording(launch_.recording);
  delete launch_.totals;
  delete launch_.global_races;
}
bool LaunchObservation::single_thread() const { return tracing_ || launch_.global_races != nullptr; }
void LaunchObservation::finish(const LaunchRequest& request, uint64_t groups, double seconds) const {
  if (launch_.totals != nullptr) collect_launch(launch_, launch_.totals->stats, request, groups, seconds);
}

void note_global(Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access) {
  if (w.thread->stats != nullptr) w.thread->stats->global(index_of(w, in), a, exec, bytes, access);
  if (w.thread->recorder != nullptr) w.thread->recorder->global(w, a, exec, bytes, access);
  if (w.launch->global_races != nullptr) w.launch->global_races->access(w, in, a, exec, bytes, access);
}
void note_scalar(Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, Access access) {
  if (w.thread->stats != nullptr) w.thread->stats->scalar(index_of(w, in), address, bytes, access);
  if (w.thread->recorder != nullptr) w.thread->recorder->scalar(w, address, bytes, access);
  if (w.launch->global_races != nullptr) {
    LaneAddresses one;
    one.at[0] = address;
    w.launch->global_races->access(w, in, one, 1, bytes, access);
  }
}
void note_lds(Wave& w, const ExecInst& in, const uint32_t* a, uint64_t exec, uint32_t bytes, Access access) {
  if (w.thread->stats != nullptr) w.thread->stats->lds(index_of(w, in), a, exec, bytes);
  if (w.thread->recorder != nullptr) w.thread->recorder->lds(w, a, exec, bytes);
  if (w.wg->shadow != nullptr) check_lds_access(w, in, a, exec, bytes, access);
}
void note_scratch(Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access) {
  if (w.thread->stats != nullptr) w.thread->stats->scratch(index_of(w, in), exec, bytes);
  if (w.shadow != nullptr) check_scratch_access(w, in, a, exec, bytes, access);
}

}  // namespace hfemu
