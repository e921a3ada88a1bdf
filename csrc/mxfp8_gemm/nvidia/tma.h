// Tiles of a matrix through the copy engine of sm_90: tensor maps, barriers in shared memory, clusters.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include "hipforge/device/hip.h"
#include "hipforge/module.h"
#include "stream.h"

namespace hf {

/// A matrix in memory and its tiles, in elements of 1 byte or of 4; `pitch` is in bytes. What lies outside of it is read as zeros.
struct Mapped {
  const void* data;
  int64_t rows, columns, pitch;
  int tile_rows, tile_columns, bytes;
};

/// The map of a matrix. Tiles with lines of 128 bytes are in the 128-byte swizzle: byte 16 c of line r is at 128 r + 16 (c ^ r % 8);
/// others are as in memory.
inline CUtensorMap map_of(const Mapped& a) {
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
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(a.columns), static_cast<cuuint64_t>(a.rows)};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(a.pitch)};
  const cuuint32_t tile[] = {static_cast<cuuint32_t>(a.tile_columns), static_cast<cuuint32_t>(a.tile_rows)}, every[] = {1, 1};
  const bool swizzled = a.bytes == 1 && a.tile_columns == 128;
  const CUresult status = encode(
      &map, a.bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(a.data), sizes, pitch, tile,
      every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  HF_CHECK(status == CUDA_SUCCESS, "the driver makes no tensor map of [", a.rows, ", ", a.columns, "] elements of ", a.bytes,
           " bytes: error ", static_cast<int>(status));
  return map;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

/// Barriers, by their address: a phase ends with its last arrival, when all bytes that it expects have been copied.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
}
// A warp lets a stage go by one arrival, of its first lane, which __syncwarp() puts behind what the others have read. racecheck does not
// follow that order: what it checks is built with an arrival of each lane.
#if defined(HF_FOR_RACECHECK)
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

/// Waits for the end of a phase of this parity: 0 for the first.
__device__ __forceinline__ void wait_phase(uint32_t barrier, int parity) {
  uint32_t ended;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
  } while (!ended);
}

/// Copies the tile whose first byte is `column` of `row`.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(&map), "r"(column), "r"(row), "r"(barrier)
               : "memory");
}

/// Every thread of the cluster's blocks meets the others; shared memory written before is seen after.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
/// Where another block of the cluster has what this one has at `address`.
__device__ __forceinline__ uint32_t address_in(uint32_t address, int block) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
__device__ __forceinline__ float4 load_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

}  // namespace hf
