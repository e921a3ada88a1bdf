// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 in tiles on sm_90: wgmma on e4m3 as the operands come.
//
//   X: kRows rows                        tile_ring.h has the rings, their producer and the places of tiles.
//   (columns of wgmma)                   The k of 32 of a product is one block of scales: a group sums it from zero, multiplies it by
//  +-----------------+                   2^(sw - 127) and adds it in float32, while other groups' products are under way. The sums of
//  | group 0: 64 W   |  sums             a row of X are in units of its scale, 2^(sx - 127), which share_scales.h makes the same for as
//  | group 1: 64 W   |                   much of K as it can. So 32 products take one instruction of a lane; sums are multiplied by a
//  | ...             |                   power of two where a row's scale changes, and at the end.
//  +-----------------+
//
// A step in which a row of X has several scales is slow: each product is multiplied by its own 2^(sw + sx). So is a step with a
// scale of W outside of kLeastW to kMostW or one of X outside of kLeastX to kMostX, and all after it, in units of 1, with care for
// exponents that no float has. Powers of two round nothing, so that all ways give the same bits.
//
// The tensor core sums the 32 products in its own precision, which has fewer bits than float32.
//
// Bytes moved: N K (1 + 1/32) of W once for each kRows of X, (N / kColumns) M K (1 + 1/32) of X from L2, 2 M N written. Bound: for few
// rows W over the memory's bandwidth; for many the 128 lanes of a multiprocessor: 32 products take one lane's cycle, as long as
// e4m3 wgmma takes and half as long as bf16 wgmma would.
#pragma once

#include "tile_ring.h"

