/* Calls hf_entry_* of a module from Python: arguments in, the entry's error out as a Python exception.
 *
 * One function object per entry (METH_FASTCALL). Tensors are read through the DLPack exchange table that torch
 * publishes on its tensor type, so no torch header is needed; where a torch has no such table, through a Python
 * callable. Compiled against the limited API of Python 3.10: one build serves every later CPython.
 */
#include "binding.h"
#include "binding_tensors.h"
#include "binding_overlap.h"
#include "binding_describe.h"
#include "binding_route.h"
#include "binding_run.h"

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

static int64_t mode_depth(const Binder* env) {
  if (env->torch.offset) return active_modes(&env->torch);
  PyObject* depth = PyObject_CallNoArgs(env->mode_depth);
  const int64_t active = depth ? PyLong_AsLongLong(depth) : -1;
  Py_XDECREF(depth);
  return active;
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
    /* A variant function or load() fails first on an argument that is refused here, and has the better message. */
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
 * addresses: eight ints: push, pop, last_error, clear_error and stream of the emulator, the functions that get and set
 * a thread's GPU, the one that names its stream (0: none).
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
  unsigned long long a[8];
  if (!PyArg_ParseTuple(args, "iOOO!OOOO(KKKKKKKK)(OOOOOOOOO)O", &target, &tensor_type, &parameter_type, &PyTuple_Type, &errors,
                        &mode_depth, &read_tensor, &read_stream, &capsule, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5],
                        &a[6], &a[7], &problem, &is_negative, &storage, &storage_bytes, &storage_offset, &grad_enabled, &drop_gradient, &part,
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
  env->name_stream = (StreamName (*)(int8_t))(uintptr_t)a[7];
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
                       active_modes(torch));
}

/* Binder.modes() -> how many dispatch modes are active, torch.jit.trace among them. */
static PyObject* binder_modes(PyObject* binder, PyObject* unused) {
  (void)unused;
  const int64_t depth = mode_depth((Binder*)binder);
  return depth < 0 ? NULL : PyLong_FromLongLong(depth);
}

static PyMethodDef binder_methods[] = {
    {"route", binder_route, METH_VARARGS, "Make what autograd sees of an operator."},
    {"describe", (PyCFunction)(void (*)(void))binder_describe, METH_FASTCALL, "What a decision may depend on."},
    {"modes", binder_modes, METH_NOARGS, "How many dispatch modes are active, torch.jit.trace among them."},
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
