#include "scale_rows.h"

static thread_local std::string last;

AITER_C_ITFS int aiter_ctypes_abi_version() { return 2; }
AITER_C_ITFS const char* aiter_get_last_error() { return last.empty() ? nullptr : last.c_str(); }
AITER_C_ITFS void aiter_clear_last_error() { last.clear(); }

template <typename F>
static int guarded(F function) {
  const bool before = aiter_detail::g_aiter_can_throw;
  aiter_detail::g_aiter_can_throw = true;
  int status = 0;
  try {
    function();
  } catch (const std::exception& error) {
    last = error.what();
    status = -1;
  }
  aiter_detail::g_aiter_can_throw = before;
  return status;
}

AITER_C_ITFS int scale_c(aiter_tensor_t* out, aiter_tensor_t* x, aiter_tensor_t* bias, float factor, int64_t beyond,
                         int negate, const char* mode, hipStream_t stream) {
  return guarded([&] {
    AITER_CHECK(!mode || std::string(mode) == "plain", "mode must be plain");
    launch_scale_rows(*out, *x, bias, negate ? -factor : factor, beyond < 0 ? 0 : beyond, stream);
  });
}

AITER_C_ITFS int padded(int64_t m, hipStream_t) { return int(m + 255) & ~255; }
AITER_C_ITFS int quiet_failure(int64_t, hipStream_t) { return 7; }