namespace hf::mx_tiles {

// |sums| < 2^23 (a block) 2^19 (blocks) 2^32 (W) 2^20 (X) 2^20 (units) = 2^114; the least product is 2^-18 2^-31 2^-40.
constexpr uint32_t kLeastW = 96, kMostW = 159, kLeastX = 107, kMostX = 147;

/// Whether a byte is outside of 96 to 159: 32 more have the upper bits 10 (a byte that carries into the next has not).
__device__ __forceinline__ uint32_t has_rare_w(uint32_t word) {
  const uint32_t more = word + 0x20202020u;
  return (~more | more << 1) & 0x80808080u;
}
__device__ __forceinline__ bool has_rare_x(uint32_t word) {
  return __vcmpltu4(word, kLeastX * 0x01010101u) | __vcmpgtu4(word, kMostX * 0x01010101u);
}
/// 2^(byte b of a word - 127), 0 for the byte 0.
__device__ __forceinline__ float factor_of(uint32_t word, int b) { return __uint_as_float(__byte_perm(word, 0, 0x0444 | b << 12) >> 1); }

template <int VALUE>
struct Number {
  static constexpr int kValue = VALUE;
};

template <class L>
__global__ void __launch_bounds__(L::kThreads, L::kBlocks) code_tiles(const __grid_constant__ Maps maps, const Problem p) {
  constexpr int kSums = L::kRows / 2, kSeen = L::kRows / 32, kDepth = L::kRows >= 128 ? 2 : 1;
  extern __shared__ uint8_t unaligned[];
  uint8_t* const memory = unaligned + (1024 - (shared_address(unaligned) & 1023)) % 1024;
  const Shared<L> shared(memory);
  if (threadIdx.x == 0) {
    shared.init();
    barriers_ready();
  }
  let_next_start();
  __syncthreads();
  if (L::kTeam > 1) arrive_at_cluster();  // other blocks arrive at this one's barriers and fill its stages
  if (threadIdx.x >= L::kConsumers) {
    give_registers<L::kOfProducer>();
    if (threadIdx.x == L::kConsumers) {
      produce<L>(p, shared, maps);
    } else if (L::kTeam > 1) {
      wait_for_cluster();
    }
    __syncwarp();
    if (L::kTeam > 1) {
      arrive_at_cluster(), wait_for_cluster();
    } else if (p.splits > 1) {
      meet_cluster(), meet_cluster();
    }
    return;
  }
  take_registers<L::kOfConsumer>();
  if (L::kTeam > 1) wait_for_cluster();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), lane = threadIdx.x % 32, t = lane % 4;
  const int of_group = L::kTurns ? 0 : group * 64;  // its rows of W
  uint32_t of_line = (of_group + threadIdx.x % 128 / 32 * 16 + lane / 4) * 16;  // its scales in a slot
  uint32_t of_words = L::kWordsAt + lane * kSeen * 4;                               // this lane's words of X in a slot
  asm volatile("" : "+r"(of_line), "+r"(of_words));                                 // not computed again in every step
  const uint32_t units = shared.stages + L::kUnitsAt + group * L::kRows * 4;  // of the sums' columns: a scale byte each
  const auto meet_group = [&] { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); };
  int sets = 0;  // counted where groups are to meet alike
  const auto set_units = [&](auto byte_of) {
    meet_group();
    for (int i = threadIdx.x % 128; i < L::kRows; i += 128) store_shared(units + i * 4, byte_of(i));
    meet_group();
    ++sets;
  };
  Cursor<L> cursor;
  for_each_tile<L>(p, [&](const Place<L>& before, int turn) {
    Place<L> at = before;
    float sums[kSums] = {}, d[kDepth][kSums] = {};  // sums, and products of a block of k: one is under way while one is added
    sets = 0;
    set_units([](int) { return 127u; });
    uint32_t seen[kSeen] = {};  // words of this lane's rows of X
    bool uniform = false, careful = false, rare_w = false;
    uint32_t several = 0;  // of a span of W: bit i, that a row has several scales in step i
    // From the present units to others: (address of the words of columns c and c + 1) -> their bytes.
    const auto convert = [&](auto bytes_at) {
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const uint2 from = load_shared<uint2>(units + t * 8 + j * 32), to = bytes_at(t * 8 + j * 32);
        const float factors[2] = {__uint_as_float((from.x - to.x + 127) << 23), __uint_as_float((from.y - to.y + 127) << 23)};
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[4 * j + i] *= factors[i % 2];
      }
    };
    const auto to_ones = [](uint32_t) { return make_uint2(127, 127); };
    const auto product = [&](float (&to)[kSums], int block, bool more = false) {
      const uint32_t stage = shared.stage(cursor);
      CodeProduct<L::kRows>::start(to, tile_at(stage + of_group * kStep) + 2 * block, tile_at(stage + L::kXAt) + 2 * block, more);
    };
    const auto start = [&](float (&to)[kSums], int block) {
      order_registers();
      product(to, block);
      commit_products();
    };
    const auto load_of_w = [&](uint32_t (&of_w)[2], int of_span) {
      const uint32_t from = shared.scales(cursor) + of_line + of_span * 4;
      of_w[0] = load_shared<uint32_t>(from), of_w[1] = load_shared<uint32_t>(from + 128);
    };
    const auto add = [&](const float (&from)[kSums], const uint32_t (&of_w)[2], int block) {
      const float factors[2] = {factor_of(of_w[0], block), factor_of(of_w[1], block)};
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = fmaf(from[i], factors[i % 4 / 2], sums[i]);
    };
    bool starts = false;  // a span, since this group's last step
    int step = -1;
    const auto move = [&] {
      do {
        if (step >= 0) cursor.advance();
        if (++step == at.steps) break;
        const bool of_span = cursor.starts_span(at, step);
        starts |= of_span;
        if (L::kTurns && of_span) shared.wait_scales(cursor);  // also of a span whose first step is the other group's
      } while (L::kTurns && (step & 1) != group);
    };
    move();
    while (step < at.steps) {
      shared.wait_full(cursor);
      const uint32_t scales = shared.scales(cursor);
      const int of_span = (at.first + step) % kSpan;
      uint32_t of_w[2];
      load_of_w(of_w, of_span);
      uint32_t now[kSeen], changed = step == (L::kTurns ? group : 0);
      const uint32_t words_of_lane = scales + of_words + of_span * L::kRows * 4;
      load_words(now, words_of_lane);
      start(d[0], 0);  // what the products are multiplied by is found while they are under way
      if (starts) {
        uint32_t found = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = of_group + lane + 32 * i;
          uint32_t v[4];
          load_words(v, scales + row * 16);
          if (at.n0 + row >= p.n) continue;
#pragma unroll
          for (int s = 0; s < 4; ++s) {
            if (has_rare_w(v[s])) found |= 16;
            if (L::kWhole && v[s] != (v[s] & 255) * 0x01010101u) found |= 1 << s;
          }
        }
        several = __reduce_or_sync(~0u, found), rare_w = several & 16, starts = false;
      }
      const bool whole = L::kWhole && !(several >> of_span & 1);
      if (whole) {
        order_registers();
#pragma unroll
        for (int block = 1; block < 4; ++block) product(d[0], block, true);
        commit_products();
      } else if (kDepth == 2) {
        start(d[kDepth - 1], 1);
      }
      const uint32_t words = scales + L::kWordsAt + of_span * L::kRows * 4;
#pragma unroll
      for (int i = 0; i < kSeen; ++i) changed |= now[i] ^ seen[i];
      if (__any_sync(~0u, changed || rare_w)) {
        uint32_t other = 0;
        bool rare_x = false;
#pragma unroll
        for (int i = 0; i < kSeen; ++i) {
          other |= now[i] ^ (now[i] & 255) * 0x01010101u;
          rare_x |= has_rare_x(now[i]);
          seen[i] = now[i];
        }
        uniform = !__any_sync(~0u, other);
        if (!careful && (rare_w || __any_sync(~0u, rare_x))) {
          careful = true;
          convert(to_ones);
          set_units([](int) { return 127u; });
        }
        if (!careful && uniform) {
          convert([&](uint32_t place) {
            const uint2 to = load_shared<uint2>(words + place);
            return make_uint2(to.x & 255, to.y & 255);
          });
          set_units([&](int i) { return load_shared<uint32_t>(words + i * 4) & 255; });
        }
      }
      if (careful || !uniform) {
        wait_products<0>();
        const auto power = [](int e) { return __int_as_float(max((e + 127) << 23, 0x00400000)); };  // for e of -127 to 127
#pragma unroll 1
        for (int block = 0; block < 4; ++block) {
          start(d[0], block);
          wait_products<0>(d[0]);
#pragma unroll
          for (int j = 0; j < kSums / 4; ++j) {
            const uint2 of_x = load_shared<uint2>(words + t * 8 + j * 32), unit = load_shared<uint2>(units + t * 8 + j * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int w = of_w[i / 2] >> (8 * block) & 255, x = (i % 2 ? of_x.y : of_x.x) >> (8 * block) & 255;
              const int e = w + x - 127 - static_cast<int>(i % 2 ? unit.y : unit.x);
              const float scaled_sum = d[0][4 * j + i] * power(e >> 1) * power(e - (e >> 1));
              sums[4 * j + i] += w == 255 || x == 255 ? __int_as_float(0x7fc00000) : scaled_sum;
            }
          }
        }
        shared.release(cursor);
      } else if (whole) {
        // Steps of the span that are like this one follow at once: each starts before the sums of the one before are added.
        int like = 0;
        const int left = min(kSpan - of_span, at.steps - step) - 1;
        if (L::kTeam > 1 && left > 0 && several >> (of_span + 1) << (31 - left) << 1 == 0) {
          uint32_t other = 0;
#pragma unroll
          for (int s = 1; s < kSpan; ++s) {
            if (s > left) break;
            uint32_t then[kSeen];
            load_words(then, words_of_lane + s * L::kRows * 4);
#pragma unroll
            for (int i = 0; i < kSeen; ++i) other |= now[i] ^ then[i];
          }
          if (!__any_sync(~0u, other)) like = L::kTurns ? left / 2 : left;
        }
        const auto finish = [&](auto self, auto number) {
          constexpr int kNumber = decltype(number)::kValue;
          const Cursor<L> from = cursor;
          if constexpr ((kNumber + 1) * (L::kTurns ? 2 : 1) < kSpan) {
            if (like > kNumber) {
              uint32_t next_of_w[2];
              move();
              shared.wait_full(cursor);
              load_of_w(next_of_w, (at.first + step) % kSpan);
              order_registers();
#pragma unroll
              for (int block = 0; block < 4; ++block) product(d[(kNumber + 1) % kDepth], block, block > 0);
              commit_products();
              wait_products<1>(d[kNumber % kDepth]);
              shared.release(from);
              add(d[kNumber % kDepth], of_w, 0);
              of_w[0] = next_of_w[0], of_w[1] = next_of_w[1];
              self(self, Number<kNumber + 1>{});
              return;
            }
          }
          wait_products<0>(d[kNumber % kDepth]);
          shared.release(from);
          add(d[kNumber % kDepth], of_w, 0);
        };
        finish(finish, Number<0>{});
      } else {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          if (kDepth == 2 && block < 3) {
            if (block > 0) start(d[(block + 1) % 2], block + 1);
            wait_products<1>(d[block % 2]);
          } else {
            if (kDepth == 1 && block > 0) start(d[0], block);
            wait_products<0>(d[block % kDepth]);
          }
          if (block == 3) shared.release(cursor);
          add(d[block % kDepth], of_w, block);
        }
      }
      move();
    }
    convert(to_ones);
    if (kGroupsMeetAlike && L::kTurns)  // a group has set units at the start and once a step at most
      for (const int most = 1 + (at.steps + 1) / 2; sets < most; ++sets) meet_group(), meet_group();
    asm volatile("" : "+r"(turn));  // found again: its registers are free in the steps
    place_of(p, turn, at);
    if constexpr (L::kTurns) {
      float half[kSums / 2];
      exchange<L>(memory, group, sums, half);
      if (at.whole || add_parts<L>(p, at, half)) store_sums<L>(p, at.m0 + group * L::kRows / 2, at.n0, half);
      return;
    } else if constexpr (L::kTeam > 1) {
      if (at.whole || add_parts<L>(p, at, sums)) store_sums<L>(p, at.m0, at.n0 + of_group, sums);
      return;
    }
    if (at.whole) {
      store_sums<L>(p, at.m0, at.n0 + of_group, sums);
      return;
    }
    meet_consumers<L>();  // the stages are not read any more
#pragma unroll
    for (int i = 0; i < kSums; ++i) part_of<L>(reinterpret_cast<float*>(memory), i) = sums[i];
    meet_cluster();
    store_shared_sums<L>(p, at, shared.stages);
    meet_cluster();  // nobody reads the sums of a block that has ended
  });
  if (L::kTeam > 1) arrive_at_cluster(), wait_for_cluster();  // nor arrives at its barriers
}

}  // namespace hf::mx_tiles
