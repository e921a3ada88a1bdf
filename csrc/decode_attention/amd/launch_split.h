// The launches of AMD's kernels: of the splits, and of the merge that follows them.
#pragma once

#include "../guards.h"
#include "hipforge/amd/launch.h"
#include "merge_kernel.h"

namespace hf::decode_attention {

/// Work-groups of either kernel over `batch` sequences: (tiles of query rows, B * Hkv, splits).
inline dim3 split_grid(const Problem& p, int64_t batch) {
  return dim3((p.group * p.mq + kBlockM - 1) / kBlockM, static_cast<uint32_t>(batch) * p.kv_heads.value, p.splits);
}

/// Launches `kernel`, whose arguments are First's members, the problem and `more`.
template <class Kernel, class... More>
void launch_split(Kernel kernel, const Problem& p, int64_t batch, uint32_t threads, uint32_t lds, hipStream_t stream, More... more) {
  hf::launch(kernel, {split_grid(p, batch), threads, lds, stream}, p.seqlens, p.q_starts, p.q, p.k.scale, p.kv_heads.value,
             p.kv_heads.factor, p.kv_heads.shift, p.group, p.mq, (p.k.scale_stride ? kOwnScale : 0) | (p.lists.value > 1 ? kOwnKeys : 0), p, more...);
}

/// Launches the merge that follows the kernel where there are several splits.
template <class Half, int kD>
void launch_merge(const Problem& p, int64_t batch, hipStream_t stream) {
  if (p.splits == 1) return;
  hf::launch(decode_merge<Half, kD>,
             {dim3(p.kv_heads.value * p.group, p.mq, static_cast<uint32_t>(batch)), kMergeThreads, 0, stream}, p.partial,
             p.partial_lse, p.q_starts, p.rows, p.splits, p.kv_heads.value * p.group, p.mq, p);
}

}  // namespace hf::decode_attention
