// The slow side of the memory checks: per-lane extents, scalar accesses, and the texts of memory faults.
#include "access.h"

namespace hfemu {
namespace {

const char* verb(Access access) {
  switch (access) {
    case Access::load: return "read";
    case Access::store: return "write";
    case Access::atomic: return "atomic update";
  }
  return "access";
}

[[noreturn]] void global_fault(const Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, Access access,
                               int lane) {
  const AddressMap& map = w.launch->map;
  const bool inside = map.find(address, bytes) != nullptr;
  fault(w, in, FaultKind::memory,
        format("%s of %u bytes at 0x%llx %s: %s", verb(access), bytes, static_cast<unsigned long long>(address),
               inside ? "hits a read-only range" : "is outside every live allocation",
               map.describe(address, bytes).c_str()),
        lane);
}

bool allowed(const AddressMap& map, uint64_t address, uint32_t bytes, Access access) {
  const AddressMap::Run* run = map.find(address, bytes);
  if (run == nullptr) return false;
  return access == Access::load || run->all_writable || map.writable(address, bytes);
}

}  // namespace

void check_extents_slow(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes,
                        Access access) {
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (!allowed(w.launch->map, a.at[l], bytes, access)) global_fault(w, in, a.at[l], bytes, access, l);
  }
}

void check_scalar_extent(Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, Access access) {
  if (w.launch->options.check_memory) {
    const AddressMap::Run& last = w.thread->last_scalar;
    const bool hit = access == Access::load && address >= last.begin && address < last.end && bytes <= last.end - address;
    if (!hit) {
      if (!allowed(w.launch->map, address, bytes, access)) global_fault(w, in, address, bytes, access, -1);
      w.thread->last_scalar = *w.launch->map.find(address, bytes);
    }
  }
  if (observed(w)) note_scalar(w, in, address, bytes, access);
}

void lds_fault(const Wave& w, const ExecInst& in, const uint32_t* a, uint64_t exec, uint32_t bytes) {
  const uint32_t size = w.wg->lds_bytes;
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (size < bytes || a[l] > size - bytes)
      fault(w, in, FaultKind::lds,
            format("LDS access of %u bytes at 0x%x, but the work-group has %u bytes of LDS", bytes, a[l], size), l);
  }
  fault(w, in, FaultKind::lds, format("LDS access, but the work-group has %u bytes of LDS", size));
}

}  // namespace hfemu
