// out [1, N] = sum weights swiglu(gate_up) W[ids]^T for the experts of one token on sm_90: passes of 16 rows of an expert's W.
//
//             expert 0      expert 1      expert 2
//           +-------------+-------------+-------------+--      A block has every gridDim.x-th tile of 16 rows, all experts of
//   tile 0  | team 0      | team 1      | team 2      | ...    it. A team of 2^k_shift warps takes every teams-th expert, all
//           +-------------+-------------+-------------+--      of its K: a pass, which the copy engine brings as pass_ring.h
//   tile b  | team 0      | team 1      | team 2      | ...    says. All warps' sums meet once a tile, in the order of the
//           +-------------+-------------+-------------+--      warps.
//
// A warp makes X of its steps itself, in registers: lane 4 g + t quantises 8 values of block g of a pair of steps, and the columns
// that have the steps take them from there. It does so once where a team has one expert, and for each pass otherwise.
//
// Bytes moved: S N K (1 + 1/32) of W once, 4 S K of gate and up per block from L2, 2 N written. Bound: W over the memory's
// bandwidth.
#pragma once

#include "pass_ring.h"

namespace hf::moe {

constexpr int kMostTokenSlots = 32;  // a lane keeps the expert of one
#if defined(HF_EVERY_LANE_ARRIVES)
constexpr bool kTeamsMeetAlike = true;  // for racecheck, which miscounts meetings of a part of the block that others do not have
#else
constexpr bool kTeamsMeetAlike = false;
#endif
constexpr int kTokenRingAt = 2 * kWarps * kPassRows * int(sizeof(float));  // behind the sums of all warps, twice
static_assert(kTokenRingAt % 128 == 0 && kTokenRingAt + kMostStageBytes + kStaticBytes <= kMostShared);

struct TokenDown {
  const dev::bf16* gate_up;
  const uint8_t *w, *w_scales;
  const int32_t* ids;
  const float* weights;
  dev::bf16* out;
  Activation activation;
  int slots, n, k, k_shift;
};

template <int STEPS>
__global__ void __launch_bounds__(kThreads, 1) mxfp8_token_down(const TokenDown p, const Ring r) {
  static_assert(STEPS <= kMostSteps);
  constexpr int kChunks = (STEPS + 1) / 2;  // pairs of steps, of which a lane quantises 8 values each
  using Chunk = dev::Vector<dev::bf16, 8>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[kWarps * kMostStages];
  float* const parts = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int sharers = 1 << p.k_shift, part = warp & (sharers - 1), team = warp >> p.k_shift, teams = kWarps >> p.k_shift;
  const int scale_pitch = p.k / kBlock;
  const bool issuer = part == sharers - 1;
  const uint32_t full = shared_address(barriers + team * kMostStages);
  if (issuer && lane < r.stages) init_barrier(full + lane * 8, 1);
  barriers_ready();
  __syncthreads();
  const int tiles = p.n / kPassRows, blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int tiles_here = (tiles - block + blocks - 1) / blocks;
  const int of_team = (p.slots - team + teams - 1) / teams;  // experts
  const int passes = tiles_here * of_team;
  let_next_start();
  wait_for_predecessor();

  const int own_id = lane < p.slots ? p.ids[lane] : 0;
  const float own_weight = lane < p.slots ? p.weights[lane] : 0.f;
  Chunk gate[kChunks] = {}, up[kChunks] = {};
  const auto k_of = [&](int c) { return (part + (2 * c + g / 4) * sharers) * kStep + g % 4 * kBlock + 8 * t; };
  const auto load_x = [&](int expert) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int k = k_of(c);
      if (2 * c + g / 4 >= STEPS || k >= p.k) continue;
      const dev::bf16* const from = p.gate_up + size_t(expert) * 2 * p.k + k;
      gate[c] = *reinterpret_cast<const Chunk*>(from), up[c] = *reinterpret_cast<const Chunk*>(from + p.k);
    }
  };
  if (of_team > 0) load_x(team);

  uint8_t* const ring = shared + kTokenRingAt + team * r.stages * r.stage_bytes;
  const auto ask = [&](int i, int stage) {
    if (i >= passes) return;
    const int tile = i / of_team, expert = team + (i - tile * of_team) * teams;
    const size_t row = size_t(__shfl_sync(~0u, own_id, expert)) * p.n + (block + tile * blocks) * kPassRows;
    const uint32_t barrier = full + stage * 8, to = shared_address(ring + stage * r.stage_bytes);
    if (lane == 0) arrive_expecting(barrier, kPassRows * (p.k + scale_pitch));
    __syncwarp();
    if (lane < kPassRows)
      copy_run(to + lane * r.pitch, p.w + (row + lane) * p.k, p.k, barrier);
    else if (lane == kPassRows)
      copy_run(to + r.scales_at(), p.w_scales + row * scale_pitch, kPassRows * scale_pitch, barrier);
  };
  if (issuer)
    for (int s = 0; s < r.stages; ++s) ask(s, s);

  // Lanes 4 g + t get step g of the warp: that of pair g / 2, which the lanes of half g % 2 of all have.
  uint32_t x[4][4], x_less[2];
  bool usual_x = true;
  const auto make_x = [&] {
    dev::u32x2 codes[kChunks];
    uint32_t bytes[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float values[8];
      uint32_t amax = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] = dev::swiglu(static_cast<float>(gate[c][j]), static_cast<float>(up[c][j]), p.activation);
        amax = dev::larger(amax, dev::magnitude_bits(values[j]));
      }
      bytes[c] = dev::e4m3_block_scale(dev::largest_of_lanes<4>(amax));
      const float inverse = dev::e8m0_inverse(bytes[c]);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] *= inverse;
      codes[c] = dev::encode_mx_e4m3x8(values, bytes[c]);
    }
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int from = (g % 2 * 4 + b) * 4;
      uint32_t byte = 0, low = 0, high = 0;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t byte_of = __shfl_sync(~0u, bytes[c], from);
        const uint32_t low_of = __shfl_sync(~0u, codes[c][0], from + t), high_of = __shfl_sync(~0u, codes[c][1], from + t);
        if (g / 2 == c) byte = byte_of & 255, low = low_of, high = high_of;
      }
      word |= byte << (8 * b);
      halves_of(low, x[b][0], x[b][1]);
      halves_of(high, x[b][2], x[b][3]);
    }
    const bool mine = g < STEPS && (part + g * sharers) * kStep < p.k;
    usual_x = __all_sync(~0u, !mine || (in_range(word) & in_range(word + 0x01010101u) & 0x80808080u) == 0x80808080u);
