// The C interface of api.h.
#include "api.h"

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "counters.h"
#include "decode.h"
#include "disasm.h"
#include "exec.h"
#include "hip_graph.h"
#include "hip_streams.h"
#include "memory.h"
#include "python_poll.h"
#include "runtime.h"

using namespace hfemu;

namespace {

struct Loaded {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<CodeObject>> objects;
  int64_t next = 1;
};

Loaded& loaded() {
  static Loaded* const instance = new Loaded;
  return *instance;
}

std::shared_ptr<CodeObject> find(int64_t handle) {
  std::lock_guard<std::mutex> lock(loaded().mutex);
  const auto found = loaded().objects.find(handle);
  return found == loaded().objects.end() ? nullptr : found->second;
}

// Texts handed out by pointer live until the same function's next call on the thread.
const char* keep(std::string* slot, std::string text) {
  *slot = std::move(text);
  return slot->c_str();
}

std::string address_text(uint64_t address) {
  char text[24];
  std::snprintf(text, sizeof text, "%6llx: ", static_cast<unsigned long long>(address));
  return text;
}

}  // namespace

void hfemu_get_options(hfemu_options* out) {
  const Options options = current_options();
  *out = {};
  out->arch = arch_name(options.arch);
  out->cu_count = options.cu_count;
  out->threads = options.threads;
  out->check_memory = options.check_memory;
  out->check_uninit = options.check_uninit;
  out->check_waits = options.check_waits;
  out->check_races = options.check_races;
  out->check_global_races = options.check_global_races;
  out->check_strict = options.check_strict;
  out->max_reports = static_cast<int32_t>(options.max_reports);
  out->wave_order = static_cast<int32_t>(options.wave_order);
  out->quantum = static_cast<int32_t>(options.quantum);
  out->seed = options.seed;
  out->instruction_budget = options.instruction_budget;
}

int hfemu_set_options(const hfemu_options* given) {
  Options options;
  if (!given->arch || !parse_arch(given->arch, &options.arch))
    return record(hipErrorInvalidValue, std::string("unknown architecture ") + (given->arch ? given->arch : "(null)") +
                                            "; gfx950 and gfx942 are emulated");
  constexpr int32_t kMostQuantum = 4096;
  if (given->cu_count < 1 || given->threads < 0 || given->wave_order < 0 || given->wave_order > 2 ||
      given->quantum < 1 || given->quantum > kMostQuantum || given->max_reports < 1)
    return record(hipErrorInvalidValue, "emulator options: cu_count " + std::to_string(given->cu_count) + ", threads " +
                                            std::to_string(given->threads) + ", wave_order " +
                                            std::to_string(given->wave_order) + ", quantum " +
                                            std::to_string(given->quantum) + ", max_reports " +
                                            std::to_string(given->max_reports) +
                                            "; accepted: at least 1, at least 0, 0 to 2, 1 to " +
                                            std::to_string(kMostQuantum) + ", and at least 1");
  options.cu_count = given->cu_count;
  options.threads = given->threads;
  options.check_memory = given->check_memory;
  options.check_uninit = given->check_uninit;
  options.check_waits = given->check_waits;
  options.check_races = given->check_races;
  options.check_global_races = given->check_global_races;
  options.check_strict = given->check_strict;
  options.max_reports = static_cast<uint32_t>(given->max_reports);
  options.wave_order = static_cast<WaveOrder>(given->wave_order);
  options.quantum = static_cast<uint32_t>(given->quantum);
  options.seed = given->seed;
  options.instruction_budget = given->instruction_budget;
  set_options(options);
  return hipSuccess;
}

void hfemu_push_extents(const hfemu_extent* extents, int32_t count) {
  std::vector<Extent> level;
  for (int32_t i = 0; i < count; ++i)
    level.push_back({extents[i].name ? extents[i].name : "", extents[i].base, extents[i].bytes,
                     extents[i].writable != 0});
  push_extents(level.data(), level.size());
}

void hfemu_pop_extents() { pop_extents(); }

const char* hfemu_last_error() { return pending_report().empty() ? nullptr : pending_report().c_str(); }
void hfemu_clear_error() { clear_errors(); }

int64_t hfemu_load(const void* image, uint64_t bytes, const char* arch) {
  Arch wanted = current_options().arch;
  try {
    const auto images = device_images(static_cast<const uint8_t*>(image), bytes);
    DeviceImage chosen;
    if (arch) {
      if (!parse_arch(arch, &wanted)) throw std::runtime_error(std::string("unknown architecture ") + arch);
      chosen = select_image(images, wanted);
    } else if (images.size() == 1) {
      chosen = images[0];
    } else {
      throw std::runtime_error(std::to_string(images.size()) + " device images and no architecture to choose by");
    }
    std::shared_ptr<CodeObject> object = CodeObject::load(chosen, "code object");
    std::lock_guard<std::mutex> lock(loaded().mutex);
    loaded().objects[loaded().next] = std::move(object);
    return loaded().next++;
  } catch (const std::runtime_error& error) {
    record(hipErrorInvalidImage, error.what());
    return 0;
  }
}

