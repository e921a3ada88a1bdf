// The entries for other frameworks: __tvm_ffi_NAME beside hf_entry_NAME, as tvm_ffi.load_module and what builds on it look
// for them. Structs and numbers are those that apache-tvm-ffi and DLPack document for their C ABIs; nothing of either is
// needed to build or to load a module, and hipforge's own calls do not pass here. The caller answers for what the binding
// checks of arguments together: all are on the current device, and none that is written shares memory with another.
#pragma once

#include <dlfcn.h>

#include "hipforge/host/tensor.h"

namespace hf __attribute__((visibility("hidden"))) {
namespace tvm_ffi {

struct DlTensor {
  char* data;
  int32_t device_type, device_index, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct ObjectHeader {  // before the contents of an object on the heap
  uint64_t references;
  int32_t type;
  uint32_t padding;
  void* deleter;
};
enum Type : int32_t {
  kNone = 0, kInt = 1, kBool = 2, kFloat = 3, kTensorPointer = 7, kText = 8, kSmallText = 11, kTextObject = 65, kTensorObject = 70
};
struct Any {
  int32_t type;
  uint32_t small_size;
  union {
    int64_t i;
    double f;
    const char* text;
    const ObjectHeader* object;
    char small_text[8];
  } value;
};
struct Extent {  // as the emulator's api.h has it
  const char* name;
  uint64_t base, bytes;
  uint32_t writable, reserved;
};

constexpr int kMostArguments = 64, kDlCpu = 1;

inline int32_t dtype_of(const DlTensor& tensor) {
  static constexpr uint8_t known[][4] = {  // DLPack's code, bits and lanes
      {0, 8, 1, HF_I8}, {0, 16, 1, HF_I16}, {0, 32, 1, HF_I32}, {0, 64, 1, HF_I64}, {1, 8, 1, HF_U8}, {2, 16, 1, HF_F16},
      {2, 32, 1, HF_F32}, {2, 64, 1, HF_F64}, {4, 16, 1, HF_BF16}, {6, 8, 1, HF_BOOL}, {10, 8, 1, HF_E4M3FN},
      {11, 8, 1, HF_E4M3FNUZ}, {12, 8, 1, HF_E5M2}, {13, 8, 1, HF_E5M2FNUZ}, {14, 8, 1, HF_E8M0FNU}, {17, 4, 2, HF_E2M1FN_X2}};
  for (const auto& one : known)
    if (tensor.code == one[0] && tensor.bits == one[1] && tensor.lanes == one[2]) return one[3];
  return HF_UNKNOWN;
}

// One argument for its letter in the signature; null, or what it should have been.
inline const char* convert(char letter, const Any& from, hf_arg& to, const DlTensor*& tensor) {
  const bool number = from.type == kInt || from.type == kBool;
  switch (letter) {
    case 't':
      to.kind = HF_KIND_NONE;
      if (from.type == kNone) return nullptr;
      [[fallthrough]];
    case 'T':
      if (from.type != kTensorPointer && from.type != kTensorObject) return "a tensor";
      tensor = reinterpret_cast<const DlTensor*>(from.value.object + (from.type == kTensorObject));
      to.kind = HF_KIND_TENSOR;
      to.value.tensor = {tensor->data + tensor->byte_offset, tensor->shape, tensor->strides, tensor->ndim, dtype_of(*tensor),
                         tensor->device_type == kDlCpu ? HF_DEVICE_CPU : HF_DEVICE_GPU, tensor->device_index};
      return tensor->strides == nullptr && tensor->ndim != 0 ? "a tensor with strides" : nullptr;
    case 's':
      to.kind = HF_KIND_STRING;
      to.value.s = from.type == kText ? from.value.text : from.type == kSmallText ? from.value.small_text
                 : from.type == kTextObject ? *reinterpret_cast<const char* const*>(from.value.object + 1) : nullptr;
      return to.value.s == nullptr ? "a string" : nullptr;
    case 'd':
      to.kind = HF_KIND_FLOAT;
      to.value.f = number ? static_cast<double>(from.value.i) : from.value.f;
      return number || from.type == kFloat ? nullptr : "a number";
    default:
      to.kind = letter == 'b' ? HF_KIND_BOOL : HF_KIND_INT;
      to.value.i = from.value.i;
      return number ? nullptr : "an integer or a bool";
  }
}

template <class F>
F* loaded(const char* name) { return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name)); }

inline int raise(const char* kind, const char* message) {
  if (auto* set = loaded<void(const char*, const char*)>("TVMFFIErrorSetRaisedFromCStr")) set(kind, message);
  return -1;
}

inline int call(int (*entry)(hf_call*), const char* letters, const Any* given, int32_t count) {
  static auto* const stream_of = loaded<void*(int32_t, int32_t)>("TVMFFIEnvGetStream");
  static auto* const push = loaded<void(const Extent*, int32_t)>("hfemu_push_extents");  // on the emulator
  static auto* const pop = loaded<void()>("hfemu_pop_extents");
  hf_arg arguments[kMostArguments];
  Extent extents[kMostArguments];
  int32_t tensors = 0;
  hf_call made;
  made.args = arguments;
  made.num_args = count;
  made.stream = nullptr;
  if (count > kMostArguments) return raise("TypeError", "an entry takes at most 64 arguments from here");
  for (int32_t i = 0; i < count && letters[i]; ++i) {
    const DlTensor* tensor = nullptr;
    if (const char* wanted = convert(letters[i], given[i], arguments[i], tensor)) {
      __builtin_snprintf(made.error, sizeof(made.error), "argument %d must be %s", i, wanted);
      return raise("TypeError", made.error);
    }
    if (tensor == nullptr) continue;
    const hf_tensor& view = arguments[i].value.tensor;
    if (view.device_type == HF_DEVICE_GPU && stream_of) made.stream = stream_of(tensor->device_type, tensor->device_index);
    int64_t reach = 1;  // elements from the first to behind the last
    for (int32_t axis = 0; axis < view.ndim; ++axis)
      reach = view.shape[axis] == 0 || reach == 0 ? 0 : reach + (view.shape[axis] - 1) * view.strides[axis];
    extents[tensors++] = {"a tensor argument", reinterpret_cast<uint64_t>(view.data),
                          static_cast<uint64_t>(reach * dtype_bytes(view.dtype)), 1, 0};
  }
  if (push) push(extents, tensors);
  const int kind = entry(&made);
  if (push) pop();
  return kind == HF_OK ? 0 : raise(kind == HF_ERROR_GUARD || kind == HF_ERROR_ARCH ? "ValueError" : "RuntimeError", made.error);
}

}  // namespace tvm_ffi
}  // namespace hf
