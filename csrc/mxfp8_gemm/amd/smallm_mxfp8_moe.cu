// MX-FP8 grouped GEMM of a mixture of experts for gfx950. moe_kernel.h has the kernel; a variant serves one number of
// columns per work-group (HF_BLOCK_N: 8 or 16).
#include <hip/hip_runtime.h>

#include "hipforge/module.h"
#include "../guards.h"
#include "moe_kernel.h"

#ifndef HF_BLOCK_N
#error "build a variant: -DHF_BLOCK_N=8 or 16"
#endif
static_assert(HF_BLOCK_N == 8 || HF_BLOCK_N == 16);

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::moe;
using namespace hf::smallm_mxfp8;

constexpr int64_t kMaxInt32 = (int64_t{1} << 31) - 1;

struct MoeShape {
  int64_t experts, n, k, a_rows, num_valid, a_div, block_m;
};

static void check_same(int64_t said, int64_t real, const char* name, const char* where) {
  HF_CHECK(said == real, name, " = ", said, " disagrees with ", where, ", which says ", real);
}

static void check_index(const Tensor& tensor, const char* name, const Tensor& w) {
  HF_CHECK(tensor.dtype() == HF_I32, name, " must be int32; got ", tensor.dtype());
  HF_CHECK(tensor.dim() == 1, name, " must have 1 dimension; got ", tensor);
  check_layout(tensor, name, w, "w");
}

static void check_experts(const Tensor& w, const Tensor& scales, const MoeShape& shape) {
  check_elements(w, "w");
  HF_CHECK(w.dim() == 3, "w must have 3 dimensions, [E, N, K]; got ", w);
  check_same(shape.experts, w.size(0), "E", "the shape of w");
  check_same(shape.n, w.size(1), "N", "the shape of w");
  check_same(shape.k, w.size(2), "K", "the shape of w");
  HF_CHECK(shape.n >= 1, "N must be at least 1; got ", shape.n);
  HF_CHECK(shape.experts >= 1 && shape.experts <= kMaxInt32, "E must be between 1 and 2^31 - 1; got ", shape.experts);
  check_scale_dtype(scales, "w_scale");
  HF_CHECK(scales.is_shape(shape.experts, shape.n, shape.k / hf::kMxBlock), "w_scale must be [", shape.experts, ", ",
           shape.n, ", ", shape.k / hf::kMxBlock, "], one scale per row and 32 elements of K; got ", scales);
  check_bytes(shape.n, shape.k, "one expert of w", "N");
  check_layout(w, "w", w, "w");
  check_layout(scales, "w_scale", w, "w");
  check_alignment(w, "w");
}

static void check_activations(const Tensor& a, const Tensor& scales, const Tensor& w, const MoeShape& shape) {
  check_payload(a, "a_q");
  check_same(shape.a_rows, a.size(0), "M_act", "the shape of a_q");
  HF_CHECK(a.size(1) == shape.k, "a_q and w must have the same K; got a_q ", a, " and w ", w);
  check_scales(scales, "a_scale", shape.a_rows, shape.k);
  check_bytes(shape.a_rows, shape.k, "a_q", "M_act");
  check_layout(a, "a_q", w, "w");
  check_layout(scales, "a_scale", w, "w");
  check_alignment(a, "a_q");
  HF_CHECK(shape.a_div >= 1 && shape.a_div <= kMaxInt32, "a_div must be a positive 32-bit integer; got ", shape.a_div);
  const int64_t needed = (shape.num_valid + shape.a_div - 1) / shape.a_div;
  HF_CHECK(shape.a_rows >= needed, "a_q has M_act = ", shape.a_rows, " rows, but ", shape.num_valid,
           " slots with a_div = ", shape.a_div, " read rows 0 to ", needed - 1);
}

