// What a group of four warps does with its sums of 64 rows of an expert's W by some slots, as wgmma leaves them: thread 4 g + t of warp w
// has rows 16 w + g and 8 more of the product, and slots 8 j + 2 t, + 1.
//
// Which rows of W those are is row_in_group's to say. Of the 16 of a warp a thread has four neighbours once each 8 x 8 sums are transposed,
// and stores them at once. With GATE_UP they are 8 of the gate and the 8 of up, so that a thread has both of a result; the four warps have
// the 32 results of an MX block, whose largest they tell each other.
#pragma once

#include "../../mxfp8_gemm/nvidia/wgmma_tile.h"
#include "hipforge/device/wave.h"
#include "problem.h"

namespace hf::moe {

constexpr int kGroupResults = wgmma_tiles::kGroupRows / 2;
static_assert(kGroupResults == kMxBlock, "a group has gate and up of a block of results");

/// Without GATE_UP: the row, among a group's, that a line of the left operand has. Lines 2 q, 2 q + 1, 8 + 2 q and 8 + 2 q + 1 of each 16
/// are rows 4 q to 4 q + 3.
__host__ __device__ constexpr int row_in_group(int line) { return line / 16 * 16 + line % 8 / 2 * 4 + line % 16 / 8 * 2 + line % 2; }

/// Where a thread stands in its group.
struct GroupPlace {
  int warp, g, t;
  /// The line of sum i, and its slot among those of the group.
  __device__ __forceinline__ int line(int i) const { return warp * 16 + g + (i % 4 < 2 ? 0 : 8); }
  __device__ __forceinline__ int column(int i) const { return i / 4 * 8 + 2 * t + i % 2; }
};

/// The slots of a group's columns, -1 for none, and their weights.
template <int SLOTS>
struct Slots {
  int ids[SLOTS];
  float weights[SLOTS];

  __device__ __forceinline__ void set(const Problem& p, int column, int id) {
    ids[column] = id;
    weights[column] = id >= 0 && p.slot_weights ? p.slot_weights[id] : 1.f;
  }
};

/// Lane 4 a + b, which has elements 2 b and 2 b + 1 of row a of an 8 x 8 matrix, is given those of column a.
__device__ __forceinline__ uint32_t transposed(float first, float second) {
  uint32_t pair, result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// Stores them. of_expert: the first row of its W; first: of the group's rows, or results. `largest` has [4][columns] of the group, and is
/// free again behind its next meeting at `barrier`; without GATE_UP neither is used.
template <bool GATE_UP, int SUMS, int SLOTS>
__device__ __forceinline__ void store_results(const Problem& p, const GroupPlace& place, const Slots<SLOTS>& slots, size_t of_expert,
                                              int first, const float (&sums)[SUMS], uint32_t* largest, int barrier) {
  if constexpr (GATE_UP) {
    constexpr int kValues = SUMS / 2, kColumns = 2 * SUMS;
    const int result = first + place.warp * 8 + place.g;
    if (result >= p.n / 2) return;  // a whole group
    const size_t gate_row = of_expert + (p.activation.interleaved ? 2 * result : result);
    const size_t up_row = gate_row + (p.activation.interleaved ? 1 : p.n / 2);
    float values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int at = i / 2 * 4 + i % 2;
      values[i] = dev::swiglu(p.stored(sums[at], gate_row), p.stored(sums[at + 2], up_row), p.activation);
      uint32_t most = dev::magnitude_bits(values[i]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) most = dev::larger(most, __shfl_xor_sync(~0u, most, distance));
      if (place.g == 0) largest[place.warp * kColumns + place.column(at)] = most;
    }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int column = place.column(i / 2 * 4 + i % 2), id = slots.ids[column];
      if (id < 0) continue;
      uint32_t most = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = dev::larger(most, largest[w * kColumns + column]);
      const uint32_t byte = dev::e4m3_block_scale(most);
      const size_t at = size_t(id) * (p.n / 2) + result;
      p.q[at] = dev::encode_mx_e4m3(values[i] * dev::e8m0_inverse(byte), byte);
      if (place.warp == 0 && place.g == 0) p.q_scales[at / kMxBlock] = static_cast<uint8_t>(byte);
    }
  } else {
    float biases[2] = {};
    if (p.biases)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + row_in_group(place.line(2 * h));
        if (row < p.n) biases[h] = p.biases[of_expert + row];
      }
    const int own = first + place.warp * 16 + 4 * place.t;  // of the four rows that this thread stores
    const bool whole = p.n % 4 == 0 && (reinterpret_cast<uintptr_t>(p.out) & 7) == 0;
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
      const float weights[2] = {slots.weights[8 * j + 2 * place.t], slots.weights[8 * j + 2 * place.t + 1]};
      uint32_t pairs[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        pairs[h] = transposed((sums[4 * j + 2 * h] + biases[h]) * weights[0], (sums[4 * j + 2 * h + 1] + biases[h]) * weights[1]);
      const int id = slots.ids[8 * j + place.g];
      if (id < 0 || own >= p.n) continue;
      dev::bf16* const to = p.out + size_t(id) * p.n + own;
      if (whole) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (own + i < p.n) reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
      }
    }
  }
}

}  // namespace hf::moe
