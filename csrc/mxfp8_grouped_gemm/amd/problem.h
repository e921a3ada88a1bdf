// The problem of the grouped MX-FP8 GEMMs of a mixture of experts, made from operands that were checked.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/amd/vector.h"
#include "hipforge/amd/wave.h"
#include "../guards.h"

namespace hf::moe {

/// The arguments of a launch, with device pointers: First has those that a wave's first loads need. A kernel may take the
/// members of First one by one, in this order, and then a structure that begins with Rest: only arguments that are no
/// structures can be in SGPRs when a wave starts (kernel-argument preload), and First fills all of these.
struct First {
  const int32_t *sorted_ids, *expert_ids, *padded;
  const uint8_t *w, *w_scales;
  uint32_t num_valid, block_m, n, k;
};

struct Rest {
  const uint8_t *a, *a_scales;
  dev::bf16* out;
  const float* slot_weights;  // null: outputs are not weighted
  const float* biases;        // [experts, n], added before the weight; null: none
  uint32_t a_rows, experts, a_div, tiles;
  uint32_t grid_rows;       // of a grid that walks the tiles: if every expert is padded, num_valid tiles at most are in use
  uint32_t aligned_output;  // four neighbouring outputs can be stored at once
  uint32_t log2_parts;      // of K, of kernels that split it over waves
  uint32_t tile_columns;    // of a work-group, of the same kernels
  uint32_t options;
};

// Options. Of scales that are not MX's: one for all of A, one for each expert. Of MX's: rows of both tensors start at a multiple of
// 4 bytes, and K is a multiple of 128; or rows start between words, but both tensors, and the scales of each expert, do not.
constexpr uint32_t kOneAScale = 1, kOneWScale = 2, kAlignedScales = 4, kScalesBetweenWords = 8;

constexpr int kPreloadedDwords = 14;  // what 16 user SGPRs leave
static_assert(sizeof(First) == kPreloadedDwords * sizeof(uint32_t) && sizeof(First) % alignof(Rest) == 0);

struct Problem : First, Rest {};

using Late = dev::Late<Problem>;
__device__ inline const Late& arguments_here() { return dev::arguments_here<Problem>(); }
__device__ inline First first_here() {
  const Late& p = arguments_here();
  return {p.sorted_ids, p.expert_ids, p.padded, p.w, p.w_scales, p.num_valid, p.block_m, p.n, p.k};
}

/// Launches a kernel that takes the members of First one by one and then `rest`.
template <class Kernel, class Following>
void launch(Kernel kernel, const First& p, const Following& rest, dim3 grid, uint32_t threads, uint32_t lds, hipStream_t stream) {
  hf::launch(kernel, {grid, threads, lds, stream}, p.sorted_ids, p.expert_ids, p.padded, p.w, p.w_scales, p.num_valid,
             p.block_m, p.n, p.k, rest);
}

constexpr int64_t kScaleStep = 128;  // k whose scales are one dword of a row

/// The problem of operands that were checked, without output and slot weights.
inline Problem problem_of(const Operands& given) {
  const First first{.sorted_ids = given.sorted_ids.data<int32_t>(),
                    .expert_ids = given.expert_ids.data<int32_t>(),
                    .padded = given.padded.data<int32_t>(),
                    .w = given.w.data<uint8_t>(),
                    .w_scales = static_cast<const uint8_t*>(given.w_scales.data()),
                    .num_valid = static_cast<uint32_t>(given.num_valid),
                    .block_m = static_cast<uint32_t>(given.block_m),
                    .n = static_cast<uint32_t>(given.n),
                    .k = static_cast<uint32_t>(given.k)};
  const auto tiles = static_cast<uint32_t>(given.sorted_ids.numel() / given.block_m);
  const bool words = aligned_to(given.a_scales.data(), 4) && aligned_to(given.w_scales.data(), 4);
  const bool between = words && given.k % kScaleStep != 0 && given.n * (given.k / kMxBlock) % 4 == 0;
  const Rest rest{.a = given.a.data<uint8_t>(),
                  .a_scales = static_cast<const uint8_t*>(given.a_scales.data()),
                  .biases = given.biases.data<float>(),
                  .a_rows = static_cast<uint32_t>(given.a_rows),
                  .experts = static_cast<uint32_t>(given.experts),
                  .a_div = static_cast<uint32_t>(given.a_div),
                  .tiles = tiles,
                  .grid_rows = tiles < first.num_valid ? tiles : first.num_valid,
                  .options = given.k % kScaleStep == 0 && words ? kAlignedScales : between ? kScalesBetweenWords : 0};
  return {first, rest};
}

/// Checks everything but the output and returns the problem without it and without slot weights.
inline Problem checked(const Operands& given) {
  check_operands(given);
  return problem_of(given);
}

/// Checks the output and the slots' weights, and adds both to the problem.
inline void take_output(Problem& problem, const Tensor& out, const OptionalTensor& slot_weights, const Operands& given) {
  check_output(out, slot_weights, given);
  problem.out = out.data<dev::bf16>();
  problem.slot_weights = slot_weights.data<float>();
  problem.aligned_output = given.n % dev::kColumnsPerLane == 0 && aligned_to(out.data(), 8);
}

}  // namespace hf::moe
