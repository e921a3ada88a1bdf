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

// Whether a tensor of a dtype may be read as elements T. Signed integers and floats take their own dtype; unsigned ones
// any of their size, because they stand for bits (fp8 payloads, scales, packed values, words of a workspace); char
// takes all, for addresses in bytes. For a further type, a header adds `template <> struct HoldsElement<T>`.
template <class T>
struct HoldsElement {
  static_assert(sizeof(T) == 0,
                "data<T>(): T must be float, double, __half, _Float16, __hip_bfloat16, hip_bfloat16, __bf16, bool, char or an "
                "(u)int8_t to (u)int64_t; for another type take data() and cast, or specialise HoldsElement");
};
template <int32_t kDtype>
struct HoldsDtype {
  static bool in(int32_t dtype) { return dtype == kDtype; }
  static const char* name() { return dtype_name(kDtype); }
};
template <int64_t kBytes>
struct HoldsBits {
  static bool in(int32_t dtype) { return dtype_bytes(dtype) == kBytes; }
  static const char* name() {
    return kBytes == 1 ? "elements of 1 byte" : kBytes == 2 ? "elements of 2 bytes"
         : kBytes == 4 ? "elements of 4 bytes" : "elements of 8 bytes";
  }
};
struct HoldsAnything {
  static bool in(int32_t) { return true; }
  static const char* name() { return "bytes"; }
};
template <> struct HoldsElement<char> : HoldsAnything {};
template <> struct HoldsElement<uint8_t> : HoldsBits<1> {};
template <> struct HoldsElement<uint16_t> : HoldsBits<2> {};
template <> struct HoldsElement<uint32_t> : HoldsBits<4> {};
template <> struct HoldsElement<uint64_t> : HoldsBits<8> {};
template <> struct HoldsElement<int8_t> : HoldsDtype<HF_I8> {};
template <> struct HoldsElement<int16_t> : HoldsDtype<HF_I16> {};
template <> struct HoldsElement<int32_t> : HoldsDtype<HF_I32> {};
template <> struct HoldsElement<int64_t> : HoldsDtype<HF_I64> {};
template <> struct HoldsElement<float> : HoldsDtype<HF_F32> {};
template <> struct HoldsElement<double> : HoldsDtype<HF_F64> {};
template <> struct HoldsElement<bool> : HoldsDtype<HF_BOOL> {};
template <class T> struct HoldsElement<const T> : HoldsElement<T> {};

template <class T>
T* elements(const hf_tensor& view) {
  using Holds = HoldsElement<T>;
  HF_CHECK(Holds::in(view.dtype), "the kernel reads ", Holds::name(), "; got a tensor of ", &view,
           ". Convert it, or view it as what the kernel takes");
  return static_cast<T*>(view.data);
}

class Tensor {
 public:
  explicit Tensor(const hf_tensor& view) : view_(&view) {}

  // The elements as T, which must be what the tensor holds: a GuardError otherwise. See HoldsElement.
  template <class T>
  T* data() const { return elements<T>(*view_); }
  // The address alone, whatever the dtype.
  void* data() const { return view_->data; }

  int64_t dim() const { return view_->ndim; }
  // Extent of axis `i`; negative counts from the last one. GuardError if there is no such axis.
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
  // Index of the device that runs the kernel; 0 on the emulator.
  int device_index() const { return view_->device_index; }
  const hf_tensor& view() const { return *view_; }

 private:
  int64_t axis(int64_t i) const {
    const int64_t wrapped = i < 0 ? i + view_->ndim : i;
    HF_CHECK(wrapped >= 0 && wrapped < view_->ndim, "axis ", i, " of a tensor ", view_, " that has ", view_->ndim,
             " dimensions");
    return wrapped;
  }

  const hf_tensor* view_;
};

// In a message: "uint8 [4, 128]".
inline Said<'T'> said(const Tensor& tensor) { return {&tensor.view()}; }

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
  T* data() const { return view_ ? elements<T>(*view_) : nullptr; }

 private:
  const hf_tensor* view_;
};

}  // namespace hf
