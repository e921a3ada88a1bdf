// out [S, N / 2] = swiglu(X [1, K] W[ids]^T) for the experts of one token on sm_90: passes of 16 rows of an expert's W, 8 of the
// gate and the 8 of up that belong to them.
//
//    expert 0's passes        expert 1's passes             The passes of all experts are one stream, of which a block has every
//    +-----+-----+-- ... --+  +-----+-----+-- ... --+       gridDim.x-th. Teams of 2^k_shift warps that share K take every
//    | 0   | 1   |  N / 16 |  | 0   | 1   |         |       teams-th of those, which the copy engine brings as pass_ring.h says.
//    +-----+-----+-- ... --+  +-----+-----+-- ... --+       A team's sums meet once a pass.
//
// token_row.h has the products. gate and up are rounded to bf16, as a launch of their own would store them; SwiGLU of them stays
// in float32 and is quantised by whoever needs it, since a block of 32 results would be four passes.
//
// With CHOOSES a block chooses the experts itself (choice.h), and asks for the first one's passes while a warp looks for the others; the
// next launch may start when block 0 has left them in memory. Bytes moved: S N K (1 + 1/32) of W once, K (1 + 1/32) of X per block
// from L2, 2 S N written. Bound: W over the memory's bandwidth.
#pragma once

#include "choice.h"
#include "token_row.h"

