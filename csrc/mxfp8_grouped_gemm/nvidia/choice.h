// The experts of one token, chosen from its router's logits by every block of the first product: what topk_gating.cu computes, bit for
// bit, without its launch and without groups. One warp of a block chooses; weights, which the second product needs, are made there by
// each warp in the order of topk_gating.cu.
#pragma once

#include "../../moe_routing/gating.h"
#include "groups.h"

namespace hf::moe {

struct Choice {
  const float* logits;  // [experts]
  const float* bias;    // [experts], of a sigmoid's scores, for the choice only; null: none
  int experts, choices, shared;
  bool sigmoid, renormalize;
  float scale;

  /// They may be read before the launch before has ended: L1 may have those of an earlier launch.
  __device__ __forceinline__ float logit(int expert) const { return __ldcg(logits + expert); }
  __device__ __forceinline__ static float sigmoid_of(float value) { return 1.f / (1.f + __builtin_expf(-value)); }
};

__device__ __noinline__ inline uint32_t biased_key(float logit, float bias) {
  return gating::key_of(Choice::sigmoid_of(logit) + bias);
}

template <int PER_LANE, class Found>
__device__ __forceinline__ void choose_of(const Choice& c, int lane, const Found& found) {
  float logits[PER_LANE];
  uint32_t own[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) logits[j] = c.logit(min(j * 32 + lane, c.experts - 1));
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) {
    const int e = j * 32 + lane;
    own[j] = e >= c.experts ? gating::kNotThere : c.bias ? biased_key(logits[j], c.bias[e]) : gating::key_of(logits[j]);
  }
  gating::Ranked<PER_LANE> ranked(own, lane);
#pragma unroll 1
  for (int i = 0; i < c.choices; ++i) {
    const uint32_t best = ranked.take_best(lane);
    if (lane == 0) found(i, static_cast<int>(best));
  }
  if (lane < c.shared) found(c.choices + lane, c.experts + lane);
}

constexpr int kNotChosen = -1;  // where the number of an expert will be

/// Calls found(place, expert) once for each of the choices, then for the shared experts. One warp calls it.
template <class Found>
__device__ __forceinline__ void choose_experts(const Choice& c, int lane, const Found& found) {
  constexpr int kFew = 4;
  if (c.experts <= kFew * 32)
    choose_of<kFew>(c, lane, found);
  else
    choose_of<gating::kMaxExperts / 32>(c, lane, found);
}

/// Leaves the logits of all experts, as keys, in shared memory. All threads of a block call it.
__device__ __forceinline__ void load_keys(const Choice& c, uint32_t* keys) {
  for (int e = threadIdx.x; e < c.experts; e += blockDim.x) keys[e] = gating::key_of(c.logit(e));
}

/// Returns the routing weight of choice number `lane`, whose expert is `expert`; 1 of a shared one. All lanes of a warp call it;
/// keys: of load_keys.
__device__ __forceinline__ float routing_weight(const Choice& c, const uint32_t* keys, int lane, int expert) {
  const bool is_chosen = lane < c.choices;
  float weight;
  if (c.sigmoid) {
    weight = Choice::sigmoid_of(is_chosen ? c.logit(expert) : 0.f);
  } else {
    uint32_t largest_key = gating::key_of(-__builtin_inff());  // a NaN takes no part
#pragma unroll 1
    for (int e = lane; e < c.experts; e += 32) largest_key = max(largest_key, keys[e]);
    const float largest = gating::value_of(dev::largest_of_wave(largest_key));
    // By comparison, because infinity minus itself is NaN.
    const auto score_of = [&](float value) { return value == largest ? 1.f : __builtin_expf(value - largest); };
    float sum = 0.f;
#pragma unroll 1
    for (int e = lane; e < c.experts; e += 32) {
      const float score = score_of(gating::value_of(keys[e]));
      sum = sum + (score == score ? score : 0.f);
    }
    weight = score_of(gating::value_of(keys[is_chosen ? expert : 0])) / dev::wave_sum(sum);
  }
  if (c.renormalize) {
    float sum = 0.f;
#pragma unroll 1
    for (int i = 0; i < c.choices; ++i) sum = sum + __shfl_sync(~0u, weight, i);
    weight = weight / (sum + gating::kLeastSum);
  }
  return is_chosen ? weight * c.scale : 1.f;
}

}  // namespace hf::moe
