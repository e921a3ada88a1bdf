// What an entry demands of one tensor argument, in one form of message. What tensors have to do with each other is checked
// where a call enters (jit/call/binding.c): all are on one device, and none that is written shares memory with another,
// unless that is the very same view.
#pragma once

#include <initializer_list>

#include "hipforge/host/error.h"
#include "hipforge/host/tensor.h"

namespace hf {

inline bool aligned_to(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

inline void check_aligned(const Tensor& x, const char* name, uintptr_t bytes = 16) {
  HF_CHECK(aligned_to(x.data(), bytes), name, " must start at a multiple of ", bytes, " bytes; pass a copy of this view");
}

inline void check_contiguous(const Tensor& x, const char* name) {
  HF_CHECK(x.is_contiguous(), name, " must be contiguous (row-major); got ", x, " with other strides: pass ", name,
           ".contiguous()");
}

/// One dtype, or either of two that hold the same bytes.
struct Dtypes {
  hf_dtype one, other;
  constexpr Dtypes(hf_dtype only) : one(only), other(only) {}
  constexpr Dtypes(hf_dtype first, hf_dtype second) : one(first), other(second) {}
  bool have(const Tensor& x) const { return x.dtype() == one || x.dtype() == other; }
  // In a message: the first of two, and what joins them.
  const char* first() const { return one == other ? "" : dtype_name(one); }
  const char* joined() const { return one == other ? "" : " or "; }
};
constexpr Dtypes kE8m0{HF_U8, HF_E8M0FNU}, kIndex{HF_I32, HF_I64};

/// The fp8 of a device, and what messages say of it.
constexpr hf_dtype e4m3_of(bool fnuz) { return fnuz ? HF_E4M3FNUZ : HF_E4M3FN; }
constexpr const char* kOfDevice = ", the fp8 of this device";

/// A size in a declared shape: a number, or the name of one that the operand itself says.
struct Size {
  int64_t number = -1;
  const char* name = nullptr;
  constexpr Size(int64_t exactly) : number(exactly) {}
  constexpr Size(const char* any) : name(any) {}
};
using Sizes = std::initializer_list<Size>;

/// Where elements lie: from a multiple of `start` bytes on, without gaps, or with a `unit` in rows of the last axis that are
/// multiples of so many bytes apart.
struct Placement {
  uintptr_t start = 1;
  int64_t unit = 0;
};
constexpr Placement kAligned{16}, kAlignedRows{16, 16}, kAnyStrides{1, -1};

inline HF_NOT_OPTIMISED void refuse_operand(const Tensor& x, const char* name, Dtypes dtypes, Sizes shape, const char* why,
                                            bool contiguous) {
  char text[256];
  TextBuffer sizes(text, sizeof(text));
  for (const Size& size : shape) {
    sizes.add(&size == shape.begin() ? " [" : ", ");
    size.name ? sizes.add(size.name) : sizes.add(static_cast<long long>(size.number));
  }
  HF_FAIL(HF_ERROR_GUARD, name, " must be ", contiguous ? "contiguous " : "", dtypes.first(), dtypes.joined(), dtypes.other, text,
          "]", why, "; got ", x, !contiguous || x.is_contiguous() ? "" : " with other strides");
}

/// Raises GuardError unless `x` is of these dtypes, of this shape and lies like this; `why` says what the shape stands for.
inline void check_operand(const Tensor& x, const char* name, Dtypes dtypes, Sizes shape, const char* why = "",
                          Placement at = {}) {
  bool same = dtypes.have(x) && x.dim() == static_cast<int64_t>(shape.size()) && (at.unit || x.is_contiguous());
  for (int64_t i = 0; same && i < x.dim(); ++i) same = shape.begin()[i].name || x.size(i) == shape.begin()[i].number;
  if (!same) refuse_operand(x, name, dtypes, shape, why, !at.unit);
  if (at.unit > 0) {
    HF_CHECK(x.stride(-1) == 1, name, " must have its last dimension contiguous; got stride ", x.stride(-1));
    for (int64_t i = 0; i + 1 < x.dim(); ++i)
      HF_CHECK(x.size(i) == 1 || (x.stride(i) >= 0 && x.stride(i) * x.element_bytes() % at.unit == 0), name,
               " must have strides that are multiples of ", at.unit, " bytes; got ", x.stride(i) * x.element_bytes(),
               " along axis ", i);
  }
  check_aligned(x, name, at.start);
}

/// Raises GuardError unless `x` is contiguous and of these dtypes, whatever its shape.
inline void check_numbers(const Tensor& x, const char* name, Dtypes dtypes) {
  HF_CHECK(dtypes.have(x) && x.is_contiguous(), name, " must be contiguous ", dtypes.first(), dtypes.joined(), dtypes.other,
           "; got ", x, x.is_contiguous() ? "" : " with other strides");
}

/// Raises GuardError unless `x` is one element of this dtype, in any number of dimensions.
inline void check_one(const Tensor& x, const char* name, hf_dtype dtype) {
  HF_CHECK(x.dtype() == dtype && x.numel() == 1, name, " must be one ", dtype, "; got ", x);
}

/// Raises GuardError unless `x` is contiguous, one element or `count` of them; returns the distance between two, 0 for one element.
inline uint32_t check_one_or(const Tensor& x, const char* name, hf_dtype dtype, int64_t count, const char* of_what) {
  HF_CHECK(x.dtype() == dtype && x.is_contiguous() && (x.numel() == 1 || x.is_shape(count)), name, " must be ", dtype,
           ", one element or [", count, "] (one per ", of_what, "); got ", x);
  return x.numel() == 1 ? 0 : 1;
}

struct Named {
  Tensor tensor;
  const char* name;
};

/// Refuses to write what is read: for a kernel that does not work in place.
inline void check_not_in_place(const Named& written, std::initializer_list<Named> read) {
  for (const Named& other : read)
    HF_CHECK(written.tensor.data() != other.tensor.data() || written.tensor.numel() == 0, written.name,
             " is written and must not share memory with ", other.name, "; pass a tensor of its own");
}

}  // namespace hf
