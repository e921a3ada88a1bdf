// The same function as a torch extension: one function, torch/extension.h, pybind11, the same guards, no launch.
#include <torch/extension.h>

void bench_guarded_out(torch::Tensor out, torch::Tensor a, torch::Tensor b, torch::Tensor c, torch::Tensor d, int64_t n,
                       int64_t block) {
  TORCH_CHECK(out.dim() == 2 && a.dim() == 2 && b.dim() == 2 && c.dim() == 2 && d.dim() == 2, "all must be matrices");
  TORCH_CHECK(out.scalar_type() == torch::kBFloat16, "out must be bfloat16");
  TORCH_CHECK(a.element_size() == 1 && c.element_size() == 1, "payloads must be bytes");
  TORCH_CHECK(b.size(0) == a.size(0) && b.size(1) == a.size(1) / 32, "scales must be [M, K/32]");
  TORCH_CHECK(d.size(0) == c.size(0) && d.size(1) == a.size(1) / 32, "scales must be [N, K/32]");
  TORCH_CHECK(a.is_contiguous() && b.is_contiguous() && c.is_contiguous() && d.is_contiguous() && out.is_contiguous());
  TORCH_CHECK(block == 4 || block == 8, "block must be 4 or 8");
  out.data_ptr<at::BFloat16>()[0] = static_cast<float>(n);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("bench_guarded_out", &bench_guarded_out); }
