// The experts of each token: scores of the logits, the k best of the experts (of the best groups), and their weights.
//
//   one wave per token; lane l owns experts l, l + 64, l + 128, ... (kPerLane of them)
//
//   logits row | 0 1 .. 63 | 64 .. 127 | ...     scores in fp32: softmax over the wave, or sigmoid
//   keys       fp32 as an unsigned integer that orders alike: NaN is 1, an expert that takes no part 0
//   groups     lane g scores group g from keys in LDS (its best, or with a bias the sum of its two best); the experts
//              of all but the best topk_groups lose their keys
//   k times    the largest first key of the wave's lanes, which have sorted theirs, into a scalar; of lanes that have it the one of
//              the lowest expert, which goes on to its next key
//
// The choice is by logit where there is no bias: scores are monotone in it, and two logits whose scores round to the
// same number still have an order. With a bias it is by score + bias.
// Bytes: a row of logits is read once; the latency of k dependent steps over the wave is the bound.
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/math.h"
#include "hipforge/device/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "gating.h"

#if !defined(HF_INPUT)
#error "build with -DHF_INPUT=f32, f16 or bf16"
#endif

// Every operation rounds on its own, as torch's do.
#pragma clang fp contract(off)

namespace {

using namespace hf::gating;
using Input = HF_ELEMENT(HF_INPUT);
constexpr int kWaveSize = hf::dev::kWaveSize;
constexpr int kReciprocalBits = 20;  // experts / group size by multiplication: exact below 2^9

// The kernel takes these one by one, in this order: those up to `scale` are in SGPRs when a wave starts (kernel-argument
// preload), the others are loaded where there are groups.
struct Arguments {
  const Input* logits;
  int64_t row_stride;
  const float* bias;
  float* weights;
  int32_t* ids;
  uint32_t experts, groups;
  uint32_t options;  // of pack_options
  float scale;
  uint32_t topk_groups, group_size, group_reciprocal;

  __device__ uint32_t choices() const { return options & 0xFF; }
  __device__ uint32_t shared() const { return options >> 8 & 0xFF; }
  __device__ bool sigmoid() const { return options >> 16 & 1; }
  __device__ bool renormalize() const { return options >> 17 & 1; }
};

constexpr uint32_t pack_options(uint32_t choices, uint32_t shared, bool sigmoid, bool renormalize) {
  static_assert(kMaxChoices <= 0xFF && kMaxShared <= 0xFF);
  return choices | shared << 8 | uint32_t{sigmoid} << 16 | uint32_t{renormalize} << 17;
}

// Clears the keys of experts outside the best groups. `lds` has the keys of all experts, then those of the groups.
template <int kPerLane>
__device__ inline void keep_best_groups(uint32_t (&keys)[kPerLane], uint32_t* lds, uint32_t lane, const Arguments& a) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) lds[j * kWaveSize + lane] = keys[j];
  hf::dev::wave_fence();
  uint32_t group_keys[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const uint32_t group = j * kWaveSize + lane;
    uint32_t best = kNotThere, second = kNotThere;
    uint32_t at = group < a.group_size ? group : 0;  // lanes start apart, which reduces LDS bank conflicts
    if (group < a.groups)
      for (uint32_t i = 0; i < a.group_size; ++i, at = at + 1 < a.group_size ? at + 1 : 0) {
        const uint32_t key = lds[group * a.group_size + at];
        const uint32_t lower = key < best ? key : best;
        second = second > lower ? second : lower;
        best = best > key ? best : key;
      }
    // A group of one expert has no second best.
    const bool sums = a.bias && second != kNotThere;
    group_keys[j] = best == kNotThere || !sums ? best : key_of(value_of(best) + value_of(second));
  }
  uint32_t* kept = lds + kPerLane * kWaveSize;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) kept[j * kWaveSize + lane] = 0;
  hf::dev::wave_fence();
  Ranked<kPerLane> ranked(group_keys, lane);
  for (uint32_t i = 0; i < a.topk_groups; ++i) {
    const uint32_t group = ranked.take_best(lane);
    if (lane == 0) kept[group] = 1;
  }
  hf::dev::wave_fence();
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const uint32_t expert = j * kWaveSize + lane;
    const uint32_t group = expert * a.group_reciprocal >> kReciprocalBits;
    if (expert < a.experts && !kept[group]) keys[j] = kNotThere;
  }
}

