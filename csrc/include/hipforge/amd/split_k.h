// Shared by the split-K GEMMs: the store of a tile whose lanes hold four neighbouring columns of an output row, and the check
// of the number of splits.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "hipforge/amd/vector.h"

namespace hf::dev {

constexpr int kColumnsPerLane = 4;

/// Stores values[i] to out[row, column + i] of a row-major [*, n], at once where `aligned` says that rows allow it.
template <class T>
__device__ inline void store_columns(T* out, f32x4 values, uint32_t row, uint32_t column, uint32_t n, bool aligned) {
  using Vector = T __attribute__((ext_vector_type(kColumnsPerLane)));
  T* at = out + uint64_t{row} * n + column;
  const Vector converted = __builtin_convertvector(values, Vector);
  if (aligned) {
    if (column < n) *reinterpret_cast<Vector*>(at) = converted;
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumnsPerLane; ++i)
    if (column + i < n) at[i] = converted[i];
}

}  // namespace hf::dev

namespace hf {

inline void check_k_splits(int64_t k_splits, int64_t steps, int64_t k, const char* name = "k_splits", int64_t step = 128) {
  HF_CHECK(k_splits == 1 || k_splits == 2 || k_splits == 4 || k_splits == 8, name, " must be 1, 2, 4 or 8; got ", k_splits);
  HF_CHECK(k_splits <= steps, name, " must not exceed the number of K steps, ceil(K/", step, ") = ", steps, " for K = ", k,
           "; got ", k_splits);
}

}  // namespace hf
