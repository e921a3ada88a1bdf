/* Shared by the parts of the binding: a binder, a bound entry, and the part of DLPack that they read. */
#pragma once

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "hipforge/host/abi.h"

#if defined(Py_LIMITED_API) && Py_LIMITED_API < 0x030C0000
/* Part of the limited API from 3.12 on, exported from 3.11 on; null in a CPython 3.10, where it is an inline function. */
extern PyObject* PyObject_Vectorcall(PyObject* callable, PyObject* const* args, size_t count, PyObject* kwnames)
    __attribute__((weak));
#define HAS_VECTORCALL (PyObject_Vectorcall != NULL)
#else
#define HAS_VECTORCALL 1
#endif

enum { MAX_ARGS = 64, MAX_DIMS = 64 };

/* ---- DLPack, the part that a consumer of views needs (layout fixed by its specification, major version 1) ---- */

typedef struct {
  int32_t device_type;
  int32_t device_id;
} DlDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DlDataType;

typedef struct {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DlTensor;

typedef struct {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*view_of_object)(void* object, DlTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
} DlExchangeTable;

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_ROCM = 10, DL_ROCM_HOST = 11 };

/* Type codes of DLPack against ours; bits tell the widths apart. */
static int32_t dtype_of(DlDataType type) {
  if (type.lanes == 2 && type.code == 17 && type.bits == 4) return HF_E2M1FN_X2;
  if (type.lanes != 1) return HF_UNKNOWN;
  switch (type.code) {
    case 0: return type.bits == 8 ? HF_I8 : type.bits == 16 ? HF_I16 : type.bits == 32 ? HF_I32 : type.bits == 64 ? HF_I64 : HF_UNKNOWN;
    case 1: return type.bits == 8 ? HF_U8 : HF_UNKNOWN;
    case 2: return type.bits == 16 ? HF_F16 : type.bits == 32 ? HF_F32 : type.bits == 64 ? HF_F64 : HF_UNKNOWN;
    case 4: return type.bits == 16 ? HF_BF16 : HF_UNKNOWN;
    case 6: return type.bits == 8 ? HF_BOOL : HF_UNKNOWN;
    case 10: return HF_E4M3FN;
    case 11: return HF_E4M3FNUZ;
    case 12: return HF_E5M2;
    case 13: return HF_E5M2FNUZ;
    case 14: return HF_E8M0FNU;
    default: return HF_UNKNOWN;
  }
}

static int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case HF_I64: case HF_F64: return 8;
    case HF_I32: case HF_F32: return 4;
    case HF_I16: case HF_F16: case HF_BF16: return 2;
    default: return 1;
  }
}

/* ---- what a binder knows: device, types, exceptions; one per process outside of tests ---- */

typedef struct {
  const char* name;
  uint64_t base;
  uint64_t bytes;
  uint32_t writable;
  uint32_t reserved;
} Extent; /* hfemu_extent of the emulator's api.h */

typedef enum { ON_HOST = 0, ON_EMULATOR = 1, ON_HIP = 2, ON_CUDA = 3 } Target;

/* torch's own functions, for reading a tensor without a Python call: its C shims, whose ABI torch keeps, and four of its C++
 * functions that take one pointer or nothing. abi.py finds them, tries them, and gives none where one is missing. */
typedef struct {
  int64_t offset; /* of the at::Tensor, one pointer, in a Python tensor; 0: nothing here is used */
  int32_t (*layout)(void*, int32_t*);
  int32_t (*device_type)(void*, int32_t*);
  int32_t (*device_index)(void*, int32_t*);
  int32_t (*data)(void*, void**);
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*ndim)(void*, int64_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*strides)(void*, int64_t**);
  int32_t (*storage_bytes)(void*, int64_t*);
  int32_t (*storage_offset)(void*, int64_t*);
  bool (*grad_enabled)(void);
  bool (*is_negative)(const void*);   /* of an at::Tensor */
  bool (*requires_grad)(const void*); /* of the TensorImpl it points to */
  int64_t (*mode_depth)(void);
  void* const* (*recorder)(void); /* of torch.jit.trace: a reference to a pointer, null where nothing is recorded */
  int32_t strided, cpu, cuda;
  uint8_t dtypes[64]; /* hf_dtype by torch's number */
} Torch;

enum { TORCH_FUNCTIONS = 15, MAX_GPUS = 64 };

/* A stream as torch names it: its device, type and index in a byte each, and a number that is one stream's for as long as the
 * process lives. A C++ function returns its object of this layout in two registers, as C does this one. */
typedef struct {
  int64_t device, id;
} StreamName;

