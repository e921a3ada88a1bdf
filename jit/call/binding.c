/* Calls hf_entry_* of a module from Python: arguments in, the entry's error out as a Python exception.
 *
 * One function object per entry (METH_FASTCALL). Tensors are read through the DLPack exchange table that torch
 * publishes on its tensor type, so no torch header is needed; where a torch has no such table, through a Python
 * callable. Compiled against the limited API of Python 3.10: one build serves every later CPython.
 */
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

/* torch's own functions, for reading a tensor without a Python call: its C shims, whose ABI torch keeps, and three of its C++
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
  int32_t strided, cpu, cuda;
  uint8_t dtypes[64]; /* hf_dtype by torch's number */
} Torch;

enum { TORCH_FUNCTIONS = 14 };

typedef struct {
  PyObject_HEAD
  Target target;
  Torch torch;
  PyObject* tensor_type;
  PyObject* parameter_type;
  PyObject* errors[5];      /* by hf_error_kind; [0] is EmulatorFault */
  PyObject* mode_depth;     /* torch's count of active dispatch modes */
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
  int (*get_device)(int*);
  int (*set_device)(int);
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

/* Puts positional and keyword arguments and defaults in order; borrowed references. */
static int order_arguments(Entry* self, PyObject* const* args, Py_ssize_t given, PyObject* kwnames, PyObject** out) {
  const Py_ssize_t count = self->count;
  if (given > count) {
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments but %zd were given", self->name, count, given);
    return -1;
  }
  memset(out, 0, (size_t)count * sizeof(*out));
  for (Py_ssize_t i = 0; i < given; ++i) out[i] = args[i];
  const Py_ssize_t keywords = kwnames ? PyTuple_Size(kwnames) : 0;
  for (Py_ssize_t k = 0; k < keywords; ++k) {
    PyObject* key = PyTuple_GetItem(kwnames, k);
    Py_ssize_t i = 0;
    while (i < count && PyUnicode_Compare(key, PyTuple_GetItem(self->names, i)) != 0) ++i;
    if (i == count) {
      PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R; arguments: %R", self->name, key,
                   self->names);
      return -1;
    }
    if (out[i]) {
      PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument %R", self->name, key);
      return -1;
    }
    out[i] = args[given + k];
  }
  const Py_ssize_t first_default = count - PyTuple_Size(self->defaults);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (out[i]) continue;
    if (i < first_default) {
      PyErr_Format(PyExc_TypeError, "%s() missing argument '%s'", self->name, self->texts[i]);
      return -1;
    }
    out[i] = PyTuple_GetItem(self->defaults, i - first_default);
  }
  return 0;
}

/* Shape and stride storage for tensors that are read through Python. */
typedef struct {
  int64_t values[2 * MAX_DIMS];
  void* next;
} Dims;