namespace hf::moe {

#if defined(HF_FOR_RACECHECK)
constexpr bool kChoiceIsMet = true;  // for racecheck, which does not know that a warp may look for what another one leaves
#else
constexpr bool kChoiceIsMet = false;
#endif

struct TokenGateUp {
  const uint8_t *a, *a_scales, *w, *w_scales;
  const int32_t* ids;  // null where the experts are chosen here
  int32_t* chosen;     // where those are left for the next launch, which may start then; null otherwise
  float* out;
  Activation activation;
  int slots, n, k, k_shift;
  Divisor passes;  // of an expert
};

template <int STEPS, bool CHOOSES>
__global__ void __launch_bounds__(kThreads, 1) mxfp8_token_gate_up(const TokenGateUp p, const Ring r, const Choice choice) {
  static_assert(STEPS <= kMostSteps);
  using Row = TokenRow<STEPS>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[kWarps * kMostStages];
  __shared__ int experts[kMostTokenSlots];
  float* const parts = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, scale_pitch = p.k / kBlock;
  const Team team(p.k_shift, r.stages, barriers);
  const int units = p.slots * static_cast<int>(p.passes.value), blocks = static_cast<int>(gridDim.x);
  const int block = static_cast<int>(blockIdx.x), passes = (units - block + blocks - 1) / blocks;  // every blocks-th
  if constexpr (CHOOSES) {
    if (threadIdx.x < kMostTokenSlots) experts[threadIdx.x] = kNotChosen;
    __syncthreads();
  }
  wait_for_predecessor();
  if (!CHOOSES || block > 0) let_next_start();  // what follows may rely on what came before, and on the choice of block 0

  // X is asked for ahead of W, whose copies a multiprocessor's loads would wait for.
  uint2 codes[Row::kPairs];
  uint32_t words[Row::kPairs];
#pragma unroll
  for (int i = 0; i < Row::kPairs; ++i) {
    const int k0 = Row::block_at(i, g, team.part, team.sharers), columns = Row::columns_at(i, t, team.part, team.sharers);
    codes[i] = Row::has(i, g / 4, k0, p.k) ? __ldg(reinterpret_cast<const uint2*>(p.a + k0 + 8 * t)) : make_uint2(0, 0);
    words[i] = Row::has(i, t / 2, columns, p.k) ? __ldg(reinterpret_cast<const uint16_t*>(p.a_scales + columns / kBlock)) : 0x7f7f;
  }
  if constexpr (CHOOSES) {
    if (warp == 0) {
      choose_experts(choice, lane, [&](int place, int expert) {
        *const_cast<volatile int*>(experts + place) = expert;
        if (block == 0) p.chosen[place] = expert;
      });
      if (block == 0) {
        __threadfence();
        __syncwarp();
        let_next_start();
      }
    }
    if (kChoiceIsMet) __syncthreads();
  } else {
    if (threadIdx.x < p.slots) experts[threadIdx.x] = p.ids[threadIdx.x];
    __syncthreads();
  }

  // The copies of pass number i of the team: a lane has a row, two more the scales of the gate's and of up's.
  uint8_t* const ring = shared + kTokenRingAt + team.number * r.stages * r.stage_bytes;
  const auto ask = [&](int i, int stage) {
    const int of_block = i * team.count + team.number;
    if (of_block >= passes) return;
    const int pass = block + of_block * blocks, slot = p.passes.quotient(pass);
    const int in_expert = pass - slot * static_cast<int>(p.passes.value);
    const int half = lane < kPassRows ? lane / kTileRows : lane - kPassRows;
    int expert = experts[slot];
    if constexpr (CHOOSES)  // the first of them are asked for while the others are looked for
      while (expert == kNotChosen) expert = *const_cast<volatile int*>(experts + slot);
    const size_t row = size_t(expert) * p.n + half * (p.n / 2) + in_expert * kTileRows;
    const uint32_t barrier = team.full + stage * 8, to = shared_address(ring + stage * r.stage_bytes);
    if (lane == 0) arrive_expecting(barrier, kPassRows * (p.k + scale_pitch));
    __syncwarp();
    if (lane < kPassRows)
      copy_run_once(to + lane * r.pitch, p.w + (row + lane % kTileRows) * p.k, p.k, barrier);
    else if (lane < kPassRows + 2)
      copy_run_once(to + r.scales_at() + half * kTileRows * scale_pitch, p.w_scales + row * scale_pitch, kTileRows * scale_pitch, barrier);
  };
  if (team.issuer)
    for (int s = 0; s < r.stages; ++s) ask(s, s);
  Row row;
#pragma unroll
  for (int i = 0; i < Row::kPairs; ++i) row.set(i, codes[i].x, codes[i].y, words[i] & 255, words[i] >> 8);

  int stage = 0, parity = 0;
  for (int i = 0, of_block; (of_block = i * team.count + team.number) < passes; ++i) {
    // Two buffers in turn: whoever writes the next pass's sums may be ahead of those who read these.
    float* const all = parts + ((i & 1) * kWarps + (team.number << p.k_shift)) * kPassRows;
    wait_phase(team.full + stage * 8, parity);
    const float2 sums = sums_of_columns(row.multiply(ring + stage * r.stage_bytes, r, team.part, team.sharers, p.k, g, t));
    if (t == 0) all[team.part * kPassRows + g] = sums.x, all[team.part * kPassRows + g + 8] = sums.y;
    meet(team.number, team.sharers * 32);
    if (team.issuer) ask(i + r.stages, stage);
    if (++stage == r.stages) stage = 0, parity ^= 1;
    if (team.part > 0) continue;
    const float sum = static_cast<float>(static_cast<dev::bf16>(added<kPassRows>(all + lane % kPassRows, p.k_shift)));
    const float up = __shfl_down_sync(~0u, sum, kTileRows);
    const int pass = block + of_block * blocks, slot = p.passes.quotient(pass);
    const int in_expert = pass - slot * static_cast<int>(p.passes.value);
    if (lane < kTileRows) p.out[size_t(slot) * (p.n / 2) + in_expert * kTileRows + lane] = dev::swiglu(sum, up, p.activation);
  }
}

/// Launches it on what is checked.
template <bool CHOOSES>
inline void stream_token_gate_up(TokenGateUp p, const Choice& choice, int64_t sharers, int64_t blocks, bool programmatic,
                                 hipStream_t stream) {
  const int steps = steps_of_warp(p.k, sharers);
  const Ring ring = Ring::of(p.k, sharers, kMostShared - kStaticBytes - kTokenRingAt);
  p.k_shift = __builtin_ctzll(static_cast<uint64_t>(sharers));
  const auto kernel = steps == 1   ? mxfp8_token_gate_up<1, CHOOSES>
                      : steps == 2 ? mxfp8_token_gate_up<2, CHOOSES>
                                   : mxfp8_token_gate_up<3, CHOOSES>;
  hf::Launch at{static_cast<uint32_t>(blocks), kThreads, static_cast<uint32_t>(kTokenRingAt + ring.bytes(sharers)), stream};
  at.programmatic = programmatic;
  hf::launch(kernel, at, p, ring, choice);
}

}  // namespace hf::moe
