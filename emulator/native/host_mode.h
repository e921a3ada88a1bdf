// The host's floating-point state while waves run: default but for the rounding direction, whatever the caller had.
#pragma once

#include "core.h"

#ifdef __SSE2__
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace hfemu {

class HostFloat {
 public:
  HostFloat() { apply(); }
  HostFloat(const HostFloat&) = delete;
  HostFloat& operator=(const HostFloat&) = delete;
#ifdef __SSE2__
  ~HostFloat() { _mm_setcsr(saved_); }
#else
  ~HostFloat() { std::fesetenv(&saved_); }
#endif
  // MODE's code: 0 nearest-even, 1 up, 2 down, 3 toward zero.
  void round(uint8_t mode) {
    if (mode == now_) return;
    now_ = mode;
    apply();
  }

 private:
#ifdef __SSE2__
  void apply() {
    static constexpr uint32_t code[4] = {0, 2, 1, 3};  // in MXCSR's order; exceptions masked, denormals kept
    _mm_setcsr(0x1F80 | code[now_] << 13);
  }
  uint32_t saved_ = _mm_getcsr();
#else
  void apply() {
    static constexpr int code[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    std::fesetround(code[now_]);
  }
  static std::fenv_t hold() {
    std::fenv_t state;
    std::feholdexcept(&state);
    return state;
  }
  std::fenv_t saved_ = hold();
#endif
  uint8_t now_ = 0;
};

}  // namespace hfemu