static int read_dims(PyObject* tuple, int64_t* out, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyTuple_GetItem(tuple, i);
    out[i] = item ? PyLong_AsLongLong(item) : -1;
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

/* Reads one tensor through the binder's read_tensor; the dimensions are chained into *dims, freed after the call. */
static int view_through_python(const Binder* env, PyObject* object, hf_tensor* out, void** dims) {
  PyObject* facts = PyObject_CallFunctionObjArgs(env->read_tensor, object, NULL);
  if (!facts) return -1;
  unsigned long long data = 0;
  int dtype = 0, gpu = 0, index = 0;
  PyObject *shape = NULL, *strides = NULL;
  int status = -1;
  if (!PyArg_ParseTuple(facts, "KiiiO!O!", &data, &dtype, &gpu, &index, &PyTuple_Type, &shape, &PyTuple_Type, &strides))
    goto done;
  const Py_ssize_t ndim = PyTuple_Size(shape);
  if (ndim > MAX_DIMS || PyTuple_Size(strides) != ndim) {
    PyErr_Format(PyExc_BufferError, "%zd dimensions, at most %d are supported", ndim, (int)MAX_DIMS);
    goto done;
  }
  Dims* storage = PyMem_Malloc(sizeof(*storage));
  if (!storage) {
    PyErr_NoMemory();
    goto done;
  }
  storage->next = *dims;
  *dims = storage;
  if (read_dims(shape, storage->values, ndim) || read_dims(strides, storage->values + MAX_DIMS, ndim)) goto done;
  out->data = (void*)(uintptr_t)data;
  out->dtype = dtype;
  out->device_type = gpu ? HF_DEVICE_GPU : HF_DEVICE_CPU;
  out->device_index = index;
  out->ndim = (int32_t)ndim;
  out->shape = storage->values;
  out->strides = storage->values + MAX_DIMS;
  status = 0;
done:
  Py_DECREF(facts);
  return status;
}

static void free_dims(void* dims) {
  while (dims) {
    void* next = ((Dims*)dims)->next;
    PyMem_Free(dims);
    dims = next;
  }
}

static int view_through_table(const Binder* env, PyObject* object, hf_tensor* out) {
  DlTensor view;
  if (env->table->view_of_object(object, &view)) return -1;
  out->data = (char*)view.data + view.byte_offset;
  out->shape = view.shape;
  out->strides = view.strides;
  out->ndim = view.ndim;
  out->dtype = dtype_of(view.dtype);
  const int32_t device = view.device.device_type;
  if (device == DL_CPU || device == DL_CUDA_HOST || device == DL_ROCM_HOST) {
    out->device_type = HF_DEVICE_CPU;
    out->device_index = 0;
  } else if (device == DL_CUDA || device == DL_ROCM) {
    out->device_type = HF_DEVICE_GPU;
    out->device_index = view.device.device_id;
  } else {
    PyErr_Format(PyExc_BufferError, "its device (DLPack type %d) is neither a CPU nor a GPU", (int)device);
    return -1;
  }
  return 0;
}

/* 1: read; 0: not a plain strided tensor of a CPU or GPU, for the long way to look at. */
static int view_directly(const Torch* torch, PyObject* object, hf_tensor* out) {
  void* tensor = (char*)object + torch->offset;
  int32_t layout = 0, device = 0, index = 0, dtype = 0;
  int64_t ndim = 0, *sizes = NULL, *strides = NULL;
  if (torch->layout(tensor, &layout) || layout != torch->strided || torch->device_type(tensor, &device) ||
      (device != torch->cpu && device != torch->cuda) || torch->device_index(tensor, &index) ||
      torch->data(tensor, &out->data) || torch->dtype(tensor, &dtype) || torch->ndim(tensor, &ndim) ||
      torch->sizes(tensor, &sizes) || torch->strides(tensor, &strides))
    return 0;
  out->shape = sizes;
  out->strides = strides;
  out->ndim = (int32_t)ndim;
  out->dtype = (uint32_t)dtype < sizeof(torch->dtypes) ? torch->dtypes[dtype] : HF_UNKNOWN;
  out->device_type = device == torch->cpu ? HF_DEVICE_CPU : HF_DEVICE_GPU;
  out->device_index = device == torch->cpu ? 0 : index;
  return 1;
}

static int is_plain(const Binder* env, PyObject* object) {
  PyObject* type = (PyObject*)Py_TYPE(object);
  return type == env->tensor_type || type == env->parameter_type;
}

/* torch's functions where they may be used on this tensor: not on a subclass, which may be a shell. */
static const Torch* torch_for(const Binder* env, PyObject* object) {
  return env->torch.offset && is_plain(env, object) ? &env->torch : NULL;
}

static int view(const Binder* env, PyObject* object, hf_tensor* out, void** dims) {
  const Torch* torch = torch_for(env, object);
  if (torch && view_directly(torch, object, out)) return 0;
  return env->table ? view_through_table(env, object, out) : view_through_python(env, object, out, dims);
}

/* Gives a tensor without elements the strides of a contiguous one: its own mean nothing, and torch calls it contiguous
 * whatever they are. The dimensions are chained into *dims. */
static int normalise_empty(hf_tensor* tensor, void** dims) {
  int32_t i = 0;
  while (i < tensor->ndim && tensor->shape[i]) ++i;
  if (i == tensor->ndim || tensor->ndim > MAX_DIMS) return 0;
  Dims* storage = PyMem_Malloc(sizeof(*storage));
  if (!storage) {
    PyErr_NoMemory();
    return -1;
  }
  storage->next = *dims;
  *dims = storage;
  int64_t stride = 1;
  for (i = tensor->ndim; i-- > 0;) {
    storage->values[i] = stride;
    if (tensor->shape[i] > 1) stride *= tensor->shape[i];
  }
  tensor->strides = storage->values;
  return 0;
}

/* Turns torch's refusal to describe a tensor into a GuardError that names the argument; a meta tensor has no data but
 * may have a dispatcher to go to: then 1, as convert(). */
static int unreadable(Entry* self, Py_ssize_t i, PyObject* object) {
  const Binder* env = self->env;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* meta = self->divert ? PyObject_GetAttrString(object, "is_meta") : NULL;
  PyErr_Clear();
  const int diverted = meta == Py_True;
  Py_XDECREF(meta);
  if (!diverted) {
    char reason[200]; /* the first line: torch appends its C++ backtrace */
    PyObject* words = value ? PyObject_Str(value) : NULL;
    const char* text = words ? PyUnicode_AsUTF8AndSize(words, NULL) : NULL;
    PyErr_Clear();
    size_t length = text ? strcspn(text, "\n") : 0;
    if (length >= sizeof(reason)) length = sizeof(reason) - 1;
    if (length) memcpy(reason, text, length);
    reason[length] = 0;
    Py_XDECREF(words);
    PyErr_Format(env->errors[HF_ERROR_GUARD], "%s: argument '%s' is not a plain strided tensor: %s", self->name,
                 self->texts[i], reason);
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return diverted ? 1 : -1;
}

/* Where kernels run decides which tensors are taken. */
static int check_device(Entry* self, Py_ssize_t i, const hf_tensor* tensor, int* device_index) {
  const Binder* env = self->env;
  if (on_gpu(env)) {
    if (tensor->device_type != HF_DEVICE_GPU) {
      PyErr_Format(env->errors[HF_ERROR_GUARD],
                   "%s: argument '%s' is a CPU tensor, but kernels run on the GPU (HIPFORGE_DEVICE=%s or auto); "
                   "move it to the GPU, or set HIPFORGE_DEVICE=emulator for CPU tensors",
                   self->name, self->texts[i], env->target == ON_CUDA ? "cuda" : "hip");
      return -1;
    }
    if (*device_index >= 0 && *device_index != tensor->device_index) {
      PyErr_Format(env->errors[HF_ERROR_GUARD],
                   "%s: argument '%s' is on GPU %d, an earlier one on GPU %d; all tensors of a call share one GPU",
                   self->name, self->texts[i], (int)tensor->device_index, *device_index);
      return -1;
    }
    *device_index = tensor->device_index;
  } else if (tensor->device_type != HF_DEVICE_CPU) {
    PyErr_Format(env->errors[HF_ERROR_GUARD],
                 "%s: argument '%s' is on GPU %d, but kernels run on the emulator, which takes CPU tensors; pass CPU "
                 "tensors, or set HIPFORGE_DEVICE=hip (an AMD GPU and a ROCm build of torch) before the first call",
                 self->name, self->texts[i], (int)tensor->device_index);
    return -1;
  }
  return 0;
}

/* Exact bytes from the first element to the end of the last one. */
static uint64_t extent_bytes(const hf_tensor* tensor) {
  int64_t last = 0;
  for (int32_t i = 0; i < tensor->ndim; ++i) {
    if (tensor->shape[i] == 0) return 0;
    last += (tensor->shape[i] - 1) * tensor->strides[i];
  }
  return (uint64_t)(last + 1) * (uint64_t)dtype_bytes(tensor->dtype);
}

/* The integer that `function` returns for `object`; -1 with an exception set. */
static int64_t integer_of(PyObject* function, PyObject* object) {
  PyObject* result = PyObject_CallFunctionObjArgs(function, object, NULL);
  const int64_t value = result ? PyLong_AsLongLong(result) : -1;
  Py_XDECREF(result);
  return value;
}

static int is_float(int32_t dtype) {
  return dtype == HF_F16 || dtype == HF_BF16 || dtype == HF_F32 || dtype == HF_F64;
}

static int is_suspicious_directly(const Torch* torch, PyObject* object, const hf_tensor* tensor) {
  void* handle = (char*)object + torch->offset;
  int64_t held = 0, offset = 0;
  const uint64_t bytes = extent_bytes(tensor);
  /* Data is null, and a pending sign looked for, without elements too: what a decision's first call refuses, all do. */
  if (!tensor->data || torch->is_negative(handle)) return 1;
  if (torch->storage_bytes(handle, &held) || torch->storage_offset(handle, &offset)) return 1;
  return (uint64_t)offset * (uint64_t)dtype_bytes(tensor->dtype) + bytes > (uint64_t)held;
}

/* Whether a tensor needs the long look of `problem`: 1, 0, or -1 with an exception set. Through Python calls, on a GPU a freed storage shows by
 * an address below 4 GiB (the bare offset); the heap of an interpreter that is not position-independent is there too. Only
 * a GPU's launches are so short that asking for the storage's size would count, so there a storage that was merely shrunk
 * is not looked for. */
static int is_suspicious(const Binder* env, PyObject* object, const hf_tensor* tensor) {
  const Torch* torch = torch_for(env, object);
  if (torch) return is_suspicious_directly(torch, object, tensor);
  const uint64_t bytes = extent_bytes(tensor);
  if (!bytes) return 1;
  if (on_gpu(env) ? !((uint64_t)(uintptr_t)tensor->data >> 32) : !tensor->data) return 1;
  const int32_t dtype = tensor->dtype;
  PyObject* negative = PyObject_CallFunctionObjArgs(env->is_negative, object, NULL);
  if (!negative) return -1;
  Py_DECREF(negative);
  if (negative == Py_True) return 1;
  if (on_gpu(env) || env->storage == Py_None) return 0;
  PyObject* storage = PyObject_CallFunctionObjArgs(env->storage, object, NULL);
  if (!storage) return -1;
  const int64_t held = integer_of(env->storage_bytes, storage);
  Py_DECREF(storage);
  const int64_t offset = held < 0 ? -1 : integer_of(env->storage_offset, object);
  if (offset < 0) return PyErr_Occurred() ? -1 : 1;
  return (uint64_t)offset * (uint64_t)dtype_bytes(dtype) + bytes > (uint64_t)held;
}

static int check_hidden(Entry* self, Py_ssize_t i, PyObject* object, const hf_tensor* tensor) {
  const Binder* env = self->env;
  const int suspicious = is_suspicious(env, object, tensor);
  if (suspicious <= 0) return suspicious;
  PyObject* words = PyObject_CallFunctionObjArgs(env->problem, object, NULL);
  if (!words) return -1;
  const int bad = words != Py_None;
  if (bad) PyErr_Format(env->errors[HF_ERROR_GUARD], "%s: argument '%s' %U", self->name, self->texts[i], words);
  Py_DECREF(words);
  return bad ? -1 : 0;
}

/* *recording: whether torch records gradients, -1 until asked. */
static int check_gradient(Entry* self, Py_ssize_t i, PyObject* object, int32_t dtype, int* recording) {
  const Binder* env = self->env;
  if (!is_float(dtype)) return 0;
  const Torch* torch = torch_for(env, object);
  if (torch) {
    if (!torch->grad_enabled() || !torch->requires_grad(*(void**)((char*)object + torch->offset))) return 0;
    *recording = 1;
  } else if (*recording < 0) {
    PyObject* enabled = PyObject_CallNoArgs(env->grad_enabled);
    if (!enabled) return -1;
    *recording = enabled == Py_True;
    Py_DECREF(enabled);
  }
  if (!*recording) return 0;
  PyObject* required = PyObject_GetAttr(object, requires_grad_name);
  if (!required) return -1;
  const int requires = required == Py_True;
  Py_DECREF(required);
  if (!requires) return 0;
  if (self->writable[i]) {
    PyErr_Format(env->errors[HF_ERROR_GUARD],
                 "%s: argument '%s' is written and requires grad, which autograd would not see; pass it detached, or "
                 "call under torch.no_grad()",
                 self->name, self->texts[i]);
    return -1;
  }
  PyObject* done = PyObject_CallFunction(env->drop_gradient, "ss", self->name, self->texts[i]);
  Py_XDECREF(done);
  return done ? 0 : -1;
}

/* 0 converted, 1 the call must take the torch dispatcher, -1 error set */
static int convert(Entry* self, Py_ssize_t i, PyObject* object, hf_arg* arg, int* device_index, void** dims,
                   int* recording) {
  const Binder* env = self->env;
  switch (self->kinds[i]) {
    case 't':
      if (object == Py_None) {
        arg->kind = HF_KIND_NONE;
        return 0;
      }
      /* fall through */
    case 'T': {
      if (!is_plain(env, object)) {
        const int known = PyObject_IsInstance(object, env->tensor_type);
        if (known < 0) return -1;
        if (!known) return refuse(self, i, self->kinds[i] == 't' ? "a torch.Tensor or None" : "a torch.Tensor", object);
        if (self->divert) return 1;
      }
      hf_tensor* tensor = &arg->value.tensor;
      arg->kind = HF_KIND_TENSOR;
      if (view(env, object, tensor, dims)) return unreadable(self, i, object);
      if (normalise_empty(tensor, dims)) return -1;
      if (tensor->dtype == HF_UNKNOWN) {
        PyObject* dtype = PyObject_GetAttrString(object, "dtype");
        PyErr_Format(env->errors[HF_ERROR_GUARD],
                     "%s: argument '%s' has dtype %S, which no kernel takes; accepted: bool, uint8, int8 to int64, "
                     "float16, bfloat16, float32, float64, float8 types and float4_e2m1fn_x2",
                     self->name, self->texts[i], dtype ? dtype : Py_None);
        Py_XDECREF(dtype);
        return -1;
      }
      if (check_device(self, i, tensor, device_index) || check_hidden(self, i, object, tensor)) return -1;
      return check_gradient(self, i, object, tensor->dtype, recording);
    }
    case 'i': {
      arg->kind = HF_KIND_INT;
      if (PyLong_Check(object)) {
        arg->value.i = PyLong_AsLongLong(object);
      } else {
        PyObject* index = PyNumber_Index(object);
        if (!index) {
          PyErr_Clear();
          return refuse(self, i, "an int", object);
        }
        arg->value.i = PyLong_AsLongLong(index);
        Py_DECREF(index);
      }
      if (arg->value.i == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Format(env->errors[HF_ERROR_GUARD], "%s: argument '%s' = %R does not fit 64 bits", self->name,
                     self->texts[i], object);
        return -1;
      }
      return 0;
    }
    case 'd':
      arg->kind = HF_KIND_FLOAT;
      arg->value.f = PyFloat_AsDouble(object);
      if (arg->value.f == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return refuse(self, i, "a float", object);
      }
      return 0;
    case 'b':
      if (object != Py_True && object != Py_False) return refuse(self, i, "True or False", object);
      arg->kind = HF_KIND_BOOL;
      arg->value.i = object == Py_True;
      return 0;
    default: {
      Py_ssize_t length = 0;
      if (!PyUnicode_Check(object)) return refuse(self, i, "a str", object);
      arg->kind = HF_KIND_STRING;
      arg->value.s = PyUnicode_AsUTF8AndSize(object, &length);
      if (!arg->value.s) return -1;
      if ((Py_ssize_t)strlen(arg->value.s) != length) return refuse(self, i, "a str without zero characters", object);
      return 0;
    }
  }
}

static int current_stream(const Binder* env, int device_index, void** out) {
  if (env->table) return env->table->current_stream(env->target == ON_CUDA ? DL_CUDA : DL_ROCM, device_index, out);
  PyObject* stream = PyObject_CallFunction(env->read_stream, "i", device_index);
  if (!stream) return -1;
  *out = PyLong_AsVoidPtr(stream);
  Py_DECREF(stream);
  return PyErr_Occurred() ? -1 : 0;
}

static void raise_entry_error(Entry* self, int kind, const char* message, const char* fault) {
  const Binder* env = self->env;
  /* An interrupted launch reports the handler's exception, not its own abort: the emulator's poll leaves it set. */
  if (PyErr_Occurred() || PyErr_CheckSignals()) return;
  if (fault) {
    PyErr_Format(env->errors[0], "%s: %s", self->name, fault);
  } else {
    if (kind < HF_ERROR_GUARD || kind > HF_ERROR_OTHER) kind = HF_ERROR_OTHER;
    PyErr_Format(env->errors[kind], "%s: %s", self->name, message);
  }
}

/* Runs the entry without the GIL, on the tensors' device; 0, or -1 with an exception set. */
static int run_on_gpu(Entry* self, hf_call* call, int device_index) {
  const Binder* env = self->env;
  if (current_stream(env, device_index, &call->stream)) return -1;
  int previous = device_index, status = 0, kind = 0;
  PyThreadState* thread = PyEval_SaveThread();
  status = env->get_device(&previous);
  if (!status && previous != device_index) status = env->set_device(device_index);
  if (!status) kind = self->entry(call);
  if (!status && previous != device_index) env->set_device(previous);
  PyEval_RestoreThread(thread);
  if (status) {
    PyErr_Format(env->errors[HF_ERROR_LAUNCH], "%s: %s error %d on making GPU %d the current one", self->name,
                 env->target == ON_CUDA ? "CUDA" : "HIP", status, device_index);
    return -1;
  }
  if (kind) raise_entry_error(self, kind, call->error, NULL);
  return PyErr_Occurred() ? -1 : 0;
}

static int run_on_emulator(Entry* self, hf_call* call) {
  const Binder* env = self->env;
  Extent extents[MAX_ARGS];
  int32_t count = 0;
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    const hf_arg* arg = &call->args[i];
    if (arg->kind != HF_KIND_TENSOR) continue;
    Extent* extent = &extents[count++];
    extent->name = self->texts[i];
    extent->base = (uint64_t)(uintptr_t)arg->value.tensor.data;
    extent->bytes = extent_bytes(&arg->value.tensor);
    extent->writable = self->writable[i];
    extent->reserved = 0;
  }
  PyThreadState* thread = PyEval_SaveThread();
  if (env->emulator_stream) call->stream = env->emulator_stream();
  env->clear_error();
  env->push_extents(extents, count);
  const int kind = self->entry(call);
  env->pop_extents();
  /* A fault counts even if the entry forgot to ask hipGetLastError. */
  const char* fault = kind == HF_OK || kind == HF_ERROR_LAUNCH ? env->last_error() : NULL;
  PyEval_RestoreThread(thread);
  if (kind || fault || PyErr_Occurred()) {
    raise_entry_error(self, kind, call->error, fault);
    return -1;
  }
  return 0;
}

static int run_on_host(Entry* self, hf_call* call) {
  PyThreadState* thread = PyEval_SaveThread();
  const int kind = self->entry(call);
  PyEval_RestoreThread(thread);
  if (kind) raise_entry_error(self, kind, call->error, NULL);
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject* arguments_tuple(PyObject* const* args, Py_ssize_t count) {
  PyObject* tuple = PyTuple_New(count);
  if (!tuple) return NULL;
  for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
  return tuple;
}


static int64_t mode_depth(const Binder* env) {
  if (env->torch.offset) return env->torch.mode_depth();
  PyObject* depth = PyObject_CallNoArgs(env->mode_depth);
  const int64_t active = depth ? PyLong_AsLongLong(depth) : -1;
  Py_XDECREF(depth);
  return active;
}

static PyObject* call_with(PyObject* callable, PyObject* const* args, Py_ssize_t count) {
  if (HAS_VECTORCALL) return PyObject_Vectorcall(callable, args, (size_t)count, NULL);
  PyObject* tuple = arguments_tuple(args, count);
  if (!tuple) return NULL;
  PyObject* result = PyObject_CallObject(callable, tuple);
  Py_DECREF(tuple);
  return result;
}

/* The loaded entry for these arguments, a borrowed reference; NULL without an exception if there is none yet. */
static PyObject* find_variant(Entry* self, PyObject* const* args) {
  PyObject* chosen = call_with(self->variant, args, self->count);
  PyObject *found = NULL, *key = NULL, *name = NULL, *value = NULL;
  Py_ssize_t position = 0;
  if (!chosen || !PyDict_Check(chosen)) goto done;
  const Py_ssize_t size = PyDict_Size(chosen);
  if (size == 1) {
    PyDict_Next(chosen, &position, &name, &value);
    key = Py_NewRef(value);
  } else {
    key = PyTuple_New(size);
    for (Py_ssize_t i = 0; key && PyDict_Next(chosen, &position, &name, &value); ++i)
      PyTuple_SetItem(key, i, Py_NewRef(value));
  }
  if (key) found = PyDict_GetItemWithError(self->entries, key);
done:
  Py_XDECREF(key);
  Py_XDECREF(chosen);
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear(); /* load() finds it again */
  return found;
}

static PyObject* entry_call(PyObject* object, PyObject* const* args, Py_ssize_t given, PyObject* kwnames);

/* The bound entry behind a function that this binding made, or NULL. */
static Entry* entry_of(Entry* self, PyObject* function) {
  if (Py_TYPE(function) != &PyCFunction_Type || PyCFunction_GetFunction(function) != self->method.ml_meth) return NULL;
  Entry* entry = (Entry*)PyCFunction_GetSelf(function);
  return entry->entry && entry->count == self->count ? entry : NULL;
}

/* Writes what a variant function may go by: shapes, strides, dtypes and numbers, no addresses. The count, or 0: too many, or a
 * str among them. */
static int32_t facts_of(const Entry* self, const hf_arg* args, int64_t* facts) {
  int32_t count = 0;
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    const hf_arg* arg = &args[i];
    const int32_t axes = arg->kind == HF_KIND_TENSOR ? arg->value.tensor.ndim : 0;
    if (arg->kind == HF_KIND_STRING || count + 2 + 2 * axes > MAX_FACTS) return 0;
    if (arg->kind != HF_KIND_TENSOR) {
      facts[count++] = arg->kind == HF_KIND_NONE ? INT64_MIN : arg->value.i; /* a double's bits too */
      continue;
    }
    facts[count++] = (int64_t)arg->value.tensor.dtype << 32 | axes;
    for (int32_t axis = 0; axis < axes; ++axis) {
      facts[count++] = arg->value.tensor.shape[axis];
      facts[count++] = arg->value.tensor.strides[axis];
    }
  }
  return count;
}

static Choice* place_of(const Entry* self, const Choice* wanted) {
  uint64_t hash = 0;
  for (int32_t i = 0; i < wanted->count; ++i) hash = (hash + (uint64_t)wanted->facts[i]) * 0x9E3779B97F4A7C15u;
  return &self->choices[hash % CHOICES];
}

/* What was chosen for these facts before, a borrowed reference; or NULL. */
static PyObject* chosen(const Entry* self, const Choice* wanted) {
  if (!wanted->count || !self->choices) return NULL;
  const Choice* place = place_of(self, wanted);
  const size_t bytes = (size_t)wanted->count * sizeof(*wanted->facts);
  return place->count == wanted->count && !memcmp(place->facts, wanted->facts, bytes) ? place->function : NULL;
}

static void remember(Entry* self, const Choice* wanted, PyObject* function) {
  if (!self->any) self->any = Py_NewRef(function);
  if (!wanted || !wanted->count) return;
  if (!self->choices) self->choices = PyMem_Calloc(CHOICES, sizeof(Choice));
  if (!self->choices) return;
  Choice* place = place_of(self, wanted);
  PyObject* before = place->function;
  memcpy(place, wanted, sizeof(*place));
  place->function = Py_NewRef(function);
  Py_XDECREF(before);
}

static PyObject* call_variant(Entry* self, PyObject* const* args, const Choice* wanted) {
  PyObject* function = find_variant(self, args);
  if (PyErr_Occurred()) return NULL;
  if (function && entry_of(self, function)) {
    remember(self, wanted, function);
    return entry_call(PyCFunction_GetSelf(function), args, self->count, NULL);
  }
  PyObject* tuple = arguments_tuple(args, self->count);
  if (!tuple) return NULL;
  PyObject* loaded = function ? Py_NewRef(function) : PyObject_CallFunctionObjArgs(self->load, tuple, NULL);
  PyObject* result = loaded ? PyObject_CallObject(loaded, tuple) : NULL;
  Py_XDECREF(loaded);
  Py_DECREF(tuple);
  return result;
}

/* ---- what is written shares no byte with another argument, unless that is only read and the very same view ---- */

enum { MAX_NESTED = 8 }; /* axes of more than one element that are told apart; of more, spans decide */

typedef struct {
  uint64_t begin, end;
  int64_t stride[MAX_NESTED], count[MAX_NESTED], below[MAX_NESTED + 1]; /* bytes; longest first; span from an axis on */
  int32_t axes;
} Footprint;

static int footprint(const hf_tensor* tensor, Footprint* out) {
  const int64_t bytes = dtype_bytes(tensor->dtype);
  out->axes = 0;
  for (int32_t i = 0; i < tensor->ndim; ++i) {
    if (tensor->shape[i] == 1) continue;
    if (out->axes == MAX_NESTED) return 0;
    int32_t at = out->axes++;
    const int64_t stride = tensor->strides[i] * bytes;
    for (; at > 0 && out->stride[at - 1] < stride; --at)
      out->stride[at] = out->stride[at - 1], out->count[at] = out->count[at - 1];
    out->stride[at] = stride, out->count[at] = tensor->shape[i];
  }
  out->below[out->axes] = bytes;
  for (int32_t at = out->axes; at-- > 0;) out->below[at] = out->below[at + 1] + (out->count[at] - 1) * out->stride[at];
  return 1;
}

/* Whether b, which starts `offset` bytes after a, may share a byte with it, both from axis `at` on. */
static int may_meet(const Footprint* a, const Footprint* b, int32_t at, int64_t offset) {
  if (offset >= a->below[at] || -offset >= b->below[at]) return 0;
  if (at == a->axes || at == b->axes || a->stride[at] != b->stride[at]) return 1;
  const int64_t step = a->stride[at];
  if (step < a->below[at + 1] || step < b->below[at + 1] || step <= 0) return 1;
  const int64_t rest = (offset % step + step) % step;
  return may_meet(a, b, at + 1, rest) || may_meet(a, b, at + 1, rest - step);
}

static int same_view(const hf_tensor* a, const hf_tensor* b) {
  const size_t bytes = (size_t)a->ndim * sizeof(int64_t);
  return a->data == b->data && a->dtype == b->dtype && a->ndim == b->ndim && !memcmp(a->shape, b->shape, bytes) &&
         !memcmp(a->strides, b->strides, bytes);
}

static int is_packed(const hf_tensor* tensor) {
  int64_t expected = 1;
  for (int32_t i = tensor->ndim - 1; i >= 0; --i) {
    if (tensor->shape[i] != 1 && tensor->strides[i] != expected) return 0;
    expected *= tensor->shape[i];
  }
  return 1;
}

/* Whether two elements of a tensor are the same memory, as those of an expanded one. */
static int meets_itself(const hf_tensor* tensor) {
  Footprint own;
  if (is_packed(tensor) || !footprint(tensor, &own)) return 0;
  for (int32_t at = 0; at < own.axes; ++at)
    if (own.stride[at] < own.below[at + 1]) return 1;
  return 0;
}

static int check_apart(Entry* self, const hf_arg* args) {
  uint64_t begin[MAX_ARGS], end[MAX_ARGS];
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    begin[i] = end[i] = 0;
    if (args[i].kind != HF_KIND_TENSOR) continue;
    begin[i] = (uint64_t)(uintptr_t)args[i].value.tensor.data;
    end[i] = begin[i] + extent_bytes(&args[i].value.tensor);
  }
  for (Py_ssize_t i = 0; i < self->count; ++i) {
    if (!self->writable[i] || begin[i] == end[i]) continue;
    if (meets_itself(&args[i].value.tensor)) {
      PyErr_Format(self->env->errors[HF_ERROR_GUARD],
                   "%s: %s is written and must not be expanded: its rows share memory; pass a clone", self->name,
                   self->texts[i]);
      return -1;
    }
    for (Py_ssize_t j = 0; j < self->count; ++j) {
      if (j == i || begin[j] == end[j] || begin[i] >= end[j] || begin[j] >= end[i]) continue;
      const hf_tensor *written = &args[i].value.tensor, *other = &args[j].value.tensor;
      Footprint one, two;
      if (same_view(written, other) && !self->writable[j]) continue;
      if (footprint(written, &one) && footprint(other, &two) && !may_meet(&one, &two, 0, (int64_t)(begin[j] - begin[i])))
        continue;
      PyErr_Format(self->env->errors[HF_ERROR_GUARD],
                   "%s: %s is written and must not share memory with %s; pass a tensor of its own", self->name,
                   self->texts[i], self->texts[j]);
      return -1;
    }
  }
  return 0;
}

