// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 in tiles on sm_90: wgmma on bf16, to which both operands are converted on their way.
//
//             X: kRows rows (columns of wgmma)          A block multiplies kColumns = 64 kGroups kSets rows of W by kRows of X.
//            +-----------------+                        Each group of four warps has kSets times 64 rows of W, which it converts
//  W:  64    | group 0, set 0  |  sums[0]               from shared memory into the registers of the left operand. All groups
//  rows 64   | group 0, set 1  |  sums[1]               convert X together, into shared memory, for the right operand.
//            +-----------------+                        tile_ring.h has the ring of stages of 128 k, its producer and the
//      64    | group 1, set 0  |                        places of blocks. Scales wait in a stage as factors in bf16, twice in a
//      64    | group 1, set 1  |                        word, four words a row.
//            +-----------------+
//
//   step s, unit (set, half of 128 k):  wgmma  | s,0 | s,1 | s,2 | s,3 | s+1,0 ...    a group converts a unit of W while that before
//                                       convert| 1 | 2 | 3 | X of s+1 |  0 | ...      it multiplies, X of the next step at the end
//
// e4m3 times 2^(s - 127) is a bf16 for every s of 10 to 246, so that products of the converted operands are those of the format,
// and sums are in float32 for all of K. (A multiply in float32 for each block of 32 would cost 2 instructions for each 32 products:
// 2.3 times the time of e4m3 wgmma, which has twice the rate of bf16.) A pair of codes is moved to the exponents and mantissas of
// two bf16, which are 2^-120 times their values, and multiplied by 2^(s - 7). Rows and columns with a NaN are marked; those with a
// scale outside of that range on a block that is not zero are marked too and computed again in float32: slow, and rare.
//
// The order of k in a step of 128 is free where both operands have the same: thread t of four has block t of its row of W, whose
// one scale serves 32 products. k = 16 j + 2 t, + 1 of step are bytes 0 and 2 of word j of block t, and + 8, + 9 its bytes 1 and 3;
// in the upper half of a step the two pairs are exchanged, so that the lanes that write X meet no bank twice.
//
// Bytes moved: (M N / kColumns + M N / kRows) K (1 + 1/32) from L2, 2 M N written. Bound for few rows: W over the memory's
// bandwidth; for many the rate of bf16 wgmma, which hides about 10 instructions for each 4 elements converted.
#pragma once

#include "bf16_codes.h"
#include "tile_ring.h"

