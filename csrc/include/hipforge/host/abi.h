/* The C ABI between Python and a module of GPU code: plain views in, error kind and message out.
 *
 * A module exports, per entry point NAME,
 *     int  hf_entry_NAME(hf_call* call);      0 on success, else one of hf_error_kind
 *     const char* hf_signature_NAME;          one letter per argument, see hf_kind
 *     and once  const uint32_t hf_abi_version = HF_ABI_VERSION;
 * Nothing here needs torch, pybind11, a GPU's runtime or C++.
 */
#ifndef HIPFORGE_ABI_H
#define HIPFORGE_ABI_H

#include <stdint.h>

#define HF_ABI_VERSION 1
#define HF_ERROR_MESSAGE_BYTES 4096

/* Signature letters: T tensor, t optional tensor, i int64, d double, b bool, s string. */
typedef enum hf_kind {
  HF_KIND_NONE = 0, /* an optional tensor that was not given */
  HF_KIND_TENSOR = 1,
  HF_KIND_INT = 2,
  HF_KIND_FLOAT = 3,
  HF_KIND_BOOL = 4,
  HF_KIND_STRING = 5
} hf_kind;

typedef enum hf_dtype {
  HF_UNKNOWN = 0,
  HF_BOOL = 1,
  HF_U8 = 2,
  HF_I8 = 3,
  HF_I16 = 4,
  HF_I32 = 5,
  HF_I64 = 6,
  HF_F16 = 7,
  HF_BF16 = 8,
  HF_F32 = 9,
  HF_F64 = 10,
  HF_E4M3FN = 11,
  HF_E4M3FNUZ = 12,
  HF_E5M2 = 13,
  HF_E5M2FNUZ = 14,
  HF_E8M0FNU = 15,
  HF_E2M1FN_X2 = 16 /* two fp4 values per byte; shape and strides count bytes */
} hf_dtype;

typedef enum hf_device_type { HF_DEVICE_CPU = 0, HF_DEVICE_GPU = 1 } hf_device_type;

/* Becomes the Python exception of that kind. */
typedef enum hf_error_kind {
  HF_OK = 0,
  HF_ERROR_GUARD = 1,  /* GuardError */
  HF_ERROR_ARCH = 2,   /* ArchError */
  HF_ERROR_LAUNCH = 3, /* LaunchError, or EmulatorFault with the emulator's report */
  HF_ERROR_OTHER = 4   /* HipforgeError */
} hf_error_kind;

typedef struct hf_tensor {
  void* data;             /* first element, storage offset applied */
  const int64_t* shape;   /* ndim entries */
  const int64_t* strides; /* ndim entries, in elements */
  int32_t ndim;
  int32_t dtype; /* hf_dtype */
  int32_t device_type;
  int32_t device_index;
} hf_tensor;

typedef struct hf_arg {
  int32_t kind; /* hf_kind */
  int32_t reserved;
  union {
    hf_tensor tensor;
    int64_t i;
    double f;
    const char* s;
  } value;
} hf_arg;

typedef struct hf_call {
  const hf_arg* args;
  int32_t num_args;
  int32_t error_kind;
  void* stream; /* torch's current stream of the tensors' device, as its runtime has it; null on the emulator */
  char error[HF_ERROR_MESSAGE_BYTES];
} hf_call;

#endif
