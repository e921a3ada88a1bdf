#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <utility>

namespace hfemu {
namespace {

struct Settings {
  std::mutex mutex;
  Options options;
  TraceRequest trace;
  Poll poll = nullptr;
};

// Never destroyed: modules unregister from static destructors, whose order is unspecified.
Settings& settings() {
  static Settings* const instance = new Settings;
  return *instance;
}

struct ThreadErrors {
  hipError_t last = hipSuccess;      // HIP's last error
  hipError_t reported = hipSuccess;  // the error that `report` explains
  std::string report;
  bool launch = false;  // `report` is about a launch
};

thread_local ThreadErrors thread_errors;
const std::string kNoReport;

hipError_t error_of(FaultKind kind) {
  switch (kind) {
    case FaultKind::memory: return hipErrorIllegalAddress;
    case FaultKind::invalid_launch: return hipErrorInvalidConfiguration;
    case FaultKind::deadlock: return hipErrorLaunchTimeOut;
    default: return hipErrorLaunchFailure;
  }
}

std::string triple(const uint32_t v[3]) {
  return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + ")";
}

}  // namespace

Options current_options() {
  std::lock_guard<std::mutex> lock(settings().mutex);
  return settings().options;
}

void set_options(const Options& options) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  settings().options = options;
}

void set_trace(const TraceRequest& trace) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  settings().trace = trace;
}

void set_poll(Poll poll) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  settings().poll = poll;
}

uint32_t lds_limit(Arch arch) { return arch == Arch::gfx942 ? 64 * 1024 : 160 * 1024; }

const std::string& pending_report() {
  const bool pending = thread_errors.launch || thread_errors.last == thread_errors.reported;
  return thread_errors.reported != hipSuccess && pending ? thread_errors.report : kNoReport;
}

const std::string& report_of(hipError_t error) {
  return error != hipSuccess && error == thread_errors.reported ? thread_errors.report : kNoReport;
}

void clear_errors() { thread_errors = ThreadErrors(); }

hipError_t record(hipError_t error) {
  if (error != hipSuccess) thread_errors.last = error;
  return error;
}

hipError_t record(hipError_t error, std::string report) {
  thread_errors.reported = error;
  thread_errors.report = std::move(report);
  thread_errors.launch = false;
  return record(error);
}

hipError_t launch_failed() {
  thread_errors.launch = true;
  return thread_errors.last;
}

hipError_t peek_error() { return thread_errors.last; }

hipError_t take_error() { return std::exchange(thread_errors.last, hipSuccess); }

hipError_t not_provided(const char* call) {
  return record(hipErrorNotSupported, std::string(call) + " is not provided by hipforge's emulator");
}

namespace {

// A fault at one of the stand-in addresses means that the kernel asked for a service; say which.
std::string explained(const std::string& text) {
  const auto mentions = [&](uint64_t address) {
    char prefix[24];  // all but the digits that an offset changes
    std::snprintf(prefix, sizeof prefix, "0x%llx", static_cast<unsigned long long>(address >> 20));
    return text.find(prefix) != std::string::npos;
  };
  if (mentions(kHostcallAddress)) return "printf and assert in a kernel need a host service that is not emulated\n" + text;
  if (mentions(kHeapAddress)) return "malloc and new in a kernel need a device heap that is not emulated\n" + text;
  return text;
}

hipError_t refuse(const Kernel& kernel, hipError_t error, const std::string& why) {
  record(error, "launch of " + kernel.info.name + ": " + why);
  return launch_failed();
}

}  // namespace

hipError_t check_launch(const CodeObject& object, const Kernel& kernel, const uint32_t grid[3], const uint32_t block[3],
                        uint64_t dynamic_lds) {
  const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
  if (!grid[0] || !grid[1] || !grid[2] || !threads)
    return refuse(kernel, hipErrorInvalidConfiguration,
                  "grid " + triple(grid) + " of blocks " + triple(block) + " is empty; sizes start at 1");
  if (block[0] > 1024 || block[1] > 1024 || block[2] > 1024 || threads > kernel.info.max_workgroup)
    return refuse(kernel, hipErrorInvalidConfiguration,
                  "blocks of " + triple(block) + " work items; this kernel takes at most " +
                      std::to_string(kernel.info.max_workgroup) + " per block");
  const uint32_t limit = lds_limit(object.arch());
  if (dynamic_lds > limit || kernel.info.lds_bytes + dynamic_lds > limit)
    return refuse(kernel, hipErrorLaunchOutOfResources,
                  std::to_string(kernel.info.lds_bytes) + " static and " + std::to_string(dynamic_lds) +
                      " dynamic LDS bytes; " + arch_name(object.arch()) + " has " + std::to_string(limit));
  return hipSuccess;
}

hipError_t launch(CodeObject& object, const Kernel& kernel, const uint32_t grid[3], const uint32_t block[3],
                  const void* explicit_bytes, size_t count, uint64_t dynamic_lds) {
  thread_errors.reported = hipSuccess;
  const hipError_t refused = check_launch(object, kernel, grid, block, dynamic_lds);
  if (refused != hipSuccess) return refused;
  Options options;
  TraceRequest trace;
  Poll poll;
  {
    std::lock_guard<std::mutex> lock(settings().mutex);
    options = settings().options;
    trace = settings().trace;
    poll = settings().poll;
  }
  const std::vector<uint8_t> kernarg = build_kernarg(kernel, explicit_bytes, count, grid, block,
                                                     static_cast<uint32_t>(dynamic_lds));
  LaunchRequest request;
  request.code = &object.code();
  request.kernel = &kernel.info;
  std::copy_n(grid, 3, request.grid);
  std::copy_n(block, 3, request.block);
  request.kernarg = kernarg.data();
  request.kernarg_bytes = kernarg.size();
  request.dynamic_lds = static_cast<uint32_t>(dynamic_lds);
  Fault fault;
  if (run_launch(request, options, trace, poll, &fault)) return hipSuccess;
  record(error_of(fault.kind), fault.kind == FaultKind::memory ? explained(fault.text) : fault.text);
  return launch_failed();
}

int blocks_per_cu(const CodeObject& object, const Kernel& kernel, uint32_t threads, uint64_t dynamic_lds) {
  return static_cast<int>(groups_per_cu(kernel.info, object.arch(), threads, dynamic_lds));
}

uint32_t groups_per_cu(const KernelInfo& kernel, Arch arch, uint32_t threads, uint64_t dynamic_lds) {
  constexpr uint32_t kVgprFile = 512, kMaxWaves = 8, kSimds = 4, kSgprsForAllWaves = 100;
  if (threads == 0 || threads > kernel.max_workgroup) return 0;
  const uint32_t vgprs = std::max<uint32_t>(1, kernel.vgprs), granted = (vgprs + 7) / 8 * 8;
  uint32_t waves = std::min(kMaxWaves, kVgprFile / granted);
  if (kernel.sgprs > kSgprsForAllWaves) waves = std::min(waves, kMaxWaves - 1);
  const uint32_t groups = waves * kSimds / ((threads + 63) / 64);
  // LDS is allocated in granules (LLVM's getLdsDwGranularity: 320 dwords on gfx950, 128 before).
  const uint64_t granule = arch == Arch::gfx950 ? 1280 : 512;
  const uint64_t lds = (kernel.lds_bytes + dynamic_lds + granule - 1) / granule * granule;
  return lds ? static_cast<uint32_t>(std::min<uint64_t>(groups, lds_limit(arch) / lds)) : groups;
}

}  // namespace hfemu
