// Y[slot] = A[slot / a_div] W[expert]^T for few slots of an expert on sm_90, as in row_stream_kernel.h: the rows of W of all experts
// that have slots are one stream, of which every multiprocessor has an equal share. Here the copy engine brings whole passes, and X
// stays in registers: for N a multiple of 16, and K of 128 up to 4096 with W in MX-FP8, of 64 up to 6144 in MXFP4.
//
//    groups of up to 8 slots of one expert, in the order of the tiles             A block first lists the groups that have a
//    +------------+------------+------------+-- ... --+                           slot, then takes its part of all passes.
//    | expert 3   | expert 8   | expert 8   |         |   x  N rows of W          A pass is 16 rows of a group's W, all of K.
//    +------------+------------+------------+-- ... --+                           Teams of 2^k_shift warps that share K take
//      | pass 0 | pass 1 | ...   | pass N/16 | ...                                every teams-th pass of the block.
//
// pass_ring.h has copies and products. A warp makes f16 of its up to STEPS steps of X once for a group. Its team meets once a pass:
// sums are added in the order of the warps, and the pass's place in the ring is asked for again.
//
// With GATE_UP a pass is 8 rows of the gate and the 8 of up (interleaved: 16 rows of both). A team takes four neighbouring passes,
// which have a block of 32 results of each slot: then a warp finishes a slot, a lane one result, and writes them as MX-FP8.
//
// Bytes moved: N K (1 + 1/32) of W, of MXFP4 N K (1/2 + 1/32), once for each group, K (1 + 1/32) of X per slot and block from L2, 2 N per slot written (N/2
// (1 + 1/32) with GATE_UP). Bound: W over the memory's bandwidth.
#pragma once

#include "pass_ring.h"

