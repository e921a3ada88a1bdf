// A step of the row stream with e2m1 weights: 128 k of TILES x 8 rows of W, half a cache line each, times ROWS rows of X in bf16
// or e2m1.
//
//     a row's 64 bytes, 4 chunks, each a block of 32 k with its own scale
//    +----------------+----------------+----------------+----------------+    lane 4 g + t has word t of every chunk of row g,
//    | t0  t1  t2  t3 | t0  t1  t2  t3 | t0  t1  t2  t3 | t0  t1  t2  t3 |    8 codes: two mma.m16n8k16 a block and tile, whose
//    +----------------+----------------+----------------+----------------+    order of k is the same in X.
//
// A code's sign and three bits are moved to where a bf16 has its sign and the end of its exponent: that is the value less 2^126,
// with e2m1's subnormal as one of bf16. One product by 2^(scale - 1) makes it exact, scale included, so that the instructions add
// over all of K. It fits where scales of W are 65 to 128 (2^-62 to 2); others, rare, are applied to the float32 sums of a block.
// X in e2m1 becomes bf16 the same way, by two products, for scales of 96 to 159 (2^-31 to 2^32); rows of X with others are left
// out of a step and added after it, so that no row depends on its neighbours.
//
// A word's eight codes take 15 moves and masks and 4 products for two mma: below the time of reading them.
#pragma once

#include "../../mxfp8_gemm/nvidia/row_stream_kernel.h"

namespace hf::row_stream {

constexpr uint32_t kPower126 = 0x7e807e80;  // 2^126 twice in bf16
constexpr uint32_t kOnes = 0x3f803f80;

/// Codes j and j + 4 of a word as bf16, less a factor of 2^126.
__device__ __forceinline__ void pairs_of(uint32_t codes, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSize = 0x01c001c0, kSign = 0x80008000;
  pairs[0] = (codes << 6 & kSize) | (codes << 12 & kSign);
  pairs[1] = (codes << 2 & kSize) | (codes << 8 & kSign);
  pairs[2] = (codes >> 2 & kSize) | (codes << 4 & kSign);
  pairs[3] = (codes >> 6 & kSize) | (codes & kSign);
}

__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

/// Byte b of a word as the exponents of two bf16, plus `more`.
template <int BYTE>
__device__ __forceinline__ uint32_t power_pair(uint32_t bytes, uint32_t more) {
  return __byte_perm(bytes, 0, BYTE | 4 << 4 | BYTE << 8 | 4 << 12) * 0x80u + more * 0x00800080u;
}

__device__ __forceinline__ void multiply_add_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The four scale bytes from `at` on, of the blocks from k0 on, where words start anywhere; those past K are 1.
template <bool ALIGNED>
__device__ __forceinline__ uint32_t shared_scale_word(const uint8_t* at, int k0, int k) {
  if (ALIGNED) return *reinterpret_cast<const uint32_t*>(at);
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  const auto* const words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const uint32_t word = __funnelshift_r(words[0], words[1], static_cast<uint32_t>(address & 3) * 8);
  const int there = max(k - k0, 0) / kBlock;
  const uint32_t kept = there >= 4 ? ~0u : (1u << 8 * there) - 1;
  return (word & kept) | (0x7f7f7f7fu & ~kept);
}

/// Activations in bf16: 16 bytes of a lane are the 8 k of a word of W.
struct Bf16Part {
  using Word = uint4;
  static constexpr int kWordBytes = 16;  // of 8 k
  static constexpr bool kScaled = false;

  static __device__ __forceinline__ Word nothing() { return make_uint4(0, 0, 0, 0); }
  static __device__ __forceinline__ void pairs(const Word& x, uint32_t, uint32_t (&to)[4]) {
    to[0] = __byte_perm(x.x, x.z, 0x5410), to[1] = __byte_perm(x.x, x.z, 0x7632);
    to[2] = __byte_perm(x.y, x.w, 0x5410), to[3] = __byte_perm(x.y, x.w, 0x7632);
  }
};

/// Activations in e2m1, times 2^126 and another power.
struct E2m1Part {
  using Word = uint32_t;
  static constexpr int kWordBytes = 4;
  static constexpr bool kScaled = true;

