// hf::Tensor, a view of a torch tensor that crossed the C ABI. It owns nothing and lives as long as the call.
#pragma once

#include "hipforge/host/error.h"

namespace hf __attribute__((visibility("hidden"))) {

// Bytes of one element; 0 for HF_UNKNOWN.
inline int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case HF_BOOL: case HF_U8: case HF_I8:
    case HF_E4M3FN: case HF_E4M3FNUZ: case HF_E5M2: case HF_E5M2FNUZ: case HF_E8M0FNU:
    case HF_E2M1FN_X2: return 1;
    case HF_I16: case HF_F16: case HF_BF16: return 2;
    case HF_I32: case HF_F32: return 4;
    case HF_I64: case HF_F64: return 8;
    default: return 0;
  }
}

class Tensor {
 public:
  explicit Tensor(const hf_tensor& view) : view_(&view) {}

  template <class T>
  T* data() const { return static_cast<T*>(view_->data); }
  void* data() const { return view_->data; }

  int64_t dim() const { return view_->ndim; }
  // Extent of axis `i`; negative counts from the last one. An axis that is not there is a GuardError.
  int64_t size(int64_t i) const { return view_->shape[axis(i)]; }
  // Elements (not bytes) between neighbours along axis `i`.
  int64_t stride(int64_t i) const { return view_->strides[axis(i)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int32_t i = 0; i < view_->ndim; ++i) count *= view_->shape[i];
    return count;
  }
  hf_dtype dtype() const { return static_cast<hf_dtype>(view_->dtype); }
  int64_t element_bytes() const { return dtype_bytes(view_->dtype); }
  // numel() * element_bytes(): what a contiguous tensor covers.
  int64_t bytes() const { return numel() * element_bytes(); }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int32_t i = view_->ndim - 1; i >= 0; --i) {
      if (view_->shape[i] == 0) return true;
      if (view_->shape[i] != 1 && view_->strides[i] != expected) return false;
      expected *= view_->shape[i];
    }
    return true;
  }
  // Whether the shape is exactly (sizes...).
  template <class... Sizes>
  bool is_shape(Sizes... sizes) const {
    const int64_t expected[] = {static_cast<int64_t>(sizes)...};
    if (view_->ndim != static_cast<int32_t>(sizeof...(sizes))) return false;
    for (int32_t i = 0; i < view_->ndim; ++i)
      if (view_->shape[i] != expected[i]) return false;
    return true;
  }
  bool on_gpu() const { return view_->device_type == HF_DEVICE_GPU; }
  // Index of the HIP device that runs the kernel; 0 on the emulator.
  int device_index() const { return view_->device_index; }
  const hf_tensor& view() const { return *view_; }

  // In a message: "uint8 [4, 128]".
  operator Part() const { return Part(*view_); }

 private:
  int64_t axis(int64_t i) const {
    const int64_t wrapped = i < 0 ? i + view_->ndim : i;
    HF_CHECK(wrapped >= 0 && wrapped < view_->ndim, "axis ", i, " of a tensor ", *view_, " that has ", view_->ndim,
             " dimensions");
    return wrapped;
  }

  const hf_tensor* view_;
};

// A tensor argument that may be None.
class OptionalTensor {
 public:
  OptionalTensor() : view_(nullptr) {}
  explicit OptionalTensor(const hf_tensor& view) : view_(&view) {}

  bool has_value() const { return view_ != nullptr; }
  explicit operator bool() const { return has_value(); }
  Tensor value() const {
    HF_CHECK(view_, "an optional tensor that was not given is used");
    return Tensor(*view_);
  }
  Tensor operator*() const { return value(); }
  // Null when the tensor was not given: kernels test the pointer.
  template <class T>
  T* data() const { return view_ ? static_cast<T*>(view_->data) : nullptr; }

 private:
  const hf_tensor* view_;
};

}  // namespace hf
