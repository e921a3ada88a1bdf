// Y[slot] = A[slot / a_div] W[expert]^T for few slots of an expert on sm_90, A in MX-FP8 and W in MX-FP8 or MXFP4: the rows of W of
// all experts that have slots are one stream, of which every multiprocessor has an equal share. With MX-FP8 this kernel is for 16
// slots at once, and for 8 with the K and N that pass_stream_kernel.h does not take.
//
//    groups of up to ROWS slots of one expert, in the order of the tiles          A block first lists the groups that have a
//    +------------+------------+------------+-- ... --+                           slot (ROWS entries of a tile; others cost
//    | expert 3   | expert 8   | expert 8   |         |   x  N rows of W          nothing), then takes its part of all passes.
//    +------------+------------+------------+-- ... --+                           A pass is 16 rows of a group's W:
//      | pass 0 | pass 1 | ...   | pass N/16 | ...
//                                                          2^k_shift warps share the steps of 128 k of a pass, as in
//        +-----+-----+-----+-----+-----+--                 mxfp8_gemm/nvidia/row_stream_kernel.h; teams of them take
//   W    | w 0 | w 1 | w 2 | w 3 | w 0 | ...  one pass     neighbouring passes. A warp has kSlots - 1 steps of W, its scales
//        +-----+-----+-----+-----+-----+--                 with it, in flight in its own ring in shared memory, which is not
//                                                          emptied between passes or experts.
//
// row_step.h has the products. X's rows are gathered a step ahead, by slot; entries that are no slot repeat the row of one.
// Sums of the warps meet in shared memory once a round of passes, and are added in the order of the warps.
//
// With GATE_UP a pass is 8 rows of the gate and the 8 of up (interleaved: 16 rows of both), four teams share 64 rows, so that a
// round has a block of 32 results of each slot: a warp finishes one slot, a lane one result, and writes them as MX-FP8.
//
// Bytes moved: N K (1 + 1/32) of W, of MXFP4 N K (1/2 + 1/32), once for each group, K (1 + 1/32) of X per slot and block from L2, 2 N per slot written. Bound:
// W over the memory's bandwidth.
#pragma once

#include "groups.h"