template <int kPerLane>
__global__ __launch_bounds__(kWaveSize) void topk_gating_kernel(
    const Input* logits, int64_t row_stride, const float* expert_bias, float* weights, int32_t* ids, uint32_t experts,
    uint32_t groups, uint32_t options, float scale, uint32_t topk_groups, uint32_t group_size, uint32_t group_reciprocal) {
  const Arguments a{logits, row_stride, expert_bias, weights,     ids,        experts,
                    groups, options,    scale,       topk_groups, group_size, group_reciprocal};
  __shared__ uint32_t lds[2 * kPerLane * kWaveSize];
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  const uint32_t lane = threadIdx.x;
  const int64_t token = blockIdx.x;
  const Input* row = a.logits + token * a.row_stride;
  Input logits_here[kPerLane];
  float scores[kPerLane], bias[kPerLane];
  uint32_t keys[kPerLane];
  uint32_t largest_key = key_of(-__builtin_inff());  // a NaN takes no part
  // Lanes without an expert read the last one's values, so that all loads go out before the first is waited for.
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) logits_here[j] = row[min(j * kWaveSize + lane, a.experts - 1)];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) bias[j] = a.bias ? a.bias[min(j * kWaveSize + lane, a.experts - 1)] : 0.f;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const bool here = j * kWaveSize + lane < a.experts;
    scores[j] = here ? static_cast<float>(logits_here[j]) : -__builtin_inff();
    keys[j] = here ? key_of(scores[j]) : kNotThere;
    largest_key = largest_key > keys[j] ? largest_key : keys[j];
  }
  float divisor = 1.f;  // of scores: those of a softmax that are not chosen need none
  if (a.sigmoid()) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) scores[j] = 1.f / (1.f + __builtin_expf(-scores[j]));
  } else {
    const float largest = value_of(hf::dev::largest_of_wave(largest_key));
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      // By comparison, because infinity minus itself is NaN.
      const bool here = j * kWaveSize + lane < a.experts;
      scores[j] = here ? (scores[j] == largest ? 1.f : __builtin_expf(scores[j] - largest)) : 0.f;
      sum = sum + (scores[j] == scores[j] ? scores[j] : 0.f);
    }
    sum = hf::dev::lanes_combined<kWaveSize>(sum, [](float x, float y) { return x + y; });
    divisor = sum;
  }
  if (a.bias) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      scores[j] = scores[j] / divisor;
      if (keys[j] != kNotThere) keys[j] = key_of(scores[j] + bias[j]);
    }
    divisor = 1.f;
  }
  if (a.groups > 1) keep_best_groups(keys, lds, lane, a);

  uint32_t id = 0;
  Ranked<kPerLane> ranked(keys, lane);
  for (uint32_t i = 0; i < a.choices(); ++i) {
    const uint32_t best = ranked.take_best(lane);
    if (lane == i) id = best;
  }
  hf::dev::wave_fence();  // groups have read the keys there
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) lds[j * kWaveSize + lane] = __builtin_bit_cast(uint32_t, scores[j]);
  hf::dev::wave_fence();
  float weight = __builtin_bit_cast(float, lds[id]) / divisor;
  if (a.renormalize()) {
    float sum = 0.f;
    for (uint32_t i = 0; i < a.choices(); ++i) sum = sum + hf::dev::of_lane(weight, i);
    weight = weight / (sum + kLeastSum);
  }
  weight = weight * a.scale;
  const uint32_t width = a.choices() + a.shared();
  if (lane >= a.choices()) weight = 1.f, id = a.experts + lane - a.choices();
  if (lane < width) {
    a.weights[token * width + lane] = weight;
    a.ids[token * width + lane] = static_cast<int32_t>(id);
  }
}