namespace hf::mx_tiles {

/// With two buffers of X in bf16, and marks: of W's rows, of X's, and whether there are any.
template <int ROWS, int GROUPS, int SETS, int STAGES, int BLOCKS>
struct Bf16Tile : Ring<ROWS, GROUPS, SETS, STAGES, BLOCKS, 8, 4 * ROWS * kStep + (GROUPS * SETS * 64 + ROWS + 4) * 4> {
  using Base = Ring<ROWS, GROUPS, SETS, STAGES, BLOCKS, 8, 4 * ROWS * kStep + (GROUPS * SETS * 64 + ROWS + 4) * 4>;
  static constexpr int kConverted = ROWS * kStep * 2, kMarks = Base::kLines + 1, kMarksAt = Base::kExtraAt + 2 * kConverted;
  static constexpr int kTurns = ROWS * 4 / Base::kConsumers;  // of 32 elements of X that a thread converts in a step
  static_assert(ROWS * 4 % Base::kConsumers == 0);
};

constexpr uint32_t kNanSize = 0x07f0;
__device__ __forceinline__ bool has_nan(uint32_t sizes) {
  return (sizes & 0x7fff) == kNanSize || (sizes >> 16 & 0x7fff) == kNanSize;
}

constexpr uint32_t kLeast = 10, kMost = 246, kOneFactor = 134;  // scale bytes: whose values are bf16; up to which one factor will do
/// 2^(s - 7) for s up to kOneFactor.
__device__ __forceinline__ uint32_t factor_of(uint32_t s) { return (s + 120) << 7; }
__device__ __forceinline__ uint32_t twice(uint32_t half) { return half * 0x10001u; }
constexpr uint32_t kRare = 1u << 15;  // of a factor: what follows is a scale byte outside of kLeast to kOneFactor
/// A factor that is rare becomes the larger of two; returns the other, and in `strange` whether values may not be bf16.
__device__ __forceinline__ uint32_t split_factor(uint32_t& factor, bool& strange) {
  strange = false;
  if (!(factor & kRare)) return 0x3f803f80u;
  const uint32_t s = factor & 255;
  strange = s < kLeast || (s > kMost && s != 255);
  factor = twice(factor_of(min(s, kOneFactor)));
  return twice(s == 255 ? 0x7fffu : s > kOneFactor ? (s - 7) << 7 : 0x3f80u);
}

constexpr uint32_t kNan = 1, kStrange = 2;  // marks of a row

/// The part of a result from blocks `first` to `last` of K, block by block in float32.
__device__ inline float computed_again(const Problem& p, int row, int column, int first, int last) {
  const int pitch = p.k / kBlock;
  const auto power = [](int e) { return __int_as_float(max((e + 127) << 23, 0x00400000)); };  // for e of -127 to 127
  float total = 0;
  for (int b = first; b < last; ++b) {
    const auto* const x = reinterpret_cast<const uint32_t*>(p.x + size_t(row) * p.k + b * kBlock);
    const auto* const w = reinterpret_cast<const uint32_t*>(p.w + size_t(column) * p.k + b * kBlock);
    float sum = 0;
    for (int i = 0; i < kBlock / 4; ++i) {
      uint32_t of_x[2], of_w[2];
      halves_of(x[i], of_x[0], of_x[1]);
      halves_of(w[i], of_w[0], of_w[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        dev::f16 a, c;
        a.bits = static_cast<uint16_t>(of_x[j / 2] >> (j % 2 * 16)), c.bits = static_cast<uint16_t>(of_w[j / 2] >> (j % 2 * 16));
        sum = fmaf(static_cast<float>(a), static_cast<float>(c), sum);
      }
    }
    const int sx = p.xs[size_t(row) * pitch + b], sw = p.ws[size_t(column) * pitch + b], e = sx + sw - 254;
    total += sx == 255 || sw == 255 ? __int_as_float(0x7fc00000) : sum * power(e >> 1) * power(e - (e >> 1));
  }
  return total;
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, L::kBlocks)
    bf16_tiles(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map, const Problem p) {
  constexpr int kSums = L::kRows / 2, kUnits = 2 * L::kSets;
  extern __shared__ uint8_t unaligned[];
  uint8_t* const memory = unaligned + (1024 - (shared_address(unaligned) & 1023)) % 1024;
  const Shared<L> shared(memory);
  const Place<L> at(p);
  const uint32_t converted = shared.stages + L::kExtraAt, x_ready = shared.more, x_free = x_ready + 16;
  uint32_t* const marks = reinterpret_cast<uint32_t*>(memory + L::kMarksAt);
  if (threadIdx.x == 0) {
    shared.init();
    for (int b = 0; b < 2; ++b) init_barrier(x_ready + 8 * b, L::kConsumers), init_barrier(x_free + 8 * b, L::kWarps);
    barriers_ready();
  }
  for (int i = threadIdx.x; i < L::kMarks; i += L::kThreads) marks[i] = 0;
  let_next_start();
  __syncthreads();
  if (threadIdx.x >= L::kConsumers) {
    give_registers<L::kOfProducer>();
    produce<L>(p, at, shared, x_map, w_map, [](uint32_t stage, int line, uint32_t word) {
      uint32_t factors[4];
      bool rare = false;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t s = word >> (8 * b) & 255;
        const bool is_rare = s - kLeast > kOneFactor - kLeast;
        factors[b] = is_rare ? kRare | s : factor_of(s);
        rare |= is_rare;
      }
      store_shared(stage + L::kScalesAt + line * 8, make_uint2(factors[0] | factors[1] << 16, factors[2] | factors[3] << 16));
      return rare;
    });
    if (p.splits > 1) meet_cluster(), meet_cluster();
  } else {
    take_registers<L::kOfConsumer>();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, group = warp / 4;
    float sums[L::kSets][kSums];
    uint32_t sizes[L::kSets][2] = {}, x_sizes[L::kTurns] = {}, strange = 0, x_strange = 0;

    // A lane has 8 bytes of each block of a row of X: of every second row in each half of the warp, so that no bank meets twice.
    const int part = lane % 4, x_row = warp * 8 + (g % 4 * 2 + g / 4);
    const auto convert_x = [&](int step) {
      const uint32_t stage = shared.stage(step), to = converted + step % 2 * L::kConverted;
      const bool rare = has_rare<L>(stage);
#pragma unroll
      for (int turn = 0; turn < L::kTurns; ++turn) {
        const int row = x_row + turn * L::kWarps * 8, r = row % 8;
        const uint2 pairs = load_shared<uint2>(stage + L::kXScalesAt + row * 8);
        uint32_t factors[4] = {twice(pairs.x & 0xffff), twice(pairs.x >> 16), twice(pairs.y & 0xffff), twice(pairs.y >> 16)};
        uint2 words[4];
#pragma unroll
        for (int b = 0; b < 4; ++b)
          words[b] = load_shared<uint2>(stage + L::kXAt + row * kStep + (((2 * b + part / 2) ^ r) * 16) + part % 2 * 8);
        uint32_t rests[4];
        if (rare) {
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            bool is_strange;
            rests[b] = split_factor(factors[b], is_strange);
            if (is_strange && ((words[b].x | words[b].y) & 0x7f7f7f7fu)) x_strange |= 1u << turn;
          }
        }
        uint32_t values[2][2][4];  // by word and by even and odd codes
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const uint32_t word = j ? words[b].y : words[b].x, even = even_codes(word), odd = odd_codes(word);
            x_sizes[turn] = larger(larger(x_sizes[turn], even), odd);
            values[j][0][b] = times(even, factors[b]), values[j][1][b] = times(odd, factors[b]);
          }
        if (rare) {
#pragma unroll
          for (int b = 0; b < 4; ++b)
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
              for (int odd = 0; odd < 2; ++odd) values[j][odd][b] = times(values[j][odd][b], rests[b]);
        }
        const uint32_t line = to + part / 2 * (L::kRows * kStep) + row * kStep;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const uint32_t(&v)[4] = values[j][odd];
            const int chunk = (part % 2 * 4 + 2 * j + odd) ^ (part / 2);
            store_shared(line + ((chunk ^ r) * 16), make_uint4(v[0], v[1], v[2], v[3]));
          }
      }
      fence_stores();
      arrive(x_ready + 8 * (step % 2));
    };

    uint32_t a[2][16];
    shared.wait_full(0);
    convert_x(0);
    for (int step = 0; step < at.steps; ++step) {
      const uint32_t stage = shared.stage(step);
      const uint64_t b = tile_at(converted + step % 2 * L::kConverted);
      const bool rare = has_rare<L>(stage);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int set = unit / 2, half = unit % 2;
        uint32_t(&to)[16] = a[unit % 2];
        uint32_t words[2][4], factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = (group * L::kSets + set) * 64 + warp % 4 * 16 + g + 8 * i;
          const uint4 v = load_shared<uint4>(stage + row * kStep + (((2 * t + half) ^ g) * 16));
          words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
          factors[i] = twice(load_shared<uint16_t>(stage + L::kScalesAt + 8 * row + 2 * t));
        }
        wait_products<1>();  // those of the unit before the last have read their registers
        if (unit == 1 && step > 0 && lane == 0) arrive(x_free + 8 * ((step - 1) % 2));
        uint32_t rests[2];
        if (rare) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            bool is_strange;
            rests[i] = split_factor(factors[i], is_strange);
            if (is_strange && ((words[i][0] | words[i][1] | words[i][2] | words[i][3]) & 0x7f7f7f7fu)) strange |= 1u << (2 * set + i);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t even = even_codes(words[i][j]), odd = odd_codes(words[i][j]);
            sizes[set][i] = larger(larger(sizes[set][i], even), odd);
            to[4 * j + i] = times(half ? odd : even, factors[i]);
            to[4 * j + 2 + i] = times(half ? even : odd, factors[i]);
          }
        if (rare) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) to[2 * j + i] = times(to[2 * j + i], rests[i]);
        }
        if (unit == 0) wait_phase(x_ready + 8 * (step % 2), step / 2 & 1);
        order_registers();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          Bf16Product<L::kRows>::start(sums[set], to + 4 * j, b + half * (L::kRows * kStep / 16) + 2 * j, half + j > 0 || step > 0);
        commit_products();
      }
      shared.release(step);
      if (step + 1 < at.steps) {
        shared.wait_full(step + 1);
        if (step > 0) wait_phase(x_free + 8 * ((step + 1) % 2), (step - 1) / 2 & 1);
        convert_x(step + 1);
      }
    }
    wait_products<0>();

    const auto mark = [&](int i, bool nan, bool is_strange) {
      if (nan || is_strange) {
        atomicOr(marks + i, (nan ? kNan : 0) | (is_strange ? kStrange : 0));
        marks[L::kLines] = 1;
      }
    };
    meet_consumers<L>();  // the stages are not read any more
    float* const parts = reinterpret_cast<float*>(memory);
