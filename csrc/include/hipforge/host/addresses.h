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

constexpr int kMaxAxes = 8;

/// The bytes of a tensor with any strides: its axes of more than one element by descending stride.
struct Footprint {
  const char* first;
  int64_t count[kMaxAxes], stride[kMaxAxes];
  int64_t below[kMaxAxes];  // bytes that one element of the axis spans
  int axes = 0;
  int64_t span = 0;  // of everything; 0 where there are no elements

  explicit Footprint(const Tensor& tensor) : first(tensor.data<const char>()) {
    if (tensor.numel() == 0) return;
    HF_CHECK(tensor.dim() <= kMaxAxes, "a tensor may have at most ", kMaxAxes, " dimensions here; got ", tensor);
    for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
      if (tensor.size(axis) == 1) continue;
      int at = axes++;
      const int64_t bytes = tensor.stride(axis) * tensor.element_bytes();
      for (; at > 0 && stride[at - 1] < bytes; --at) count[at] = count[at - 1], stride[at] = stride[at - 1];
      count[at] = tensor.size(axis), stride[at] = bytes;
    }
    span = tensor.element_bytes();
    for (int at = axes; at-- > 0;) below[at] = span, span += (count[at] - 1) * stride[at];
  }

  int64_t span_from(int axis) const { return axis ? below[axis - 1] : span; }

  /// Whether no two of its elements share a byte (sufficient, and exact for nested strides).
  bool distinct() const {
    for (int at = 0; at < axes; ++at)
      if (stride[at] < below[at]) return false;
    return true;
  }
};

namespace detail {

// Whether b, which starts `offset` bytes after a, may share a byte with it, both from axis `at` on.
inline bool may_meet(const Footprint& a, const Footprint& b, int at, int64_t offset) {
  if (offset >= a.span_from(at) || -offset >= b.span_from(at)) return false;
  if (at >= a.axes || at >= b.axes || a.stride[at] != b.stride[at]) return true;
  const int64_t step = a.stride[at];
  if (step < a.below[at] || step < b.below[at]) return true;
  const int64_t rest = (offset % step + step) % step;
  return may_meet(a, b, at + 1, rest) || may_meet(a, b, at + 1, rest - step);
}

}  // namespace detail

/// Whether two tensors of any strides may share a byte: false for slices of one tensor that lie side by side.
inline bool may_share(const Tensor& a, const Tensor& b) {
  const Footprint of_a(a), of_b(b);
  if (of_a.span == 0 || of_b.span == 0) return false;
  return detail::may_meet(of_a, of_b, 0, of_b.first - of_a.first);
}

/// As check_apart, for tensors of any strides.
inline void check_slices_apart(const Named& written, std::initializer_list<Named> others) {
  for (const Named& other : others)
    HF_CHECK(!may_share(written.tensor, other.tensor), written.name, " is written and must not share memory with ",
             other.name, "; pass a tensor of its own");
}

}  // namespace hf
