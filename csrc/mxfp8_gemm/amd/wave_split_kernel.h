// MX-FP8 GEMM whose K is split over the waves of a work-group: out = X W^T for decode batches, in one launch.
//
//                 k ->
//               | wave 0 | wave 1 | ... | last wave |   each wave: all 16 kRowTiles x 16 kColumnTiles outputs over its
//                                                       part of K
//   X rows m0.. |========|========|     |===========|   \
//   W rows n0.. |========|========|     |===========|   /  one matrix instruction per 16 x 16 x 128 (gfx950)
//                    \        \     LDS      /
//                     +--- sums in the order of the waves ---> out[m0 .., n0 ..]
//
// W is the instruction's A operand: lane l has column l % 16 of the tile as its row of X, and four neighbouring outputs
// of it. Grid: ceil(n / columns) x ceil(m / (16 kRowTiles)). columns is 16 or, on gfx950, a multiple of 4 up to
// 16 kColumnTiles: rows of W past them are out of range and cost no traffic. 6,144 columns in work-groups of 24 are 256, one for
// each compute unit.
//
// gfx950: a lane loads the 16 bytes at 16 (l / 16) and those 64 past it; the scaled instruction takes a step of 128 k.
// gfx942: a lane loads the 8 bytes at 8 (l / 16) of each block of 32. One instruction is exactly one scale block; its sums
// are scaled by ldexp with both exponents and added, 17 vector instructions per block. A maximum over an output's scale bytes
// finds a byte of 255.
//
// Both operands have the same offset in all lanes, relative to resources over just the work-group's rows: rows past the
// end read 0, tensors may have any size, and a run of up to max_run steps needs no address but its first. Scales come as
// one dword per row and step, four steps per load.
//
// Bytes: W is loaded once for every 16 kRowTiles rows of X, X once per work-group from L2: with more columns X is loaded less
// often and fewer work-groups have to start, one each 17 ns on an XCD (modelled). At 8 TB/s, 256 CUs and 2.4 GHz a CU receives
// the 2 KiB of a step each 158 cycles and its four SIMDs multiply them in 8 kRowTiles: memory is the bound.
// Instructions of one wave: about 70, 9 + 5 (kRowTiles - 1) for each step, and 8 for each wave whose sums are added; with two
// tiles of columns 150 to 280, and 16, 22 or 36 for each step of 16, 32 or 64 rows (both with four waves and their sums). Three
// tiles and more take up to 512 registers, so that a work-group has at most four waves.
//
// Where K is no multiple of 128, rows of scales start at any byte. Lanes load the words around them and combine each step's
// scales from two words, one more vector instruction for each row and step. A run's last step may be shorter than 128: it loads
// scales byte by byte, and its loads are out of range past K. Where a scale tensor is not aligned, every step is loaded like
// such a last one.
//
// W may be e2m1 under MX scales, half the bytes: gfx950's instruction takes the formats as they are, a lane's 16 bytes at 16 (l / 16)
// being its k of one block; on gfx942 a lane's 4 bytes at 4 (l / 16) of each block become e4m3 codes, 16 vector instructions.
//
// The same loop serves scales that are not MX's (Scales below): f32 or e8m0 for each 128 of K, or one f32 for a row, with which
// sums are multiplied before they are stored. Then k is a multiple of 16, and only the last step of K can be partial.
#pragma once

#include "hipforge/amd/mfma.h"
#include "wave_split_rows.h"

