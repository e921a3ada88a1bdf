/* An argument that is written shares no byte with another one, unless that is only read and the very same view. */
#pragma once

#include "binding.h"

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
