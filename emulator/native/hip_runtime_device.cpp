// HIP entry points for the device itself and for errors. There is one device.
#include <cstring>
#include <iterator>

#include "hip_streams.h"
#include "runtime.h"

using namespace hfemu;

namespace {

constexpr int kVersion = 70100000;  // HIP 7.1

hipError_t check_device(int device) {
  return device == 0 ? hipSuccess
                     : record(hipErrorInvalidDevice, "device " + std::to_string(device) + "; the emulator has device 0");
}

struct ErrorRow {
  hipError_t code;
  const char* name;
  const char* text;
};

constexpr ErrorRow kErrors[] = {
#define HFEMU_HIP_ERROR(name, code, text) {code, #name, text},
#include "hip_errors.inc"
#undef HFEMU_HIP_ERROR
};

const ErrorRow& error_row(hipError_t error) {
  for (const ErrorRow& row : kErrors)
    if (row.code == error) return row;
  static const ErrorRow unknown = {hipErrorUnknown, "hipErrorUnknown", "unknown error"};
  return unknown;
}

hipDeviceProp_tR0600 properties() {
  const Options options = current_options();
  const bool mi300 = options.arch == Arch::gfx942;
  hipDeviceProp_tR0600 out;
  std::memset(&out, 0, sizeof out);
  std::strcpy(out.name, mi300 ? "hipforge emulator (gfx942, MI300X)" : "hipforge emulator (gfx950, MI355X)");
  std::strcpy(out.gcnArchName, mi300 ? "gfx942:sramecc+:xnack-" : "gfx950:sramecc+:xnack-");
  std::memcpy(out.uuid.bytes, "hipforgeemulator", 16);
  const size_t lds = lds_limit(options.arch);
  out.totalGlobalMem = size_t{mi300 ? 192u : 288u} << 30;
  out.sharedMemPerBlock = out.sharedMemPerMultiprocessor = lds;
  out.sharedMemPerBlockOptin = out.maxSharedMemoryPerMultiProcessor = lds;
  out.regsPerBlock = out.regsPerMultiprocessor = 4 * 512 * 64;  // four SIMDs, 512 registers, 64 lanes
  out.warpSize = 64;
  out.memPitch = 0x7fffffff;
  out.maxThreadsPerBlock = 1024;
  for (int& size : out.maxThreadsDim) size = 1024;
  out.maxGridSize[0] = 0x7fffffff;
  out.maxGridSize[1] = out.maxGridSize[2] = 65536;
  out.totalConstMem = 0x7fffffff;
  out.major = 9;
  out.minor = mi300 ? 4 : 5;
  out.textureAlignment = 256;
  out.texturePitchAlignment = 256;
  out.surfaceAlignment = 256;
  out.multiProcessorCount = options.cu_count;
  out.canMapHostMemory = 1;
  out.concurrentKernels = 0;
  out.unifiedAddressing = 1;
  out.l2CacheSize = 4 << 20;  // per XCD
  out.maxThreadsPerMultiProcessor = 4 * 8 * 64;  // four SIMDs, 8 waves each
  out.maxBlocksPerMultiProcessor = 32;
  out.managedMemory = out.pageableMemoryAccess = out.concurrentManagedAccess = 1;
  out.canUseHostPointerForRegisteredMem = out.hostRegisterSupported = 1;
  out.directManagedMemAccessFromHost = 1;
  constexpr unsigned kHasSurfaces = 1u << 14, kHasDynamicParallelism = 1u << 16, kAll = (1u << 17) - 1;
  out.arch = kAll & ~kHasSurfaces & ~kHasDynamicParallelism;
  out.isLargeBar = 1;
  return out;
}

}  // namespace

// --- errors ---

HFEMU_HIP_API hipError_t hipGetLastError() { return take_error(); }
HFEMU_HIP_API hipError_t hipExtGetLastError() { return take_error(); }
HFEMU_HIP_API hipError_t hipPeekAtLastError() { return peek_error(); }
HFEMU_HIP_API const char* hipGetErrorName(hipError_t error) { return error_row(error).name; }