namespace hf::wave_split {

/// Steps of straight code: as many as have their scales in registers.
#if defined(__gfx942__)
constexpr int max_run(int row_tiles, int) { return row_tiles == 4 ? 2 : 4; }
#else
// Clang 21 spills at twelve.
constexpr int max_run(int row_tiles, int columns) { return row_tiles == 1 && columns == 16 && __clang_major__ >= 22 ? 12 : 8; }
#endif

/// Steps whose operands are in flight: as many as 128 (one row tile) or 256 registers hold.
#if defined(__gfx942__)
// Clang 21 spills gathered rows three steps ahead.
constexpr int kAheadOfTwoTiles = __clang_major__ < 22 ? 2 : 3;
constexpr int steps_ahead(int row_tiles, int = 1) { return row_tiles == 1 ? 2 : row_tiles == 2 ? kAheadOfTwoTiles : 1; }
#else
// Two tiles of columns: more steps are not faster, a compute unit can have only 32 KiB in flight.
constexpr int steps_ahead(int row_tiles, int column_tiles = 1) {
  return column_tiles > 2 ? 3 : column_tiles > 1 ? (row_tiles == 4 ? 2 : 3) : row_tiles == 1 ? 4 : row_tiles == 2 ? 6 : 3;
}
#endif

/// What a wave does while the first loads of a run of steps are under way: behind those of its first step, and behind all.
struct Nothing {
  __device__ void first_asked() const {}
  __device__ void operator()() const {}
};

/// One wave's 16 kRowTiles x 16 outputs; acc[t][i] is row lane % 16 of row tile t, column 4 (lane / 16) + i. kColumns as in
/// tile_row_offset, of W. With several tiles of columns those of tile c begin at acc[c kRowTiles].
template <int kRowTiles, class Rows, int kColumns = kTile, int kColumnTiles = 1, Scales kScales = Scales::kMx,
          Elements kW = Elements::e4m3>
struct Wave {
  static constexpr int kTilesOfX = kRowTiles;
  static constexpr bool kOnce = kScales == Scales::kOnce, kFloats = kScales == Scales::kBlocks, kEach = kScales == Scales::kMx;
  static constexpr bool kBytes = kEach || kScales == Scales::kMxShared, kE8m0 = kBytes || kScales == Scales::kBlocksE8m0;
  static constexpr int kWScales = kEach ? kScaleRows : 1;  // of a tile, that a lane takes
  static constexpr bool kTakesOneByte = kScaleRows == 1;   // of a step's scales of a row
  static constexpr int kShared = shared_rows(kScales);
  static constexpr int kAhead = steps_ahead(kRowTiles, kColumnTiles);
  static constexpr bool kOfSteps = kFloats || kScales == Scales::kBlocksE8m0;  // longer runs of their scales would spill
  static constexpr int kMostRun = !kOfSteps ? 16 : kRowTiles < 4 ? 8 : kColumnTiles < 5 ? 4 : 2;
  static constexpr int kMaxRun = max_run(kRowTiles, kColumns) < kMostRun ? max_run(kRowTiles, kColumns) : kMostRun;
  // Longer runs would spill.
  static constexpr int kOfOneTile = kW == Elements::e2m1 ? 8 : Rows::kMostBetween;  // e2m1: half of the registers of W
  static constexpr int kMostBetween = kRowTiles == 1 ? kOfOneTile : kRowTiles * kColumnTiles <= 6 ? 4 : 2;
  static constexpr int kRunBetween = kMaxRun < kMostBetween ? kMaxRun : kMostBetween;
  // A run's first steps are asked for ahead of the branches that find its length.
  static constexpr bool kStartsEarly = !kFloats && kColumnTiles > 2 && kRowTiles < 4;
  // X, which L2 has, before W, and both halves of W's lines in turn; else the compiler loads the first halves of all tiles first.
  static constexpr bool kWholeLines = kRowTiles == 1 && kColumnTiles == 2;

  using OfW = WPieces<kW>;
  struct Step {
    typename OfW::Piece w[kColumnTiles][OfW::kCount];
    Piece x[kRowTiles][kPieces];
  };
  // Rows whose scales a lane takes, those of W first. gfx942: of each tile the four whose products it holds.
  static constexpr int kWRows = kColumnTiles * kWScales, kRows = kWRows + kRowTiles;
  // Words of four steps.
  struct ScaleWords {
    dev::u32x4 row[kOnce ? 1 : kRows];
  };

  const Rows x;
  const dev::Buffer w, ws;  // over the wave's 16 rows of W
  const uint32_t k, blocks, group;
  const uint32_t offset;    // of the lane's row and first piece in W
  uint32_t w_scales[kEach ? 1 : kColumnTiles];  // of the first row of W whose scales the lane takes
  dev::f32x4 acc[kColumnTiles * kRowTiles] = {};
  // gfx942: the largest byte so far.
  uint32_t highest_w[kWScales] = {}, highest_x[kRowTiles] = {};

