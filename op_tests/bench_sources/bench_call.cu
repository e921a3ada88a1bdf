// Five tensors and two integers, as an out-first GEMV has them, with the guards such an op needs.
#include "hipforge/module.h"

__global__ void bench_kernel(const uint8_t* a, uint16_t* out, int64_t n) {
  if (int64_t(threadIdx.x) < n) out[threadIdx.x] = a[threadIdx.x];
}

void bench_guarded_out(hf::Tensor out, hf::Tensor a, hf::Tensor b, hf::Tensor c, hf::Tensor d, int64_t n, int64_t block,
                       hipStream_t stream) {
  HF_CHECK_ARCH(out, HF_ARCHS);
  HF_CHECK(out.dim() == 2 && a.dim() == 2 && b.dim() == 2 && c.dim() == 2 && d.dim() == 2, "all must be matrices");
  HF_CHECK(out.dtype() == HF_BF16, "out must be bfloat16; got ", out);
  HF_CHECK(a.element_bytes() == 1 && c.element_bytes() == 1, "payloads must be bytes; got ", a, " and ", c);
  HF_CHECK(b.is_shape(a.size(0), a.size(1) / 32), "scales must be [M, K/32]; got ", b);
  HF_CHECK(d.is_shape(c.size(0), a.size(1) / 32), "scales must be [N, K/32]; got ", d);
  HF_CHECK(a.is_contiguous() && b.is_contiguous() && c.is_contiguous() && d.is_contiguous() && out.is_contiguous(),
           "tensors must be contiguous");
  HF_CHECK(block == 4 || block == 8, "block must be 4 or 8; got ", block);
  if (n < 0) return;  // everything but the launch
  bench_kernel<<<1, 64, 0, stream>>>(a.data<uint8_t>(), out.data<uint16_t>(), n);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(bench_guarded_out);

void bench_unguarded_out(hf::Tensor out, hf::Tensor a, hf::Tensor, hf::Tensor, hf::Tensor, int64_t n, int64_t,
                         hipStream_t stream) {
  bench_kernel<<<1, 64, 0, stream>>>(a.data<uint8_t>(), out.data<uint16_t>(), n);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(bench_unguarded_out);

// The same launch for a caller that passes addresses: what a ctypes binding of an op looks like.
extern "C" __attribute__((visibility("default"))) int bench_plain(void* out, void* a, void*, void*, void*, int64_t n,
                                                                  int64_t, void* stream) {
  bench_kernel<<<1, 64, 0, static_cast<hipStream_t>(stream)>>>(static_cast<uint8_t*>(a), static_cast<uint16_t*>(out), n);
  return hipGetLastError();
}

// Launches alone, one after the other.
extern "C" __attribute__((visibility("default"))) int bench_launches(void* out, void* a, int64_t n, int64_t count,
                                                                     void* stream) {
  for (int64_t i = 0; i < count; ++i)
    bench_kernel<<<1, 64, 0, static_cast<hipStream_t>(stream)>>>(static_cast<uint8_t*>(a), static_cast<uint16_t*>(out),
                                                                n);
  return hipGetLastError();
}
