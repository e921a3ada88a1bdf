// e2m1 codes by the hardware: sm_90 has no such conversion.
#pragma once

#include "hipforge/nvidia/hip.h"

namespace hf::dev {

constexpr bool kConvertsToE2m1 = false;
__device__ inline uint32_t e2m1_codes(const float (&)[8]) { return 0; }

}  // namespace hf::dev