  // in_shared: of the wave's first row of W among those that share scales.
  __device__ Wave(const Rows& rows, dev::Buffer weight, dev::Buffer weight_scales, uint32_t depth, uint32_t in_lane,
                  uint32_t lane, uint32_t in_shared = 0)
      : x(rows),
        w(weight),
        ws(weight_scales),
        k(depth),
        blocks(depth / kMxBlock),
        group(lane / kTile),
        offset(in_lane) {
    static_assert(kColumns % kScaleRows == 0, "the rows of W whose scales a lane takes follow each other");
    static_assert(kEach || kColumns == kTile);
    // The instruction's rows of W, or the four whose products a lane holds.
    const uint32_t row = kScaleRows == 1 && !kFloats ? lane % kTile : lane / kTile * 4;
    if constexpr (kEach) {
      w_scales[0] = tile_row_offset<kColumns>(row, blocks);
    } else {
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
        w_scales[c] = (in_shared + c * kTile + row) / kShared * scale_row_bytes(kScales, depth);
    }
  }

  // The offset in a row of W of the element that is `at` bytes from the beginning of a row of X.
  static __device__ __forceinline__ constexpr uint32_t in_w(uint32_t at) { return row_bytes(kW, at); }

  static __device__ typename OfW::Piece load_w(dev::Buffer from, uint32_t lane_offset, uint32_t wave_offset) {
    if constexpr (OfW::kBytes == 4)
      return dev::load_b32(from, lane_offset, wave_offset);
    else
      return load_piece(from, lane_offset, wave_offset);
  }

  static __device__ Piece load_piece(dev::Buffer from, uint32_t lane_offset, uint32_t wave_offset) {
#if defined(__gfx950__)
    return dev::load_b128(from, lane_offset, wave_offset);
#else
    return dev::load_b64(from, lane_offset, wave_offset);
#endif
  }

  __device__ __forceinline__ void load_x(Step& to, uint32_t at, int ahead) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        to.x[t][i] = load_piece(x.payload, x.in_lane(t) + ahead * kStep + i * kPieceStride, at + x.in_wave(t));
  }

  __device__ __forceinline__ void load(Step& to, uint32_t at, int ahead) const {
    if constexpr (kWholeLines) load_x(to, at, ahead);
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      if constexpr (kWholeLines) __builtin_amdgcn_sched_barrier(0);
#pragma unroll
      for (int i = 0; i < OfW::kCount; ++i)
        to.w[c][i] = load_w(w, offset + ahead * in_w(kStep) + i * OfW::kStride, in_w(at + c * kTile * k));
    }
    if constexpr (!kWholeLines) load_x(to, at, ahead);
  }

  // each(row, where it is, its offset in the lane and in the wave)
  template <class Each>
  __device__ __forceinline__ void for_scales(Each each) const {
    if constexpr (kOnce) return;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int r = 0; r < kWScales; ++r)
        each(c * kWScales + r, ws, w_scales[kEach ? 0 : c], kEach ? (c * kTile + r) * blocks : 0);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) each(kWRows + t, x.scales, x.scales_in_lane(t), x.scales_in_wave(t));
  }

  __device__ __forceinline__ void load_scales(ScaleWords& to, uint32_t step) const {
    for_scales([&](int row, dev::Buffer from, uint32_t in_lane, uint32_t in_wave) {
      if constexpr (kBytes || kFloats) {
        to.row[row] = dev::load_b128(from, in_lane, step * kBlocks + in_wave);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to.row[row][i] = dev::load_u8(from, in_lane, step + i + in_wave);
      }
    });
  }

  // The scale of the products of tile t of X and tile c of W in a step.
  static __device__ __forceinline__ float scale_of_step(const ScaleWords& words, int c, int t, int which) {
    // Copied out first: given an element of a vector, clang 22's bit_cast reads element 0.
    const uint32_t w = words.row[c][which], x = words.row[kWRows + t][which];
    return __builtin_bit_cast(float, w) * __builtin_bit_cast(float, x);
  }