  static __device__ __forceinline__ Word nothing() { return 0; }
  static __device__ __forceinline__ void pairs(Word x, uint32_t power, uint32_t (&to)[4]) {
    pairs_of(x, to);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = product(product(to[i], kPower126), power);
  }
};

constexpr int64_t kMaxK = int64_t{1} << 21;
static_assert(kMaxK / 8 * Bf16Part::kWordBytes < int64_t{1} << 31, "places in a row of X are 31 bits");
// Sums of usual scales: codes up to 6, W's scales up to 2 and X's up to 2^32.
static_assert(double(kMaxK) * (6 * 2.0) * (6 * 4294967296.0) < 3e38, "they are finite");

/// X: Bf16Part or E2m1Part. ALIGNED: K is a multiple of a step.
template <class X, int ROWS, int TILES, bool ALIGNED>
class E2m1Step {
 public:
  static constexpr int kRows = ROWS, kTiles = TILES, kStepK = kStep, kLine = kStepK / 2;
  static constexpr bool kAligned = ALIGNED, kScalesX = X::kScaled, kScalesW = true, kKeeps = false;
  using Result = dev::bf16;
  static constexpr int kHalves = ROWS / 8, kPairs = Pairs<ROWS, TILES>::kPairs;
  using Sums = typename Pairs<ROWS, TILES>::Sums;

  /// Where 16 bytes of a row's line are: the words of a warp, of 8 rows, meet no bank twice.
  static __device__ __forceinline__ int chunk_at(int row, int chunk) { return row * kLine + ((chunk ^ (row >> 1 & 3)) * 16); }