static PyObject* entry_call(PyObject* object, PyObject* const* args, Py_ssize_t given, PyObject* kwnames) {
  Entry* self = (Entry*)object;
  const Binder* env = self->env;
  PyObject* ordered[MAX_ARGS];
  if (kwnames || given != self->count) {
    if (order_arguments(self, args, given, kwnames, ordered)) return NULL;
    args = ordered;
  }
  Entry* chooser = self->variant ? self : NULL;
  if (chooser) {
    if (!chooser->any) return call_variant(chooser, args, NULL);
    self = (Entry*)PyCFunction_GetSelf(chooser->any);
  }
  if (self->divert) {
    const int64_t depth = mode_depth(env);
    if (depth) return depth < 0 ? NULL : call_with(self->divert, args, self->count);
  }
  hf_arg converted[MAX_ARGS];
  hf_call call;
  call.args = converted;
  call.num_args = (int32_t)self->count;
  call.error_kind = HF_OK;
  call.stream = NULL;
  call.error[0] = 0;
  void* dims = NULL;
  int device_index = -1;
  int recording = -1;
  int status = 0;
  for (Py_ssize_t i = 0; i < self->count && !status; ++i)
    status = convert(self, i, args[i], &converted[i], &device_index, &dims, &recording);
  if (chooser) {
    /* What an argument that is refused here breaks first, a variant function or load(), has the better words. */
    if (status < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) {
      free_dims(dims);
      return NULL;
    }
    if (status < 0) PyErr_Clear();
    Choice wanted;
    wanted.count = status ? 0 : facts_of(chooser, converted, wanted.facts);
    PyObject* function = chosen(chooser, &wanted);
    if (!function) {
      free_dims(dims);
      return call_variant(chooser, args, &wanted);
    }
    self = (Entry*)PyCFunction_GetSelf(function);
  }
  PyObject* keep = Py_NewRef((PyObject*)self); /* another thread may take its place among the choices */
  if (status == 0) status = check_apart(self, converted);
  if (status == 0) {
    status = on_gpu(env)                   ? run_on_gpu(self, &call, device_index)
             : env->target == ON_EMULATOR ? run_on_emulator(self, &call)
                                         : run_on_host(self, &call);
  }
  free_dims(dims);
  PyObject* result = NULL;
  if (status > 0) result = call_with(self->divert, args, self->count);
  if (status == 0) result = Py_NewRef(Py_None);
  Py_DECREF(keep);
  return result;
}