#if defined(__gfx950__)
  /// sum + the products of tile c of W and tile t of X under the low bytes of both scales.
  __device__ __forceinline__ dev::f32x4 scaled_products(const Step& step, int c, uint32_t w_scale, int t, uint32_t x_scale,
                                                        dev::f32x4 sum) const {
    if constexpr (kW == Elements::e2m1)
      return dev::mfma_scaled_e2m1_e4m3(step.w[c][0], w_scale, dev::mfma_operand(step.x[t][0], step.x[t][1]), x_scale, sum);
    else
      return dev::mfma_scaled_e4m3(dev::mfma_operand(step.w[c][0], step.w[c][1]), w_scale,
                                   dev::mfma_operand(step.x[t][0], step.x[t][1]), x_scale, sum);
  }

  __device__ __forceinline__ void multiply(const Step& step, const ScaleWords& words, int which) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
      const uint32_t w_scale = kOnce ? 0 : words.row[kOnce ? 0 : c][which] >> (kBytes ? 8 * group : 0);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        dev::f32x4& sum = acc[c * kRowTiles + t];
        if constexpr (kW == Elements::e2m1)
          sum = scaled_products(step, c, w_scale, t, words.row[kWRows + t][which] >> 8 * group, sum);
        else if constexpr (kE8m0)
          sum = dev::mfma_scaled_e4m3(dev::mfma_operand(step.w[c][0], step.w[c][1]), w_scale,
                                      dev::mfma_operand(step.x[t][0], step.x[t][1]),
                                      kBytes ? words.row[kWRows + t][which] >> 8 * group : words.row[kWRows + t][which], sum);
        else if constexpr (kOnce)
          sum = dev::mfma_e4m3(dev::mfma_operand(step.w[c][0], step.w[c][1]), dev::mfma_operand(step.x[t][0], step.x[t][1]),
                               sum);
        else
          sum += dev::mfma_e4m3(dev::mfma_operand(step.w[c][0], step.w[c][1]),
                                dev::mfma_operand(step.x[t][0], step.x[t][1]), dev::f32x4{}) *
                 scale_of_step(words, c, t, which);
      }
    }
  }
#else
  // The products of a whole step with one scale, or none.
  __device__ __forceinline__ void multiply_at_once(const Step& step, const ScaleWords& words, int which) {
    if constexpr (kE8m0) highest_w[0] = max(highest_w[0], words.row[0][which]);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      dev::f32x4 products = kOnce ? acc[t] : dev::f32x4{};
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        products = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(int64_t, step.w[0][b]),
                                                              __builtin_bit_cast(int64_t, step.x[t][b]), products, 0, 0, 0);
      if constexpr (kOnce) {
        acc[t] = products;
      } else if constexpr (kFloats) {
        acc[t] += products * scale_of_step(words, 0, t, which);
      } else {
        const uint32_t x_byte = words.row[kWRows + t][which];
        highest_x[t] = max(highest_x[t], x_byte);
        const int exponent = static_cast<int>(words.row[0][which] + x_byte) - 2 * kE8m0Bias;
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[t][r] += __builtin_ldexpf(products[r], exponent);
      }
    }
  }

  // A piece of W in e4m3.
  static __device__ __forceinline__ Piece as_e4m3(typename OfW::Piece piece) {
    if constexpr (kW == Elements::e2m1)
      return dev::e4m3_of_e2m1(piece);
    else
      return piece;
  }

  __device__ __forceinline__ void multiply_block(Piece w_piece, const Piece (&x_piece)[kRowTiles],
                                                 const uint32_t (&w_byte)[kWScales], const uint32_t (&x_byte)[kRowTiles]) {
#pragma unroll
    for (int r = 0; r < kWScales; ++r) highest_w[r] = max(highest_w[r], w_byte[r]);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      highest_x[t] = max(highest_x[t], x_byte[t]);
      const dev::f32x4 products = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(
          __builtin_bit_cast(int64_t, w_piece), __builtin_bit_cast(int64_t, x_piece[t]), dev::f32x4{}, 0, 0, 0);
      const int x_exponent = static_cast<int>(x_byte[t]) - 2 * kE8m0Bias;
#pragma unroll
      for (int r = 0; r < 4; ++r)
        acc[t][r] += __builtin_ldexpf(products[r], static_cast<int>(w_byte[r % kWScales]) + x_exponent);
    }
  }

  __device__ __forceinline__ void multiply(const Step& step, const ScaleWords& words, int which) {
    if constexpr (!kBytes) return multiply_at_once(step, words, which);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      Piece x_piece[kRowTiles];
      uint32_t w_byte[kWScales], x_byte[kRowTiles];
#pragma unroll
      for (int r = 0; r < kWScales; ++r) w_byte[r] = words.row[r][which] >> 8 * b & 0xFF;
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        x_byte[t] = words.row[kWRows + t][which] >> 8 * b & 0xFF;
        x_piece[t] = step.x[t][b];
      }
      multiply_block(as_e4m3(step.w[0][b]), x_piece, w_byte, x_byte);
      __builtin_amdgcn_sched_barrier(0);  // bytes unpacked ahead of their use cost registers
    }
  }
