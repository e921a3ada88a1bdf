// The host's rounding and denormal state for as long as a wave runs.
#pragma once

#include "core.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace hfemu {

class HostMode {
 public:
  HostMode() = default;
  explicit HostMode(const Mode& m) { set(m); }
  HostMode(const HostMode&) = delete;
  HostMode& operator=(const HostMode&) = delete;
#ifdef __SSE2__
  ~HostMode() { _mm_setcsr(saved_); }
  void set(const Mode& m) {
    static constexpr uint32_t rounding[4] = {0, 2, 1, 3};  // nearest, up, down, zero in MXCSR's order
    uint32_t csr = 0x1F80 | rounding[m.round32] << 13;
    if (!(m.denorm32 & 1)) csr |= 0x0040;
    if (!(m.denorm32 & 2)) csr |= 0x8000;
    if (csr != now_) _mm_setcsr(now_ = csr);
  }

 private:
  uint32_t saved_ = _mm_getcsr(), now_ = 0;
#else
  ~HostMode() {}
  void set(const Mode&) {}
#endif
};

}  // namespace hfemu
