// out [1, N] = sum weights swiglu(gate_up) W[ids]^T for the experts of one token on sm_90: passes of 16 rows of an expert's W.
//
//             expert 0      expert 1      expert 2
//           +-------------+-------------+-------------+--      A block has every gridDim.x-th tile of 16 rows, all experts of
//   tile 0  | team 0      | team 1      | team 2      | ...    it. A team of 2^k_shift warps takes every teams-th expert, all
//           +-------------+-------------+-------------+--      of its K: a pass, which the copy engine brings as pass_ring.h
//   tile b  | team 0      | team 1      | team 2      | ...    says. All warps' sums meet once a tile, in the order of the
//           +-------------+-------------+-------------+--      warps.
//
// A warp makes X of its steps itself, in registers, once where a team has one expert and for each pass otherwise: it quantises
// SwiGLU, which is given or made here of gate and up. token_row.h has the products.
//
// With CHOOSES the launch before has chosen the experts (choice.h) before this one may start: W is asked for before that has ended, of
// half of the teams ahead of X and of the others behind it, since a multiprocessor's loads come in their order.
//
// Bytes moved: S N K (1 + 1/32) of W once, 4 S K of SwiGLU, or of gate and up, per block from L2, 2 N written. Bound: W over the memory's
// bandwidth.
#pragma once

#include "choice.h"
#include "token_row.h"