void hfemu_unload(int64_t handle) {
  std::shared_ptr<CodeObject> last;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(loaded().mutex);
  const auto found = loaded().objects.find(handle);
  if (found == loaded().objects.end()) return;
  last = std::move(found->second);
  loaded().objects.erase(found);
}

int64_t hfemu_counters_begin(int32_t per_pc) { return counters_begin(per_pc != 0); }

const char* hfemu_counters_end(int64_t collector) {
  thread_local std::string text;
  return keep(&text, counters_end(collector));
}

namespace {

template <class F>
const char* text_of_kernel(std::string* slot, int64_t handle, const char* kernel, F f) {
  const std::shared_ptr<CodeObject> object = find(handle);
  const Kernel* found = object ? object->find_kernel(kernel) : nullptr;
  if (!found) {
    record(hipErrorNotFound, std::string("no kernel ") + kernel + " in this code object");
    return nullptr;
  }
  return keep(slot, f(object->code(), found->info));
}

}  // namespace

const char* hfemu_disassemble(int64_t handle, const char* kernel) {
  thread_local std::string text;
  return text_of_kernel(&text, handle, kernel, disassemble_kernel);
}

const char* hfemu_source_lines(int64_t handle, const char* kernel) {
  thread_local std::string text;
  return text_of_kernel(&text, handle, kernel, source_lines_of_kernel);
}

const char* hfemu_disassemble_bytes(const void* code, uint64_t bytes, const char* arch) {
  thread_local std::string text;
  Arch target = Arch::gfx950;
  if (!arch || !parse_arch(arch, &target)) {
    record(hipErrorInvalidValue, std::string("unknown architecture ") + (arch ? arch : "(null)"));
    return nullptr;
  }
  const uint8_t* data = static_cast<const uint8_t*>(code);
  std::string lines;
  for (uint64_t at = 0; at < bytes;) {
    Inst inst;
    const bool known = decode(data + at, bytes - at, at, target, inst);
    lines += address_text(at) + (known ? disassemble(inst) : std::string("<unknown>")) + "\n";
    at += known ? inst.bytes : 4;
  }
  return keep(&text, lines);
}

const char* hfemu_mnemonics(int32_t executable) {
  thread_local std::string text;
  std::string lines;
  for (unsigned i = 1; i < static_cast<unsigned>(Op::count); ++i) {
    const Op op = static_cast<Op>(i);
    const OpEntry& entry = op_table().entry(op);
    if ((entry.handler || entry.kernel) == (executable != 0)) lines += std::string(op_name(op)) + "\n";
  }
  return keep(&text, lines);
}

void hfemu_set_trace(hfemu_trace_sink sink, void* context, const char* kernel, uint32_t workgroup, uint32_t wave,
                     uint32_t lane) {
  TraceRequest request;
  request.sink = sink;
  request.context = context;
  request.kernel = kernel ? kernel : "";
  request.workgroup = workgroup;
  request.wave = wave;
  request.lane = lane;
  set_trace(request);
}

int32_t hfemu_launch(int64_t handle, const char* kernel, const uint32_t grid[3], const uint32_t block[3],
                     const void* kernarg, uint64_t kernarg_bytes, uint64_t dynamic_lds) {
  const std::shared_ptr<CodeObject> object = find(handle);
  if (!object) return record(hipErrorInvalidHandle, "no code object " + std::to_string(handle) + " is loaded");
  const Kernel* found = object->find_kernel(kernel);
  if (!found) return record(hipErrorNotFound, std::string("no kernel ") + kernel + " in this code object");
  if (is_capturing(current_stream()))
    return record(hipErrorStreamCaptureUnsupported, "a direct launch runs to its end, and the thread's stream is "
                                                    "capturing");
  const hipError_t error = launch(*object, *found, grid, block, kernarg, kernarg_bytes, dynamic_lds);
  stash_exception();
  return error;
}

int32_t hfemu_poll_python() { return poll_python(); }
int32_t hfemu_restore_exception() { return restore_exception(); }

void hfemu_set_stream(void* stream) { set_current_stream(static_cast<hipStream_t>(stream)); }
void* hfemu_stream() { return current_stream(); }
int32_t hfemu_capturing() { return is_capturing(current_stream()); }
int32_t hfemu_graph_launch(void* executable, void* stream) { return launch_graph(executable, stream); }

const char* hfemu_graph_nodes(void* graph) {
  thread_local std::string text;
  return graph_names(graph, &text) ? text.c_str() : nullptr;
}
