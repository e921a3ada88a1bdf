// What every entry of the grouped MX-FP8 GEMMs demands of its operands, with the messages that say so.
#pragma once

#include "../mxfp8_gemm/guards.h"

namespace hf::moe {

constexpr int64_t kMaxInt32 = (int64_t{1} << 31) - 1;

/// The operands that the entries share, and the numbers that they are told.
struct Operands {
  Tensor a, a_scales, w, w_scales, sorted_ids, expert_ids, padded;
  OptionalTensor biases;
  int64_t experts, n, k, num_valid, a_rows, a_div, block_m;
  hf_dtype payload;  // dtype of the elements, HF_E4M3FN or HF_E4M3FNUZ
  bool fp4 = false;  // w holds two e2m1 elements in a byte
};

inline void check_same(int64_t said, int64_t real, const char* name, const char* where) {
  HF_CHECK(said == real, name, " = ", said, " disagrees with ", where, ", which says ", real);
}

inline void check_experts(const Operands& given) {
  const Tensor& w = given.w;
  if (given.fp4)
    check_operand(w, "w", HF_U8, {"E", "N", "K/2"}, ", two e2m1 elements in a byte", kAligned);
  else
    mxfp8::check_payload(w, "w", given.payload, {"E", "N", "K"});
  check_same(given.experts, w.size(0), "E", "the shape of w");
  check_same(given.n, w.size(1), "N", "the shape of w");
  check_same(given.k, w.size(2) * (given.fp4 ? 2 : 1), "K", "the shape of w");
  HF_CHECK(given.n >= 1, "N must be at least 1; got ", given.n);
  HF_CHECK(given.experts >= 1 && given.experts <= kMaxInt32, "E must be between 1 and 2^31 - 1; got ", given.experts);
  mxfp8::check_bytes(given.n, given.k, "one expert of w", "N");
}

inline void check_activations(const Operands& given) {
  const Tensor &a = given.a, &w = given.w;
  mxfp8::check_payload(a, "a_q", given.payload);
  check_same(given.a_rows, a.size(0), "M_act", "the shape of a_q");
  HF_CHECK(a.size(1) == given.k, "a_q and w must have the same K; got a_q ", a, " and w ", w);
  mxfp8::check_bytes(given.a_rows, given.k, "a_q", "M_act");
  HF_CHECK(given.a_div >= 1 && given.a_div <= kMaxInt32, "a_div must be a positive 32-bit integer; got ", given.a_div);
  const int64_t needed = (given.num_valid + given.a_div - 1) / given.a_div;
  HF_CHECK(given.a_rows >= needed, "a_q has M_act = ", given.a_rows, " rows, but ", given.num_valid,
           " slots with a_div = ", given.a_div, " read rows 0 to ", needed - 1);
}

inline void check_indices(const Operands& given) {
  for (const auto& [index, name] : {Named{given.sorted_ids, "sorted_token_ids"}, Named{given.expert_ids, "expert_ids"},
                                    Named{given.padded, "num_tokens_post_padded"}})
    check_operand(index, name, HF_I32, {index.numel()});
  HF_CHECK(given.block_m >= 4 && given.block_m % 4 == 0, "block_m must be a positive multiple of 4; got ",
           given.block_m);
  const int64_t entries = given.sorted_ids.numel();
  HF_CHECK(entries <= kMaxInt32, "sorted_token_ids must have at most 2^31 - 1 entries; got ", entries);
  HF_CHECK(entries % given.block_m == 0, "sorted_token_ids must hold whole tiles, a multiple of block_m = ",
           given.block_m, " entries; got ", entries);
  HF_CHECK(given.expert_ids.numel() >= entries / given.block_m, "expert_ids must have one entry per tile, ",
           entries / given.block_m, "; got ", given.expert_ids.numel());
  HF_CHECK(given.padded.numel() >= 1, "num_tokens_post_padded must have 1 entry; got none");
}

/// Checks everything but the scales and the output.
inline void check_unscaled(const Operands& given) {
  HF_CHECK(given.num_valid >= 0 && given.num_valid <= kMaxInt32,
           "num_valid_tokens must be between 0 and 2^31 - 1; got ", given.num_valid);
  check_experts(given);
  check_activations(given);
  check_indices(given);
  if (given.biases) check_operand(*given.biases, "bias", HF_F32, {given.experts, given.n}, " = [E, N]");
}

/// Checks everything but the output.
inline void check_operands(const Operands& given) {
  HF_CHECK(given.k > 0 && given.k % kMxBlock == 0,
           "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ", given.k);
  check_unscaled(given);
  check_operand(given.w_scales, "w_scale", kE8m0, {given.experts, given.n, given.k / kMxBlock}, mxfp8::kPerBlock);
  check_operand(given.a_scales, "a_scale", kE8m0, {given.a_rows, given.k / kMxBlock}, mxfp8::kPerBlock);
}

/// Checks the bf16 output of one row per slot and the slots' weights.
inline void check_output(const Tensor& out, const OptionalTensor& slot_weights, const Operands& given) {
  check_numbers(out, "out", HF_BF16);
  HF_CHECK(out.numel() / given.n >= given.num_valid, "out has ", out.numel(), " elements; ", given.num_valid,
           " slots of N = ", given.n, " columns need ", given.num_valid * given.n);
  if (slot_weights.has_value()) {
    const Tensor weights = *slot_weights;
    check_numbers(weights, "mul_weight_by", HF_F32);
    HF_CHECK(weights.numel() >= given.num_valid, "mul_weight_by must have one weight per slot, ", given.num_valid,
             "; got ", weights.numel());
  }
}

/// Checks the MX-FP8 output of SwiGLU over gate and up, the rows of W.
inline void check_gate_up(const Tensor& out, const Tensor& out_scales, const Operands& given) {
  HF_CHECK(given.n % (2 * kMxBlock) == 0, "N must be a multiple of 64 (gate and up of a block of 32); got ", given.n);
  check_operand(out, "out", given.payload, {given.num_valid, given.n / 2}, hf::kOfDevice);
  check_operand(out_scales, "out_scales", HF_U8, {given.num_valid, given.n / (2 * kMxBlock)});
}

}  // namespace hf::moe
