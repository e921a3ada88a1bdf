// HIP entry points: fat-binary registration, modules, launches, function attributes, occupancy.
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "hip_modules.h"
#include "hip_streams.h"
#include "memory.h"
#include "runtime.h"

using namespace hfemu;

struct ihipModule_t {
  std::unique_ptr<CodeObject> object;
  std::mutex mutex;
  std::map<std::string, ihipModuleSymbol_t> functions;
};

namespace {

struct ManagedVariable {
  void** host;
  std::string name;
  std::unique_ptr<uint8_t[]> storage;
};

// The argument of one __hipRegisterFatBinary call; its code is loaded at its first use.
struct FatBinary {
  const uint8_t* data = nullptr;
  std::string name;
  std::mutex mutex;
  std::map<Arch, std::unique_ptr<CodeObject>> objects;
  std::vector<ManagedVariable> managed;

  CodeObject* object(Arch arch) {
    std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<CodeObject>& slot = objects[arch];
    if (!slot) {
      slot = CodeObject::load(select_image(device_images(data, 0), arch), name);
      for (const ManagedVariable& variable : managed)
        if (const Variable* pointer = slot->find_variable(variable.name))
          std::memcpy(reinterpret_cast<void*>(pointer->address), variable.host, sizeof(void*));
    }
    return slot.get();
  }
};

struct Registered {
  FatBinary* binary = nullptr;
  std::string name;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, Registered> functions, variables;
  std::map<std::pair<const void*, Arch>, ihipModuleSymbol_t> resolved;
};

// Never destroyed: modules unregister from static destructors, whose order is unspecified.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

thread_local struct {
  dim3 grid{1, 1, 1}, block{1, 1, 1};
  size_t shared = 0;
  hipStream_t stream = nullptr;
} call_configuration;

// Launches now, or records a node that owns the arguments and what the kernel may touch.
hipError_t launch_on(hipStream_t stream, hipFunction_t function, const uint32_t grid[3], const uint32_t block[3],
                     const void* bytes, size_t count, size_t shared) {
  CodeObject& object = *function->object;
  const Kernel& kernel = *function->kernel;
  hipError_t error = check_stream(stream);
  Admission admission = error == hipSuccess ? Admission::run : Admission::refuse;
  if (error == hipSuccess && open_captures.load(std::memory_order_acquire))
    admission = admit("a kernel launch", stream, &error);
  if (admission == Admission::run) return launch(object, kernel, grid, block, bytes, count, shared);
  if (admission == Admission::record) error = check_launch(object, kernel, grid, block, shared);
  if (error != hipSuccess) return launch_failed();
  const uint8_t* const first = static_cast<const uint8_t*>(bytes);
  return record_node("a kernel launch", stream, hipGraphNodeTypeKernel, kernel.info.name,
                     [&object, &kernel, shared, groups = std::array<uint32_t, 3>{grid[0], grid[1], grid[2]},
                      items = std::array<uint32_t, 3>{block[0], block[1], block[2]},
                      arguments = std::vector<uint8_t>(first, first + count), extents = pushed_extents()] {
                       push_extents(extents.data(), extents.size());
                       const hipError_t status = launch(object, kernel, groups.data(), items.data(), arguments.data(),
                                                        arguments.size(), shared);
                       pop_extents();
                       return status;
                     });
}

hipError_t launch_pointers(hipStream_t stream, hipFunction_t function, dim3 grid, dim3 block, void** args,
                           size_t shared) {
  const uint32_t groups[3] = {grid.x, grid.y, grid.z}, items[3] = {block.x, block.y, block.z};
  for (const KernelArg& arg : function->kernel->args)
    if (!arg.hidden() && !args) {
      record(hipErrorInvalidValue, "launch of " + function->kernel->info.name + ": it takes arguments, none came");
      return launch_failed();
    }
  const std::vector<uint8_t> bytes = gather_arguments(*function->kernel, args);
  return launch_on(stream, function, groups, items, bytes.data(), bytes.size(), shared);
}

// hipModuleLaunchKernel's `extra`: tagged pointers to one packed argument buffer.
hipError_t launch_packed(hipStream_t stream, hipFunction_t function, const uint32_t grid[3], const uint32_t block[3],
                         void** extra, size_t shared) {
  const void* buffer = nullptr;
  size_t bytes = 0;
  for (; extra && *extra != reinterpret_cast<void*>(3); extra += 2) {
    if (*extra == reinterpret_cast<void*>(1)) {
      buffer = extra[1];
    } else if (*extra == reinterpret_cast<void*>(2)) {
      bytes = *static_cast<size_t*>(extra[1]);
    } else {
      return record(hipErrorInvalidValue, "hipModuleLaunchKernel: `extra` holds an unknown tag");
    }
  }
  return launch_on(stream, function, grid, block, buffer, bytes, shared);
}

hipError_t module_launch(hipStream_t stream, hipFunction_t function, const uint32_t grid[3], const uint32_t block[3],
                         size_t shared, void** params, void** extra) {
  if (!function) return record(hipErrorInvalidHandle, "a launch of a null function");
  if (params || !extra)
    return launch_pointers(stream, function, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, params,
                           shared);
  return launch_packed(stream, function, grid, block, extra, shared);
}

hipError_t load_module(hipModule_t* module, const uint8_t* data, size_t bytes, const std::string& name) {
  *module = nullptr;
  auto fresh = std::make_unique<ihipModule_t>();
  try {
    fresh->object = CodeObject::load(select_image(device_images(data, bytes), current_options().arch), name);
  } catch (const std::runtime_error& error) {
    return record(hipErrorNoBinaryForGpu, name + ": " + error.what());
  }
  *module = fresh.release();
  return hipSuccess;
}

hipError_t fill_attributes(hipFuncAttributes* out, const ihipModuleSymbol_t& function) {
  const KernelInfo& info = function.kernel->info;
  *out = {};
  out->binaryVersion = out->ptxVersion = function.object->arch() == Arch::gfx942 ? 94 : 95;
  out->localSizeBytes = info.private_bytes;
  out->sharedSizeBytes = info.lds_bytes;
  out->maxDynamicSharedSizeBytes = static_cast<int>(lds_limit(function.object->arch()) - info.lds_bytes);
  out->maxThreadsPerBlock = static_cast<int>(info.max_workgroup);
  out->numRegs = static_cast<int>(info.vgprs);
  return hipSuccess;
}

hipError_t occupancy_blocks(int* blocks, hipFunction_t function, int threads, size_t shared) {
  if (!blocks || threads <= 0) return record(hipErrorInvalidValue, "occupancy query: a block size below 1");
  if (!function) return record(hipErrorInvalidDeviceFunction);
  *blocks = blocks_per_cu(*function->object, *function->kernel, static_cast<uint32_t>(threads), shared);
  return hipSuccess;
}

// The block size with the most resident work items, the largest such size first.
hipError_t occupancy_size(int* grid, int* block, hipFunction_t function, size_t shared, int limit) {
  if (!grid || !block) return record(hipErrorInvalidValue);
  if (!function) return record(hipErrorInvalidDeviceFunction);
  const int largest = static_cast<int>(function->kernel->info.max_workgroup);
  const int top = limit > 0 && limit < largest ? limit : largest;
  int best = 0;
  *block = *grid = 0;
  for (int threads = (top + 63) / 64 * 64; threads >= 64; threads -= 64) {
    const int size = threads < top ? threads : top;
    const int blocks = blocks_per_cu(*function->object, *function->kernel, static_cast<uint32_t>(size), shared);
    if (blocks * size <= best) continue;
    best = blocks * size;
    *block = size;
    *grid = blocks * current_options().cu_count;
  }
  return hipSuccess;
}

}  // namespace