namespace hf::moe {

/// W: the class of its elements.
template <int ROWS, class W>
struct Layout {
  static_assert(ROWS == 8 || ROWS == 16);
  static constexpr int kSlots = 3 * (kStep / W::kLine);            // of a warp's ring
  static constexpr int kScalesAt = kPassRows * W::kLine;           // in a slot of the ring: a word of each row
  static constexpr int kSlotBytes = kScalesAt + kPassRows * 4;
  static constexpr int kPart = kPassRows * ROWS;                   // floats of a warp's sums
  static constexpr int kPartsAt = kWarps * kSlots * kSlotBytes;
  static constexpr int kGroupsAt = kPartsAt + 2 * kWarps * kPart * int(sizeof(float));
  static constexpr int kBytes = kGroupsAt + kMostGroups * int(sizeof(Group));
  static_assert(kSlotBytes % 16 == 0 && kBytes <= kMostShared);
};

/// ALIGNED: K is a multiple of a step and scales are read as words.
template <int ROWS, bool GATE_UP, bool ALIGNED, class W>
__global__ void __launch_bounds__(kThreads, 1) grouped_row_stream(const Streamed p) {
  using L = Layout<ROWS, W>;
  constexpr int kSlots = L::kSlots, kPacking = kStep / W::kLine;    // elements in a byte
  constexpr int kChunks = W::kLine / 16, kRowsAtOnce = 32 / kChunks;  // of a row's step; that a copy of a warp has
  static_assert(kTileRows % kRowsAtOnce == 0);
  constexpr int kHalves = Part<ROWS>::kHalves, kGroups = Part<ROWS>::kGroups;
  extern __shared__ __align__(128) uint8_t shared[];
  float* const parts = reinterpret_cast<float*>(shared + L::kPartsAt);
  Group* const groups = reinterpret_cast<Group*>(shared + L::kGroupsAt);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int sharers = 1 << p.k_shift, part = warp & (sharers - 1), team = warp >> p.k_shift, teams = kWarps >> p.k_shift;
  const int scale_pitch = p.k / kBlock, step_bytes = sharers * kStep;
  const int steps = ((p.k + kStep - 1) / kStep - part + sharers - 1) >> p.k_shift;
  let_next_start();
  wait_for_predecessor();

  constexpr int kUnit = GATE_UP ? kUnitPasses : 1;
  const int units = list_groups<ROWS>(p, groups) * static_cast<int>(p.passes.value) / kUnit;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int each = units / blocks, more = units % blocks;
  const int first = (block * each + min(block, more)) * kUnit, passes = (each + (block < more)) * kUnit;

  // The next step to ask for: this lane's 16 bytes of every fourth or eighth row, and the scales of row `lane`.
  uint8_t* const ring = shared + warp * kSlots * L::kSlotBytes;
  uint8_t* const ask_to = ring + W::chunk_at(lane / kChunks, lane % kChunks);
  const bool split = GATE_UP && !p.activation.interleaved;  // up's rows are n / 2 below the gate's
  const uint32_t tile_rows = split ? p.n / 2 : kTileRows;
  int ask_pass = team, ask_step = 0, rows_left = 0, k_left = 0;
  const uint8_t *ask = nullptr, *ask_scales = nullptr;
  uint32_t pending = 0;
  uint8_t* pending_to = nullptr;
  const auto ask_next = [&](int slot) {
    if (!ALIGNED && pending_to != nullptr) {
      if (lane < kPassRows) *reinterpret_cast<uint32_t*>(pending_to) = pending;
      pending_to = nullptr;
    }
    if (ask_pass < passes && steps > 0) {
      if (ask_step == 0) {
        const int pass = first + ask_pass, group = p.passes.quotient(pass), in_group = pass - group * p.passes.value;
        const int row = in_group * (split ? kTileRows : kPassRows), copied = row + lane / kChunks;
        const size_t of_expert = size_t(groups[group].expert) * p.n;
        const int scaled_row = min(row + lane % kPassRows / kTileRows * static_cast<int>(tile_rows) + lane % kTileRows, p.n - 1);
        rows_left = p.n - copied;
        k_left = p.k - part * kStep - lane % kChunks * 16 * kPacking;
        ask = p.w + ((of_expert + copied) * p.k + (p.k - k_left)) / kPacking;
        ask_scales = p.w_scales + (of_expert + scaled_row) * scale_pitch + part * 4;
      }
      uint8_t* const to = ring + slot * L::kSlotBytes;
#pragma unroll
      for (int at = 0; at < kPassRows; at += kRowsAtOnce) {
        const uint32_t row = at / kTileRows * tile_rows + at % kTileRows;
        const bool there = (GATE_UP || rows_left > at) && (ALIGNED || k_left > 0);
        copy_async(ask_to + slot * L::kSlotBytes + at * W::kLine, there ? ask + row * (p.k / kPacking) : p.w, there ? 16 : 0);
      }
      if (lane < kPassRows) {
        if (ALIGNED) {
          copy_word_async(to + L::kScalesAt + lane * 4, ask_scales);
        } else {  // written a step later, when it has come
          pending = scale_word<false>(ask_scales, (part + ask_step * sharers) * kStep, p.k);
        }
      }
      if (!ALIGNED) pending_to = to + L::kScalesAt + lane * 4;
      ask += step_bytes / kPacking, k_left -= step_bytes, ask_scales += step_bytes / kBlock;
      if (++ask_step == steps) ask_step = 0, ask_pass += teams;
    }
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < kSlots - 1; ++s) ask_next(s);

  // X's rows of this lane, of the group of the pass that is to be loaded next.
  Part<ROWS> x_next;
  const uint8_t *x_from[kHalves], *xs_from[kHalves];
  int x_pass = team, x_step = 0, x_group = -1;
  const auto load_x = [&] {
    if (x_pass >= passes) return;
    const int group = p.passes.quotient(first + x_pass);
    if (group != x_group) {
      x_group = group;
      const Group of = groups[group];
      int row[kHalves], one = -1;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int id = of.slot(p, g + 8 * h);
        row[h] = p.is_slot(id) ? static_cast<int>(p.a_div.quotient(id)) : -1;
        one = max(one, row[h]);
      }
      one = __reduce_max_sync(~0u, one);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const size_t from = row[h] < 0 ? one : row[h];
        x_from[h] = p.a + from * p.k + part * kStep + 8 * t;
        xs_from[h] = p.a_scales + from * scale_pitch + part * 4;
      }
    }
    x_next.template load<ALIGNED>(x_from, xs_from, x_step * step_bytes, part * kStep + x_step * step_bytes, p.k);
    if (++x_step == steps) x_step = 0, x_pass += teams;
  };
  if (steps > 0) load_x();

  const typename W::Lane lane_of_w(g, t);
  int slot = 0;
  for (int of_team = team, round = 0; of_team < passes; of_team += teams, ++round) {
    float sums[kPassTiles][kGroups][4] = {};
    for (int step = 0; step < steps; ++step) {
      ask_next(slot == 0 ? kSlots - 1 : slot - 1);
      const Factors<ROWS, W> x(x_next);
      load_x();
      wait_copies<kSlots - 1>();
      __syncwarp();
      const uint8_t* const here = ring + slot * L::kSlotBytes;
      uint32_t sw[kPassTiles][2], usual = x.usual;
#pragma unroll
      for (int i = 0; i < kPassTiles; ++i) {
        const uint2 words = *reinterpret_cast<const uint2*>(here + L::kScalesAt + (i * kTileRows + 2 * t) * 4);
        sw[i][0] = words.x, sw[i][1] = words.y;
        usual &= W::usual(words.x) & W::usual(words.y);
      }
      multiply_step<ROWS, kPassTiles, W>(here, lane_of_w, x, sw, __all_sync(~0u, usual == 0x80808080u), sums);
      __syncwarp();  // the slot may be filled again
      slot = slot + 1 == kSlots ? 0 : slot + 1;
    }
    // Two buffers in turn: whoever writes the next round's sums may be ahead of those who read these.
    float* const all = parts + (round & 1) * kWarps * L::kPart;
    float* const mine = all + warp * L::kPart;
#pragma unroll
    for (int i = 0; i < kPassTiles; ++i)
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          mine[(h * 8 + g) * kPassRows + i * kTileRows + 2 * t + j] = sums[i][h / 2][h % 2 * 2 + j];
    if constexpr (GATE_UP) {
      __syncthreads();
      const int pass = first + round * kUnitPasses, group = p.passes.quotient(pass);
      const int result = (pass - group * static_cast<int>(p.passes.value)) / kUnitPasses * kMxBlock + lane;
      const Group of = groups[group];
      for (int m = warp; m < ROWS; m += kWarps) {
        const int id = of.slot(p, m);
        if (!p.is_slot(id)) continue;
        const float* const from = all + (lane / 8 << p.k_shift) * L::kPart + m * kPassRows + lane % 8 * (split ? 1 : 2);
        const size_t column = size_t(of.expert) * p.n + (split ? result : 2 * result);
        const float gate = p.stored(added<L::kPart>(from, p.k_shift), column);
        const float up = p.stored(added<L::kPart>(from + (split ? kTileRows : 1), p.k_shift), column + (split ? p.n / 2 : 1));
        const float value = dev::swiglu(gate, up, p.activation);
        const uint32_t byte = dev::e4m3_block_scale(dev::largest_of_lanes<32>(dev::magnitude_bits(value)));
        const size_t at = size_t(id) * (p.n / 2) + result;
        p.q[at] = dev::encode_mx_e4m3(value * dev::e8m0_inverse(byte), byte);
        if (lane == 0) p.q_scales[at / kMxBlock] = static_cast<uint8_t>(byte);
      }
    } else {
      // A team's warps meet alone, and may be rounds ahead of others.
      meet(team, sharers * 32);
      const int pass = first + of_team, group = p.passes.quotient(pass);
      const int row0 = (pass - group * static_cast<int>(p.passes.value)) * kPassRows;
      const Group of = groups[group];
      for (int at = part * 32 + lane; at < L::kPart; at += sharers * 32) {
        const int row = row0 + at % kPassRows, id = of.slot(p, at / kPassRows);
        if (!p.is_slot(id) || row >= p.n) continue;
        float sum = added<L::kPart>(all + (team << p.k_shift) * L::kPart + at, p.k_shift);
        if (p.biases) sum += p.biases[size_t(of.expert) * p.n + row];
        if (p.slot_weights) sum *= p.slot_weights[id];
        p.out[size_t(id) * p.n + row] = static_cast<dev::bf16>(sum);
      }
    }
  }
}