#endif

  // The first kCount steps of a run, in the order of their use: loads return in order.
  template <int kCount, class Meanwhile, int kSteps>
  __device__ __forceinline__ void start(Step (&steps)[kSteps], uint32_t first, Meanwhile& meanwhile) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      load(steps[i], first * kStep, i);
      __builtin_amdgcn_sched_barrier(0);
      if (i == 0) meanwhile.first_asked();
    }
    meanwhile();
  }

  // The products of the steps of a run that has been started; loads the other steps, at most kAhead in flight.
  template <int kCount, int kWords>
  __device__ __forceinline__ void finish(Step (&steps)[kCount], const ScaleWords (&words)[kWords], uint32_t first) {
    static_assert(kCount <= 4 * kWords);
    const uint32_t at = first * kStep;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      multiply(steps[i], words[i / 4], i % 4);
      if constexpr (kOnce && kColumnTiles > 2) __builtin_amdgcn_sched_barrier(0);
      if (i + kAhead < kCount) load(steps[i + kAhead], at, i + kAhead);
      __builtin_amdgcn_sched_barrier(0);
    }
  }

  // kCount whole steps from `first`; `meanwhile`: see Nothing.
  template <int kCount, class Meanwhile>
  __device__ __forceinline__ void run_steps(uint32_t first, Meanwhile& meanwhile) {
    constexpr int kWords = (kCount + 3) / 4;
    ScaleWords words[kWords];
    Step steps[kCount];
#pragma unroll
    for (int i = 0; i < kWords; ++i) load_scales(words[i], first + 4 * i);
    start<(kAhead < kCount ? kAhead : kCount)>(steps, first, meanwhile);
    finish<kCount>(steps, words, first);
  }

  // `count` steps, below kMaxRun.
  template <int kCount, class Meanwhile>
  __device__ __forceinline__ void run_rest(uint32_t first, uint32_t count, Meanwhile& meanwhile) {
    if constexpr (kCount < kMaxRun) {
      // Not a switch where there are many steps: its tree of branches lies between the bodies, and each hop is cold code.
      if constexpr (kMaxRun > 8) asm volatile("" : "+s"(count));
      if (__builtin_expect(count == kCount, 0))
        run_steps<kCount>(first, meanwhile);
      else
        run_rest<kCount + 1>(first, count, meanwhile);
    }
  }

  // A single run of kCount to kMaxRun - 1 steps, whose first kAhead have been asked for: ahead of the branches to its code, and of
  // clearing sums.
  template <int kCount, int kWords>
  __device__ __forceinline__ void finish_started(const Step (&started)[kAhead], const ScaleWords (&words)[kWords], uint32_t first,
                                                 uint32_t count) {
    if constexpr (kCount < kMaxRun) {
      if (count == kCount) {
        Step steps[kCount];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) steps[i] = started[i];
        finish<kCount>(steps, words, first);
      } else {
        finish_started<kCount + 1>(started, words, first, count);
      }
    }
  }

  // Piece i of W, where it exists.
  __device__ __forceinline__ void load_w_to_end(Step& to, uint32_t at, int i, bool exists) const {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
      to.w[c][i] = load_w(w, exists ? offset + i * OfW::kStride : dev::kOutOfRange, in_w(at + c * kTile * k));
  }

  // The payload of a step that may be partial.
  __device__ __forceinline__ void load_to_end(Step& to, uint32_t step) const {
    // A lane's pieces of W and X are of the same k.
    constexpr bool kPiecesMatch = kW == Elements::e4m3 || OfW::kCount == kPieces;
    const uint32_t at = step * kStep;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool exists = at + group * kPieceBytes + i * kPieceStride < k;
      if constexpr (kPiecesMatch) load_w_to_end(to, at, i, exists);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
        to.x[t][i] = load_piece(x.payload, exists ? x.in_lane(t) + i * kPieceStride : dev::kOutOfRange, at + x.in_wave(t));
    }
    if constexpr (!kPiecesMatch) {
#pragma unroll
      for (int i = 0; i < OfW::kCount; ++i)
        load_w_to_end(to, at, i, in_w(at) + group * OfW::kBytes + i * OfW::kStride < in_w(k));
    }
  }

  // As for_scales, where rows start between words: each(row, where it is, its offset in the lane without whole words of the
  // wave, and these). gfx942: the wave's part, of the rows of W that a lane takes, starts between words too.
  template <class Each>
  __device__ __forceinline__ void for_scales_between(Each each) const {
    for_scales([&](int row, dev::Buffer from, uint32_t in_lane, uint32_t in_wave) {
      if constexpr (kTakesOneByte || !kBytes)
        each(row, from, in_lane, in_wave);
      else
        each(row, from, in_lane + in_wave, 0);
    });
  }

  // Its scales, in word 0, of which a lane has the bytes that it takes. They may start at any byte.
  __device__ __forceinline__ void load_scales_to_end(ScaleWords& to, uint32_t step) const {
    const uint32_t block = step * kBlocks;
    for_scales_between([&](int row, dev::Buffer from, uint32_t in_lane, uint32_t in_wave) {
      if constexpr (kBytes && kTakesOneByte) {
        const bool exists = block + group < blocks;
        to.row[row][0] = dev::load_u8(from, exists ? in_lane + group : dev::kOutOfRange, block + in_wave) << 8 * group;
      } else if constexpr (kBytes) {
        uint32_t word = 0;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) word |= dev::load_u8(from, in_lane + b, block + in_wave) << 8 * b;
        // Bytes past K are the next row's. One mask serves all rows: a condition for each byte would need a pair of SGPRs.
        to.row[row][0] = blocks - block < kBlocks ? word & ((1u << 8 * (blocks - block)) - 1) : word;
      } else if constexpr (kFloats) {
        to.row[row][0] = dev::load_b32(from, in_lane, step * sizeof(float) + in_wave);
      } else {
        to.row[row][0] = dev::load_u8(from, in_lane, step + in_wave);
      }
    });
  }

  // As run_steps, with scales between words; the last step may be partial.
  template <int kCount>
  __device__ __forceinline__ void run_between(uint32_t first) {
    constexpr int kWhole = kCount - 1;
    ScaleWords around[(kCount + 3) / 4], last;
    Step steps[kCount];
    const auto load_step = [&](int i) {
      if (i < kWhole) {
        load(steps[i], first * kStep, i);
      } else {
        load_scales_to_end(last, first + i);
        load_to_end(steps[i], first + i);
      }
      __builtin_amdgcn_sched_barrier(0);
    };
    if constexpr (kWhole > 0)
      for_scales_between([&](int row, dev::Buffer from, uint32_t in_lane, uint32_t in_wave) {
#pragma unroll
        for (int i = 0; i < kCount; i += 4)
          around[i / 4].row[row] = dev::load_b128(from, in_lane & ~3u, (first + i) * kBlocks + in_wave);
      });
#pragma unroll
    for (int i = 0; i < kAhead && i < kCount; ++i) load_step(i);
    for_scales_between([&](int row, dev::Buffer, uint32_t in_lane, uint32_t) {
#pragma unroll
      for (int i = 0; i < kWhole; ++i)
        around[i / 4].row[row][i % 4] = __builtin_amdgcn_alignbyte(around[(i + 1) / 4].row[row][(i + 1) % 4],
                                                                   around[i / 4].row[row][i % 4], in_lane);
    });
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < kWhole)
        multiply(steps[i], around[i / 4], i % 4);
      else
        multiply(steps[i], last, 0);
      if (i + kAhead < kCount) load_step(i + kAhead);
      __builtin_amdgcn_sched_barrier(0);
    }
  }

  // `count` steps, at most kMost.
  template <int kMost>
  __device__ __forceinline__ void run_rest_between(uint32_t first, uint32_t count) {
    if constexpr (kMost > 0) {
      if (count == kMost)
        run_between<kMost>(first);
      else
        run_rest_between<kMost - 1>(first, count);
    }
  }

  // A step that may be partial, or whose scales are not aligned.
  __device__ void run_slowly(uint32_t step) {
    Step loaded;
    load_to_end(loaded, step);
    ScaleWords words;
    load_scales_to_end(words, step);
    multiply(loaded, words, 0);
  }

  // Steps whose scales may start anywhere or, with `between`, in aligned tensors; the last step may be partial.
  __device__ __forceinline__ void run_to_end(uint32_t step, uint32_t end, bool between) {
    if (step >= end) return;
    if constexpr (kBytes && kColumns == kTile) {
      if (between) {
        // Where the last step has one block, the words around the scales of the step before it may end past the tensor: that
        // step ends a run.
        const uint32_t fast = blocks % kBlocks == 1 ? min(end, k / kStep) : end;
        for (; step + kRunBetween <= fast; step += kRunBetween) run_between<kRunBetween>(step);
        run_rest_between<kRunBetween - 1>(step, fast - step);
        step = fast;
      }
    }
    for (; step < end; ++step) run_slowly(step);
  }

  // A scale byte of 255 makes the outputs that it scales NaN; gfx950's instruction does so itself.
  __device__ __forceinline__ void take_nans() {
#if !defined(__gfx950__)
    if constexpr (kE8m0) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          if (max(highest_w[r % kWScales], highest_x[t]) == kE8m0Nan) acc[t][r] = __builtin_nanf("");
    }