namespace hfemu {

std::string owner_name(const void* address) {
  Dl_info info;
  if (!dladdr(address, &info) || !info.dli_fname) return "a module";
  const std::string path = info.dli_fname;
  const size_t file = path.rfind('/');
  if (file == std::string::npos || file == 0) return path;
  const size_t folder = path.rfind('/', file - 1);
  return path.substr(folder == std::string::npos ? 0 : folder + 1);
}

hipFunction_t function_of(const void* host) {
  const Arch arch = current_options().arch;
  Registered found;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto known = registry().resolved.find({host, arch});
    if (known != registry().resolved.end()) return &known->second;
    const auto entry = registry().functions.find(host);
    if (entry != registry().functions.end()) found = entry->second;
  }
  if (!found.binary) {
    record(hipErrorInvalidDeviceFunction, "the launched address is not a kernel that a loaded module registered");
    return nullptr;
  }
  try {
    CodeObject* object = found.binary->object(arch);
    const Kernel* kernel = object->find_kernel(found.name);
    if (!kernel) {
      record(hipErrorInvalidDeviceFunction, found.binary->name + " holds no kernel " + found.name + " for " +
                                                arch_name(arch) + ", although its host code registers one");
      return nullptr;
    }
    std::lock_guard<std::mutex> lock(registry().mutex);
    return &(registry().resolved[{host, arch}] = {object, kernel});
  } catch (const std::runtime_error& error) {
    record(hipErrorNoBinaryForGpu, found.binary->name + ": " + error.what());
    return nullptr;
  }
}