  __device__ __forceinline__ E2m1Step(const Problem& p, int lane) : g_(lane / 4), t_(lane % 4), k_(p.k) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = min(g_ + 8 * h, p.m - 1);
      x_[h] = p.x + size_t(row) * p.x_pitch + X::kWordBytes * t_;
      if (kScalesX) xs_[h] = p.xs + size_t(row) * (p.k / kBlock);
    }
  }

  static __device__ __forceinline__ Result result(const Problem&, float sum, int, const Result&) { return Result(sum); }

  /// Asks for X's part of the step whose first k is k0.
  __device__ __forceinline__ void load(int k0) {
#pragma unroll
    for (int b = 0; b < 4; ++b) load_block(k0, b);
    load_scales(k0);
  }

  static __device__ __forceinline__ PassRows rows(const PassRows& of) { return of; }

  /// Adds the products of the step at k0 once `arrived` says that W is here, and asks for X of the step at `next` unless it is -1.
  template <class Arrived>
  __device__ __forceinline__ void multiply(const uint8_t* here, const PassRows& rows, int k0, int next, Sums& sums,
                                           Arrived arrived) {
    if (next < 0) next = k0;
    uint32_t xs[kHalves], sw[TILES];
    bool left_out[kHalves], usual = true, again = false;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      xs[h] = next_scales_[h];
      left_out[h] = kScalesX && ((xs[h] - 0x60606060u) & 0xc0c0c0c0u) != 0;
      again |= left_out[h];
    }
    load_scales(next);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int row = min(rows.first + g_ + i * kTileRows, rows.last);
      sw[i] = shared_scale_word<ALIGNED>(rows.scales + row * rows.pitch + k0 / kBlock, k0, k_) - 0x01010101u;
      usual &= (sw[i] & 0xc0c0c0c0u) == 0x40404040u;
    }
    usual = __all_sync(~0u, usual);
    again = __any_sync(~0u, again) || !usual;
    arrived();
    if (usual) {
      const auto block_of = [&](auto which) {
        constexpr int b = decltype(which)::value;
        uint32_t x[kHalves][4];
#pragma unroll
        for (int h = 0; h < kHalves; ++h) X::pairs(next_[h][b], left_out[h] ? 0 : power_pair<b>(xs[h], 0), x[h]);
        load_block(next, b);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          uint32_t w[2][4] = {};
#pragma unroll
          for (int s = 0; s < 2; ++s)
            if (2 * i + s < TILES) word_of_w(here, 2 * i + s, b, power_pair<b>(sw[2 * i + s], 127), w[s]);
          add_products(w, x, sums[i]);
        }
      };
      block_of(std::integral_constant<int, 0>{}), block_of(std::integral_constant<int, 1>{});
      block_of(std::integral_constant<int, 2>{}), block_of(std::integral_constant<int, 3>{});
    }
    if (again) {
      add_with_care(here, k0, xs, sw, usual, sums);
      if (!usual) load(next);  // not before: these registers are needed meanwhile
    }
  }

  static __device__ __forceinline__ void put(const Sums& sums, int lane, float* to) { Pairs<ROWS, TILES>::put(sums, lane, to); }

 private:
  __device__ __forceinline__ typename X::Word word(int h, int k) const {
    if (!ALIGNED && k >= k_) return X::nothing();
    return __ldg(reinterpret_cast<const typename X::Word*>(x_[h] + k / 8 * X::kWordBytes));
  }
  __device__ __forceinline__ void load_block(int k0, int b) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) next_[h][b] = word(h, k0 + b * kBlock);
  }
  __device__ __forceinline__ void load_scales(int k0) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      next_scales_[h] = kScalesX ? scale_word<ALIGNED>(xs_[h] + k0 / kBlock, k0, k_) : 0x7f7f7f7fu;
  }

  /// Word t of block b of row g of a tile, times a power and 2^126.
  __device__ __forceinline__ void word_of_w(const uint8_t* here, int tile, int b, uint32_t power, uint32_t (&w)[4]) const {
    pairs_of(*reinterpret_cast<const uint32_t*>(here + chunk_at(tile * kTileRows + g_, b) + 4 * t_), w);
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = product(w[j], power);
  }

  static __device__ __forceinline__ void add_products(const uint32_t (&w)[2][4], const uint32_t (&x)[kHalves][4],
                                                      float (&sums)[kHalves][4]) {
    Pairs<ROWS, TILES>::add(w, x, sums, multiply_add_bf16);
  }

  /// Sums each block alone and applies its scales in float32: to all rows of X, or where W's are `usual` to those left out.
  __device__ __forceinline__ void add_with_care(const uint8_t* here, int k0, const uint32_t (&xs)[kHalves],
                                                const uint32_t (&sw)[TILES], bool usual, Sums& sums) const {
    uint32_t scales[kHalves][2];  // of rows 8 h + 2 t + j of X
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int j = 0; j < 2; ++j) scales[h][j] = __shfl_sync(~0u, xs[h], 4 * (2 * t_ + j));
    const auto cared_for = [&](uint32_t of) { return !usual || (kScalesX && ((of - 0x60606060u) & 0xc0c0c0c0u) != 0); };
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (!ALIGNED && k0 + b * kBlock >= k_) break;
      uint32_t x[kHalves][4];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) X::pairs(word(h, k0 + b * kBlock), cared_for(xs[h]) ? kOnes : 0, x[h]);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        uint32_t w[2][4] = {};
        float d[kHalves][4] = {};
#pragma unroll
        for (int s = 0; s < 2; ++s)
          if (2 * i + s < TILES) word_of_w(here, 2 * i + s, b, kPower126, w[s]);
        add_products(w, x, d);
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              if (2 * i + s < TILES && cared_for(scales[h][j]))
                sums[i][h][2 * s + j] += scaled(d[h][2 * s + j], (sw[2 * i + s] + 0x01010101u) >> (8 * b) & 255,
                                                scales[h][j] >> (8 * b) & 255);
      }
    }
  }

  const uint8_t *x_[kHalves], *xs_[kHalves];
  typename X::Word next_[kHalves][4];
  uint32_t next_scales_[kHalves];
  int g_, t_, k_;
};

}  // namespace hf::row_stream