namespace hf::moe {

constexpr int kSlotsAtOnce = 8, kPassSums = kPassRows * kSlotsAtOnce;

/// Sums of all warps, twice, and with GATE_UP those of four passes of a team; the ring; the groups.
template <bool GATE_UP>
struct PassLayout {
  static constexpr int kUnitsAt = 2 * kWarps * kPassSums * int(sizeof(float));
  static constexpr int kMostTeams = 4;  // with GATE_UP
  static constexpr int kRingAt = kUnitsAt + (GATE_UP ? kMostTeams * kUnitPasses * kPassSums * int(sizeof(float)) : 0);
  static_assert(kRingAt % 128 == 0);
  static_assert(kRingAt + kMostStageBytes + kMostGroups * int(sizeof(Group)) + kStaticBytes <= kMostShared);
};

/// W: the class of its elements.
template <int STEPS, bool GATE_UP, class W>
__global__ void __launch_bounds__(kThreads, 1) grouped_pass_stream(const Streamed p, const Ring r) {
  using L = PassLayout<GATE_UP>;
  constexpr int kPacking = Passes<W>::kPacking;
  static_assert(STEPS <= kMostSteps);
  static_assert(kMostStages * stage_bytes_at_most<W>() + 64 * 1024 <= kMostShared);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barriers[kWarps * kMostStages];
  float* const parts = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, scale_pitch = p.k / kBlock;
  const Team team(p.k_shift, r.stages, barriers);
  Group* const groups = reinterpret_cast<Group*>(shared + L::kRingAt + team.count * r.stages * r.stage_bytes);
  let_next_start();
  wait_for_predecessor();

  constexpr int kUnit = GATE_UP ? kUnitPasses : 1;
  const bool split = GATE_UP && !p.activation.interleaved;  // up's rows are n / 2 below the gate's
  const int units = list_groups<kSlotsAtOnce>(p, groups) * static_cast<int>(p.passes.value) / kUnit;  // all threads meet in it
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int each = units / blocks, more = units % blocks;
  const int first = (block * each + min(block, more)) * kUnit, passes = (each + (block < more)) * kUnit;
  const auto pass_of = [&](int i) { return GATE_UP ? (i / kUnit * team.count + team.number) * kUnit + i % kUnit : i * team.count + team.number; };

  // X of the group's slots: lane 4 g + t has number g. Returns what makes f16 of it when it has come.
  uint32_t x[STEPS][4][4], x_less[STEPS][2];
  int x_group = -1, id = -1;
  bool usual_x = true;
  const auto load_x = [&](int group) {
    x_group = group;
    const Group of = groups[group];
    id = of.slot(p, g);
    if (!p.is_slot(id)) id = -1;
    const int one = __reduce_max_sync(~0u, id);  // entries that are no slot repeat one
    const size_t row = p.a_div.quotient(id < 0 ? one : id);
    const uint8_t* const from = p.a + row * p.k + 8 * t;
    const uint8_t* const scales = p.a_scales + row * scale_pitch;
    uint2 bytes[STEPS][4];
    uint32_t words[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k0 = (team.part + s * team.sharers) * kStep;
      words[s] = 0x7f7f7f7fu;
#pragma unroll
      for (int b = 0; b < 4; ++b) bytes[s][b] = make_uint2(0, 0);
      if (k0 < p.k) {
#pragma unroll
        for (int b = 0; b < 4; ++b)
          if (Passes<W>::kWhole || k0 + b * kBlock < p.k) bytes[s][b] = __ldg(reinterpret_cast<const uint2*>(from + k0 + b * kBlock));
        words[s] = pass_scales<W>(scales + k0 / kBlock, k0, p.k);
      }
    }
    return [=, &x, &x_less, &usual_x] {
      uint32_t usual = 0x80808080u;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        usual &= in_range(words[s]) & in_range(words[s] + 0x01010101u);
#pragma unroll
        for (int j = 0; j < 2; ++j) x_less[s][j] = __shfl_sync(~0u, words[s], 8 * t + 4 * j) - kScaleBias<W>;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const uint2 ordered = W::ordered(bytes[s][b]);
          halves_of(ordered.x, x[s][b][0], x[s][b][1]);
          halves_of(ordered.y, x[s][b][2], x[s][b][3]);
        }
      }
      usual_x = __all_sync(~0u, usual == 0x80808080u);
    };
  };

  // The copies of pass number i of the team: a lane has a row, another one the scales of all, or of each run of rows.
  uint8_t* const ring = shared + L::kRingAt + team.number * r.stages * r.stage_bytes;
  const auto ask = [&](int i, int stage) {
    const int of_block = pass_of(i);
    if (of_block >= passes) return;
    const int pass = first + of_block, group = p.passes.quotient(pass), in_group = pass - group * static_cast<int>(p.passes.value);
    const size_t of_expert = size_t(groups[group].expert) * p.n;
    const int halves = split ? 2 : 1, rows = kPassRows / halves;  // of a run
    const auto row_of = [&](int row) { return of_expert + in_group * rows + (row >= rows ? p.n / 2 + row - rows : row); };
    const uint32_t barrier = team.full + stage * 8, to = shared_address(ring + stage * r.stage_bytes), scales = to + r.scales_at();
    if (lane == 0) arrive_expecting(barrier, kPassRows * (p.k / kPacking + scale_pitch));
    __syncwarp();
    if (lane < kPassRows) {
      copy_run(to + lane * r.pitch, p.w + row_of(lane) * (p.k / kPacking), p.k / kPacking, barrier);
    } else if (lane - kPassRows < halves) {
      const int row = (lane - kPassRows) * rows;
      copy_run(scales + row * scale_pitch, p.w_scales + row_of(row) * scale_pitch, rows * scale_pitch, barrier);
    }
  };

  // X is asked for ahead of W, whose copies a multiprocessor's loads would wait for.
  if (pass_of(0) < passes) {
    const auto convert = load_x(p.passes.quotient(first + pass_of(0)));
    if (team.issuer)
      for (int s = 0; s < r.stages; ++s) ask(s, s);
    convert();
  }

  int stage = 0, parity = 0;
  for (int i = 0, of_block; (of_block = pass_of(i)) < passes; ++i) {
    const int pass = first + of_block, group = p.passes.quotient(pass), in_group = pass - group * static_cast<int>(p.passes.value);
    if (group != x_group) load_x(group)();
    // Two buffers in turn: whoever writes the next pass's sums may be ahead of those who read these.
    float* const all = parts + ((i & 1) * kWarps + (team.number << p.k_shift)) * kPassSums;
    float sums[2][2] = {};
    const uint8_t* const here = ring + stage * r.stage_bytes + g * r.pitch + W::kLaneBytes * t;
    const uint8_t* const scales = ring + stage * r.stage_bytes + r.scales_at() + g * r.scale_pitch;
    wait_phase(team.full + stage * 8, parity);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int k0 = (team.part + s * team.sharers) * kStep;
      if (k0 >= p.k) break;
      multiply_pass_step<W>(here + k0 / kPacking, scales + k0 / kBlock, r, k0, p.k, x[s], x_less[s], usual_x, sums);
    }
    *reinterpret_cast<float4*>(all + team.part * kPassSums + lane * 4) = make_float4(sums[0][0], sums[0][1], sums[1][0], sums[1][1]);
    meet(team.number, team.sharers * 32);
    if (team.issuer) ask(i + r.stages, stage);
    if (++stage == r.stages) stage = 0, parity ^= 1;
    // Sum number 4 (4 g + t) + 2 h + j is that of W's row g + 8 h and slot 2 t + j.
    if constexpr (GATE_UP) {
      float* const unit = reinterpret_cast<float*>(shared + L::kUnitsAt) + team.number * kUnitPasses * kPassSums;
      for (int at = team.part * 32 + lane; at < kPassSums; at += team.sharers * 32)
        unit[i % kUnitPasses * kPassSums + at] = added<kPassSums>(all + at, p.k_shift);
      if (i % kUnitPasses != kUnitPasses - 1) continue;
      meet(team.number, team.sharers * 32);
      const int result = in_group / kUnitPasses * kMxBlock + lane;
      const int expert = groups[group].expert;
      for (int m = team.part; m < kSlotsAtOnce; m += team.sharers) {
        const int slot = __shfl_sync(~0u, id, 4 * m);
        if (slot < 0) continue;
        const auto sum_of = [&](int row) {
          return unit[lane / 8 * kPassSums + (row % 8 * 4 + m / 2) * 4 + row / 8 * 2 + m % 2];
        };
        const size_t column = size_t(expert) * p.n + (split ? result : 2 * result);
        const float gate = p.stored(sum_of(split ? lane % 8 : lane % 8 * 2), column);
        const float up = p.stored(sum_of(split ? lane % 8 + 8 : lane % 8 * 2 + 1), column + (split ? p.n / 2 : 1));
        const float value = dev::swiglu(gate, up, p.activation);
        const uint32_t byte = dev::e4m3_block_scale(dev::largest_of_lanes<32>(dev::magnitude_bits(value)));
        const size_t at = size_t(slot) * (p.n / 2) + result;
        p.q[at] = dev::encode_mx_e4m3(value * dev::e8m0_inverse(byte), byte);
        if (lane == 0) p.q_scales[at / kMxBlock] = static_cast<uint8_t>(byte);
      }
    } else {
      for (int base = team.part * 32; base < kPassSums; base += team.sharers * 32) {
        const int at = base + lane, m = 2 * (at / 4 % 4) + at % 2, of_slot = __shfl_sync(~0u, id, 4 * m);
        if (of_slot < 0) continue;
        const int row = in_group * kPassRows + at / 16 + at % 4 / 2 * 8;
        float sum = added<kPassSums>(all + at, p.k_shift);
        if (p.biases) sum += p.biases[size_t(groups[group].expert) * p.n + row];
        if (p.slot_weights) sum *= p.slot_weights[of_slot];
        p.out[size_t(of_slot) * p.n + row] = static_cast<dev::bf16>(sum);
      }
    }
  }
}

