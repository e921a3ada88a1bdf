#include "access.h"
#include "counters.h"
#include "schedule.h"

namespace hfemu {

std::unique_ptr<Observer> Observer::create(Launch&, uint32_t, uint32_t) { return nullptr; }
LaunchObservation::LaunchObservation(Launch& launch, const TraceRequest&) : launch_(launch) {}
LaunchObservation::~LaunchObservation() = default;
bool LaunchObservation::single_thread() const { return false; }
void LaunchObservation::finish(const LaunchRequest&, uint64_t, double) const { (void)launch_; }

void note_global(Wave&, const ExecInst&, const LaneAddresses&, uint64_t, uint32_t, Access) {}
void note_scalar(Wave&, const ExecInst&, uint64_t, uint32_t, Access) {}
void note_lds(Wave&, const ExecInst&, const uint32_t*, uint64_t, uint32_t, Access) {}
void note_scratch(Wave&, const ExecInst&, uint64_t, uint32_t, Access) {}

int64_t counters_begin(bool) { return 1; }
std::string counters_end(int64_t) { return "{}"; }

}  // namespace hfemu
