#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "aiter_tensor.h"

// The class of the struct, which every module of the form develop=True shares.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<aiter_tensor_t>(m, "aiter_tensor_t")
      .def(pybind11::init([](int64_t ptr, size_t numel, int ndim, const std::vector<int64_t>& shape,
                             const std::vector<int64_t>& strides, int dtype, int device) {
        aiter_tensor_t t{(void*)ptr, numel, ndim, {}, {}, AiterDtype(dtype), device};
        for (int i = 0; i < ndim; ++i) {
          t.shape[i] = shape[i];
          t.strides[i] = strides[i];
        }
        return t;
      }));
}
