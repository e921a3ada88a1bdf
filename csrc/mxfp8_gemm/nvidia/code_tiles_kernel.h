// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 in tiles on sm_90, for up to 64 rows of X: wgmma on e4m3 as the operands come.
//
//   X: kRows rows                        tile_ring.h has the ring, its producer and the places of blocks.
//   (columns of wgmma)                   The k of 32 of a product is one block of scales: it is summed from zero, multiplied by
//  +-----------------+                   2^(sw - 127) 2^(sx - 127) and added in float32, while the next one is under way.
//  | group 0: 64 W   |  sums             The scales wait in shared memory as floats: four of a row of W side by side; those of X by
//  | group 1: 64 W   |                   block of k, in the order of a thread's columns, so that it has four with one load.
//  +-----------------+
//
// The tensor core sums the 32 products in its own precision, which has fewer bits than float32. A step with a scale byte outside of
// 64 to 190 is scaled with care for exponents that no float has.
//
// Bytes moved: N K (1 + 1/32) of W once for each kRows of X, (N / kColumns) M K (1 + 1/32) of X from L2, 2 M N written. Bound: W over
// the memory's bandwidth; 2 instructions for each 32 products, which is kRows / 4 of a thread for each 32 k, leave room for it.
#pragma once

#include "tile_ring.h"

namespace hf::mx_tiles {

template <int ROWS, int GROUPS, int STAGES, int BLOCKS>
using CodeTile = Ring<ROWS, GROUPS, 1, STAGES, BLOCKS, 16, 0>;

/// Where the scale of row `row` of X is among those of a block of k: columns 16 i + 8 j + 2 t + e of thread t side by side.
__device__ __forceinline__ int x_place(int row) { return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2; }

template <class L>
__global__ void __launch_bounds__(L::kThreads, L::kBlocks)
    code_tiles(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const Problem p) {
  constexpr int kSums = L::kRows / 2;
  extern __shared__ uint8_t unaligned[];
  uint8_t* const memory = unaligned + (1024 - (shared_address(unaligned) & 1023)) % 1024;
  const Shared<L> shared(memory);
  const Place<L> at(p);
  if (threadIdx.x == 0) {
    shared.init();
    barriers_ready();
  }
  let_next_start();
  __syncthreads();
  if (threadIdx.x >= L::kConsumers) {
    give_registers<L::kOfProducer>();
    produce<L>(p, at, shared, x_map, w_map, [](uint32_t stage, int line, uint32_t word) {
      const auto power = [&](int b) { return (word >> (8 * b) & 255) << 23; };
      if (line < L::kColumns) {
        store_shared(stage + L::kScalesAt + line * 16, make_uint4(power(0), power(1), power(2), power(3)));
      } else {
        const uint32_t to = stage + L::kXScalesAt + x_place(line - L::kColumns) * 4;
#pragma unroll
        for (int b = 0; b < 4; ++b)
          store_shared(to + b * L::kRows * 4, power(b));
      }
      const uint32_t next = word + 0x01010101u;  // 64 to 190: the upper two bits of a byte and of the one after differ
      return ((word ^ word << 1) & (next ^ next << 1) & 0x80808080u) != 0x80808080u;
    });
    if (p.splits > 1) meet_cluster(), meet_cluster();
  } else {
    take_registers<L::kOfConsumer>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, line = warp / 4 * 64 + warp % 4 * 16 + g;
    const auto load = [](float (&to)[4], uint32_t address) {
      const uint4 v = load_shared<uint4>(address);
      to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y), to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
    };
    float sums[kSums] = {};
    for (int step = 0; step < at.steps; ++step) {
      shared.wait_full(step);
      const uint32_t stage = shared.stage(step);
      const uint64_t a = tile_at(stage + warp / 4 * 64 * kStep), b = tile_at(stage + L::kXAt);
      float d[2][kSums];
      order_registers();
      CodeProduct<L::kRows>::start(d[0], a, b);
      commit_products();
      CodeProduct<L::kRows>::start(d[1], a + 2, b + 2);
      commit_products();
      float sw[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) load(sw[i], stage + L::kScalesAt + (line + 8 * i) * 16);
      const bool rare = has_rare<L>(stage);
      const auto add = [&](int block, const float (&from)[kSums]) {
        const uint32_t of_x = stage + L::kXScalesAt + block * L::kRows * 4 + t * 16;
        if (!rare) {
#pragma unroll
          for (int j = 0; j < kSums / 8; ++j) {
            float sx[4];
            load(sx, of_x + j * 64);
#pragma unroll
            for (int i = 0; i < 8; ++i)
              sums[8 * j + i] = fmaf(from[8 * j + i], sw[i % 4 / 2][block] * sx[i / 4 * 2 + i % 2], sums[8 * j + i]);
          }
          return;
        }
        const auto power = [](int e) { return __int_as_float(max((e + 127) << 23, 0x00400000)); };  // for e of -127 to 127
#pragma unroll
        for (int j = 0; j < kSums / 8; ++j) {
          float sx[4];
          load(sx, of_x + j * 64);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int of_w = __float_as_int(sw[i % 4 / 2][block]) >> 23, of_row = __float_as_int(sx[i / 4 * 2 + i % 2]) >> 23;
            const int e = of_w + of_row - 254;
            const float scaled_sum = from[8 * j + i] * power(e >> 1) * power(e - (e >> 1));
            sums[8 * j + i] += of_w == 255 || of_row == 255 ? __int_as_float(0x7fc00000) : scaled_sum;
          }
        }
      };
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        if (block < 3)
          wait_products<1>(d[block % 2]);
        else
          wait_products<0>(d[block % 2]);
        add(block, d[block % 2]);
        if (block < 2) {
          order_registers();
          CodeProduct<L::kRows>::start(d[block % 2], a + 2 * (block + 2), b + 2 * (block + 2));
          commit_products();
        }
      }
      shared.release(step);
    }
    meet_consumers<L>();  // the stages are not read any more
#pragma unroll
    for (int i = 0; i < kSums; ++i) part_of<L>(reinterpret_cast<float*>(memory), 0, i) = sums[i];
    meet_for_sums<L>(p);
    store_results<L>(p, at, shared.stages);
    if (p.splits > 1) meet_cluster();  // nobody reads the sums of a block that has ended
  }
}

}  // namespace hf::mx_tiles
