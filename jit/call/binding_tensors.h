/* Reads torch tensors as views, and refuses those whose kernel would give wrong results or crash. */
#pragma once

#include "binding.h"

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

/* As torch_functions.active_modes: dispatch modes, and torch.jit.trace. */
static int64_t active_modes(const Torch* torch) { return torch->mode_depth() + (*torch->recorder() != NULL); }

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

/* The device that kernels run on decides which tensors are accepted. */
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