// For this thread's own last failure, the first line of its report follows HIP's text.
HFEMU_HIP_API const char* hipGetErrorString(hipError_t error) {
  thread_local std::string text;
  const std::string& report = report_of(error);
  text = error_row(error).text;
  if (!report.empty()) text += ": " + report.substr(0, report.find('\n'));
  return text.c_str();
}
HFEMU_HIP_API hipError_t hipDrvGetErrorName(hipError_t error, const char** out) {
  *out = hipGetErrorName(error);
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipDrvGetErrorString(hipError_t error, const char** out) {
  *out = hipGetErrorString(error);
  return hipSuccess;
}

// --- the device ---

HFEMU_HIP_API hipError_t hipInit(unsigned) { return hipSuccess; }
HFEMU_HIP_API hipError_t hipDriverGetVersion(int* version) {
  *version = kVersion;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipRuntimeGetVersion(int* version) {
  *version = kVersion;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipGetDeviceCount(int* count) {
  *count = 1;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipSetDevice(int device) { return check_device(device); }
HFEMU_HIP_API hipError_t hipDeviceGet(hipDevice_t* out, int device) {
  *out = 0;
  return check_device(device);
}
HFEMU_HIP_API hipError_t hipDeviceGetName(char* name, int bytes, hipDevice_t device) {
  if (bytes > 0) std::snprintf(name, static_cast<size_t>(bytes), "%s", properties().name);
  return check_device(device);
}
HFEMU_HIP_API hipError_t hipDeviceComputeCapability(int* major, int* minor, hipDevice_t device) {
  *major = properties().major;
  *minor = properties().minor;
  return check_device(device);
}
HFEMU_HIP_API hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t device) {
  *bytes = properties().totalGlobalMem;
  return check_device(device);
}
HFEMU_HIP_API hipError_t hipDeviceGetUuid(hipUUID* uuid, hipDevice_t device) {
  *uuid = properties().uuid;
  return check_device(device);
}
HFEMU_HIP_API hipError_t hipDeviceSynchronize() { return refuse_wait("hipDeviceSynchronize"); }
HFEMU_HIP_API hipError_t hipDeviceSetCacheConfig(int) { return hipSuccess; }
HFEMU_HIP_API hipError_t hipDeviceSetSharedMemConfig(int) { return hipSuccess; }
HFEMU_HIP_API hipError_t hipSetDeviceFlags(unsigned) { return hipSuccess; }
HFEMU_HIP_API hipError_t hipGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* out, int device) {
  if (!out) return record(hipErrorInvalidValue);
  *out = properties();
  return check_device(device);
}

HFEMU_HIP_API hipError_t hipDeviceGetAttribute(int* value, int attribute, int device) {
  if (!value) return record(hipErrorInvalidValue);
  const hipDeviceProp_tR0600 p = properties();
  switch (attribute) {
    case hipDeviceAttributeCanMapHostMemory: *value = p.canMapHostMemory; break;
    case hipDeviceAttributeConcurrentKernels: *value = p.concurrentKernels; break;
    case hipDeviceAttributeConcurrentManagedAccess: *value = p.concurrentManagedAccess; break;
    case hipDeviceAttributeCooperativeLaunch: *value = p.cooperativeLaunch; break;
    case hipDeviceAttributeIntegrated: *value = p.integrated; break;
    case hipDeviceAttributeL2CacheSize: *value = p.l2CacheSize; break;
    case hipDeviceAttributeComputeCapabilityMajor: *value = p.major; break;
    case hipDeviceAttributeManagedMemory: *value = p.managedMemory; break;
    case hipDeviceAttributeMaxBlocksPerMultiProcessor: *value = p.maxBlocksPerMultiProcessor; break;
    case hipDeviceAttributeMaxBlockDimX:
    case hipDeviceAttributeMaxBlockDimY:
    case hipDeviceAttributeMaxBlockDimZ: *value = p.maxThreadsDim[attribute - hipDeviceAttributeMaxBlockDimX]; break;
    case hipDeviceAttributeMaxGridDimX:
    case hipDeviceAttributeMaxGridDimY:
    case hipDeviceAttributeMaxGridDimZ: *value = p.maxGridSize[attribute - hipDeviceAttributeMaxGridDimX]; break;
    case hipDeviceAttributeMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case hipDeviceAttributeMaxPitch: *value = static_cast<int>(p.memPitch); break;
    case hipDeviceAttributeComputeCapabilityMinor: *value = p.minor; break;
    case hipDeviceAttributeMultiprocessorCount:
    case hipDeviceAttributePhysicalMultiProcessorCount: *value = p.multiProcessorCount; break;
    case hipDeviceAttributePageableMemoryAccess: *value = p.pageableMemoryAccess; break;
    case hipDeviceAttributeMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case hipDeviceAttributeMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case hipDeviceAttributeSharedMemPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    case hipDeviceAttributeSharedMemPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(p.maxSharedMemoryPerMultiProcessor);
      break;
    case hipDeviceAttributeTexturePitchAlignment: *value = static_cast<int>(p.texturePitchAlignment); break;
    case hipDeviceAttributeTotalConstantMemory: *value = static_cast<int>(p.totalConstMem); break;
    case hipDeviceAttributeUnifiedAddressing: *value = p.unifiedAddressing; break;
    case hipDeviceAttributeWarpSize: *value = p.warpSize; break;
    case hipDeviceAttributeHostRegisterSupported: *value = p.hostRegisterSupported; break;
    case hipDeviceAttributeNumberOfXccs: *value = 8; break;
    case hipDeviceAttributeMaxAvailableVgprsPerThread: *value = 512; break;
    // Clocks, bus widths and bandwidths: a functional emulator has none.
    case hipDeviceAttributeClockRate:
    case hipDeviceAttributeMemoryBusWidth:
    case hipDeviceAttributeMemoryClockRate:
    case hipDeviceAttributeClockInstructionRate:
    case hipDeviceAttributeWallClockRate:
      return record(hipErrorNotSupported, "hipDeviceGetAttribute: the emulator models no clock or memory bus");
    default:
      if (attribute < 0 || attribute > hipDeviceAttributePciChipId ||
          (attribute > hipDeviceAttributeMemoryPoolSupportedHandleTypes &&
           attribute < hipDeviceAttributeClockInstructionRate))
        return record(hipErrorInvalidValue, "hipDeviceGetAttribute: attribute " + std::to_string(attribute));
      *value = 0;  // the remaining attributes are features that the emulator lacks
  }
  return check_device(device);
}

HFEMU_HIP_API hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = 0;
  return hipSuccess;
}

// --- profiler marks ---

HFEMU_HIP_API hipError_t hipProfilerStart() { return hipSuccess; }
HFEMU_HIP_API hipError_t hipProfilerStop() { return hipSuccess; }
