// HIP entry points for memory. Host and device share one address space; a call that is not captured completes before it
// returns.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "hip_modules.h"
#include "hip_streams.h"
#include "memory.h"
#include "runtime.h"

using namespace hfemu;

namespace {

constexpr size_t kAlignment = 256;  // what hipMalloc promises
constexpr size_t kPitchAlignment = 256;
const hipStream_t kPerThread = reinterpret_cast<hipStream_t>(2);  // what a null stream means to the _spt variants
// Fresh memory is filled with a pattern, so that a kernel which relies on zeros fails; beyond this size only its start.
constexpr size_t kPoisonLimit = size_t{64} << 20;
constexpr int kPoison = 0xA5;

struct Allocation {
  size_t bytes = 0;
  hipMemoryType type = hipMemoryTypeDevice;
  unsigned flags = 0;
  bool owned = true;  // false: hipHostRegister
};

struct Heap {
  std::mutex mutex;
  std::map<uint64_t, Allocation> blocks;
  uint64_t serial = 0, used = 0;
};

Heap& heap() {
  static Heap* const instance = new Heap;  // never destroyed: modules may free from static destructors
  return *instance;
}

hipError_t allocate(const char* call, void** out, size_t bytes, hipMemoryType type, unsigned flags) {
  if (!out) return record(hipErrorInvalidValue, std::string(call) + ": a null result pointer");
  *out = nullptr;
  const hipError_t refused = refuse_unsafe(call);
  if (refused != hipSuccess) return refused;
  if (bytes == 0) return hipSuccess;
  void* block = nullptr;
  if (posix_memalign(&block, kAlignment, bytes))
    return record(hipErrorOutOfMemory, std::string(call) + ": no " + std::to_string(bytes) + " bytes on this machine");
  std::memset(block, kPoison, bytes < kPoisonLimit ? bytes : kPoisonLimit);
  std::lock_guard<std::mutex> lock(heap().mutex);
  const uint64_t base = reinterpret_cast<uint64_t>(block);
  heap().blocks[base] = {bytes, type, flags, true};
  heap().used += bytes;
  add_allocation({std::string(call) + "#" + std::to_string(++heap().serial), base, bytes, true});
  *out = block;
  return hipSuccess;
}

hipError_t release(const char* call, void* block, bool owned) {
  if (!block) return hipSuccess;
  const hipError_t refused = refuse_unsafe(call);
  if (refused != hipSuccess) return refused;
  const uint64_t base = reinterpret_cast<uint64_t>(block);
  std::lock_guard<std::mutex> lock(heap().mutex);
  const auto found = heap().blocks.find(base);
  if (found == heap().blocks.end() || found->second.owned != owned)
    return record(hipErrorInvalidValue, std::string(call) + ": the pointer does not start a live allocation");
  remove_allocation(base);
  if (owned) {
    heap().used -= found->second.bytes;
    std::free(block);
  }
  heap().blocks.erase(found);
  return hipSuccess;
}

// A range that starts in a live allocation must end in it; other addresses are the caller's own host memory.
bool range_ok(const char* call, const char* role, const void* pointer, size_t bytes, hipError_t* error) {
  if (bytes == 0) return true;
  Extent extent;
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  if (!pointer) {
    *error = record(hipErrorInvalidValue, std::string(call) + ": a null " + role);
    return false;
  }
  if (!find_allocation(address, &extent) || bytes <= extent.base + extent.bytes - address) return true;
  *error = record(hipErrorInvalidValue,
                  std::string(call) + ": " + role + " of " + std::to_string(bytes) + " bytes at offset " +
                      std::to_string(address - extent.base) + " of " + extent.name + ", which has " +
                      std::to_string(extent.bytes) + " bytes");
  return false;
}

hipError_t copy(const char* call, void* to, const void* from, size_t bytes, hipMemcpyKind kind = hipMemcpyDefault) {
  hipError_t error = hipSuccess;
  if ((kind < hipMemcpyHostToHost || kind > hipMemcpyDefault) && kind != hipMemcpyDeviceToDeviceNoCU)
    return record(hipErrorInvalidMemcpyDirection, std::string(call) + ": kind " + std::to_string(kind));
  if (!range_ok(call, "destination", to, bytes, &error) || !range_ok(call, "source", from, bytes, &error)) return error;
  if (bytes) std::memmove(to, from, bytes);
  return hipSuccess;
}

hipError_t copy_2d(const char* call, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                   size_t height, hipMemcpyKind kind) {
  if (width > to_pitch || width > from_pitch)
    return record(hipErrorInvalidPitchValue, std::string(call) + ": rows of " + std::to_string(width) +
                                                 " bytes do not fit pitches " + std::to_string(to_pitch) + " and " +
                                                 std::to_string(from_pitch));
  for (size_t row = 0; row < height; ++row) {
    const hipError_t error = copy(call, static_cast<char*>(to) + row * to_pitch,
                                  static_cast<const char*>(from) + row * from_pitch, width, kind);
    if (error != hipSuccess) return error;
  }
  return hipSuccess;
}

template <class F>
hipError_t synchronously(const char* call, F&& run) {
  const hipError_t refused = refuse_synchronous(call);
  return refused == hipSuccess ? run() : refused;
}

template <class T>
hipError_t fill(const char* call, void* to, T value, size_t count) {
  hipError_t error = hipSuccess;
  if (!range_ok(call, "destination", to, count * sizeof(T), &error)) return error;
  for (size_t i = 0; i < count; ++i) std::memcpy(static_cast<char*>(to) + i * sizeof(T), &value, sizeof(T));
  return hipSuccess;
}

hipError_t fill_2d(const char* call, void* to, size_t pitch, int value, size_t width, size_t height) {
  if (width > pitch) return record(hipErrorInvalidPitchValue);
  for (size_t row = 0; row < height; ++row) {
    const hipError_t error = fill(call, static_cast<char*>(to) + row * pitch, static_cast<uint8_t>(value), width);
    if (error != hipSuccess) return error;
  }
  return hipSuccess;
}

// The address `offset` bytes into a device variable, if `bytes` from there lie inside it.
hipError_t symbol_range(const char* call, const void* symbol, size_t offset, size_t bytes, void** out) {
  Variable variable;
  std::string name;
  if (!variable_of(symbol, &variable, &name)) return peek_error();
  if (offset > variable.bytes || bytes > variable.bytes - offset)
    return record(hipErrorInvalidValue, std::string(call) + ": " + std::to_string(bytes) + " bytes at offset " +
                                            std::to_string(offset) + " of " + name + ", which has " +
                                            std::to_string(variable.bytes) + " bytes");
  *out = reinterpret_cast<char*>(variable.address) + offset;
  return hipSuccess;
}

hipError_t to_symbol(const void* symbol, const void* from, size_t bytes, size_t offset, hipMemcpyKind kind) {
  void* place = nullptr;
  const hipError_t error = symbol_range("hipMemcpyToSymbol", symbol, offset, bytes, &place);
  return error == hipSuccess ? copy("hipMemcpyToSymbol", place, from, bytes, kind) : error;
}

hipError_t from_symbol(void* to, const void* symbol, size_t bytes, size_t offset, hipMemcpyKind kind) {
  void* place = nullptr;
  const hipError_t error = symbol_range("hipMemcpyFromSymbol", symbol, offset, bytes, &place);
  return error == hipSuccess ? copy("hipMemcpyFromSymbol", to, place, bytes, kind) : error;
}

// The block that holds `pointer`, and where it starts; false if no live block does.
bool find_block(const void* pointer, uint64_t* base, Allocation* out) {
  std::lock_guard<std::mutex> lock(heap().mutex);
  const uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto next = heap().blocks.upper_bound(address);
  if (next == heap().blocks.begin()) return false;
  --next;
  if (address - next->first >= next->second.bytes) return false;
  *base = next->first;
  *out = next->second;
  return true;
}

size_t total_memory() {
  constexpr size_t kGiB = size_t{1} << 30;
  return (current_options().arch == Arch::gfx942 ? 192 : 288) * kGiB;
}

}  // namespace

