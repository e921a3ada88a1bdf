// Device code from its container (ELF, offload bundle, compressed bundle) to what the executor runs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch.h"

namespace hfemu {

// --- containers (bundle.cpp) ------------------------------------------------------------------------------------------

// A device image inside a container; the bytes belong to the container or to `storage`.
struct DeviceImage {
  std::string target;  // bundle id, empty for a bare ELF
  const uint8_t* data = nullptr;
  uint64_t bytes = 0;
  std::shared_ptr<std::vector<uint8_t>> storage;  // decompressed bundle, else empty
};

// Every device image in `data`. `bytes` 0: unknown, as in a fat binary that a module registers by address; its own
// headers then say how far it reaches. Throws std::runtime_error.
std::vector<DeviceImage> device_images(const uint8_t* data, uint64_t bytes);

// The image that runs on `arch`; throws std::runtime_error that names those there are.
DeviceImage select_image(const std::vector<DeviceImage>& images, Arch arch);

const char* arch_name(Arch arch);
bool parse_arch(std::string_view text, Arch* out);  // features after ':' are ignored

// --- loaded code objects (code_object.cpp) ----------------------------------------------------------------------------

enum class ArgKind : uint8_t {
  value, buffer,
  hidden_none,  // and every other hidden argument that is null here (queues, grid synchronisation)
  hidden_block_count, hidden_group_size, hidden_remainder, hidden_global_offset,
  hidden_grid_dims, hidden_dynamic_lds_size, hidden_private_base, hidden_shared_base,
  hidden_hostcall, hidden_heap,
};

// Pointers to services that the emulator lacks: addresses outside user space, so that their use is a fault which
// launch() can explain.
constexpr uint64_t kHostcallAddress = 0x1CA11'0000'0000, kHeapAddress = 0x14EA9'0000'0000;

struct KernelArg {
  ArgKind kind = ArgKind::value;
  uint8_t dimension = 0;  // of block_count, group_size, remainder, global_offset
  uint32_t offset = 0, bytes = 0;

  bool hidden() const { return kind >= ArgKind::hidden_none; }
};

struct Kernel {
  KernelInfo info;
  std::vector<KernelArg> args;
};

struct Variable {
  uint64_t address = 0;  // host address
  uint64_t bytes = 0;
};

// One code object mapped for execution. Its segments are registered allocations from load() to destruction.
class CodeObject {
 public:
  // `image` is an ELF; it is copied. `name` is for messages. Throws std::runtime_error.
  static std::unique_ptr<CodeObject> load(const DeviceImage& image, const std::string& name);
  ~CodeObject();
  CodeObject(const CodeObject&) = delete;
  CodeObject& operator=(const CodeObject&) = delete;

  // By symbol (without .kd); null if there is none.
  const Kernel* find_kernel(const std::string& symbol) const;
  const Variable* find_variable(const std::string& name) const;
  const std::map<std::string, Kernel>& kernels() const { return kernels_; }
  LoadedCode& code() { return code_; }
  Arch arch() const { return code_.arch; }

 private:
  CodeObject() = default;

  LoadedCode code_;
  std::map<std::string, Kernel> kernels_;
  std::map<std::string, Variable> variables_;
  uint8_t* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  std::vector<uint64_t> registered_;  // bases of the allocations to remove

  friend class ElfLoader;
};

// The kernarg segment: explicit bytes as given, hidden arguments from the launch's geometry.
std::vector<uint8_t> build_kernarg(const Kernel& kernel, const void* explicit_bytes, size_t count,
                                   const uint32_t grid[3], const uint32_t block[3], uint32_t dynamic_lds);
// The explicit part from hipLaunchKernel's array of pointers, one per explicit argument.
std::vector<uint8_t> gather_arguments(const Kernel& kernel, void* const* pointers);

}  // namespace hfemu