static void entry_dealloc(PyObject* object) {
  Entry* self = (Entry*)object;
  PyTypeObject* type = Py_TYPE(object);
  PyMem_Free(self->name);
  PyMem_Free(self->kinds);
  PyMem_Free((void*)self->texts);
  PyMem_Free(self->writable);
  Py_XDECREF(self->names);
  Py_XDECREF(self->defaults);
  Py_XDECREF(self->divert);
  Py_XDECREF(self->owner);
  Py_XDECREF(self->variant);
  Py_XDECREF(self->entries);
  Py_XDECREF(self->load);
  Py_XDECREF(self->any);
  for (int i = 0; self->choices && i < CHOICES; ++i) Py_XDECREF(self->choices[i].function);
  PyMem_Free(self->choices);
  Py_XDECREF((PyObject*)self->env);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static char* copy_text(const char* text) {
  const size_t bytes = strlen(text) + 1;
  char* copy = PyMem_Malloc(bytes);
  if (copy) memcpy(copy, text, bytes);
  return copy;
}

static PyObject* function_of(Entry* self) {
  self->method.ml_name = self->name;
  self->method.ml_meth = (PyCFunction)(void (*)(void))entry_call;
  self->method.ml_flags = METH_FASTCALL | METH_KEYWORDS;
  return PyCFunction_NewEx(&self->method, (PyObject*)self, NULL);
}

/* A new entry with what both uses share; NULL with an exception set. */
static Entry* new_entry(PyObject* binder, const char* name, PyObject* names, PyObject* defaults) {
  const Py_ssize_t count = PyTuple_Size(names);
  if (count > MAX_ARGS || PyTuple_Size(defaults) > count) {
    PyErr_Format(PyExc_ValueError, "%s has %zd arguments and %zd defaults; at most %d arguments are supported", name,
                 count, PyTuple_Size(defaults), (int)MAX_ARGS);
    return NULL;
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject*)entry_type, Py_tp_alloc);
  Entry* self = (Entry*)allocate((PyTypeObject*)entry_type, 0);
  if (!self) return NULL;
  self->env = (Binder*)Py_NewRef(binder);
  self->count = count;
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  self->name = copy_text(name);
  self->texts = PyMem_Malloc((size_t)(count ? count : 1) * sizeof(*self->texts));
  if (!self->name || !self->texts) {
    PyErr_NoMemory();
    Py_DECREF(self);
    return NULL;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    self->texts[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, i), NULL);
    if (!self->texts[i]) {
      Py_DECREF(self);
      return NULL;
    }
  }
  return self;
}

