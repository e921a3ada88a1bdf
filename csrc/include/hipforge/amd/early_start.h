// Launches that may start before their predecessor has ended: AMD's GPUs have none, and each launch waits for the last.
#pragma once

#include "hipforge/device/launch.h"

namespace hf {

/// Lets a launch start before its predecessor in the stream has ended; its kernel must call wait_for_predecessor.
inline void may_start_early(Launch&, bool) {}

namespace dev {

constexpr bool kStartsEarly = false;  // a launch can be made to

/// The next launch in the stream may start, where it was made to.
__device__ inline void let_next_start() {}
/// Waits until the launch before this one has ended and its results are visible. Every block of a launch does.
__device__ inline void wait_for_predecessor() {}

}  // namespace dev
}  // namespace hf
