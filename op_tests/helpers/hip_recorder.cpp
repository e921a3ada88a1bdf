// Stands in for libamdhip64: answers what a module asks of it, runs nothing, and records each call with its stream.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "hip_types.h"

namespace {

struct Configuration {
  dim3 grid, block;
  size_t lds;
  void* stream;
};

std::string& record() {
  static auto* const text = new std::string;
  return *text;
}
std::map<const void*, std::string>& kernels() {
  static auto* const registered = new std::map<const void*, std::string>;
  return *registered;
}
Configuration pushed;
int device = 0;

void note(const char* call, const std::string& with) { record() += std::string(call) + " " + with + "\n"; }
std::string text(const void* pointer) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%p", pointer);
  return digits;
}

}  // namespace

extern "C" {

const char* recorded() { return record().c_str(); }

void** __hipRegisterFatBinary(const void*) {
  static void* handle = nullptr;
  note("__hipRegisterFatBinary", "");
  return &handle;
}
void __hipRegisterFunction(void**, const void* host, char*, const char* name, unsigned, void*, void*, void*, void*, int*) {
  kernels()[host] = name;
  note("__hipRegisterFunction", "");
}
void __hipUnregisterFatBinary(void**) {}

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t lds, void* stream) {
  pushed = {grid, block, lds, stream};
  note("__hipPushCallConfiguration", text(stream));
  return 0;
}
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* lds, void** stream) {
  *grid = pushed.grid, *block = pushed.block, *lds = pushed.lds, *stream = pushed.stream;
  note("__hipPopCallConfiguration", text(pushed.stream));
  return 0;
}
hipError_t hipLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, void* stream) {
  note("hipLaunchKernel", text(stream) + (kernels().count(kernel) ? "" : " of a kernel that was not registered"));
  return 0;
}
hipError_t hipMemsetAsync(void*, int, size_t, void* stream) {
  note("hipMemsetAsync", text(stream));
  return 0;
}
hipError_t hipGetLastError() {
  note("hipGetLastError", "");
  return 0;
}
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* out, int of) {
  std::memset(out, 0, sizeof *out);
  std::strcpy(out->gcnArchName, "gfx950:sramecc+:xnack-");
  note("hipGetDevicePropertiesR0600", std::to_string(of));
  return 0;
}
hipError_t hipGetDevice(int* out) {
  *out = device;
  return 0;
}
hipError_t hipSetDevice(int to) {
  device = to;
  note("hipSetDevice", std::to_string(to));
  return 0;
}
const char* hipGetErrorName(hipError_t) { return "none"; }
const char* hipGetErrorString(hipError_t) { return "none"; }

}  // extern "C"
