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
};
constexpr Dtypes kE8m0{HF_U8, HF_E8M0FNU}, kIndex{HF_I32, HF_I64};

/// The fp8 of a device, and what messages say of it.
constexpr hf_dtype e4m3_of(bool fnuz) { return fnuz ? HF_E4M3FNUZ : HF_E4M3FN; }
constexpr const char* kOfDevice = ", the fp8 of this device";

/// Raises GuardError unless `x` is contiguous, of these dtypes and of this shape; `why` says what the shape stands for.
inline void check_operand(const Tensor& x, const char* name, Dtypes dtypes, std::initializer_list<int64_t> shape,
                          const char* why = "") {
  hf_tensor wanted = {};
  wanted.dtype = dtypes.other;
  wanted.ndim = static_cast<int32_t>(shape.size());
  wanted.shape = shape.begin();
  bool same = x.dim() == wanted.ndim;
  for (int32_t i = 0; same && i < wanted.ndim; ++i) same = x.size(i) == wanted.shape[i];
  HF_CHECK(same && dtypes.have(x) && x.is_contiguous(), name, " must be contiguous ",
           dtypes.one == dtypes.other ? "" : dtype_name(dtypes.one), dtypes.one == dtypes.other ? "" : " or ",
           static_cast<const hf_tensor*>(&wanted), why, "; got ", x, x.is_contiguous() ? "" : " with other strides");
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
