// Stands in for the block-wide parts of hipCUB that kernels of selection use, where neither ROCm nor --include has hipCUB.
// Names, template parameters and results are hipCUB's; what a source uses beyond them is a compile error that names it.
//
// Threads of a work-group are numbered x first. "Blocked" means that thread t holds items t * N ... t * N + N - 1. Each
// call needs all threads of the work-group, and a barrier before its TempStorage is used again.
#pragma once
#include <hip/hip_runtime.h>

#include <type_traits>

namespace hipcub {

enum BlockLoadAlgorithm { BLOCK_LOAD_DIRECT, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE };
enum BlockStoreAlgorithm { BLOCK_STORE_DIRECT, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE };
enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

namespace detail {

constexpr int kWave = 64;

template <int X, int Y>
__device__ inline int thread_of_block() {
  return static_cast<int>(threadIdx.x + X * (threadIdx.y + Y * threadIdx.z));
}

}  // namespace detail

// Loads N items per thread, blocked. The algorithms differ in how memory is read, not in what a thread gets.
template <typename T, int X, int N, BlockLoadAlgorithm = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1>
class BlockLoad {
 public:
  struct TempStorage {};

  __device__ explicit BlockLoad(TempStorage&) {}

  template <typename Iterator>
  __device__ void Load(Iterator from, T (&items)[N]) {
    for (int n = 0; n < N; ++n) items[n] = from[detail::thread_of_block<X, Y>() * N + n];
  }
};

// Stores N blocked items per thread.
template <typename T, int X, int N, BlockStoreAlgorithm = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1>
class BlockStore {
 public:
  struct TempStorage {};

  __device__ explicit BlockStore(TempStorage&) {}

  template <typename Iterator>
  __device__ void Store(Iterator to, T (&items)[N]) {
    for (int n = 0; n < N; ++n) to[detail::thread_of_block<X, Y>() * N + n] = items[n];
  }
};

// Prefix sums over the work-group: one item or N blocked items per thread.
template <typename T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1>
class BlockScan {
  static constexpr int kThreads = X * Y * Z;
  static constexpr int kWaves = (kThreads + detail::kWave - 1) / detail::kWave;

 public:
  struct TempStorage {
    T totals[kWaves];
  };

  __device__ explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  __device__ void InclusiveSum(T item, T& sum) {
    T total;
    InclusiveSum(item, sum, total);
  }

  __device__ void InclusiveSum(T item, T& sum, T& total) { sum = before(item, total) + item; }

  __device__ void ExclusiveSum(T item, T& sum) {
    T total;
    ExclusiveSum(item, sum, total);
  }

  __device__ void ExclusiveSum(T item, T& sum, T& total) { sum = before(item, total); }

  template <int N>
  __device__ void InclusiveSum(T (&items)[N], T (&sums)[N]) {
    T total, sum = before(added(items), total);
    for (int n = 0; n < N; ++n) sums[n] = sum += items[n];
  }

  template <int N>
  __device__ void ExclusiveSum(T (&items)[N], T (&sums)[N]) {
    T total;
    ExclusiveSum(items, sums, total);
  }

  template <int N>
  __device__ void ExclusiveSum(T (&items)[N], T (&sums)[N], T& total) {
    T sum = before(added(items), total);
    for (int n = 0; n < N; ++n) {
      const T item = items[n];  // the arrays may be one
      sums[n] = sum;
      sum += item;
    }
  }

 private:
  template <int N>
  __device__ static T added(const T (&items)[N]) {
    T sum = items[0];
    for (int n = 1; n < N; ++n) sum += items[n];
    return sum;
  }

  // Returns the sum of `item` over the threads before this one; `total` is the sum over all.
  __device__ T before(T item, T& total) {
    const int thread = detail::thread_of_block<X, Y>();
    const int lane = thread % detail::kWave, wave = thread / detail::kWave;
    T sum = item;
    for (int step = 1; step < detail::kWave; step *= 2) {
      const T other = __shfl_up(sum, step, detail::kWave);
      if (lane >= step) sum += other;
    }
    if (lane == detail::kWave - 1 || thread == kThreads - 1) storage_.totals[wave] = sum;
    __syncthreads();
    T waves_before{};
    total = T{};
    for (int n = 0; n < kWaves; ++n) {
      if (n == wave) waves_before = total;
      total += storage_.totals[n];
    }
    return waves_before + sum - item;
  }

  TempStorage& storage_;
};

// Sorts N blocked keys per thread in ascending order of the bits [begin, end). Keys are integers.
template <typename Key, int X, int N, typename Value = void>
class BlockRadixSort {
  static_assert(std::is_integral_v<Key>, "this stand-in for hipCUB sorts integers");
  static_assert(std::is_void_v<Value>, "this stand-in for hipCUB sorts keys without values");
  using Scan = BlockScan<int, X>;

 public:
  struct TempStorage {
    typename Scan::TempStorage scan;
    Key keys[X * N];
  };

  __device__ explicit BlockRadixSort(TempStorage& storage) : storage_(storage) {}

  __device__ void Sort(Key (&keys)[N], int begin = 0, int end = 8 * sizeof(Key)) {
    using Bits = std::make_unsigned_t<Key>;
    constexpr Bits kSign = std::is_signed_v<Key> ? Bits{1} << (8 * sizeof(Key) - 1) : 0;
    const int first = static_cast<int>(threadIdx.x) * N;
    for (int bit = begin; bit < end; ++bit) {  // zeros go before ones, each in the order they have
      int zero[N], place[N], zeros;
      for (int n = 0; n < N; ++n) zero[n] = ((static_cast<Bits>(keys[n]) ^ kSign) >> bit & 1) == 0;
      Scan(storage_.scan).ExclusiveSum(zero, place, zeros);
      for (int n = 0; n < N; ++n) storage_.keys[zero[n] ? place[n] : zeros + first + n - place[n]] = keys[n];
      __syncthreads();
      for (int n = 0; n < N; ++n) keys[n] = storage_.keys[first + n];
      __syncthreads();
    }
  }

 private:
  TempStorage& storage_;
};

}  // namespace hipcub
