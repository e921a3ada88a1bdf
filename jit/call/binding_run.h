/* Runs an entry on its device: torch's current stream, the GIL released, the entry's error as an exception. */
#pragma once

#include "binding_tensors.h"

/* The handle of torch's current stream. torch makes the GPU current to tell it, and asks the driver for that; its name for the
 * stream costs next to nothing. */
static int current_stream(Binder* env, int device_index, void** out) {
  NamedStream* last = env->name_stream && (unsigned)device_index < MAX_GPUS ? &env->streams[device_index] : NULL;
  StreamName name = {0, 0};
  if (last) name = env->name_stream((int8_t)device_index);
  if (last && (int8_t)(name.device >> 8) != device_index) last = NULL;
  if (last && last->known && last->id == name.id) {
    *out = last->handle;
    return 0;
  }
  if (env->table) {
    if (env->table->current_stream(env->target == ON_CUDA ? DL_CUDA : DL_ROCM, device_index, out)) return -1;
  } else {
    PyObject* stream = PyObject_CallFunction(env->read_stream, "i", device_index);
    if (!stream) return -1;
    *out = PyLong_AsVoidPtr(stream);
    Py_DECREF(stream);
    if (PyErr_Occurred()) return -1;
  }
  if (last) {
    last->id = name.id;
    last->handle = *out;
    last->known = 1;
  }
  return 0;
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
  Binder* env = self->env;
  if (current_stream(env, device_index, &call->stream)) return -1;
  int previous = device_index, status = 0, kind = 0;
  PyThreadState* thread = PyEval_SaveThread();
  if (env->get_device) status = env->get_device(&previous);
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