/* Binder.bind(address, name, kinds, names, writable, defaults, divert, owner) -> function
 * kinds: signature letters; names: tuple of str; writable: bytes, one per argument; divert: callable or None. */
static PyObject* binder_bind(PyObject* binder, PyObject* args) {
  unsigned long long address = 0;
  const char *name = NULL, *kinds = NULL;
  PyObject *names = NULL, *writable = NULL, *defaults = NULL, *divert = NULL, *owner = NULL;
  /* No # formats: what they compile to in the headers of Python 3.13 is refused by 3.12. */
  if (!PyArg_ParseTuple(args, "KssO!SO!OO", &address, &name, &kinds, &PyTuple_Type, &names, &writable, &PyTuple_Type,
                        &defaults, &divert, &owner))
    return NULL;
  const Py_ssize_t count = PyTuple_Size(names);
  if (count != (Py_ssize_t)strlen(kinds) || count != PyBytes_Size(writable)) {
    PyErr_SetString(PyExc_ValueError, "names, kinds and writable differ in length");
    return NULL;
  }
  Entry* self = new_entry(binder, name, names, defaults);
  if (!self) return NULL;
  self->entry = (int (*)(hf_call*))(uintptr_t)address;
  self->divert = divert == Py_None ? NULL : Py_NewRef(divert);
  self->owner = Py_NewRef(owner);
  self->kinds = copy_text(kinds);
  self->writable = PyMem_Malloc((size_t)(count ? count : 1));
  PyObject* function = NULL;
  if (!self->kinds || !self->writable) {
    PyErr_NoMemory();
  } else {
    memcpy(self->writable, PyBytes_AsString(writable), (size_t)count);
    function = function_of(self);
  }
  Py_DECREF(self);
  return function;
}