bool variable_of(const void* host, Variable* out, std::string* name) {
  Registered found;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto entry = registry().variables.find(host);
    if (entry != registry().variables.end()) found = entry->second;
  }
  if (!found.binary) {
    record(hipErrorInvalidSymbol, "the address is not a device variable that a loaded module registered");
    return false;
  }
  try {
    const Variable* variable = found.binary->object(current_options().arch)->find_variable(found.name);
    if (!variable) {
      record(hipErrorInvalidSymbol, found.binary->name + " holds no device variable " + found.name);
      return false;
    }
    *out = *variable;
    *name = found.name;
    return true;
  } catch (const std::runtime_error& error) {
    record(hipErrorNoBinaryForGpu, found.binary->name + ": " + error.what());
    return false;
  }
}

}  // namespace hfemu

// --- registration, from the constructors that clang puts into every module ---

HFEMU_HIP_API void** __hipRegisterFatBinary(const void* wrapper) {
  struct Wrapper {
    uint32_t magic, version;
    const void* binary;
    const void* reserved;
  };
  auto* binary = new FatBinary;
  binary->data = static_cast<const uint8_t*>(static_cast<const Wrapper*>(wrapper)->binary);
  binary->name = owner_name(binary->data);
  return reinterpret_cast<void**>(binary);
}

HFEMU_HIP_API void __hipUnregisterFatBinary(void** modules) {
  auto* binary = reinterpret_cast<FatBinary*>(modules);
  Registry& known = registry();
  std::lock_guard<std::mutex> lock(known.mutex);
  for (auto* table : {&known.functions, &known.variables})
    for (auto it = table->begin(); it != table->end();) it = it->second.binary == binary ? table->erase(it) : ++it;
  for (auto it = known.resolved.begin(); it != known.resolved.end();) {
    bool ours = false;
    for (const auto& [arch, object] : binary->objects) ours |= object.get() == it->second.object;
    it = ours ? known.resolved.erase(it) : ++it;
  }
  for (const ManagedVariable& variable : binary->managed)
    remove_allocation(reinterpret_cast<uint64_t>(variable.storage.get()));
  delete binary;
}

HFEMU_HIP_API void __hipRegisterFunction(void** modules, const void* host, char*, const char* name, unsigned, void*,
                                         void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().functions[host] = {reinterpret_cast<FatBinary*>(modules), name};
}

HFEMU_HIP_API void __hipRegisterVar(void** modules, void* host, char*, char* name, int, size_t, int, int) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().variables[host] = {reinterpret_cast<FatBinary*>(modules), name};
}

HFEMU_HIP_API void __hipRegisterManagedVar(void* modules, void** pointer, void* initial, const char* name, size_t bytes,
                                           unsigned) {
  auto* binary = static_cast<FatBinary*>(modules);
  ManagedVariable variable{pointer, name, std::make_unique<uint8_t[]>(bytes)};
  if (initial) std::memcpy(variable.storage.get(), initial, bytes);
  *pointer = variable.storage.get();
  add_allocation({name, reinterpret_cast<uint64_t>(*pointer), bytes, true});
  std::lock_guard<std::mutex> lock(binary->mutex);
  binary->managed.push_back(std::move(variable));
}

// --- launches ---

HFEMU_HIP_API hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
  call_configuration = {grid, block, shared, stream};
  return hipSuccess;
}

HFEMU_HIP_API hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream) {
  *grid = call_configuration.grid;
  *block = call_configuration.block;
  *shared = call_configuration.shared;
  *stream = call_configuration.stream;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared,
                                         hipStream_t stream) {
  const hipFunction_t function = function_of(host);
  return function ? launch_pointers(stream, function, grid, block, args, shared) : launch_failed();
}

