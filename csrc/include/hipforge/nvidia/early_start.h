// Launches that may start before their predecessor has ended: programmatic dependent launch.
#pragma once

#include "hipforge/device/launch.h"

namespace hf {

/// Lets a launch start before its predecessor in the stream has ended; its kernel must call wait_for_predecessor.
inline void may_start_early(Launch& at, bool programmatic) { at.programmatic = programmatic; }

namespace dev {

constexpr bool kStartsEarly = true;  // a launch can be made to

/// The next launch in the stream may start, where it was made to.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
/// Waits until the launch before this one has ended and its results are visible. Every block of a launch does.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace dev
}  // namespace hf