/* Binder.dispatch(name, names, defaults, variant, entries, load) -> function; see Entry's fields. */
static PyObject* binder_dispatch(PyObject* binder, PyObject* args) {
  const char* name = NULL;
  PyObject *names = NULL, *defaults = NULL, *variant = NULL, *entries = NULL, *load = NULL;
  if (!PyArg_ParseTuple(args, "sO!O!OO!O", &name, &PyTuple_Type, &names, &PyTuple_Type, &defaults, &variant,
                        &PyDict_Type, &entries, &load))
    return NULL;
  Entry* self = new_entry(binder, name, names, defaults);
  if (!self) return NULL;
  self->variant = Py_NewRef(variant);
  self->entries = Py_NewRef(entries);
  self->load = Py_NewRef(load);
  PyObject* function = function_of(self);
  Py_DECREF(self);
  return function;
}

/* make_binder(target, tensor_type, parameter_type, errors, mode_depth, read_tensor, read_stream, table_capsule,
 *           addresses, checks, torch): target 0 host, 1 emulator, 2 hip, 3 cuda; errors: five exception classes, EmulatorFault first;
 * addresses: seven ints: push, pop, last_error, clear_error and stream of the emulator, the functions that get and set
 * a thread's GPU
 * (0: none).
 * checks: (problem, is_negative, storage, storage_bytes, storage_offset, grad_enabled, drop_gradient, part,
 * dtype_type), as in Binder.
 * table_capsule: torch's DLPack exchange table, or None to read tensors through the two callables.
 * torch: (offset, addresses, strided, cpu, cuda, dtypes) as in Torch, or None. */
static int read_torch(PyObject* given, Torch* out) {
  PyObject *addresses = NULL, *dtypes = NULL;
  unsigned long long found[TORCH_FUNCTIONS];
  if (!PyArg_ParseTuple(given, "LO!iiiS", &out->offset, &PyTuple_Type, &addresses, &out->strided, &out->cpu, &out->cuda,
                        &dtypes))
    return -1;
  if (PyTuple_Size(addresses) != TORCH_FUNCTIONS || PyBytes_Size(dtypes) != sizeof(out->dtypes)) {
    PyErr_SetString(PyExc_ValueError, "another number of functions or dtypes of torch is expected");
    return -1;
  }
  for (int i = 0; i < TORCH_FUNCTIONS; ++i) {
    found[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(addresses, i));
    if (PyErr_Occurred()) return -1;
  }
  memcpy(&out->layout, found, sizeof(found)); /* the functions stand in this order */
  memcpy(out->dtypes, PyBytes_AsString(dtypes), sizeof(out->dtypes));
  return 0;
}

