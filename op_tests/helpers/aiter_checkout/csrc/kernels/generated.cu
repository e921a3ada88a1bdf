#include <pybind11/pybind11.h>

#include "aiter_tensor.h"
#include "made.h"

int is_hip();

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("is_hip", [](int) { return is_hip(); });
  m.def("archs", [](int) { return std::string(ARCHS) + (ENABLE_CK ? " with" : " without") + (PLANTED ? " planted" : ""); });
}
