// The first GEMM of a mixture of experts with its activation: q[slot], scales[slot] = MX-FP8 of SwiGLU(A[slot / a_div]
// W[expert]^T + bias[expert]), on gfx950 and gfx942. What it multiplies, gathers and skips is that of grouped_split_kernel.h.
//
//        W[expert]   16 gate columns | 16 gate | 16 up | 16 up     of one block of 32 results (interleaved: 64 rows of W)
//                    +---------------+---------+-------+-------+
//   A rows of up to  | wave 0        | wave 1  | wave 2| wave 3|   part 0 of K
//   16 or 32         | wave 4        | wave 5  | wave 6| wave 7|   part 1 of K
//                    +---------------+---------+-------+-------+
//                              sums in LDS: 16 slots x 64 columns, a part each
//   epilogue: two waves for each 16 slots, a lane has 4 results of a slot and 8 neighbouring lanes one MX block
//
// Gate and up are rounded to bf16 where two launches would store them, so that the results are the same.
// Grid: (n / 64) x min(tiles, num_valid).
//
// Bytes: per tile an expert's weight byte is loaded once for every 16 kRowTiles slots; the 8 bytes that two launches write
// and read between them for each result are saved. Memory is the bound, as in grouped_split_kernel.h.
#pragma once

#include "grouped_split_kernel.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/mx_encode.h"
#include "hipforge/amd/swiglu.h"

namespace hf::moe {

constexpr int kGateUpTiles = 4;  // of 16 rows of W
constexpr int kMaxParts = kMaxWaves / kGateUpTiles;
constexpr int kResults = kMxBlock;  // columns of a work-group
constexpr int kQuads = kResults / dev::kColumnsPerLane;

static_assert(kGateUpTiles * kTile == 2 * kResults);
static_assert(kTile * kQuads == 2 * dev::kWaveSize, "two waves hold the results");
static_assert(kMaxParts == 2);

using UnalignedFour = dev::f32x4 __attribute__((aligned(4)));

/// The kernel's only argument; arguments_here() reads its start.
struct GateUpProblem {
  Problem gemm;     // without an output; n is that of gate and up together, a multiple of 64
  uint8_t* out;     // [slots, n / 2], at a multiple of 4 bytes
  uint8_t* scales;  // [slots, n / 64]
  Activation activation;
};

/// Work-groups of kGateUpTiles waves for each of kParts parts of K; 16 kRowTiles slots at a time.
template <int kRowTiles, int kParts>
__global__ __launch_bounds__(kParts * kGateUpTiles * dev::kWaveSize) void mxfp8_gate_up(GateUpProblem p) {
  static_assert(kParts == 1 || kParts == kMaxParts);
  static_assert(2 * kRowTiles <= kGateUpTiles, "two waves hold the results of a row tile");
#if defined(__gfx950__) || defined(__gfx942__)
  __shared__ dev::f32x4 sums[kParts][kGateUpTiles][kRowTiles][dev::kWaveSize];
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t tile = wave % kGateUpTiles, part = wave / kGateUpTiles;
  const uint32_t result0 = blockIdx.x * kResults;
  for_each_group(p.gemm, lane, [&](const Slots& slots, uint32_t expert) {
    uint32_t first = 0;
    do {
      const Late& late = arguments_here();
      const uint32_t k = late.k, n = late.n;
      uint32_t row[kRowTiles];
      bool exists[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const uint32_t slot = slots.of_lane(first + t * kTile, lane);
        row[t] = late.a_div == 1 ? slot : slot / late.a_div;
        exists[t] = first + t * kTile + lane % kTile < slots.count;
      }
      const uint32_t up0 = tile >= kGateUpTiles / 2 ? n / 2 - kResults : 0;
      const uint32_t column0 = (p.activation.interleaved ? 2 * result0 : result0 + up0) + tile * kTile;
      const uint64_t w_row = uint64_t{expert} * n + column0;
      using Rows = wave_split::GatheredRows<kRowTiles>;
      wave_split::Wave<kRowTiles, Rows> mine(Rows(late.a, late.a_scales, row, exists, late.a_rows, k, lane),
                                             dev::make_buffer(late.w + w_row * k, kTile * k),
                                             dev::make_buffer(late.w_scales + w_row * (k / kMxBlock), kTile * (k / kMxBlock)),
                                             k, wave_split::lane_offset(k, lane), lane);
      constexpr uint32_t kLog2Parts = kParts - 1;
      wave_split::run_long<kParts == 1>(mine, wave_split::first_step(k, part, kLog2Parts),
                           wave_split::first_step(k, part + 1, kLog2Parts), late.aligned_scales);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) sums[part][tile][t][lane] = mine.acc[t];
      __syncthreads();
      if (wave < 2 * kRowTiles) {
        const uint32_t at_slot = threadIdx.x / kQuads, quad = threadIdx.x % kQuads;
        const uint32_t in_tile = at_slot % kTile, row_tile = wave / 2;
        const uint32_t of_row = dev::from_lane(slots.each, first + at_slot);
        // Four columns of the work-group's 64, whose row of W is w_column, as a launch of their own would store them.
        const auto columns = [&](uint32_t column, uint32_t w_column) {
          const uint32_t at = in_tile + column % kTile / dev::kColumnsPerLane * kTile;
          dev::f32x4 total = sums[0][column / kTile][row_tile][at];
          if constexpr (kParts == kMaxParts) total += sums[1][column / kTile][row_tile][at];
          if (late.biases != nullptr)
            total += *reinterpret_cast<const UnalignedFour*>(late.biases + uint64_t{expert} * n + w_column);
          return __builtin_convertvector(__builtin_convertvector(total, dev::bf16x4), dev::f32x4);
        };
        dev::f32x4 gate, up;
        if (p.activation.interleaved) {
          const uint32_t column = 2 * dev::kColumnsPerLane * quad, next = column + dev::kColumnsPerLane;
          const dev::f32x4 low = columns(column, 2 * result0 + column), high = columns(next, 2 * result0 + next);
          gate = __builtin_shufflevector(low, high, 0, 2, 4, 6);
          up = __builtin_shufflevector(low, high, 1, 3, 5, 7);
        } else {
          const uint32_t column = dev::kColumnsPerLane * quad;
          gate = columns(column, result0 + column);
          up = columns(kResults + column, n / 2 + result0 + column);
        }
        float values[dev::kColumnsPerLane];
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < dev::kColumnsPerLane; ++i) {
          values[i] = dev::swiglu(gate[i], up[i], p.activation);
          amax = dev::larger(amax, dev::magnitude_bits(values[i]));
        }
        const uint32_t byte = dev::e4m3_block_scale(dev::largest_of_lanes<kQuads>(amax));
#pragma unroll
        for (int i = 0; i < dev::kColumnsPerLane; ++i) values[i] *= dev::e8m0_inverse(byte);
        if (first + at_slot < slots.count) {
          const uint64_t at = uint64_t{of_row} * (n / 2) + result0 + dev::kColumnsPerLane * quad;
          *reinterpret_cast<uint32_t*>(p.out + at) = dev::encode_mx_e4m3x4(values, byte);
          if (quad == 0) p.scales[at / kMxBlock] = static_cast<uint8_t>(byte);
        }
      }
      __syncthreads();  // the next sums take the same LDS
    } while ((first += kTile * kRowTiles) < slots.count);
  });
#endif
}

}  // namespace hf::moe