static PyObject* module_make_binder(PyObject* module, PyObject* args) {
  (void)module;
  int target = 0;
  PyObject *tensor_type, *parameter_type, *errors, *mode_depth, *read_tensor, *read_stream, *capsule;
  PyObject *problem, *is_negative, *storage, *storage_bytes, *storage_offset, *grad_enabled, *drop_gradient, *torch;
  PyObject *part, *dtype_type;
  unsigned long long a[7];
  if (!PyArg_ParseTuple(args, "iOOO!OOOO(KKKKKKK)(OOOOOOOOO)O", &target, &tensor_type, &parameter_type, &PyTuple_Type, &errors,
                        &mode_depth, &read_tensor, &read_stream, &capsule, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5],
                        &a[6], &problem, &is_negative, &storage, &storage_bytes, &storage_offset, &grad_enabled, &drop_gradient, &part,
                        &dtype_type, &torch))
    return NULL;
  if (PyTuple_Size(errors) != 5 || target < ON_HOST || target > ON_CUDA) {
    PyErr_SetString(PyExc_ValueError, "five exception classes and a target of 0 to 3 are expected");
    return NULL;
  }
  const DlExchangeTable* table = NULL;
  if (capsule != Py_None) {
    table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table) return NULL;
    if (table->major != 1 || !table->view_of_object || !table->current_stream) table = NULL;
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject*)binder_type, Py_tp_alloc);
  Binder* env = (Binder*)allocate((PyTypeObject*)binder_type, 0);
  if (!env) return NULL;
  env->target = (Target)target;
  if (torch != Py_None && read_torch(torch, &env->torch)) {
    Py_DECREF((PyObject*)env);
    return NULL;
  }
  env->tensor_type = Py_NewRef(tensor_type);
  env->parameter_type = Py_NewRef(parameter_type);
  for (int i = 0; i < 5; ++i) env->errors[i] = Py_NewRef(PyTuple_GetItem(errors, i));
  env->mode_depth = Py_NewRef(mode_depth);
  env->read_tensor = Py_NewRef(read_tensor);
  env->read_stream = Py_NewRef(read_stream);
  env->problem = Py_NewRef(problem);
  env->is_negative = Py_NewRef(is_negative);
  env->storage = Py_NewRef(storage);
  env->storage_bytes = Py_NewRef(storage_bytes);
  env->storage_offset = Py_NewRef(storage_offset);
  env->grad_enabled = Py_NewRef(grad_enabled);
  env->drop_gradient = Py_NewRef(drop_gradient);
  env->part = Py_NewRef(part);
  env->dtype_type = Py_NewRef(dtype_type);
  env->table = table;
  env->push_extents = (void (*)(const Extent*, int32_t))(uintptr_t)a[0];
  env->pop_extents = (void (*)(void))(uintptr_t)a[1];
  env->last_error = (const char* (*)(void))(uintptr_t)a[2];
  env->clear_error = (void (*)(void))(uintptr_t)a[3];
  env->emulator_stream = (void* (*)(void))(uintptr_t)a[4];
  env->get_device = (int (*)(int*))(uintptr_t)a[5];
  env->set_device = (int (*)(int))(uintptr_t)a[6];
  return (PyObject*)env;
}

static void binder_dealloc(PyObject* object) {
  Binder* env = (Binder*)object;
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF(env->tensor_type);
  Py_XDECREF(env->parameter_type);
  for (int i = 0; i < 5; ++i) Py_XDECREF(env->errors[i]);
  Py_XDECREF(env->mode_depth);
  Py_XDECREF(env->read_tensor);
  Py_XDECREF(env->read_stream);
  Py_XDECREF(env->problem);
  Py_XDECREF(env->is_negative);
  Py_XDECREF(env->storage);
  Py_XDECREF(env->storage_bytes);
  Py_XDECREF(env->storage_offset);
  Py_XDECREF(env->grad_enabled);
  Py_XDECREF(env->drop_gradient);
  Py_XDECREF(env->part);
  Py_XDECREF(env->dtype_type);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyMethodDef module_methods[] = {
    {"make_binder", module_make_binder, METH_VARARGS, "Make a binder for one device, set of types and exceptions."},
    {NULL, NULL, 0, NULL},
};
/* Binder.facts(tensor) -> what torch's functions say: (data, dtype, on a GPU, index, shape, strides, bytes of its storage, storage
 * offset, negative, requires grad), gradients are recorded, modes; None: nothing. For trying them against Python's answers. */
static PyObject* binder_facts(PyObject* binder, PyObject* object) {
  const Torch* torch = torch_for((Binder*)binder, object);
  hf_tensor tensor;
  int64_t held = 0, offset = 0;
  if (!torch || !view_directly(torch, object, &tensor)) Py_RETURN_NONE;
  void* handle = (char*)object + torch->offset;
  if (torch->storage_bytes(handle, &held) || torch->storage_offset(handle, &offset)) Py_RETURN_NONE;
  PyObject *shape = PyTuple_New(tensor.ndim), *strides = PyTuple_New(tensor.ndim);
  for (int32_t i = 0; shape && strides && i < tensor.ndim; ++i) {
    PyTuple_SetItem(shape, i, PyLong_FromLongLong(tensor.shape[i]));
    PyTuple_SetItem(strides, i, PyLong_FromLongLong(tensor.strides[i]));
  }
  return Py_BuildValue("(KiNiNNLLNN)NL", (unsigned long long)(uintptr_t)tensor.data, tensor.dtype,
                       PyBool_FromLong(tensor.device_type == HF_DEVICE_GPU), tensor.device_index, shape, strides, held,
                       offset, PyBool_FromLong(torch->is_negative(handle)),
                       PyBool_FromLong(torch->requires_grad(*(void**)handle)), PyBool_FromLong(torch->grad_enabled()),
                       torch->mode_depth());
}

/* ---- what a decision may depend on, as one hashable value ---- */

typedef struct {
  uint32_t words[256];
  int32_t count;
} Words;

static int put(Words* out, uint64_t value) {
  if (out->count + 3 > (int32_t)(sizeof(out->words) / sizeof(*out->words))) return 0;
  if (value < UINT32_MAX) {
    out->words[out->count++] = (uint32_t)value;
  } else { /* a mark, then both halves: no other words read the same */
    out->words[out->count++] = UINT32_MAX;
    out->words[out->count++] = (uint32_t)value;
    out->words[out->count++] = (uint32_t)(value >> 32);
  }
  return 1;
}

enum { NOTHING = 1, BOOLEAN, INTEGER, REAL, DTYPE, TENSOR, STRIDED_TENSOR }; /* what the words of an argument begin with */

/* Whether torch calls a tensor of these sizes and strides contiguous. */
static int is_row_major(int64_t ndim, const int64_t* sizes, const int64_t* strides) {
  int64_t stride = 1, matches = 1;
  for (int64_t i = ndim; i-- > 0;) {
    if (!sizes[i]) return 1; /* without elements */
    matches &= sizes[i] == 1 || strides[i] == stride;
    stride *= sizes[i];
  }
  return (int)matches;
}

/* Writes an argument's words: 1, or 0 if it has none. */
static int describe_one(const Binder* env, PyObject* object, Words* out) {
  const PyTypeObject* type = Py_TYPE(object);
  const Torch* torch = torch_for(env, object);
  if (torch) {
    void* tensor = (char*)object + torch->offset;
    int32_t device = 0, index = 0, dtype = 0;
    int64_t ndim = 0, *sizes = NULL, *strides = NULL;
    if (torch->device_type(tensor, &device) || torch->device_index(tensor, &index) || torch->dtype(tensor, &dtype) ||
        torch->ndim(tensor, &ndim) || torch->sizes(tensor, &sizes) || torch->strides(tensor, &strides))
      return 0;
    const uint64_t kind = is_row_major(ndim, sizes, strides) ? TENSOR : STRIDED_TENSOR;
    int fits = put(out, kind | (uint64_t)(uint8_t)ndim << 8 | (uint64_t)(uint8_t)dtype << 16 | (uint64_t)(uint8_t)device << 24) &&
               put(out, (uint32_t)index);
    for (int64_t i = 0; fits && i < ndim; ++i) fits = put(out, (uint64_t)sizes[i]);
    return fits;
  }
  if (object == Py_None) return put(out, NOTHING);
  if (object == Py_True || object == Py_False) return put(out, BOOLEAN | (object == Py_True) << 8);
  if ((PyObject*)type == env->dtype_type) return put(out, DTYPE) && put(out, (uint64_t)(uintptr_t)object);
  if (type == &PyFloat_Type) {
    const double value = PyFloat_AsDouble(object);
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return put(out, REAL) && put(out, bits);
  }
  if (type != &PyLong_Type) return 0;
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  return put(out, INTEGER) && put(out, (uint64_t)value);
}

/* What Python says of every argument, for those that do not fit the words. */
static PyObject* describe_at_length(const Binder* env, PyObject* const* args, Py_ssize_t count) {
  PyObject* parts = PyTuple_New(count);
  for (Py_ssize_t i = 0; parts && i < count; ++i) {
    PyObject* part = PyObject_CallFunctionObjArgs(env->part, args[i], NULL);
    if (!part) {
      Py_DECREF(parts);
      return NULL;
    }
    PyTuple_SetItem(parts, i, part);
  }
  return parts;
}

/* Binder.describe(*arguments) -> hashable: shapes, dtypes and devices of tensors and whether they are contiguous, values and
 * types of all else. */
static PyObject* binder_describe(PyObject* binder, PyObject* const* args, Py_ssize_t count) {
  Words words;
  words.count = 0;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!describe_one((Binder*)binder, args[i], &words)) return describe_at_length((Binder*)binder, args, count);
  return PyBytes_FromStringAndSize((const char*)words.words, (Py_ssize_t)words.count * 4);
}