typedef struct {
  int64_t id;
  void* handle;
  int known;
} NamedStream;

typedef struct {
  PyObject_HEAD
  Target target;
  Torch torch;
  PyObject* tensor_type;
  PyObject* parameter_type;
  PyObject* errors[5];      /* by hf_error_kind; [0] is EmulatorFault */
  PyObject* mode_depth;     /* torch_functions.active_modes */
  PyObject* read_tensor;    /* tensor -> (data, dtype, is_gpu, index, shape, strides); used without a table */
  PyObject* read_stream;    /* device index -> stream; used without a table */
  PyObject* problem;        /* tensor -> str or None: what its data pointer, shape and strides do not say */
  PyObject* is_negative;    /* tensor -> whether its negative bit is set */
  PyObject* storage;        /* tensor -> its storage; None: its size is not asked for, as on a GPU */
  PyObject* storage_bytes;  /* storage -> its size in bytes */
  PyObject* storage_offset; /* tensor -> elements before its first one */
  PyObject* grad_enabled;   /* whether torch records gradients now */
  PyObject* drop_gradient;  /* (op, argument): an input requires grad */
  PyObject* part;           /* an argument -> what it says to a decision, where describe() does not know it */
  PyObject* dtype_type;     /* of torch's dtypes, which live as long as the process */
  const DlExchangeTable* table;
  void (*push_extents)(const Extent*, int32_t);
  void (*pop_extents)(void);
  const char* (*last_error)(void);
  void (*clear_error)(void);
  void* (*emulator_stream)(void); /* null: none */
  int (*get_device)(int*); /* null: there is one GPU, which is every thread's current one */
  int (*set_device)(int);
  StreamName (*name_stream)(int8_t); /* this thread's current stream of a GPU; null: its handle is asked for in every call */
  NamedStream streams[MAX_GPUS];     /* the last one of each GPU */
} Binder;

static int on_gpu(const Binder* env) { return env->target >= ON_HIP; }

static PyObject* binder_type;

/* ---- one bound entry, or (entry null) a choice among the entries of a module's variants ---- */

typedef struct {
  PyObject_HEAD
  PyMethodDef method;
  Binder* env;
  PyObject* variant;            /* arguments -> dict of variant parameters */
  PyObject* entries;            /* dict: the one value, or the tuple of values, of that dict -> function */
  PyObject* load;               /* tuple of arguments -> function, for what `entries` lacks; says what is wrong */
  struct Choice* choices;       /* what was chosen for arguments of these shapes, dtypes and numbers; by hash */
  PyObject* any;                /* one function of `entries`: all have its signature */
  int (*entry)(hf_call*);
  char* name;
  Py_ssize_t count;
  char* kinds;                  /* one signature letter per argument */
  const char** texts;           /* argument names, UTF-8, owned by `names` */
  uint8_t* writable;
  PyObject* names;              /* tuple of str */
  PyObject* defaults;           /* tuple: defaults of the last arguments */
  PyObject* divert;             /* called with the arguments when they are not plain tensors; or NULL */
  PyObject* owner;              /* keeps the library loaded */
} Entry;

enum { CHOICES = 32, MAX_FACTS = 128 };

typedef struct Choice {
  PyObject* function; /* or NULL: free */
  int32_t count;
  int64_t facts[MAX_FACTS];
} Choice;

static PyObject* entry_type;
static PyObject* requires_grad_name;

static const char* type_name(PyObject* object, PyObject** keep) {
  *keep = PyObject_GetAttrString((PyObject*)Py_TYPE(object), "__name__");
  const char* text = *keep ? PyUnicode_AsUTF8AndSize(*keep, NULL) : NULL;
  PyErr_Clear();
  return text ? text : "?";
}

static int refuse(Entry* self, Py_ssize_t i, const char* accepted, PyObject* value) {
  const Binder* env = self->env;
  PyObject* keep = NULL;
  const char* got = type_name(value, &keep);
  PyErr_Format(env->errors[HF_ERROR_GUARD], "%s: argument '%s' must be %s; got %s", self->name, self->texts[i], accepted,
               value == Py_None ? "None" : got);
  Py_XDECREF(keep);
  return -1;
}

static PyObject* arguments_tuple(PyObject* const* args, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
  return tuple;
}

static PyObject* call_with(PyObject* callable, PyObject* const* args, Py_ssize_t count) {
  if (HAS_VECTORCALL) return PyObject_Vectorcall(callable, args, (size_t)count, NULL);
  PyObject* tuple = arguments_tuple(args, count);
  if (!tuple) return NULL;
  PyObject* result = PyObject_CallObject(callable, tuple);
  Py_DECREF(tuple);
  return result;
}
