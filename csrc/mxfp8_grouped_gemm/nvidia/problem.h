// What the grouped MX-FP8 GEMMs of a mixture of experts compute on sm_90, on device pointers.
#pragma once

#include "../../mxfp8_gemm/nvidia/stream.h"
#include "../guards.h"
#include "hipforge/device/divisor.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/swiglu.h"
#include "hipforge/device/vector.h"

namespace hf::moe {

struct Problem {
  const int32_t *sorted_ids, *expert_ids, *padded;
  const uint8_t *a, *a_scales, *w, *w_scales;
  const float* biases;        // [experts, n], added before the weight; null: none
  const float* slot_weights;  // null: outputs are not weighted
  dev::bf16* out;             // [slots, n]; null: the two below
  uint8_t *q, *q_scales;      // [slots, n / 2], [slots, n / 64]: MX-FP8 of SwiGLU of gate and up, the rows of W
  int num_valid, block_m, n, k, experts, tiles;
  Divisor a_div;
  Activation activation;

  __device__ __forceinline__ bool is_slot(int id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_valid); }
  __device__ __forceinline__ int tiles_in_use() const {
    const auto used = static_cast<uint32_t>(max(*padded, 0));
    return min(tiles, static_cast<int>((used + block_m - 1) / block_m));
  }
  /// A sum as a launch of its own would store it: with its bias, rounded to bf16.
  __device__ __forceinline__ float stored(float sum, size_t column) const {
    return static_cast<float>(static_cast<dev::bf16>(biases ? sum + biases[column] : sum));
  }
};

/// The operands of an entry, checked, without its results.
inline Problem problem_of(const Operands& given) {
  check_operands(given);
  return {.sorted_ids = given.sorted_ids.data<int32_t>(),
          .expert_ids = given.expert_ids.data<int32_t>(),
          .padded = given.padded.data<int32_t>(),
          .a = given.a.data<uint8_t>(),
          .a_scales = given.a_scales.data<uint8_t>(),
          .w = given.w.data<uint8_t>(),
          .w_scales = given.w_scales.data<uint8_t>(),
          .biases = given.biases.data<float>(),
          .num_valid = static_cast<int>(given.num_valid),
          .block_m = static_cast<int>(given.block_m),
          .n = static_cast<int>(given.n),
          .k = static_cast<int>(given.k),
          .experts = static_cast<int>(given.experts),
          .tiles = static_cast<int>(given.sorted_ids.numel() / given.block_m),
          .a_div = Divisor::of(static_cast<uint32_t>(given.a_div))};
}

/// Whether rows of both scale tensors are read as words.
inline bool has_scale_words(const Operands& given) {
  return given.k % 128 == 0 && aligned_to(given.a_scales.data(), 4) && aligned_to(given.w_scales.data(), 4);
}

inline void take_output(Problem& problem, const Tensor& out, const OptionalTensor& slot_weights, const Operands& given) {
  check_output(out, slot_weights, given);
  problem.out = out.data<dev::bf16>();
  problem.slot_weights = slot_weights.data<float>();
}

inline void take_gate_up(Problem& problem, const Tensor& out, const Tensor& out_scales, const Operands& given,
                         const Activation& activation) {
  check_gate_up(out, out_scales, given);
  problem.q = out.data<uint8_t>();
  problem.q_scales = out_scales.data<uint8_t>();
  problem.activation = activation;
}

}  // namespace hf::moe
