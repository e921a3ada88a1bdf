// The module of test_emulator_hip_runtime.py: one exported function per thing that is tried.
#define HF_WHOLE_HIP_API
#include "hip.h"
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))
#define TRY(call) do { hipError_t e_ = (call); if (e_ != hipSuccess) return e_; } while (0)

__global__ void where(unsigned* out) {
  const unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y,
                 z = blockIdx.z * blockDim.z + threadIdx.z;
  const unsigned nx = gridDim.x * blockDim.x, ny = gridDim.y * blockDim.y;
  out[(z * ny + y) * nx + x] = x | y << 8 | z << 16;
}

struct Big { int a[5]; double b; short c; };
__global__ void by_value(double* out, Big big, char tag, float f) {
  double sum = 0;
  for (int v : big.a) sum += v;
  out[threadIdx.x] = sum + big.b + big.c + tag + f;
}

template <typename T, int N> __global__ void repeat(T* out, T value) {
  for (int i = 0; i < N; ++i) out[threadIdx.x * N + i] = value + T(i);
}
template __global__ void repeat<float, 2>(float*, float);
template __global__ void repeat<long, 3>(long*, long);

__global__ void reverse(int* data, int n) {
  extern __shared__ int buffer[];
  buffer[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = buffer[n - 1 - threadIdx.x];
}

__constant__ int table[4] = {1, 2, 3, 4};
__device__ int counter = 5;
__device__ int* pointer_to_counter = &counter;  // a relocation
__global__ void use_variables(int* out) {
  out[threadIdx.x] = table[threadIdx.x & 3] * 10 + *pointer_to_counter;
  if (threadIdx.x == 0) counter += 1;
}

__managed__ int managed[3] = {7, 8, 9};
__global__ void add_to_managed() { managed[threadIdx.x] += 100; }

__global__ void twice(int* data, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] *= 2;
}

#if !defined(__HIP_DEVICE_COMPILE__)  // the pass in which the API is declared

// --- launches ---

API hipError_t run_where(unsigned* out) {
  where<<<dim3(3, 2, 2), dim3(5, 4, 3)>>>(out);
  return hipGetLastError();
}
API hipError_t run_by_value(double* out) {
  Big big = {{1, 2, 3, 4, 5}, 0.25, -7};
  by_value<<<1, 4>>>(out, big, 'A', 0.5f);
  return hipGetLastError();
}
API hipError_t run_templates(float* floats, long* longs) {
  repeat<float, 2><<<1, 8>>>(floats, 1.5f);
  repeat<long, 3><<<1, 8>>>(longs, 1L << 40);
  return hipGetLastError();
}
API hipError_t run_reverse(int* data, int n, unsigned lds) {
  reverse<<<1, n, lds>>>(data, n);
  return hipGetLastError();
}

// --- device variables ---

API hipError_t run_variables(int* out) {
  use_variables<<<1, 4>>>(out);
  return hipGetLastError();
}
API hipError_t set_table(const int* values, size_t count, size_t first) {
  return hipMemcpyToSymbol(table, values, count * 4, first * 4, hipMemcpyHostToDevice);
}
API hipError_t get_counter(int* value) { return hipMemcpyFromSymbol(value, counter, 4); }
API hipError_t table_size(size_t* bytes) { return hipGetSymbolSize(bytes, table); }
API hipError_t run_managed(int* out) {
  managed[1] = 50;
  add_to_managed<<<1, 3>>>();
  TRY(hipDeviceSynchronize());
  std::memcpy(out, managed, sizeof managed);
  return hipSuccess;
}

// --- memory, streams, events ---