// --- allocation ---

HFEMU_HIP_API hipError_t hipMalloc(void** out, size_t bytes) {
  return allocate("hipMalloc", out, bytes, hipMemoryTypeDevice, 0);
}
HFEMU_HIP_API hipError_t hipExtMallocWithFlags(void** out, size_t bytes, unsigned flags) {
  return allocate("hipExtMallocWithFlags", out, bytes, hipMemoryTypeDevice, flags);
}
// On a capturing stream these would be nodes that allocate; the emulator has none.
HFEMU_HIP_API hipError_t hipMallocAsync(void** out, size_t bytes, hipStream_t stream) {
  if (is_capturing(stream)) return not_provided("hipMallocAsync on a capturing stream");
  return allocate("hipMallocAsync", out, bytes, hipMemoryTypeDevice, 0);
}
HFEMU_HIP_API hipError_t hipMallocManaged(void** out, size_t bytes, unsigned flags) {
  return allocate("hipMallocManaged", out, bytes, hipMemoryTypeManaged, flags);
}
HFEMU_HIP_API hipError_t hipHostMalloc(void** out, size_t bytes, unsigned flags) {
  return allocate("hipHostMalloc", out, bytes, hipMemoryTypeHost, flags);
}
HFEMU_HIP_API hipError_t hipHostAlloc(void** out, size_t bytes, unsigned flags) {
  return allocate("hipHostAlloc", out, bytes, hipMemoryTypeHost, flags);
}
HFEMU_HIP_API hipError_t hipMallocHost(void** out, size_t bytes) {
  return allocate("hipMallocHost", out, bytes, hipMemoryTypeHost, 0);
}
HFEMU_HIP_API hipError_t hipMemAllocHost(void** out, size_t bytes) {
  return allocate("hipMemAllocHost", out, bytes, hipMemoryTypeHost, 0);
}
HFEMU_HIP_API hipError_t hipMallocPitch(void** out, size_t* pitch, size_t width, size_t height) {
  if (!pitch) return record(hipErrorInvalidValue);
  *pitch = (width + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
  return allocate("hipMallocPitch", out, *pitch * height, hipMemoryTypeDevice, 0);
}
HFEMU_HIP_API hipError_t hipFree(void* block) { return release("hipFree", block, true); }
HFEMU_HIP_API hipError_t hipFreeAsync(void* block, hipStream_t stream) {
  if (is_capturing(stream)) return not_provided("hipFreeAsync on a capturing stream");
  return release("hipFreeAsync", block, true);
}
HFEMU_HIP_API hipError_t hipHostFree(void* block) { return release("hipHostFree", block, true); }
HFEMU_HIP_API hipError_t hipFreeHost(void* block) { return release("hipFreeHost", block, true); }

HFEMU_HIP_API hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned flags) {
  if (!pointer || !bytes) return record(hipErrorInvalidValue, "hipHostRegister: an empty range");
  const hipError_t refused = refuse_unsafe("hipHostRegister");
  if (refused != hipSuccess) return refused;
  const uint64_t base = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard<std::mutex> lock(heap().mutex);
  if (!heap().blocks.emplace(base, Allocation{bytes, hipMemoryTypeHost, flags, false}).second)
    return record(hipErrorHostMemoryAlreadyRegistered);
  add_allocation({"hipHostRegister#" + std::to_string(++heap().serial), base, bytes, true});
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipHostUnregister(void* pointer) { return release("hipHostUnregister", pointer, false); }

HFEMU_HIP_API hipError_t hipHostGetDevicePointer(void** out, void* pointer, unsigned) {
  if (!out || !pointer) return record(hipErrorInvalidValue);
  *out = pointer;
  return hipSuccess;
}
HFEMU_HIP_API hipError_t hipHostGetFlags(unsigned* flags, void* pointer) {
  uint64_t base = 0;
  Allocation block;
  if (!flags || !find_block(pointer, &base, &block)) return record(hipErrorInvalidValue);
  *flags = block.flags;
  return hipSuccess;
}

// --- copies ---

HFEMU_HIP_API hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind kind) {
  return synchronously("hipMemcpy", [=] { return copy("hipMemcpy", to, from, bytes, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpy_spt(void* to, const void* from, size_t bytes, hipMemcpyKind kind) {
  return synchronously("hipMemcpy_spt", [=] { return copy("hipMemcpy", to, from, bytes, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind,
                                        hipStream_t stream) {
  return on_stream("hipMemcpyAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return copy("hipMemcpyAsync", to, from, bytes, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyAsync_spt(void* to, const void* from, size_t bytes, hipMemcpyKind kind,
                                            hipStream_t stream) {
  return on_stream("hipMemcpyAsync_spt", stream ? stream : kPerThread, hipGraphNodeTypeMemcpy,
                   [=] { return copy("hipMemcpyAsync", to, from, bytes, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyWithStream(void* to, const void* from, size_t bytes, hipMemcpyKind kind,
                                             hipStream_t stream) {
  return on_stream("hipMemcpyWithStream", stream, hipGraphNodeTypeMemcpy,
                   [=] { return copy("hipMemcpyWithStream", to, from, bytes, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyHtoD(hipDeviceptr_t to, const void* from, size_t bytes) {
  return synchronously("hipMemcpyHtoD", [=] { return copy("hipMemcpyHtoD", to, from, bytes); });
}
HFEMU_HIP_API hipError_t hipMemcpyDtoH(void* to, hipDeviceptr_t from, size_t bytes) {
  return synchronously("hipMemcpyDtoH", [=] { return copy("hipMemcpyDtoH", to, from, bytes); });
}
HFEMU_HIP_API hipError_t hipMemcpyDtoD(hipDeviceptr_t to, hipDeviceptr_t from, size_t bytes) {
  return synchronously("hipMemcpyDtoD", [=] { return copy("hipMemcpyDtoD", to, from, bytes); });
}
HFEMU_HIP_API hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, const void* from, size_t bytes, hipStream_t stream) {
  return on_stream("hipMemcpyHtoDAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return copy("hipMemcpyHtoDAsync", to, from, bytes); });
}
HFEMU_HIP_API hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t bytes, hipStream_t stream) {
  return on_stream("hipMemcpyDtoHAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return copy("hipMemcpyDtoHAsync", to, from, bytes); });
}
HFEMU_HIP_API hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t to, hipDeviceptr_t from, size_t bytes, hipStream_t stream) {
  return on_stream("hipMemcpyDtoDAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return copy("hipMemcpyDtoDAsync", to, from, bytes); });
}
HFEMU_HIP_API hipError_t hipMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, hipMemcpyKind kind) {
  return synchronously("hipMemcpy2D",
                       [=] { return copy_2d("hipMemcpy2D", to, to_pitch, from, from_pitch, width, height, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                          size_t height, hipMemcpyKind kind, hipStream_t stream) {
  return on_stream("hipMemcpy2DAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return copy_2d("hipMemcpy2DAsync", to, to_pitch, from, from_pitch, width, height, kind); });
}

// --- device variables ---

HFEMU_HIP_API hipError_t hipMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                                           hipMemcpyKind kind) {
  return synchronously("hipMemcpyToSymbol", [=] { return to_symbol(symbol, from, bytes, offset, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyToSymbolAsync(const void* symbol, const void* from, size_t bytes, size_t offset,
                                                hipMemcpyKind kind, hipStream_t stream) {
  return on_stream("hipMemcpyToSymbolAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return to_symbol(symbol, from, bytes, offset, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                                             hipMemcpyKind kind) {
  return synchronously("hipMemcpyFromSymbol", [=] { return from_symbol(to, symbol, bytes, offset, kind); });
}
HFEMU_HIP_API hipError_t hipMemcpyFromSymbolAsync(void* to, const void* symbol, size_t bytes, size_t offset,
                                                  hipMemcpyKind kind, hipStream_t stream) {
  return on_stream("hipMemcpyFromSymbolAsync", stream, hipGraphNodeTypeMemcpy,
                   [=] { return from_symbol(to, symbol, bytes, offset, kind); });
}
HFEMU_HIP_API hipError_t hipGetSymbolAddress(void** out, const void* symbol) {
  return out ? symbol_range("hipGetSymbolAddress", symbol, 0, 0, out) : record(hipErrorInvalidValue);
}
HFEMU_HIP_API hipError_t hipGetSymbolSize(size_t* bytes, const void* symbol) {
  Variable variable;
  std::string name;
  if (!bytes) return record(hipErrorInvalidValue);
  if (!variable_of(symbol, &variable, &name)) return peek_error();
  *bytes = variable.bytes;
  return hipSuccess;
}

// --- fills ---

HFEMU_HIP_API hipError_t hipMemset(void* to, int value, size_t bytes) {
  return synchronously("hipMemset", [=] { return fill("hipMemset", to, static_cast<uint8_t>(value), bytes); });
}
HFEMU_HIP_API hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t stream) {
  return on_stream("hipMemsetAsync", stream, hipGraphNodeTypeMemset,
                   [=] { return fill("hipMemsetAsync", to, static_cast<uint8_t>(value), bytes); });
}
HFEMU_HIP_API hipError_t hipMemsetD8(hipDeviceptr_t to, unsigned char value, size_t count) {
  return synchronously("hipMemsetD8", [=] { return fill("hipMemsetD8", to, value, count); });
}
HFEMU_HIP_API hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char value, size_t count, hipStream_t stream) {
  return on_stream("hipMemsetD8Async", stream, hipGraphNodeTypeMemset,
                   [=] { return fill("hipMemsetD8Async", to, value, count); });
}
HFEMU_HIP_API hipError_t hipMemsetD16(hipDeviceptr_t to, unsigned short value, size_t count) {
  return synchronously("hipMemsetD16", [=] { return fill("hipMemsetD16", to, value, count); });
}
HFEMU_HIP_API hipError_t hipMemsetD16Async(hipDeviceptr_t to, unsigned short value, size_t count, hipStream_t stream) {
  return on_stream("hipMemsetD16Async", stream, hipGraphNodeTypeMemset,
                   [=] { return fill("hipMemsetD16Async", to, value, count); });
}
HFEMU_HIP_API hipError_t hipMemsetD32(hipDeviceptr_t to, int value, size_t count) {
  return synchronously("hipMemsetD32", [=] { return fill("hipMemsetD32", to, value, count); });
}
HFEMU_HIP_API hipError_t hipMemsetD32Async(hipDeviceptr_t to, int value, size_t count, hipStream_t stream) {
  return on_stream("hipMemsetD32Async", stream, hipGraphNodeTypeMemset,
                   [=] { return fill("hipMemsetD32Async", to, value, count); });
}
HFEMU_HIP_API hipError_t hipMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  return synchronously("hipMemset2D", [=] { return fill_2d("hipMemset2D", to, pitch, value, width, height); });
}
HFEMU_HIP_API hipError_t hipMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                                          hipStream_t stream) {
  return on_stream("hipMemset2DAsync", stream, hipGraphNodeTypeMemset,
                   [=] { return fill_2d("hipMemset2DAsync", to, pitch, value, width, height); });
}

// --- queries ---

HFEMU_HIP_API hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (!free_bytes || !total_bytes) return record(hipErrorInvalidValue);
  std::lock_guard<std::mutex> lock(heap().mutex);
  *total_bytes = total_memory();
  *free_bytes = *total_bytes - heap().used;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* bytes, hipDeviceptr_t pointer) {
  Extent extent;
  if (!find_allocation(reinterpret_cast<uint64_t>(pointer), &extent)) return record(hipErrorNotFound);
  if (base) *base = reinterpret_cast<void*>(extent.base);
  if (bytes) *bytes = extent.bytes;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipMemPtrGetInfo(void* pointer, size_t* bytes) {
  return hipMemGetAddressRange(nullptr, bytes, pointer);
}

HFEMU_HIP_API hipError_t hipPointerGetAttributes(hipPointerAttribute_t* out, const void* pointer) {
  if (!out) return record(hipErrorInvalidValue);
  *out = {};
  out->hostPointer = const_cast<void*>(pointer);
  uint64_t base = 0;
  Allocation block;
  Extent extent;
  if (find_block(pointer, &base, &block)) {
    out->type = block.type;
    out->allocationFlags = block.flags;
    out->isManaged = block.type == hipMemoryTypeManaged;
    out->devicePointer = const_cast<void*>(pointer);
    if (block.type == hipMemoryTypeDevice) out->hostPointer = nullptr;
    return hipSuccess;
  }
  if (find_allocation(reinterpret_cast<uint64_t>(pointer), &extent)) {  // a device variable
    out->type = hipMemoryTypeDevice;
    out->devicePointer = const_cast<void*>(pointer);
    out->hostPointer = nullptr;
    return hipSuccess;
  }
  out->type = hipMemoryTypeUnregistered;
  return hipSuccess;
}
