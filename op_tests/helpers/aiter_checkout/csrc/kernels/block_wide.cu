// Block-wide sums and sorts, and random numbers: what aiter's selection and sampling take from hipCUB and hipRAND.
#include <hipcub/hipcub.hpp>
#include <hipcub/util_type.hpp>
#include <hiprand/hiprand.h>
#include <hiprand/hiprand_kernel.h>

#include "aiter_tensor.h"

constexpr int kThreads = 192, kItems = 3;

// sums: [4, kThreads * kItems]: inclusive sums of x, exclusive sums, inclusive sums of thread numbers, and totals.
__global__ void sums(int* sums, const int* x) {
  using Load = hipcub::BlockLoad<int, kThreads, kItems, hipcub::BLOCK_LOAD_TRANSPOSE>;
  using Store = hipcub::BlockStore<int, kThreads, kItems, hipcub::BLOCK_STORE_TRANSPOSE>;
  using Scan = hipcub::BlockScan<int, kThreads>;
  __shared__ union {
    typename Load::TempStorage load;
    typename Scan::TempStorage scan;
    typename Store::TempStorage store;
  } storage;
  constexpr int kRow = kThreads * kItems;
  int items[kItems], before[kItems], total, sum;
  Load(storage.load).Load(x, items);
  __syncthreads();
  Scan(storage.scan).ExclusiveSum(items, before, total);
  __syncthreads();
  Scan(storage.scan).InclusiveSum(items, items);
  __syncthreads();
  Store(storage.store).Store(sums, items);
  Store(storage.store).Store(sums + kRow, before);
  const int thread = threadIdx.x;
  Scan(storage.scan).InclusiveSum(thread, sum);
  sums[2 * kRow + thread] = sum;
  sums[3 * kRow + thread] = total;
}

template <typename Key>
__global__ void sorted(Key* keys) {
  using Sort = hipcub::BlockRadixSort<Key, kThreads, kItems>;
  __shared__ typename Sort::TempStorage storage;
  Key own[kItems];
  for (int n = 0; n < kItems; ++n) own[n] = keys[threadIdx.x * kItems + n];
  Sort(storage).Sort(own);
  for (int n = 0; n < kItems; ++n) keys[threadIdx.x * kItems + n] = own[n];
}

// numbers: [threads, 8] of one subsequence each; uniform: [threads, 4] of what follows.
__global__ void random(unsigned* numbers, float* uniform, unsigned long long seed, unsigned long long offset) {
  hiprandStatePhilox4_32_10_t state;
  hiprand_init(seed, threadIdx.x, offset, &state);
  for (int n = 0; n < 4; ++n) numbers[threadIdx.x * 8 + n] = hiprand(&state);
  reinterpret_cast<uint4*>(numbers)[threadIdx.x * 2 + 1] = hiprand4(&state);
  reinterpret_cast<float4*>(uniform)[threadIdx.x] = hiprand_uniform4(&state);
}

AITER_C_ITFS int block_sums(aiter_tensor_t* out, aiter_tensor_t* x, hipStream_t stream) {
  sums<<<1, kThreads, 0, stream>>>(static_cast<int*>(out->ptr), static_cast<const int*>(x->ptr));
  return 0;
}

AITER_C_ITFS int block_sort(aiter_tensor_t* keys, hipStream_t stream) {
  if (keys->dtype_ == AITER_DTYPE_i32)
    sorted<<<1, kThreads, 0, stream>>>(static_cast<int*>(keys->ptr));
  else
    sorted<<<1, kThreads, 0, stream>>>(static_cast<unsigned char*>(keys->ptr));
  return 0;
}

AITER_C_ITFS int random_numbers(aiter_tensor_t* numbers, aiter_tensor_t* uniform, int64_t seed, int64_t offset,
                                hipStream_t stream) {
  random<<<1, numbers->shape[0], 0, stream>>>(
      static_cast<unsigned*>(numbers->ptr), static_cast<float*>(uniform->ptr), seed, offset);
  return 0;
}