API hipError_t round_trip(int* host, int n, int launches, float* milliseconds) {
  int* device = nullptr;
  hipStream_t stream;
  hipEvent_t start, stop;
  TRY(hipMalloc(&device, n * sizeof(int)));
  TRY(hipStreamCreate(&stream));
  TRY(hipEventCreate(&start));
  TRY(hipEventCreate(&stop));
  TRY(hipMemcpyAsync(device, host, n * sizeof(int), hipMemcpyHostToDevice, stream));
  TRY(hipEventRecord(start, stream));
  for (int i = 0; i < launches; ++i) twice<<<(n + 63) / 64, 64, 0, stream>>>(device, n);
  TRY(hipGetLastError());
  TRY(hipEventRecord(stop, stream));
  TRY(hipEventSynchronize(stop));
  TRY(hipEventElapsedTime(milliseconds, start, stop));
  TRY(hipMemcpy(host, device, n * sizeof(int), hipMemcpyDeviceToHost));
  TRY(hipStreamDestroy(stream));
  TRY(hipEventDestroy(start));
  TRY(hipEventDestroy(stop));
  return hipFree(device);
}
API hipError_t past_the_block(int n, int touched) {
  int* device = nullptr;
  TRY(hipMalloc(&device, n * sizeof(int)));
  twice<<<1, 64>>>(device, touched);
  const hipError_t error = hipGetLastError();
  TRY(hipFree(device));
  return error;
}
API hipError_t use_after_free(int* out) {
  int* device = nullptr;
  TRY(hipMalloc(&device, 64));
  TRY(hipFree(device));
  twice<<<1, 1>>>(device, 1);
  (void)out;
  return hipGetLastError();
}
API hipError_t double_free() {
  void* device = nullptr;
  TRY(hipMalloc(&device, 64));
  TRY(hipFree(device));
  return hipFree(device);
}
API hipError_t copy_too_much() {
  char host[128];
  void* device = nullptr;
  TRY(hipMalloc(&device, 64));
  const hipError_t error = hipMemcpy(device, host, 65, hipMemcpyHostToDevice);
  TRY(hipFree(device));
  return error;
}
API hipError_t copy_rows(char* to, const char* from) { return hipMemcpy2D(to, 8, from, 4, 3, 2, hipMemcpyDefault); }
API hipError_t fill(int* to) { return hipMemsetD32(to, 0x01020304, 5); }
API hipError_t stale_stream() {
  hipStream_t stream;
  TRY(hipStreamCreate(&stream));
  TRY(hipStreamDestroy(stream));
  return hipStreamSynchronize(stream);
}
API hipError_t pointer_kinds(int* kinds) {
  hipPointerAttribute_t a;
  void *device, *host;
  int local = 0;
  TRY(hipMalloc(&device, 16));
  TRY(hipHostMalloc(&host, 16, 0));
  TRY(hipPointerGetAttributes(&a, static_cast<char*>(device) + 8));
  kinds[0] = a.type;
  TRY(hipPointerGetAttributes(&a, host));
  kinds[1] = a.type;
  TRY(hipPointerGetAttributes(&a, &local));
  kinds[2] = a.type;
  TRY(hipFree(device));
  return hipHostFree(host);
}

// --- queries ---

API hipError_t device(char* arch, int* values, size_t* lds) {
  hipDeviceProp_t p;
  TRY(hipGetDeviceProperties(&p, 0));
  std::strcpy(arch, p.gcnArchName);
  values[0] = p.multiProcessorCount;
  values[1] = p.warpSize;
  values[2] = p.maxThreadsPerBlock;
  values[3] = p.major;
  *lds = p.sharedMemPerBlock;
  TRY(hipDeviceGetAttribute(&values[4], hipDeviceAttributeMultiprocessorCount, 0));
  TRY(hipDeviceGetAttribute(&values[5], hipDeviceAttributeWarpSize, 0));
  TRY(hipDeviceGetAttribute(&values[6], hipDeviceAttributeMaxSharedMemoryPerBlock, 0));
  return hipGetDeviceCount(&values[7]);
}
API hipError_t second_device() { return hipSetDevice(1); }
API hipError_t kernel_attributes(int* values) {
  hipFuncAttributes a;
  TRY(hipFuncGetAttributes(&a, reinterpret_cast<const void*>(reverse)));
  values[0] = a.numRegs;
  values[1] = a.maxThreadsPerBlock;
  TRY(hipOccupancyMaxActiveBlocksPerMultiprocessor(&values[2], reverse, 256, 80 * 1024));
  TRY(hipOccupancyMaxActiveBlocksPerMultiprocessor(&values[3], reverse, 256, 0));
  return hipOccupancyMaxPotentialBlockSize(&values[4], &values[5], reverse, 0, 0);
}
API const char* error_name(int code) { return hipGetErrorName(static_cast<hipError_t>(code)); }
API const char* error_text(int code) { return hipGetErrorString(static_cast<hipError_t>(code)); }
API hipError_t unprovided() {
  hipGraph_t graph;
  return hipGraphCreate(&graph, 0);
}
API hipError_t last_error_twice() {
  (void)hipSetDevice(3);
  if (hipPeekAtLastError() != hipErrorInvalidDevice) return hipErrorUnknown;
  if (hipGetLastError() != hipErrorInvalidDevice) return hipErrorUnknown;
  return hipGetLastError();
}

// --- modules ---

API hipError_t run_module(const void* image, const char* kernel, const char* variable, int* out) {
  hipModule_t module;
  hipFunction_t function;
  hipDeviceptr_t address;
  size_t bytes = 0;
  TRY(hipModuleLoadData(&module, image));
  TRY(hipModuleGetFunction(&function, module, kernel));
  TRY(hipModuleGetGlobal(&address, &bytes, module, variable));
  const int bias = 1000;
  TRY(hipMemcpyHtoD(address, const_cast<int*>(&bias), sizeof bias));
  int factor = 3;
  void* params[] = {&out, &factor};
  TRY(hipModuleLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, nullptr, params, nullptr));
  struct __attribute__((packed)) { int* out; int factor; } packed = {out + 8, 5};
  size_t packed_bytes = sizeof packed;
  void* extra[] = {HIP_LAUNCH_PARAM_BUFFER_POINTER, &packed, HIP_LAUNCH_PARAM_BUFFER_SIZE, &packed_bytes,
                   HIP_LAUNCH_PARAM_END};
  TRY(hipModuleLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, nullptr, nullptr, extra));
  return hipModuleUnload(module);
}

#endif
