// Tensor maps of any rank for the copy engine of sm_90, in the 128-byte swizzle; tma.h has those of matrices.
#pragma once

#include <algorithm>
#include <array>

#include "tma.h"

namespace hf {

/// The map of bytes [sizes[RANK - 1], ..., sizes[0]]: pitches, in bytes, of all dimensions but the first, whose elements are neighbours,
/// and the tile. Of a tile 128 bytes of the first dimension are a line; what lies outside of the tensor is read as zeros.
template <int RANK>
inline CUtensorMap encoded_map(const void* data, const std::array<int64_t, RANK>& sizes, const std::array<int64_t, RANK - 1>& pitches,
                               const std::array<int, RANK>& tile) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                              const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // The driver is in the process, because the runtime has found a device; linking it would bind every process to one.
  static const Encode encode = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
  }();
  HF_CHECK(encode, "libcuda.so.1 has no cuTensorMapEncodeTiled: the driver must be one for CUDA 12 or later");
  CUtensorMap map;
  cuuint64_t extents[RANK], apart[RANK - 1];
  cuuint32_t box[RANK], every[RANK];
  std::copy(sizes.begin(), sizes.end(), extents), std::copy(pitches.begin(), pitches.end(), apart);
  std::copy(tile.begin(), tile.end(), box), std::fill(every, every + RANK, 1u);
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, RANK, const_cast<void*>(data), extents, apart, box, every,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  HF_CHECK(status == CUDA_SUCCESS, "the driver makes no tensor map of ", RANK, " dimensions, the first of ", sizes[0],
           " bytes: error ", static_cast<int>(status));
  return map;
}

}  // namespace hf
