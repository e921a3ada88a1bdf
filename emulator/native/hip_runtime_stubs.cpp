// The rest of the HIP API: a module that refers to it loads, and the call fails with its own name.
#include "runtime.h"

#define HFEMU_HIP_STUB(name) \
  HFEMU_HIP_API hipError_t name() { return hfemu::not_provided(#name); }
#include "hip_stubs.inc"
#undef HFEMU_HIP_STUB

namespace {
struct ChannelDescription {
  int x, y, z, w, kind;
};
}  // namespace

// Not a hipError_t: pure data, used while preparing texture calls that are refused above.
HFEMU_HIP_API ChannelDescription hipCreateChannelDesc(int x, int y, int z, int w, int kind) {
  return {x, y, z, w, kind};
}
HFEMU_HIP_API const char* hipApiName(uint32_t) { return "unknown"; }