#pragma unroll
    for (int j = 0; j < 2; ++j) x_less[j] = __shfl_sync(~0u, word, 8 * t + 4 * j) - 0x7f7f7f7fu;
  };

  int stage = 0, parity = 0, i = 0;
  for (int tile = 0; tile < tiles_here; ++tile) {
    float total[2][2] = {};
    for (int of_tile = 0; of_tile < of_team; ++of_tile, ++i) {
      const int expert = team + of_tile * teams;
      if (of_team > 1 && i > 0) load_x(expert);
      if (of_team > 1 || i == 0) make_x();
      const uint8_t* const here = ring + stage * r.stage_bytes + g * r.pitch + 8 * t;
      const uint8_t* const scales = ring + stage * r.stage_bytes + r.scales_at() + g * r.scale_pitch;
      wait_phase(full + stage * 8, parity);
      float sums[2][2] = {};
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int k0 = (part + s * sharers) * kStep;
        if (k0 >= p.k) break;
        multiply_pass_step<true>(here + k0, scales + k0 / kBlock, r, x, x_less, usual_x, s - 2 * t, sums);
      }
      const float weight = __shfl_sync(~0u, own_weight, expert);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j) total[h][j] = fmaf(sums[h][j], weight, total[h][j]);
      if (kTeamsMeetAlike || i + r.stages < passes) {
        meet(team, sharers * 32);
        if (issuer) ask(i + r.stages, stage);
      }
      if (++stage == r.stages) stage = 0, parity ^= 1;
    }
    if (kTeamsMeetAlike && of_team * teams < p.slots) meet(team, sharers * 32);  // others have one expert more
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
inline void stream_token_down(TokenDown p, int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  const int steps = steps_of_warp(p.k, sharers);
  const Ring ring = Ring::of(p.k, sharers, kMostShared - kStaticBytes - kTokenRingAt);
  p.k_shift = __builtin_ctzll(static_cast<uint64_t>(sharers));
  const auto kernel = steps == 1 ? mxfp8_token_down<1> : steps == 2 ? mxfp8_token_down<2> : mxfp8_token_down<3>;
  hf::Launch at{static_cast<uint32_t>(hf::smaller(blocks, int64_t{p.n / kPassRows})), kThreads,
                static_cast<uint32_t>(kTokenRingAt + ring.bytes(sharers)), stream};
  at.programmatic = programmatic;
  hf::launch(kernel, at, p, ring);
}

}  // namespace hf::moe
