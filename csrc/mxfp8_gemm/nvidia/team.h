// What blocks of a cluster that share tiles need beyond tma.h: copies to all of them, arrivals at each other's barriers.
#pragma once

#include "tma.h"

namespace hf {

/// Copies a tile to every block of the cluster that `blocks` has the bit of: at the same addresses, with the same barrier told.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int column, int row, uint32_t barrier, uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
               : "memory");
}
/// meet_cluster() in two parts, with other work between, and without order of memory but for barriers_ready().
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
/// Arrives at a barrier of this or another block of the cluster, by its address there. An arrival of cluster scope would wait for all of
/// the thread's memory.
__device__ __forceinline__ void arrive_in(uint32_t barrier, int block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, block)) : "memory");
}

}  // namespace hf