#endif
  }

  // between: rows of scales are not aligned, but their tensors are. meanwhile: as for run_steps, for each run of whole steps.
  template <class Meanwhile = Nothing>
  __device__ __forceinline__ void run(uint32_t begin, uint32_t end, bool aligned, bool between = false,
                                      Meanwhile&& meanwhile = {}) {
    const uint32_t whole = aligned ? min(end, k / kStep) : begin;
    if (kStartsEarly && whole - begin >= kAhead && whole - begin < kMaxRun) {
      const uint32_t count = whole - begin;
      constexpr int kWords = (kMaxRun + 2) / 4;
      ScaleWords words[kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (i == 0 || count > 4 * i) load_scales(words[i], begin + 4 * i);
      Step started[kAhead];
      start<kAhead>(started, begin, meanwhile);
      if constexpr (kStartsEarly) finish_started<kAhead>(started, words, begin, count);
    } else {
      uint32_t step = begin;
      for (; step + kMaxRun <= whole; step += kMaxRun) run_steps<kMaxRun>(step, meanwhile);
      run_rest<1>(step, whole - step, meanwhile);  // begin is at most k / kStep
    }
    if (!kStartsEarly || __builtin_expect(end > whole, 0)) run_to_end(max(whole, begin), end, between);
    take_nans();
  }
};

/// The steps of `part` of `parts`, a power of two.
__device__ inline uint32_t first_step(uint32_t k, uint32_t part, uint32_t log2_parts) {
  return (k + kStep - 1) / kStep * part >> log2_parts;
}

}  // namespace hf::wave_split
