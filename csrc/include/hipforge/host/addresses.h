// Addresses of operands: alignment, and whether contiguous tensors share memory. A kernel that writes one while it reads
// the other has no defined result.
#pragma once

#include <initializer_list>

#include "hipforge/host/error.h"
#include "hipforge/host/tensor.h"

namespace hf {

inline bool aligned_to(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

inline bool share_memory(const Tensor& a, const Tensor& b) {
  const char *first = a.data<char>(), *second = b.data<char>();
  return first < second + b.bytes() && second < first + a.bytes();
}

struct Named {
  Tensor tensor;
  const char* name;
};

/// Raises GuardError where `written` overlaps one of the others; all are contiguous.
inline void check_apart(const Named& written, std::initializer_list<Named> others) {
  for (const Named& other : others)
    HF_CHECK(!share_memory(written.tensor, other.tensor), written.name, " is written and must not share memory with ",
             other.name, "; pass a tensor of its own");
}

}  // namespace hf
