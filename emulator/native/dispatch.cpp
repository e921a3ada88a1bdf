// A launch: checked, described to the workers, run on a number of threads that suits its size.
#include "dispatch.h"

#include <algorithm>
#include <thread>

#include "worker.h"

namespace hfemu {
namespace {

bool refuse(Fault* fault, const LaunchRequest& r, const std::string& why) {
  fault->kind = FaultKind::invalid_launch;
  fault->text = format("cannot launch %s: ", r.kernel->name.c_str()) + why;
  return false;
}

bool valid(const LaunchRequest& r, const Options& options, Fault* fault) {
  const uint64_t items = uint64_t{r.block[0]} * r.block[1] * r.block[2];
  if (r.code->arch != options.arch)
    return refuse(fault, r, format("it is code for %s and the emulated device is %s",
                                   r.code->arch == Arch::gfx942 ? "gfx942" : "gfx950",
                                   options.arch == Arch::gfx942 ? "gfx942" : "gfx950"));
  if (items == 0 || items > r.kernel->max_workgroup)
    return refuse(fault, r, format("block (%u, %u, %u) has %llu work-items; 1 to %u are possible", r.block[0], r.block[1],
                                   r.block[2], static_cast<unsigned long long>(items), r.kernel->max_workgroup));
  if (!r.grid[0] || !r.grid[1] || !r.grid[2])
    return refuse(fault, r, format("grid (%u, %u, %u) is empty", r.grid[0], r.grid[1], r.grid[2]));
  const uint64_t lds = uint64_t{r.kernel->lds_bytes} + r.dynamic_lds;
  const uint64_t limit = r.code->arch == Arch::gfx950 ? 160 * 1024 : 64 * 1024;
  if (lds > limit)
    return refuse(fault, r, format("it asks for %llu bytes of LDS; a work-group can have %llu",
                                   static_cast<unsigned long long>(lds), static_cast<unsigned long long>(limit)));
  if (r.kernel->properties >> 10 & 1) return refuse(fault, r, "it is wave32 code");
  if (const char* field = unmodelled_descriptor(*r.kernel))
    return refuse(fault, r, format("its kernel descriptor sets %s, which the emulator does not model", field));
  if (r.kernarg_bytes < r.kernel->kernarg_bytes)
    return refuse(fault, r, format("its kernarg segment has %u bytes, %zu were given", r.kernel->kernarg_bytes, r.kernarg_bytes));
  return true;
}

// Reports that did not stop the launch, and the fault that did unless it is among them.
Fault joined(const std::vector<std::pair<const Inst*, Fault>>& reports, const Fault& last) {
  Fault all = reports.front().second;
  bool counted = last.kind == FaultKind::none;
  for (const auto& [inst, found] : reports) counted |= found.text == last.text;
  const size_t count = reports.size() + !counted;
  if (count == 1) return all;
  all.text = format("%zu reports\n", count);
  for (const auto& [inst, found] : reports) all.text += found.text + "\n";
  if (!counted) all.text += last.text;
  return all;
}

Fault deadlock_of(LaunchWork& work, uint64_t residents) {
  constexpr size_t kMostGroups = 8;
  const uint64_t started = std::min<uint64_t>(work.next, work.groups);
  std::string text = format(
      "deadlock: every work-group that has started waits, and nothing runs that could end a wait\n  kernel %s: of %llu "
      "work-groups %llu wait, %llu have ended, %llu have not started (the device holds %llu at once)\n",
      work.request.kernel->name.c_str(), static_cast<unsigned long long>(work.groups),
      static_cast<unsigned long long>(work.waiting_groups),
      static_cast<unsigned long long>(started - work.waiting_groups),
      static_cast<unsigned long long>(work.groups - started), static_cast<unsigned long long>(residents));
  std::sort(work.waits.begin(), work.waits.end());
  for (size_t i = 0; i < work.waits.size() && i < kMostGroups; ++i) text += work.waits[i].second;
  if (work.waits.size() > kMostGroups) text += format("  and %zu more\n", work.waits.size() - kMostGroups);
  return {FaultKind::deadlock, text};
}

}  // namespace

bool run_launch(const LaunchRequest& request, const Options& options, const TraceRequest& trace,
                Poll poll, Fault* fault) {
  *fault = Fault{};
  if (!valid(request, options, fault)) return false;
  const auto began = SteadyClock::now();
  const Program& program = program_of(*request.code);

  // The kernarg segment is 64-byte aligned and padded, as the runtime allocates it.
  std::vector<uint8_t> kernarg(request.kernarg_bytes + 128);
  const uint64_t kernarg_at = (reinterpret_cast<uint64_t>(kernarg.data()) + 63) & ~uint64_t{63};
  if (request.kernarg_bytes)
    std::memcpy(reinterpret_cast<void*>(kernarg_at), request.kernarg, request.kernarg_bytes);
  const DispatchPacket packet = make_packet(request, kernarg_at);

  LaunchWork work(request);
  Launch& launch = work.launch;
  launch.program = &program;
  launch.kernel = request.kernel;
  launch.options = options;
  // Calls of unknown depth get more stack than the compiler could count.
  launch.private_bytes = request.kernel->private_bytes + (request.kernel->dynamic_stack ? 16384 : 0);
  const uint64_t packet_at = reinterpret_cast<uint64_t>(&packet);
  launch.map = AddressMap::snapshot({{"kernel arguments", kernarg_at, (request.kernarg_bytes + 63) & ~uint64_t{63}, false},
                                     {"dispatch packet", packet_at, sizeof packet, false}});
  work.start = {&request, kernarg_at, packet_at,
                program.index_at(program.base + request.kernel->entry + (request.kernel->preload_dwords ? 256 : 0))};
  if (work.start.entry == Program::kNoIndex) return refuse(fault, request, "its entry point is not an instruction");
  work.groups = uint64_t{request.grid[0]} * request.grid[1] * request.grid[2];
  const uint32_t items = request.block[0] * request.block[1] * request.block[2];
  work.waves_per_group = (items + kLanes - 1) / kLanes;
  work.lds_bytes = request.kernel->lds_bytes + request.dynamic_lds;
  work.registers = std::min<uint32_t>(((request.kernel->rsrc1 & 63) + 1) * 8, kAcc);
  work.shared_budget = options.instruction_budget != 0;
  work.budget = static_cast<int64_t>(options.instruction_budget);
  work.trace = &trace;
  choose_group_order(options, work.groups, &work.stride, &work.shift);
  const LaunchObservation observation(launch, request, trace);

  uint64_t threads = options.threads > 0 ? static_cast<uint64_t>(options.threads) : std::thread::hardware_concurrency();
  if (observation.single_thread()) threads = 1;
  threads = std::min(std::max<uint64_t>(threads, 1), work.groups);
  const uint64_t per_cu = std::max(1u, groups_per_cu(*request.kernel, options.arch, items, request.dynamic_lds));
  const uint64_t residents = per_cu * static_cast<uint64_t>(std::max(1, options.cu_count));
  work.residents_per_thread = (residents + threads - 1) / threads;
  {
    Worker self(work, poll);
    // A launch that ends within half a millisecond does not justify a thread.
    const auto patience = threads > 1 ? began + std::chrono::microseconds(500) : SteadyClock::time_point::max();
    if (!self.run(patience)) {
      work.add_threads(static_cast<uint32_t>(threads - 1));
      std::vector<std::thread> helpers;
      for (uint64_t i = 1; i < threads; ++i) {
        helpers.emplace_back([&work] {
          Worker helper(work, nullptr);
          helper.run(SteadyClock::time_point::max());
          helper.finish();
        });
      }
      self.run(SteadyClock::time_point::max());
      for (std::thread& helper : helpers) helper.join();
    }
    self.finish();
  }
  observation.finish(request, work.groups, std::chrono::duration<double>(SteadyClock::now() - began).count());
  if (work.deadlock && work.fault.kind == FaultKind::none) work.fault = deadlock_of(work, residents);
  if (!launch.reports.empty()) work.fault = joined(launch.reports, work.fault);
  *fault = work.fault;
  return fault->kind == FaultKind::none;
}

namespace {

template <class F>
void each_instruction(LoadedCode& code, const KernelInfo& kernel, F f) {
  const Program& p = program_of(code);
  uint64_t end = code.text_end;
  for (const uint64_t f : code.functions)
    if (f > kernel.entry && f < end) end = f;
  const uint32_t first = p.index_at(p.base + kernel.entry);
  if (first == Program::kNoIndex) return;  // a damaged descriptor: its entry point is not an instruction
  for (uint32_t i = first; i + 1 < p.insts.size() && p.insts[i].pc < end; ++i) f(p, p.insts[i]);
}

}  // namespace

std::string disassemble_kernel(LoadedCode& code, const KernelInfo& kernel) {
  std::string s;
  each_instruction(code, kernel, [&](const Program& p, const Inst& inst) {
    s += format("%06llx: %s\n", static_cast<unsigned long long>(inst.pc),
                instruction_text(inst, reinterpret_cast<const uint8_t*>(p.base + inst.pc)).c_str());
  });
  return s;
}

std::string source_lines_of_kernel(LoadedCode& code, const KernelInfo& kernel) {
  std::string s;
  each_instruction(code, kernel, [&](const Program& p, const Inst& inst) { s += p.source(inst) + "\n"; });
  return s;
}

}  // namespace hfemu