/// Launches it; p.most_groups is not 0.
template <bool GATE_UP, class W>
inline void launch_passes(const Streamed& p, int64_t blocks, bool programmatic, hipStream_t stream) {
  using L = PassLayout<GATE_UP>;
  const int64_t sharers = int64_t{1} << p.k_shift;
  HF_CHECK(!GATE_UP || sharers >= kWarps / L::kMostTeams, "sharers must be at least ", kWarps / L::kMostTeams,
           " with gate and up; got ", sharers);
  const int steps = steps_of_warp<W>(p.k, sharers);
  const int list_bytes = p.most_groups * static_cast<int>(sizeof(Group));
  const Ring ring = Ring::of<W>(p.k, sharers, kMostShared - kStaticBytes - L::kRingAt - list_bytes);
  const auto kernel = steps == 1   ? grouped_pass_stream<1, GATE_UP, W>
                      : steps == 2 ? grouped_pass_stream<2, GATE_UP, W>
                                   : grouped_pass_stream<3, GATE_UP, W>;
  hf::Launch at{static_cast<uint32_t>(blocks), kThreads, static_cast<uint32_t>(L::kRingAt + ring.bytes(sharers) + list_bytes), stream};
  at.programmatic = programmatic;
  hf::launch(kernel, at, p, ring);
}