/* Binder.modes() -> how many dispatch modes are active. */
static PyObject* binder_modes(PyObject* binder, PyObject* unused) {
  (void)unused;
  const int64_t depth = mode_depth((Binder*)binder);
  return depth < 0 ? NULL : PyLong_FromLongLong(depth);
}

/* ---- what autograd sees of an operator, where there is nothing for it to do ---- */

typedef struct {
  PyObject_HEAD
  PyMethodDef method;
  Binder* env;
  PyObject* holder; /* dict: "kernel" is what runs the operator on real tensors */
  PyObject* slow;   /* takes every other call */
  PyObject* level;  /* of torch.func's transforms: None outside of them */
} Route;

static PyObject* route_type;

/* Whether torch has nothing to do with a call: no mode, no subclass, nothing but tensors and plain values, and no gradient to
 * record. */
static int is_direct(const Binder* env, PyObject* const* args, Py_ssize_t count) {
  const Torch* torch = &env->torch;
  if (!torch->offset || torch->mode_depth()) return 0;
  const bool recording = torch->grad_enabled();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = args[i];
    if (is_plain(env, value)) {
      void* tensor = (char*)value + torch->offset;
      int32_t device = 0;
      if (torch->device_type(tensor, &device) || (device != torch->cpu && device != torch->cuda)) return 0; /* meta */
      if (recording && torch->requires_grad(*(void**)tensor)) return 0;
    } else if (value != Py_None && !PyLong_Check(value) && !PyFloat_Check(value) && !PyUnicode_Check(value) &&
               (PyObject*)Py_TYPE(value) != env->dtype_type) {
      return 0;
    }
  }
  return 1;
}

static PyObject* route_call(PyObject* object, PyObject* const* args, Py_ssize_t given, PyObject* kwnames) {
  Route* self = (Route*)object;
  PyObject* tuple = NULL;
  const Py_ssize_t keywords = kwnames ? PyTuple_Size(kwnames) : 0;
  if (!keywords && is_direct(self->env, args, given)) {
    PyObject* level = PyObject_CallNoArgs(self->level);
    if (!level) return NULL;
    Py_DECREF(level);
    PyObject* kernel = level == Py_None ? PyDict_GetItemString(self->holder, "kernel") : NULL;
    if (kernel) return call_with(kernel, args, given);
  }
  PyObject* named = keywords ? PyDict_New() : NULL;
  PyObject* result = NULL;
  if (keywords && !named) return NULL;
  for (Py_ssize_t i = 0; i < keywords; ++i)
    if (PyDict_SetItem(named, PyTuple_GetItem(kwnames, i), args[given + i])) goto done;
  tuple = arguments_tuple(args, given);
  if (tuple) result = PyObject_Call(self->slow, tuple, named);
done:
  Py_XDECREF(tuple);
  Py_XDECREF(named);
  return result;
}

/* Binder.route(holder, slow, level) -> function; see Route's fields. */
static PyObject* binder_route(PyObject* binder, PyObject* args) {
  PyObject *holder = NULL, *slow = NULL, *level = NULL;
  if (!PyArg_ParseTuple(args, "O!OO", &PyDict_Type, &holder, &slow, &level)) return NULL;
  allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject*)route_type, Py_tp_alloc);
  Route* self = (Route*)allocate((PyTypeObject*)route_type, 0);
  if (!self) return NULL;
  self->env = (Binder*)Py_NewRef(binder);
  self->holder = Py_NewRef(holder);
  self->slow = Py_NewRef(slow);
  self->level = Py_NewRef(level);
  self->method.ml_name = "route";
  self->method.ml_meth = (PyCFunction)(void (*)(void))route_call;
  self->method.ml_flags = METH_FASTCALL | METH_KEYWORDS;
  PyObject* function = PyCFunction_NewEx(&self->method, (PyObject*)self, NULL);
  Py_DECREF(self);
  return function;
}

static void route_dealloc(PyObject* object) {
  Route* self = (Route*)object;
  PyTypeObject* type = Py_TYPE(object);
  Py_XDECREF((PyObject*)self->env);
  Py_XDECREF(self->holder);
  Py_XDECREF(self->slow);
  Py_XDECREF(self->level);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF(type);
}

static PyType_Slot route_slots[] = {{Py_tp_dealloc, route_dealloc}, {0, NULL}};
static PyType_Spec route_spec = {"hipforge_binding.Route", sizeof(Route), 0, Py_TPFLAGS_DEFAULT, route_slots};

static PyMethodDef binder_methods[] = {
    {"route", binder_route, METH_VARARGS, "Make what autograd sees of an operator."},
    {"describe", (PyCFunction)(void (*)(void))binder_describe, METH_FASTCALL, "What a decision may depend on."},
    {"modes", binder_modes, METH_NOARGS, "How many dispatch modes are active."},
    {"facts", binder_facts, METH_O, "What torch's own functions say of a tensor."},
    {"bind", binder_bind, METH_VARARGS, "Make a callable of an entry address."},
    {"dispatch", binder_dispatch, METH_VARARGS, "Make a callable that chooses among variants."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot entry_slots[] = {{Py_tp_dealloc, entry_dealloc}, {0, NULL}};
static PyType_Spec entry_spec = {"hipforge_binding.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT, entry_slots};
static PyType_Slot binder_slots[] = {{Py_tp_dealloc, binder_dealloc}, {Py_tp_methods, binder_methods}, {0, NULL}};
static PyType_Spec binder_spec = {"hipforge_binding.Binder", sizeof(Binder), 0, Py_TPFLAGS_DEFAULT, binder_slots};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "hipforge_binding", NULL, -1, module_methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_hipforge_binding(void) {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return NULL;
  entry_type = PyType_FromSpec(&entry_spec);
  route_type = PyType_FromSpec(&route_spec);
  binder_type = PyType_FromSpec(&binder_spec);
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  if (!entry_type || !route_type || !binder_type || !requires_grad_name) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
