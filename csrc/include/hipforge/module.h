// What a HIP module includes: tensor views, guards, the export macro, and the few HIP runtime calls that guards and
// launches need. No torch, no pybind11. What is in hipforge/host/ names no runtime and no vendor; this file binds it to
// HIP, whose names mean CUDA's on NVIDIA GPUs; kernels use hipforge/device/ or a vendor's own headers beside it.
#pragma once

#if defined(__HIP_DEVICE_COMPILE__)
#define HF_DEVICE_PASS 1
#endif

#include "hipforge/device/runtime.h"

namespace hf __attribute__((visibility("hidden"))) {

// How many pieces of `by` cover `count`.
inline uint32_t ceil_div(int64_t count, int64_t by) { return static_cast<uint32_t>((count + by - 1) / by); }

// Longest architecture name kept, without its features ("gfx950").
constexpr int kArchBytes = 16;

struct ArchName {
  char text[kArchBytes];

  bool is(const char* other) const { return __builtin_strcmp(text, other) == 0; }
};

#if defined(HF_DEVICE_PASS)  // which checks host code but compiles none

ArchName arch_of(int device);
bool has_fnuz(const Tensor& tensor);
void check_arch(const Tensor& tensor, const char* const* accepted, int count);
struct DeviceGuard {
  explicit DeviceGuard(const Tensor& tensor);
  ~DeviceGuard();
};

#else

constexpr int kMaxDevices = 64;

template <>
struct Argument<hipStream_t> : Stream<StreamStruct> {};

[[noreturn]] inline void hip_failed(hipError_t status, const char* expression) {
  HF_FAIL(HF_ERROR_LAUNCH, hipGetErrorName(status), " (", hipGetErrorString(status), ") from ", expression);
}

inline ArchName read_arch(int device) {
  ArchName arch = {};
  const hipError_t status = write_arch(device, arch.text, kArchBytes);
  if (status != hipSuccess) hip_failed(status, "asking for the properties of the device");
  return arch;
}

// The architecture of device `device`. Read once per device and process.
inline ArchName arch_of(int device) {
  static struct { ArchName arch; int state; } cached[kMaxDevices];  // 0 empty, 1 being written, 2 ready
  if (device < 0 || device >= kMaxDevices) return read_arch(device);
  auto& slot = cached[device];
  if (__atomic_load_n(&slot.state, __ATOMIC_ACQUIRE) == 2) return slot.arch;
  const ArchName arch = read_arch(device);
  int empty = 0;
  if (__atomic_compare_exchange_n(&slot.state, &empty, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
    slot.arch = arch;
    __atomic_store_n(&slot.state, 2, __ATOMIC_RELEASE);
  }
  return arch;
}

inline bool has_fnuz(const Tensor& tensor) { return has_fnuz(arch_of(tensor.device_index()).text); }

inline void check_arch(const Tensor& tensor, const char* const* accepted, int count) {
  const ArchName arch = arch_of(tensor.device_index());
  for (int i = 0; i < count; ++i)
    if (arch.is(accepted[i])) return;
  char list[128];
  TextBuffer names(list, sizeof(list));
  for (int i = 0; i < count; ++i) {
    if (i) names.add(", ");
    names.add(accepted[i]);
  }
  HF_FAIL(HF_ERROR_ARCH, "the kernel is for ", list, "; device ", tensor.device_index(), " is ", arch.text);
}

// Makes `tensor`'s device the current one for the scope. The binding already does so for the device of the call's
// tensors; this is for entries that are called from C++.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Tensor& tensor) {
    if (hipGetDevice(&previous_) != hipSuccess) previous_ = -1;
    changed_ = tensor.device_index() != previous_;
    if (!changed_) return;
    const hipError_t status = hipSetDevice(tensor.device_index());
    if (status != hipSuccess) hip_failed(status, "hipSetDevice");
  }
  ~DeviceGuard() {
    if (changed_ && previous_ >= 0) (void)hipSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
  bool changed_ = false;
};

#endif

}  // namespace hf

// Raises ArchError unless the tensor's own device has one of the architectures: HF_CHECK_ARCH(x, "gfx950").
#define HF_CHECK_ARCH(tensor, ...)                                                                            \
  do {                                                                                                        \
    const char* const hf_archs_[] = {__VA_ARGS__};                                                            \
    ::hf::check_arch(tensor, hf_archs_, static_cast<int>(sizeof(hf_archs_) / sizeof(hf_archs_[0])));          \
  } while (0)

// Raises LaunchError with HIP's error text unless the call succeeds. amd/launch.h has the launch of a kernel.
#if defined(HF_DEVICE_PASS)
#define HF_HIP(expression) static_cast<void>(0)
#else
#define HF_HIP(expression)                                                     \
  do {                                                                         \
    const hipError_t hf_status_ = (expression);                                \
    if (hf_status_ != hipSuccess) ::hf::hip_failed(hf_status_, #expression);   \
  } while (0)
#endif