/// Launches it on a problem that has its results: `sharers` warps for a part of K, `blocks` for the stream of W.
template <bool GATE_UP, class W>
inline void stream_passes(const Problem& problem, const Operands& given, int64_t sharers, int64_t blocks, bool programmatic,
                          hipStream_t stream) {
  const Streamed streamed = streamed_of(problem, given, kSlotsAtOnce, sharers, blocks);
  HF_CHECK(given.n % kPassRows == 0, "N must be a multiple of ", kPassRows, "; got ", given.n);
  check_operand(given.w_scales, "w_scale", kE8m0, {given.experts, given.n, given.k / kMxBlock}, mxfp8::kPerBlock, kAligned);
  check_operand(given.a_scales, "a_scale", kE8m0, {given.a_rows, given.k / kMxBlock}, mxfp8::kPerBlock, {4});
  if (streamed.most_groups > 0) launch_passes<GATE_UP, W>(streamed, blocks, programmatic, stream);
}

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. Operands as in mxfp8_grouped_split; sharers: warps
/// that share K, a power of two up to 16; blocks: how many share the rows of W; programmatic: the launch may start before its
/// predecessor has ended.
template <class W>
void grouped_pass_stream_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids, Tensor expert_ids,
                             Tensor num_tokens_post_padded, OptionalTensor mul_weight_by, OptionalTensor bias, int64_t E, int64_t N,
                             int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m, int64_t sharers,
                             int64_t blocks, bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given = with_elements<W>({a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                                           num_valid_tokens, M_act, a_div, block_m});
  Problem problem = problem_of(given);
  take_output(problem, out, mul_weight_by, given);
  stream_passes<false, W>(problem, given, sharers, blocks, programmatic, stream);
}

/// Writes out[slot] and out_scales[slot] for every slot of a tile in use; other rows stay as they are. out e4m3 [num_valid_tokens,
/// N/2], out_scales uint8 [num_valid_tokens, N/64]; operands as in mxfp8_gate_up; limit infinite for none; sharers, at least 4,
/// blocks and programmatic as above.
template <class W>
void gate_up_pass_stream_out(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale,
                             Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias, int64_t E,
                             int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m,
                             double alpha, double beta, double limit, bool interleaved, int64_t sharers, int64_t blocks,
                             bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given = with_elements<W>({a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                                           num_valid_tokens, M_act, a_div, block_m});
  Problem problem = problem_of(given);
  take_gate_up(problem, out, out_scales, given, hf::checked_activation(alpha, beta, limit, interleaved));
  stream_passes<true, W>(problem, given, sharers, blocks, programmatic, stream);
}

}  // namespace hf::moe