#pragma unroll
    for (int set = 0; set < L::kSets; ++set) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) part_of<L>(parts, set, i) = sums[set][i];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        mark((group * L::kSets + set) * 64 + warp % 4 * 16 + g + 8 * i, has_nan(sizes[set][i]), strange >> (2 * set + i) & 1);
    }
#pragma unroll
    for (int turn = 0; turn < L::kTurns; ++turn)
      mark(L::kColumns + x_row + turn * L::kWarps * 8, has_nan(x_sizes[turn]), x_strange >> turn & 1);
    meet_consumers<L>();
    if (marks[L::kLines]) {
      for (int i = thread; i < L::kColumns * L::kRows; i += L::kConsumers) {
        const int row = i / L::kColumns, column = i % L::kColumns;
        const uint32_t found = marks[column] | marks[L::kColumns + row];
        if (found == 0 || at.m0 + row >= p.m || at.n0 + column >= p.n) continue;
        parts[row * L::kPitch + column] = found & kNan ? __int_as_float(0x7fc00000)
                                                       : computed_again(p, at.m0 + row, at.n0 + column, at.first * 4,
                                                                        min((at.first + at.steps) * 4, p.k / kBlock));
      }
    }
    meet_for_sums<L>(p);
    store_results<L>(p, at, shared.stages);
    if (p.splits > 1) meet_cluster();  // nobody reads the sums of a block that has ended
  }
}

}  // namespace hf::mx_tiles
