// Shared by vector and scalar memory handlers: lane addresses, the extent check, accounting, LDS bounds.
#pragma once

#include "core.h"

namespace hfemu {

enum class Access : uint8_t { load, store, atomic };

// Inactive lanes repeat the first active lane's address, so that whole-wave range checks and loads need no mask.
struct LaneAddresses {
  alignas(64) uint64_t at[kLanes];
};

void fill_inactive(LaneAddresses& a, uint64_t exec);

// Faults unless every active lane's [address, address + bytes) lies in one live run (writable for stores).
void check_extents_slow(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes,
                        Access access);
void check_scalar_extent(Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, Access access);
// Counters and the global race checker.
void note_global(Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes, Access access);
void note_scalar(Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, Access access);
// Counters, races, uninitialised and pending LDS bytes.
void note_lds(Wave& w, const ExecInst& in, const uint32_t* addresses, uint64_t exec, uint32_t bytes, Access access);
// `addresses` are the host's.
void note_scratch(Wave& w, const ExecInst& in, const LaneAddresses& addresses, uint64_t exec, uint32_t bytes,
                  Access access);
// Whether a load begins a compare-and-swap loop on what it reads; narrow and floating-point atomics are such loops.
bool begins_exchange(const Wave& w, const ExecInst& in, bool uniform);
[[noreturn]] void lds_fault(const Wave& w, const ExecInst& in, const uint32_t* addresses, uint64_t exec,
                            uint32_t bytes);

inline bool observed(const Wave& w) {
  return w.thread->stats != nullptr || w.launch->global_races != nullptr || w.thread->recorder != nullptr;
}

inline bool observed_scratch(const Wave& w) { return observed(w) || w.shadow != nullptr; }

inline void check_global(Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes,
                         Access access) {
  if (w.launch->options.check_memory) {
    uint64_t low = a.at[0], high = a.at[0];
    for (int l = 0; l < kLanes; ++l) {
      low = a.at[l] < low ? a.at[l] : low;
      high = a.at[l] > high ? a.at[l] : high;
    }
    ThreadState& thread = *w.thread;
    const bool write = access != Access::load;
    const auto covers = [&](const AddressMap::Run& r) {
      return low >= r.begin && high < r.end && bytes <= r.end - high && (!write || r.all_writable);
    };
    if (!covers(thread.last[0])) [[unlikely]] {
      if (covers(thread.last[1])) {
        std::swap(thread.last[0], thread.last[1]);
      } else {
        const AddressMap::Run* run = w.launch->map.find(low, 1);
        if (run != nullptr && covers(*run)) {
          thread.last[1] = thread.last[0];
          thread.last[0] = *run;
        } else {
          check_extents_slow(w, in, a, exec, bytes, access);
        }
      }
    }
  }
  if (observed(w)) [[unlikely]] note_global(w, in, a, exec, bytes, access);
}

// LDS addresses of the active lanes must stay below the work-group's allocation.
inline void check_lds(Wave& w, const ExecInst& in, const uint32_t* a, uint64_t exec, uint32_t bytes, Access access) {
  const uint32_t size = w.wg->lds_bytes;
  const uint32_t limit = size >= bytes ? size - bytes : 0;
  uint32_t beyond = size < bytes;
  for (int l = 0; l < kLanes; ++l) beyond |= static_cast<uint32_t>(a[l] > limit);
  if (beyond) [[unlikely]] lds_fault(w, in, a, exec, bytes);
  if (w.thread->stats != nullptr || w.wg->shadow != nullptr || w.thread->recorder != nullptr) [[unlikely]]
    note_lds(w, in, a, exec, bytes, access);
}

}  // namespace hfemu
