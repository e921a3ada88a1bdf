// Which host addresses may a kernel touch? Named extents: process-wide allocations plus the launching thread's stack.
//
// The loader registers code-object segments, the HIP runtime registers hipMalloc blocks, the argument binding pushes the
// exact extents of a call's tensors. A launch takes a snapshot (AddressMap) of what its thread sees at that moment.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hfemu {

struct Extent {
  std::string name;     // as faults and per-tensor counters print it: "Wq", "hipMalloc#3", ".rodata of module"
  uint64_t base = 0;    // host address
  uint64_t bytes = 0;   // exact
  bool writable = true;
};

// --- process-wide, any thread ---------------------------------------------------------------------------------------
void add_allocation(const Extent& extent);
// Removes the allocation that starts at `base`; false if there is none.
bool remove_allocation(uint64_t base);
// The allocation that holds `address` (for hipMemcpy checks, hipFree, hipPointerGetAttributes); false if none.
bool find_allocation(uint64_t address, Extent* out);

// --- thread-local stack: the arguments of calls in progress; every level is visible to a launch -----------------------
void push_extents(const Extent* extents, size_t count);  // one level, count may be 0
void pop_extents();
std::vector<Extent> pushed_extents();  // of all levels

// A frozen view: disjoint runs for checking, finer pieces for naming.
class AddressMap {
 public:
  struct Run {
    uint64_t begin = 1, end = 0;  // [begin, end)
    bool all_writable = false;
  };
  struct Piece {  // between two neighbouring extent boundaries
    uint64_t begin, end;
    uint32_t extent;  // the smallest extent that covers it
    bool writable;    // whether any extent that covers it is writable
  };

  // Allocations and this thread's pushed extents, plus `extra` (kernarg and the like).
  static AddressMap snapshot(const std::vector<Extent>& extra);

  // The run that holds [address, address+bytes), or null.
  const Run* find(uint64_t address, uint64_t bytes) const;
  const Piece* piece(uint64_t address) const;
  bool writable(uint64_t address, uint64_t bytes) const;
  // "12 bytes past the end of Wq (base 0x.., 4096 bytes)" or "inside x at offset 16".
  std::string describe(uint64_t address, uint64_t bytes) const;

  const std::vector<Extent>& extents() const { return extents_; }
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::vector<Extent> extents_;
  std::vector<Run> runs_;
  std::vector<Piece> pieces_;
};

// High dwords of the generic apertures (src_shared_base, src_private_base): outside every user address.
constexpr uint32_t kSharedApertureHigh = 0x00010000;
constexpr uint32_t kPrivateApertureHigh = 0x00020000;

}  // namespace hfemu
