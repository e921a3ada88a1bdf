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

bool is_exchange(Op op) {
  switch (op) {
    case Op::global_atomic_cmpswap: case Op::flat_atomic_cmpswap: case Op::buffer_atomic_cmpswap:
    case Op::global_atomic_cmpswap_x2: case Op::flat_atomic_cmpswap_x2: case Op::buffer_atomic_cmpswap_x2: return true;
    default: return false;
  }
}

bool same_address(const Inst& a, const Inst& b) {
  const auto same = [](const Operand& x, const Operand& y) { return x.kind == y.kind && x.reg == y.reg; };
  return a.format == b.format && a.offset == b.offset && same(a.vaddr, b.vaddr) && same(a.saddr, b.saddr) &&
         same(a.srsrc, b.srsrc) && same(a.soffset, b.soffset);
}

bool same_base(const Inst& exchange, const Inst& scalar_load) {
  const Operand &base = exchange.saddr, &of_load = scalar_load.saddr;
  return base.kind == of_load.kind && base.reg == of_load.reg && exchange.offset == scalar_load.offset;
}

// Compilers implement an atomic on one or two bytes as a compare-and-swap loop on the aligned dword around them, which
// begins with a load of that dword. At the end of a tensor the dword reaches past it: legal as long as the bytes outside
// keep their value.
// Where the address is uniform, the load is a scalar one (`lane` is negative) and the exchange takes the same base.
bool within_narrow_atomic(const Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, int lane) {
  const AddressMap& map = w.launch->map;
  if (bytes != 4 || address % 4 != 0) return false;
  uint32_t outside = 0;
  for (uint32_t b = 0; b < 4; ++b)
    if (map.find(address + b, 1) == nullptr || !map.writable(address + b, 1)) outside |= 0xFFu << 8 * b;
  if (outside == ~0u) return false;
  if (is_exchange(in.inst->op)) return ((w.v[in.data][lane] ^ w.v[in.data + 1][lane]) & outside) == 0;
  return begins_exchange(w, in, lane < 0);
}

bool allowed(const AddressMap& map, uint64_t address, uint32_t bytes, Access access) {
  const AddressMap::Run* run = map.find(address, bytes);
  if (run == nullptr) return false;
  return access == Access::load || run->all_writable || map.writable(address, bytes);
}

}  // namespace

bool begins_exchange(const Wave& w, const ExecInst& in, bool uniform) {
  constexpr size_t kDistance = 64;
  const std::vector<Inst>& insts = w.launch->program->insts;
  const size_t from = static_cast<size_t>(in.inst - insts.data());
  for (size_t i = from + 1; i < insts.size() && i <= from + kDistance; ++i)
    if (is_exchange(insts[i].op) && (uniform ? same_base(insts[i], *in.inst) : same_address(insts[i], *in.inst)))
      return true;
  return false;
}

void check_extents_slow(const Wave& w, const ExecInst& in, const LaneAddresses& a, uint64_t exec, uint32_t bytes,
                        Access access) {
  for (uint64_t left = exec; left; left &= left - 1) {
    const int l = std::countr_zero(left);
    if (!allowed(w.launch->map, a.at[l], bytes, access) && !within_narrow_atomic(w, in, a.at[l], bytes, l))
      global_fault(w, in, a.at[l], bytes, access, l);
  }
}

void check_scalar_extent(Wave& w, const ExecInst& in, uint64_t address, uint32_t bytes, Access access) {
  if (w.launch->options.check_memory) {
    const AddressMap::Run& last = w.thread->last_scalar;
    const bool hit = access == Access::load && address >= last.begin && address < last.end && bytes <= last.end - address;
    if (!hit) {
      if (allowed(w.launch->map, address, bytes, access))
        w.thread->last_scalar = *w.launch->map.find(address, bytes);
      else if (access != Access::load || !within_narrow_atomic(w, in, address, bytes, -1))
        global_fault(w, in, address, bytes, access, -1);
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