static void check_indices(const Tensor& sorted, const Tensor& experts, const Tensor& padded, const Tensor& w,
                          const MoeShape& shape) {
  check_index(sorted, "sorted_token_ids", w);
  check_index(experts, "expert_ids", w);
  check_index(padded, "num_tokens_post_padded", w);
  HF_CHECK(shape.block_m >= 4 && shape.block_m % 4 == 0, "block_m must be a positive multiple of 4; got ",
           shape.block_m);
  const int64_t entries = sorted.numel();
  HF_CHECK(entries <= kMaxInt32, "sorted_token_ids must have at most 2^31 - 1 entries; got ", entries);
  HF_CHECK(entries % shape.block_m == 0, "sorted_token_ids must hold whole tiles, a multiple of block_m = ",
           shape.block_m, " entries; got ", entries);
  HF_CHECK(experts.numel() >= entries / shape.block_m, "expert_ids must have one entry per tile, ",
           entries / shape.block_m, "; got ", experts.numel());
  HF_CHECK(padded.numel() >= 1, "num_tokens_post_padded must have 1 entry; got none");
}

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. out bf16, at least num_valid_tokens
/// rows of N; a_q [M_act, K], w [E, N, K] e4m3fn (or uint8); their scales e8m0 (or uint8) [M_act, K/32], [E, N, K/32];
/// the index tensors int32; mul_weight_by float32 [num_valid_tokens] or None; bias float32 [E, N] or None, added before
/// the weight; block_n columns per work-group: 8 or 16.
void smallm_mxfp8_moe_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                          Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by,
                          OptionalTensor bias, int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act,
                          int64_t a_div, int64_t block_m, int64_t block_n, hipStream_t stream) {
  const MoeShape shape{E, N, K, M_act, num_valid_tokens, a_div, block_m};
  HF_CHECK(K > 0 && K % hf::kMxBlock == 0, "K must be a positive multiple of 32 (one e8m0 scale per 32 elements); got ",
           K);
  HF_CHECK(num_valid_tokens >= 0 && num_valid_tokens <= kMaxInt32,
           "num_valid_tokens must be between 0 and 2^31 - 1; got ", num_valid_tokens);
  check_experts(w, w_scale, shape);
  check_activations(a_q, a_scale, w, shape);
  check_indices(sorted_token_ids, expert_ids, num_tokens_post_padded, w, shape);
  HF_CHECK(block_n == 8 || block_n == 16, "block_n must be 8 or 16 (columns per work-group); got ", block_n);
  HF_CHECK(block_n == HF_BLOCK_N, "this variant of the module has block_n = ", HF_BLOCK_N, "; got ", block_n);
  HF_CHECK(out.dtype() == HF_BF16, "out must be bfloat16; got ", out.dtype());
  check_layout(out, "out", w, "w");
  HF_CHECK(out.numel() / N >= num_valid_tokens, "out has ", out.numel(), " elements; ", num_valid_tokens,
           " slots of N = ", N, " columns need ", num_valid_tokens * N);
  if (mul_weight_by.has_value()) {
    const Tensor weights = *mul_weight_by;
    HF_CHECK(weights.dtype() == HF_F32, "mul_weight_by must be float32; got ", weights.dtype());
    check_layout(weights, "mul_weight_by", w, "w");
    HF_CHECK(weights.numel() >= num_valid_tokens, "mul_weight_by must have one weight per slot, ", num_valid_tokens,
             "; got ", weights.numel());
  }
  if (bias.has_value()) {
    const Tensor biases = *bias;
    HF_CHECK(biases.dtype() == HF_F32, "bias must be float32; got ", biases.dtype());
    check_layout(biases, "bias", w, "w");
    HF_CHECK(biases.is_shape(E, N), "bias must be [E, N] = [", E, ", ", N, "]; got ", biases);
  }
  hf::check_apart({out, "out"}, {{a_q, "a_q"}, {a_scale, "a_scale"}, {w, "w"}, {w_scale, "w_scale"}});
  HF_CHECK_ARCH(w, "gfx950");

  const int64_t tiles = sorted_token_ids.numel() / block_m;
  if (tiles == 0 || num_valid_tokens == 0) return;
  const Problem problem{
      .out = out.data<hf::dev::bf16>(),
      .a = a_q.data<uint8_t>(),
      .a_scales = a_scale.data<uint8_t>(),
      .w = w.data<uint8_t>(),
      .w_scales = w_scale.data<uint8_t>(),
      .sorted_ids = sorted_token_ids.data<int32_t>(),
      .expert_ids = expert_ids.data<int32_t>(),
      .padded = num_tokens_post_padded.data<int32_t>(),
      .slot_weights = mul_weight_by.data<float>(),
      .biases = bias.data<float>(),
      .num_valid = static_cast<uint32_t>(num_valid_tokens),
      .a_rows = static_cast<uint32_t>(M_act),
      .n = static_cast<uint32_t>(N),
      .k = static_cast<uint32_t>(K),
      .experts = static_cast<uint32_t>(E),
      .a_div = static_cast<uint32_t>(a_div),
      .block_m = static_cast<uint32_t>(block_m),
      .tiles = static_cast<uint32_t>(tiles),
      .aligned_scales =
          K % hf::mfma::kStep == 0 && hf::aligned_to(a_scale.data(), 4) && hf::aligned_to(w_scale.data(), 4)};
  const int64_t rows = tiles < num_valid_tokens ? tiles : num_valid_tokens;
  const dim3 grid(hf::ceil_div(N, HF_BLOCK_N), static_cast<uint32_t>(rows));
  smallm_mxfp8_moe<HF_BLOCK_N><<<grid, kThreads, 0, stream>>>(problem);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(smallm_mxfp8_moe_out);
