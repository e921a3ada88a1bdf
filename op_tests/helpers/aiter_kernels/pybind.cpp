// The binding: torch tensors in, checks, a launch on the default stream.
#include <torch/extension.h>

#include "kernels.h"

static void check(hipError_t error, const char* what) { TORCH_CHECK(error == hipSuccess, what, " failed"); }

void silu_and_mul(torch::Tensor& out, torch::Tensor& input) {
  TORCH_CHECK(input.size(-1) == 2 * out.size(-1), "input must have twice the columns of out; got ", input.size(-1));
  const int d = out.size(-1);
  check(launch_silu_and_mul(out.data_ptr(), input.data_ptr(), out.numel() / d, d, nullptr), "silu_and_mul");
}

void rms_norm(torch::Tensor& out, torch::Tensor& input, torch::Tensor& weight, double epsilon) {
  TORCH_CHECK(weight.numel() == input.size(-1), "weight must have one element per column; got ", weight.numel());
  const int hidden = input.size(-1);
  check(
      launch_rms_norm(
          out.data_ptr(), input.data_ptr(), weight.data_ptr(), epsilon, input.numel() / hidden, hidden, nullptr),
      "rms_norm");
}

void static_per_tensor_quant(torch::Tensor& out, torch::Tensor const& input, torch::Tensor const& scale) {
  TORCH_CHECK(scale.numel() == 1, "scale must have one element; got ", scale.numel());
  check(
      launch_static_per_tensor_quant(out.data_ptr(), input.data_ptr(), scale.data_ptr(), input.numel(), nullptr),
      "static_per_tensor_quant");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("silu_and_mul", &silu_and_mul);
  m.def("rms_norm", &rms_norm);
  m.def("static_per_tensor_quant", &static_per_tensor_quant);
}
