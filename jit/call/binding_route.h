/* The function that autograd sees of an operator where autograd has nothing to do. */
#pragma once

#include "binding_tensors.h"

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
  if (!torch->offset || active_modes(torch)) return 0;
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