namespace hf::moe {

#if defined(HF_FOR_RACECHECK)
constexpr bool kTeamsMeetAlike = true;  // for racecheck, which miscounts meetings of a part of the block that others do not have
#else
constexpr bool kTeamsMeetAlike = false;
#endif

struct TokenDown {
  const void* inner;  // float32 [slots, k], SwiGLU, or bf16 [slots, 2 k], gate and up
  const uint8_t *w, *w_scales;
  const int32_t* ids;    // with CHOOSES those that the launch before leaves
  const float* weights;  // null with CHOOSES
  dev::bf16* out;
  Activation activation;
  int slots, n, k, k_shift;
};

template <int STEPS, bool CHOOSES, bool MADE>
__global__ void __launch_bounds__(kThreads, 1) mxfp8_token_down(const TokenDown p, const Ring r, const Choice choice) {
  static_assert(STEPS <= kMostSteps);
  using Row = TokenRow<STEPS>;
  constexpr int kValues = 8;  // of a lane, of a pair of steps
  using Values = std::conditional_t<MADE, dev::Vector<float, 4>, dev::Vector<dev::bf16, kValues>>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[kWarps * kMostStages];
  float* const parts = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, scale_pitch = p.k / kBlock;
  const Team team(p.k_shift, r.stages, barriers);
  __syncthreads();
  const int tiles = p.n / kPassRows, blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int tiles_here = (tiles - block + blocks - 1) / blocks;
  const int of_team = (p.slots - team.number + team.count - 1) / team.count;  // experts
  const int passes = tiles_here * of_team;
  let_next_start();
  int own_id;
  float own_weight;
  __shared__ uint32_t keys[CHOOSES ? gating::kMaxExperts : 1];
  if constexpr (CHOOSES) {
    own_id = lane < p.slots ? __ldcg(p.ids + lane) : 0;
  } else {
    wait_for_predecessor();
    own_id = lane < p.slots ? p.ids[lane] : 0;
    own_weight = lane < p.slots ? p.weights[lane] : 0.f;
  }
  Values loaded[Row::kPairs][2] = {};  // halves of the values, or gate and up
  const auto load_x = [&](int expert) {
#pragma unroll
    for (int i = 0; i < Row::kPairs; ++i) {
      const int k = Row::block_at(i, g, team.part, team.sharers);
      if (!Row::has(i, g / 4, k, p.k)) continue;
      if constexpr (MADE) {
        const auto* const from = reinterpret_cast<const Values*>(static_cast<const float*>(p.inner) + size_t(expert) * p.k + k + 8 * t);
        loaded[i][0] = from[0], loaded[i][1] = from[1];
      } else {
        const auto* const from = static_cast<const dev::bf16*>(p.inner) + size_t(expert) * 2 * p.k + k + 8 * t;
        loaded[i][0] = *reinterpret_cast<const Values*>(from), loaded[i][1] = *reinterpret_cast<const Values*>(from + p.k);
      }
    }
  };
  if (!CHOOSES && of_team > 0) load_x(team.number);

  uint8_t* const ring = shared + kTokenRingAt + team.number * r.stages * r.stage_bytes;
  const auto ask = [&](int i, int stage) {
    if (i >= passes) return;
    const int tile = i / of_team, expert = team.number + (i - tile * of_team) * team.count;
    const size_t row = size_t(__shfl_sync(~0u, own_id, expert)) * p.n + (block + tile * blocks) * kPassRows;
    const uint32_t barrier = team.full + stage * 8, to = shared_address(ring + stage * r.stage_bytes);
    if (lane == 0) arrive_expecting(barrier, kPassRows * (p.k + scale_pitch));
    __syncwarp();
    if (lane < kPassRows)
      copy_run_once(to + lane * r.pitch, p.w + (row + lane) * p.k, p.k, barrier);
    else if (lane == kPassRows)
      copy_run_once(to + r.scales_at(), p.w_scales + row * scale_pitch, kPassRows * scale_pitch, barrier);
  };
  const auto ask_first = [&] {
    if (team.issuer)
      for (int s = 0; s < r.stages; ++s) ask(s, s);
  };
  if constexpr (CHOOSES) {
    const bool ahead = 2 * team.number < team.count;
    if (ahead) ask_first();
    load_keys(choice, keys);
    __syncthreads();
    wait_for_predecessor();
    if (of_team > 0) load_x(team.number);
    if (!ahead) ask_first();
    own_weight = routing_weight(choice, keys, lane, own_id);
  } else {
    ask_first();
  }

  Row row;
  const auto make_x = [&] {
#pragma unroll
    for (int i = 0; i < Row::kPairs; ++i) {
      float values[kValues];
      uint32_t amax = 0;
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        if constexpr (MADE)
          values[j] = loaded[i][j / 4][j % 4];
        else
          values[j] = dev::swiglu(static_cast<float>(loaded[i][0][j]), static_cast<float>(loaded[i][1][j]), p.activation);
        amax = dev::larger(amax, dev::magnitude_bits(values[j]));
      }
      uint32_t byte = dev::e4m3_block_scale(dev::largest_of_lanes<4>(amax));
      const float inverse = dev::e8m0_inverse(byte);
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] *= inverse;
      const dev::u32x2 codes = dev::encode_mx_e4m3x8(values, byte);
      if (!Row::has(i, g / 4, Row::block_at(i, g, team.part, team.sharers), p.k)) byte = 127;
      // Columns 2 t + j are of blocks that lanes 4 (2 t + j) and on have.
      row.set(i, codes[0], codes[1], __shfl_sync(~0u, byte, 8 * t), __shfl_sync(~0u, byte, 8 * t + 4));
    }
  };

  int stage = 0, parity = 0, i = 0;
  for (int tile = 0; tile < tiles_here; ++tile) {
    float2 total = {};
    for (int of_tile = 0; of_tile < of_team; ++of_tile, ++i) {
      const int expert = team.number + of_tile * team.count;
      if (of_team > 1 && i > 0) load_x(expert);
      if (of_team > 1 || i == 0) make_x();
      wait_phase(team.full + stage * 8, parity);
      const float2 sums = row.multiply(ring + stage * r.stage_bytes, r, team.part, team.sharers, p.k, g, t);
      const float weight = __shfl_sync(~0u, own_weight, expert);
      total.x = fmaf(sums.x, weight, total.x), total.y = fmaf(sums.y, weight, total.y);
      if (kTeamsMeetAlike || i + r.stages < passes) {
        meet(team.number, team.sharers * 32);
        if (team.issuer) ask(i + r.stages, stage);
      }
      if (++stage == r.stages) stage = 0, parity ^= 1;
    }
    if (kTeamsMeetAlike && of_team * team.count < p.slots) meet(team.number, team.sharers * 32);  // others have one expert more
    // Two buffers in turn: whoever writes the next tile's sums may be ahead of those who read these.
    float* const all = parts + (tile & 1) * kWarps * kPassRows;
    const float2 of_row = sums_of_columns(total);
    if (t == 0) all[warp * kPassRows + g] = of_row.x, all[warp * kPassRows + g + 8] = of_row.y;
    __syncthreads();
    if (threadIdx.x < kPassRows)
      p.out[(block + tile * blocks) * kPassRows + threadIdx.x] = static_cast<dev::bf16>(added<kWarps, kPassRows>(all + threadIdx.x));
  }
}

/// Launches it on what is checked.
template <bool CHOOSES, bool MADE>
inline void stream_token_down(TokenDown p, const Choice& choice, int64_t sharers, int64_t blocks, bool programmatic,
                              hipStream_t stream) {
  const int steps = steps_of_warp(p.k, sharers);
  const Ring ring = Ring::of(p.k, sharers, kMostShared - kStaticBytes - kTokenRingAt);
  p.k_shift = __builtin_ctzll(static_cast<uint64_t>(sharers));
  const auto kernel = steps == 1   ? mxfp8_token_down<1, CHOOSES, MADE>
                      : steps == 2 ? mxfp8_token_down<2, CHOOSES, MADE>
                                   : mxfp8_token_down<3, CHOOSES, MADE>;
  hf::Launch at{static_cast<uint32_t>(hf::smaller(blocks, int64_t{p.n / kPassRows})), kThreads,
                static_cast<uint32_t>(kTokenRingAt + ring.bytes(sharers)), stream};
  at.programmatic = programmatic;
  hf::launch(kernel, at, p, ring, choice);
}

}  // namespace hf::moe