template <int kPerLane>
void launch(const Arguments& a, int64_t tokens, bool programmatic, hipStream_t stream) {
  hf::Launch at{static_cast<uint32_t>(tokens), kWaveSize, 0, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(topk_gating_kernel<kPerLane>, at, a.logits, a.row_stride,
             a.bias, a.weights, a.ids, a.experts, a.groups, a.options, a.scale, a.topk_groups, a.group_size,
             a.group_reciprocal);
}

}  // namespace

/// weights float32 and ids int32 [T, k + shared]; logits [T, E], rows contiguous; bias float32 [E]. groups is 1 and
/// topk_groups 1 where there are none.
void topk_gating_out(hf::Tensor weights, hf::Tensor ids, hf::Tensor logits, hf::OptionalTensor bias, int64_t choices,
                     bool sigmoid, bool renormalize, int64_t groups, int64_t topk_groups, double scale, int64_t shared,
                     bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(logits, HF_ARCHS);
  HF_CHECK(logits.dtype() == hf::dev::dtype_of<Input>, "logits has another dtype than this variant was built for");
  HF_CHECK(logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1), "logits must be [T, E] with contiguous rows; got ",
           logits);
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  HF_CHECK(tokens < int64_t{1} << 31, "logits must have fewer than 2^31 rows; got ", tokens);
  HF_CHECK(experts >= 1 && experts <= kMaxExperts, "logits must have 1 to ", kMaxExperts, " experts; got ", experts);
  HF_CHECK(groups >= 1 && groups <= experts && experts % groups == 0, "groups must divide the number of experts, ", experts,
           "; got ", groups);
  HF_CHECK(topk_groups >= 1 && topk_groups <= groups, "topk_groups must be 1 to groups = ", groups, "; got ", topk_groups);
  const int64_t candidates = experts / groups * topk_groups;
  HF_CHECK(choices >= 1 && choices <= kMaxChoices && choices <= candidates, "k must be 1 to ", kMaxChoices,
           " and at most the experts in the kept groups, ", candidates, "; got ", choices);
  HF_CHECK(shared >= 0 && shared <= kMaxShared, "shared_experts must be 0 to ", kMaxShared, "; got ", shared);
  HF_CHECK(scale - scale == 0, "scale must be finite; got ", scale);
  const int64_t width = choices + shared;
  hf::check_operand(weights, "weights", HF_F32, {tokens, width});
  hf::check_operand(ids, "ids", HF_I32, {tokens, width});
  hf::check_not_in_place({weights, "weights"}, {{logits, "logits"}});
  Arguments a = {};
  if (bias) {
    hf::check_operand(*bias, "bias", HF_F32, {experts});
    a.bias = bias.data<const float>();
  }
  if (tokens == 0) return;
  a.logits = logits.data<const Input>();
  a.row_stride = logits.stride(0);
  a.weights = weights.data<float>();
  a.ids = ids.data<int32_t>();
  a.experts = static_cast<uint32_t>(experts);
  a.options = pack_options(static_cast<uint32_t>(choices), static_cast<uint32_t>(shared), sigmoid, renormalize);
  a.groups = static_cast<uint32_t>(groups);
  a.topk_groups = static_cast<uint32_t>(topk_groups);
  a.group_size = static_cast<uint32_t>(experts / groups);
  a.group_reciprocal = ((1u << kReciprocalBits) + a.group_size - 1) / a.group_size;
  a.scale = static_cast<float>(scale);
  if (experts <= kWaveSize) return launch<1>(a, tokens, programmatic, stream);
  if (experts <= 2 * kWaveSize) return launch<2>(a, tokens, programmatic, stream);
  if (experts <= 4 * kWaveSize) return launch<4>(a, tokens, programmatic, stream);
  if constexpr (8 * kWaveSize < kMaxExperts) {
    if (experts > 8 * kWaveSize) return launch<kMaxExperts / kWaveSize>(a, tokens, programmatic, stream);
  }
  launch<8>(a, tokens, programmatic, stream);
}
HF_EXPORT(topk_gating_out);
