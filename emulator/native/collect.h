#pragma once

#include "dispatch.h"

namespace hfemu {

struct Launch;
class Stats;

// Whether a collector is open on this thread.
bool collecting();
// Adds a finished launch to every open collector of this thread.
void collect_launch(const Launch& launch, const Stats& stats, const LaunchRequest& request, uint64_t groups,
                    double seconds);

}  // namespace hfemu