HFEMU_HIP_API hipError_t hipLaunchKernel_spt(const void* host, dim3 grid, dim3 block, void** args, size_t shared,
                                             hipStream_t stream) {
  const auto per_thread = reinterpret_cast<hipStream_t>(2);  // what null means to this variant
  return hipLaunchKernel(host, grid, block, args, shared, stream ? stream : per_thread);
}

HFEMU_HIP_API hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);

HFEMU_HIP_API hipError_t hipExtLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared,
                                            hipStream_t stream, hipEvent_t start, hipEvent_t stop, int) {
  if (start) hipEventRecord(start, stream);
  const hipError_t error = hipLaunchKernel(host, grid, block, args, shared, stream);
  if (stop) hipEventRecord(stop, stream);
  return error;
}

HFEMU_HIP_API hipError_t hipLaunchKernelExC(const void* config, const void* host, void** args) {
  struct Config {
    dim3 grid, block;
    size_t shared;
    hipStream_t stream;
    void* attributes;
    unsigned attribute_count;
  };
  const auto* given = static_cast<const Config*>(config);
  if (given->attribute_count) return not_provided("hipLaunchKernelExC with launch attributes");
  return hipLaunchKernel(host, given->grid, given->block, args, given->shared, given->stream);
}

HFEMU_HIP_API hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz,
                                               unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                               hipStream_t stream, void** params, void** extra) {
  const uint32_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  return module_launch(stream, function, grid, block, shared, params, extra);
}

// The grid counts work items here.
HFEMU_HIP_API hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t gx, uint32_t gy, uint32_t gz,
                                                  uint32_t bx, uint32_t by, uint32_t bz, size_t shared,
                                                  hipStream_t stream, void** params, void** extra, hipEvent_t start,
                                                  hipEvent_t stop, uint32_t) {
  if (!bx || !by || !bz || gx % bx || gy % by || gz % bz)
    return record(hipErrorInvalidConfiguration,
                  "hipExtModuleLaunchKernel: work items that do not fill whole blocks are not emulated");
  const uint32_t grid[3] = {gx / bx, gy / by, gz / bz}, block[3] = {bx, by, bz};
  if (start) hipEventRecord(start, stream);
  const hipError_t error = module_launch(stream, function, grid, block, shared, params, extra);
  if (stop) hipEventRecord(stop, stream);
  return error;
}

// --- modules ---

HFEMU_HIP_API hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  if (!module || !image) return record(hipErrorInvalidValue);
  return load_module(module, static_cast<const uint8_t*>(image), 0, "hipModuleLoadData image");
}

HFEMU_HIP_API hipError_t hipModuleLoadDataEx(hipModule_t* module, const void* image, unsigned, void*, void**) {
  return hipModuleLoadData(module, image);
}

HFEMU_HIP_API hipError_t hipModuleLoadFatBinary(hipModule_t* module, const void* image) {
  return hipModuleLoadData(module, image);
}

HFEMU_HIP_API hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  if (!module || !path) return record(hipErrorInvalidValue);
  std::ifstream file(path, std::ios::binary);
  if (!file) return record(hipErrorFileNotFound, std::string("hipModuleLoad: cannot read ") + path);
  const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), {});
  return load_module(module, bytes.data(), bytes.size(), path);
}