/// Launches the kernel on a problem that has its results: `sharers` warps for a part of K, `blocks` for the stream of W.
template <int ROWS, bool GATE_UP, class W>
inline void stream_rows(const Problem& problem, const Operands& given, int64_t rows, int64_t sharers, int64_t blocks,
                        bool programmatic, hipStream_t stream) {
  using L = Layout<ROWS, W>;
  HF_CHECK(rows == ROWS, "this variant of the module has rows = ", ROWS, "; got ", rows);
  const Streamed streamed = streamed_of(problem, given, ROWS, sharers, blocks);
  if (streamed.most_groups == 0) return;
  hf::Launch at{static_cast<uint32_t>(blocks), kThreads, L::kBytes, stream};
  at.programmatic = programmatic;
  const auto kernel = has_scale_words(given) ? grouped_row_stream<ROWS, GATE_UP, true, W> : grouped_row_stream<ROWS, GATE_UP, false, W>;
  hf::launch(kernel, at, streamed);
}

/// Writes out[slot] for every slot of a tile in use; other rows stay as they are. Operands as in mxfp8_grouped_split; rows, slots
/// of an expert at a time; sharers: warps that share K, a power of two up to 16; blocks: how many share the rows
/// of W; programmatic: the launch may start before its predecessor has ended.
template <int ROWS, class W>
void grouped_row_stream_out(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids, Tensor expert_ids,
                            Tensor num_tokens_post_padded, OptionalTensor mul_weight_by, OptionalTensor bias, int64_t E, int64_t N,
                            int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m, int64_t rows,
                            int64_t sharers, int64_t blocks, bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given = with_elements<W>({a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                                           num_valid_tokens, M_act, a_div, block_m});
  Problem problem = problem_of(given);
  take_output(problem, out, mul_weight_by, given);
  stream_rows<ROWS, false, W>(problem, given, rows, sharers, blocks, programmatic, stream);
}

/// Writes out[slot] and out_scales[slot] for every slot of a tile in use; other rows stay as they are. out e4m3 [num_valid_tokens,
/// N/2], out_scales uint8 [num_valid_tokens, N/64]; operands as in mxfp8_gate_up; limit infinite for none; rows, blocks and
/// programmatic as in grouped_row_stream_out, with a quarter of the warps sharing K.
template <int ROWS, class W>
void gate_up_row_stream_out(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                            Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias, int64_t E, int64_t N, int64_t K,
                            int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m, double alpha, double beta,
                            double limit, bool interleaved, int64_t rows, int64_t blocks, bool programmatic, hipStream_t stream) {
  HF_CHECK_ARCH(w, "sm_90");
  const Operands given = with_elements<W>({a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                                           num_valid_tokens, M_act, a_div, block_m});
  Problem problem = problem_of(given);
  take_gate_up(problem, out, out_scales, given, hf::checked_activation(alpha, beta, limit, interleaved));
  stream_rows<ROWS, true, W>(problem, given, rows, kWarps / kUnitPasses, blocks, programmatic, stream);
}

}  // namespace hf::moe
