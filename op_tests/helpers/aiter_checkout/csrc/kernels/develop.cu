#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "scale_rows.h"

// The first parameter is not the output.
static void scale(double factor, aiter_tensor_t& x, aiter_tensor_t& out, std::optional<aiter_tensor_t> bias, int beyond) {
  launch_scale_rows(out, x, bias ? &*bias : nullptr, factor, beyond, aiter::current_stream());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("_set_current_hip_stream", [](int64_t stream) { aiter::current_stream() = (hipStream_t)stream; });
  m.def("current_stream", [] { return (int64_t)aiter::current_stream(); });
  m.def("scale", &scale);
  m.def("dtype_of", [](aiter_tensor_t& x) { return int(x.dtype_); });
  m.def("total", [](const std::vector<int64_t>& values) {
    int64_t sum = 0;
    for (auto value : values) sum += value;
    return sum;
  });
  m.def("fail_hard", [](aiter_tensor_t&) { aiter_detail::fatal("planted: not supported"); });
}
