// The same function for apache-tvm-ffi: the same guards, no launch.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#define CHECK(condition, text) \
  if (!(condition)) TVM_FFI_THROW(ValueError) << text

static bool is_contiguous(const tvm::ffi::TensorView& tensor) {
  int64_t step = 1;
  for (int axis = tensor.ndim() - 1; axis >= 0; --axis) {
    if (tensor.size(axis) != 1 && tensor.stride(axis) != step) return false;
    step *= tensor.size(axis);
  }
  return true;
}

static void bench_guarded_out(tvm::ffi::TensorView out, tvm::ffi::TensorView a, tvm::ffi::TensorView b,
                              tvm::ffi::TensorView c, tvm::ffi::TensorView d, int64_t n, int64_t block) {
  CHECK(out.ndim() == 2 && a.ndim() == 2 && b.ndim() == 2 && c.ndim() == 2 && d.ndim() == 2, "all must be matrices");
  CHECK(out.dtype().code == kDLBfloat && out.dtype().bits == 16, "out must be bfloat16");
  CHECK(a.dtype().bits == 8 && c.dtype().bits == 8, "payloads must be bytes");
  CHECK(b.size(0) == a.size(0) && b.size(1) == a.size(1) / 32, "scales must be [M, K/32]");
  CHECK(d.size(0) == c.size(0) && d.size(1) == a.size(1) / 32, "scales must be [N, K/32]");
  CHECK(is_contiguous(a) && is_contiguous(b) && is_contiguous(c) && is_contiguous(d) && is_contiguous(out),
        "tensors must be contiguous");
  CHECK(block == 4 || block == 8, "block must be 4 or 8");
  static_cast<uint16_t*>(out.data_ptr())[0] = static_cast<uint16_t>(n);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bench_guarded_out, bench_guarded_out);