HFEMU_HIP_API hipError_t hipModuleUnload(hipModule_t module) {
  if (!module) return record(hipErrorInvalidHandle);
  delete module;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  if (!function || !module || !name) return record(hipErrorInvalidValue);
  const Kernel* kernel = module->object->find_kernel(name);
  if (!kernel) return record(hipErrorNotFound, "no kernel " + std::string(name) + " in " + module->object->code().name);
  std::lock_guard<std::mutex> lock(module->mutex);
  *function = &(module->functions[name] = {module->object.get(), kernel});
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipModuleGetFunctionCount(unsigned* count, hipModule_t module) {
  if (!count || !module) return record(hipErrorInvalidValue);
  *count = static_cast<unsigned>(module->object->kernels().size());
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipModuleGetGlobal(hipDeviceptr_t* address, size_t* bytes, hipModule_t module,
                                            const char* name) {
  if (!module || !name) return record(hipErrorInvalidValue);
  const Variable* variable = module->object->find_variable(name);
  if (!variable)
    return record(hipErrorNotFound, "no device variable " + std::string(name) + " in " + module->object->code().name);
  if (address) *address = reinterpret_cast<void*>(variable->address);
  if (bytes) *bytes = variable->bytes;
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipGetFuncBySymbol(hipFunction_t* function, const void* host) {
  *function = function_of(host);
  return *function ? hipSuccess : peek_error();
}

// --- attributes ---

HFEMU_HIP_API hipError_t hipFuncGetAttributes(hipFuncAttributes* out, const void* host) {
  const hipFunction_t function = function_of(host);
  return function ? fill_attributes(out, *function) : peek_error();
}

HFEMU_HIP_API hipError_t hipFuncGetAttribute(int* value, int attribute, hipFunction_t function) {
  if (!value || !function) return record(hipErrorInvalidValue);
  hipFuncAttributes all;
  fill_attributes(&all, *function);
  switch (attribute) {
    case 0: *value = all.maxThreadsPerBlock; break;
    case 1: *value = static_cast<int>(all.sharedSizeBytes); break;
    case 2: *value = static_cast<int>(all.constSizeBytes); break;
    case 3: *value = static_cast<int>(all.localSizeBytes); break;
    case 4: *value = all.numRegs; break;
    case 5: *value = all.ptxVersion; break;
    case 6: *value = all.binaryVersion; break;
    case 7: *value = all.cacheModeCA; break;
    case 8: *value = all.maxDynamicSharedSizeBytes; break;
    case 9: *value = all.preferredShmemCarveout; break;
    default: return record(hipErrorInvalidValue, "hipFuncGetAttribute: attribute " + std::to_string(attribute));
  }
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipFuncSetAttribute(const void* host, int attribute, int value) {
  constexpr int kMaxDynamicSharedMemory = 8, kCarveout = 9;
  const hipFunction_t function = function_of(host);
  if (!function) return peek_error();
  if (attribute == kCarveout) return hipSuccess;  // a hint
  if (attribute != kMaxDynamicSharedMemory) return record(hipErrorInvalidValue);
  const uint32_t limit = lds_limit(function->object->arch());
  if (value < 0 || static_cast<uint32_t>(value) + function->kernel->info.lds_bytes > limit)
    return record(hipErrorInvalidValue, "hipFuncSetAttribute: " + std::to_string(value) + " bytes of dynamic LDS; " +
                                            std::to_string(limit) + " is the limit with the static part");
  return hipSuccess;
}

HFEMU_HIP_API hipError_t hipFuncSetCacheConfig(const void*, int) { return hipSuccess; }
HFEMU_HIP_API hipError_t hipFuncSetSharedMemConfig(const void*, int) { return hipSuccess; }

HFEMU_HIP_API const char* hipKernelNameRef(const hipFunction_t function) {
  return function ? function->kernel->info.name.c_str() : nullptr;
}

HFEMU_HIP_API const char* hipKernelNameRefByPtr(const void* host, hipStream_t) {
  return hipKernelNameRef(function_of(host));
}

// --- occupancy ---

HFEMU_HIP_API hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads,
                                                                      size_t shared) {
  return occupancy_blocks(blocks, function_of(host), threads, shared);
}

HFEMU_HIP_API hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host,
                                                                               int threads, size_t shared, unsigned) {
  return occupancy_blocks(blocks, function_of(host), threads, shared);
}

HFEMU_HIP_API hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, hipFunction_t function,
                                                                            int threads, size_t shared) {
  return occupancy_blocks(blocks, function, threads, shared);
}

HFEMU_HIP_API hipError_t hipModuleOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                                     hipFunction_t function,
                                                                                     int threads, size_t shared,
                                                                                     unsigned) {
  return occupancy_blocks(blocks, function, threads, shared);
}

HFEMU_HIP_API hipError_t hipOccupancyMaxPotentialBlockSize(int* grid, int* block, const void* host, size_t shared,
                                                           int limit) {
  return occupancy_size(grid, block, function_of(host), shared, limit);
}

HFEMU_HIP_API hipError_t hipModuleOccupancyMaxPotentialBlockSize(int* grid, int* block, hipFunction_t function,
                                                                 size_t shared, int limit) {
  return occupancy_size(grid, block, function, shared, limit);
}

HFEMU_HIP_API hipError_t hipModuleOccupancyMaxPotentialBlockSizeWithFlags(int* grid, int* block,
                                                                          hipFunction_t function, size_t shared,
                                                                          int limit, unsigned) {
  return occupancy_size(grid, block, function, shared, limit);
}
