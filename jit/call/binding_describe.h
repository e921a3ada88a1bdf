/* The facts of arguments that a decision may depend on, as one hashable value. */
#pragma once

#include "binding_tensors.h"

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
