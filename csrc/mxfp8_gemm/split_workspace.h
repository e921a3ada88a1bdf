// The workspace of dense kernels whose work-groups share K.
#pragma once

#include "hipforge/amd/last_group.h"

namespace hf::mxfp8 {

/// The workspace of work-groups that share K, apart from every operand.
inline uint8_t* check_workspace_of_parts(const OptionalTensor& workspace, uint64_t bytes, int64_t k_splits, const Tensor& out,
                                       const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                                       const OptionalTensor& bias) {
  uint8_t* const first = check_split_workspace(workspace, bytes, k_splits, wq,
                                               {{out, "out"}, {xq, "Xq"}, {xs, "Xs"}, {wq, "Wq"}, {ws, "Ws"}});
  if (bias.has_value()) check_apart({*workspace, "workspace"}, {{*bias, "bias"}});
  return first;
}

}  // namespace hf::mxfp8
