// MXFP4 GEMM on the scaled MFMA whose X is made in the launch: out = mxfp4(X) W^T from X in bf16 or f16 and W in e2m1 with e8m0
// scales per 32 elements of K. The blocks of X are those of mxfp4_quantize in mode `even`, bit for bit.
//
//   1. all waves make the group's rows of X in LDS      a load of a wave: 8 rows x 64 k, whole cache lines; a lane has 8
//                                                       elements, a quad of lanes a block
//        X [16 kMSub, K] --> codes [step][tile][lane], 16 bytes each, scales [step][tile][lane]: an operand of the MFMA is
//        one LDS load without bank conflicts
//
//   2. behind a barrier    W rows of wave column 0   of wave column 1         a wave: 16 kMSub rows of X x 16 rows of W, and
//                       +-------------------------+-------------------+       one part of K; a group has `columns` x `k_splits`
//            X rows     | acc[0]                  | acc[0]            |       waves
//            m0..15     +-------------------------+-------------------+
//           m16..31     | acc[1]                  |  ...              |       sums of the parts are added through LDS in their
//                                                                             order: a result equals that of mxfp4_mfma with
//                                                                             the same k_splits, bit for bit
//
// Grid: ceil(N / (16 columns)) x ceil(M / (16 kMSub)). The first loads of W leave behind the last ones of X and arrive while X
// becomes codes. Where scales of W are plain and start at multiples of 4 bytes (K % 128 == 0), those of a row and four steps are
// one load.
//
// Bytes of a group: 32 kMSub K of X, 8 columns K (1 + 1/16) of W. X is made by each of the ceil(N / (16 columns)) groups of its
// rows: 2,048 elements are about 90 vector instructions. What a CU may have in flight, 32 KiB, and the L2 caches, which deliver
// about 39 bytes per cycle and CU (modelled), are the bound.
//
// Tails: rows that do not exist and blocks of W past K read zeros, which are the value 0 with the scale 2^-127.
#pragma once

#include "hipforge/device/element.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/amd/fp4_codes.h"
#include "mxfp4_kernel.h"

namespace hf::mxfp4 {

constexpr int kMadeWaves = 8;                 // of a group, at most
constexpr int kChunk = 8;                     // elements of X that a lane loads at once
constexpr int kPerBlock = kMxBlock / kChunk;  // lanes of a block
constexpr int kPieceRows = 8, kPieceK = 64;   // of a load of a wave
constexpr int kPieceBlocks = kPieceK / kMxBlock;
constexpr int kPieces = kStep / kPieceK, kHalves = kTile / kPieceRows;  // of a unit: a tile of X and a step
constexpr int kChunks = kPieces * kHalves;                              // a lane's in a unit: half h of piece p is 2 p + h
constexpr int kAhead = 2;                       // units of a wave that are under way
constexpr int kLoadSteps = 4;                   // of W that are requested at once: a row's scales of them are 16 bytes
constexpr int kCodeBytes = kTile * kStepBytes;  // of a unit, in LDS
constexpr int kMadeBytes = kCodeBytes + dev::kWaveSize;  // with its scales

static_assert(kPerBlock == 4, "a block of X is held by a quad of lanes");
static_assert(kChunks == kPerBlock, "a lane of a quad has the scale of one chunk's block");
static_assert(kPieceRows * kPieceK == kChunk * dev::kWaveSize);
static_assert(kCodeBytes == kLaneBytes * dev::kWaveSize);
static_assert(kStep % kPieceK == 0 && kTile % kPieceRows == 0);
static_assert(kLoadSteps * kStep / kMxBlock == 16);

constexpr uint32_t pack_made_options(uint32_t log2_splits, uint32_t columns, bool shuffled, bool aligned_output) {
  return pack_options(log2_splits, shuffled, aligned_output) | columns << 16;
}

#if defined(__gfx950__)

template <int kFirst, int kSecond, int kThird, int kFourth>
__device__ inline uint32_t quad_lanes(uint32_t value) {
  constexpr int kPattern = kFirst | kSecond << 2 | kThird << 4 | kFourth << 6;
  return static_cast<uint32_t>(__builtin_amdgcn_mov_dpp(static_cast<int32_t>(value), kPattern, 0xF, 0xF, true));
}

using Unit = dev::u32x4[kChunks];

/// The chunks of a unit of X on their way to codes.
template <class T>
struct Encoder {
  static constexpr bool kBf16 = __is_same(T, dev::bf16);
  static constexpr uint32_t kRounding = dev::scale_rule(dev::ScaleMode::even, dev::kE2m1).rounding;
  static constexpr uint32_t kInfinityBits = 0x7F800000, kMagnitudes = 0x7FFF7FFF;
  static constexpr uint32_t kNanCode = 7;
  // A subnormal element of a block from this magnitude on is at most a quarter of the scale, and its code 0.
  static constexpr int kLeastExponent = kBf16 ? -126 : -14;  // of a normal number
  static constexpr uint32_t kLeastDirect = kE8m0Bias + kLeastExponent + 2;  // as a scale
  static constexpr uint32_t kDirectFrom = ((kLeastDirect + dev::kE2m1.exponent) << 23) - kRounding;
  using Pair = dev::Vector<T, 2>;
  using Chunk = dev::Vector<T, kChunk>;
  using Halves = dev::Vector<uint16_t, 2>;

  static __device__ uint32_t larger_halves(uint32_t a, uint32_t b) {
    return __builtin_bit_cast(uint32_t, __builtin_elementwise_max(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b)));
  }

  // Of the chunk's even and odd elements, the bits of the largest magnitude.
  static __device__ uint32_t largest(dev::u32x4 words) {
    uint32_t most = words[0] & kMagnitudes;
#pragma unroll
    for (int i = 1; i < 4; ++i) most = larger_halves(most, words[i] & kMagnitudes);
    return most;
  }

  // The largest magnitudes of two chunks in the halves of a word.
  static __device__ uint32_t largest(dev::u32x4 low, dev::u32x4 high) {
    constexpr uint32_t kEven = 0x05040100, kOdd = 0x07060302;
    const uint32_t of_low = largest(low), of_high = largest(high);
    return larger_halves(dev::chosen_bytes<kEven>(of_high, of_low), dev::chosen_bytes<kOdd>(of_high, of_low));
  }

  // Lane c of a quad gets the largest magnitude of the block that holds the quad's chunks c, as the bits of a float.
  static __device__ uint32_t largest_of_blocks(const Unit& unit, uint32_t lane) {
    static_assert(kChunks == 4 && kPerBlock == 4, "a lane of a quad for each chunk");
    const uint32_t first = largest(unit[0], unit[1]), last = largest(unit[2], unit[3]);
    const bool keeps_first = lane % 4 < 2;
    const uint32_t kept = keeps_first ? first : last, given = keeps_first ? last : first;
    const uint32_t of_two = larger_halves(kept, quad_lanes<2, 3, 0, 1>(given));
    const uint32_t of_four = larger_halves(of_two, quad_lanes<1, 0, 3, 2>(of_two));
    if constexpr (kBf16) {
      return (of_four << (lane % 2 ? 0 : 16)) & 0xFFFF0000u;
    } else {
      const uint16_t bits = static_cast<uint16_t>(of_four >> (lane % 2 ? 16 : 0));
      return __builtin_bit_cast(uint32_t, static_cast<float>(__builtin_bit_cast(dev::f16, bits)));
    }
  }

  template <int kByte>
  static __device__ uint32_t convert_pair(uint32_t codes, uint32_t pair, float scale) {
    const Pair both = __builtin_bit_cast(Pair, pair);
    if constexpr (kBf16) {
      return __builtin_amdgcn_cvt_scalef32_pk_fp4_bf16(codes, both, scale, kByte);
    } else {
      return __builtin_amdgcn_cvt_scalef32_pk_fp4_f16(codes, both, scale, kByte);
    }
  }

  // The instruction divides by the power of two that the exponent of `scale` names, and rounds to nearest even. Each
  // replaces a byte of the word.
  static __device__ uint32_t direct(dev::u32x4 words, uint32_t scale_bits) {
    const float scale = __builtin_bit_cast(float, scale_bits);
    uint32_t codes = __builtin_nondeterministic_value(scale_bits);
    codes = convert_pair<0>(codes, words[0], scale);
    codes = convert_pair<1>(codes, words[1], scale);
    codes = convert_pair<2>(codes, words[2], scale);
    return convert_pair<3>(codes, words[3], scale);
  }

  // Through float, for subnormal elements and NaNs.
  static __device__ uint32_t careful(dev::u32x4 words, uint32_t scale_bits) {
    const float inverse = dev::e8m0_inverse(scale_bits >> 23);
    const Chunk elements = __builtin_bit_cast(Chunk, words);
    float scaled[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) scaled[i] = static_cast<float>(elements[i]) * inverse;
    uint32_t codes = dev::e2m1_codes(scaled);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (scaled[i] != scaled[i]) codes = (codes & ~(0xFu << (4 * i))) | kNanCode << (4 * i);
    return codes;
  }

  /// The lane's codes of all chunks; returns the scale of the block of chunk lane % 4.
  static __device__ uint32_t encode(const Unit& unit, uint32_t lane, uint32_t (&codes)[kChunks]) {
    constexpr dev::ScaleRule kRule = dev::scale_rule(dev::ScaleMode::even, dev::kE2m1);
    const uint32_t amax = largest_of_blocks(unit, lane);
    const uint32_t byte = dev::block_scale(amax, kRule), own = byte << 23;
    const uint32_t scales[kChunks] = {quad_lanes<0, 0, 0, 0>(own), quad_lanes<1, 1, 1, 1>(own), quad_lanes<2, 2, 2, 2>(own),
                                      quad_lanes<3, 3, 3, 3>(own)};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) codes[c] = direct(unit[c], scales[c]);
    if (__builtin_amdgcn_ballot_w64(amax - 1 < kDirectFrom - 1 || amax > kInfinityBits) != 0) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) codes[c] = careful(unit[c], scales[c]);
    }
    return byte;
  }
};

/// A group's rows of X, whose units the waves make in turn.
template <class T, int kMSub>
struct Maker {
  dev::Buffer x;
  uint8_t* lds;
  uint32_t x_bytes, row_bytes, first_row, steps, turn, lane;
  uint32_t at;            // offset of the lane's elements in 8 rows and 64 k
  uint32_t to, scale_to;  // where the lane's codes of chunk 0 of the first unit go, and its scale

  __device__ Maker(const T* data, uint8_t* in, uint32_t row0, uint32_t rows, uint32_t k, uint32_t step_count, uint32_t of_lane)
      : lds(in), x_bytes(rows * k * sizeof(T)), row_bytes(k * sizeof(T)), first_row(row0), steps(step_count), lane(of_lane) {
    x = dev::make_buffer(data, x_bytes);
    // Groups start at different steps: what one fetches from memory, the others then find in L2.
    constexpr uint32_t kGoldenRatio = 0x9E3779B1;
    turn = static_cast<uint32_t>(uint64_t{blockIdx.x * kGoldenRatio} * steps >> 32);
    const uint32_t in_block = lane % kPerBlock, block = lane / kPerBlock % kPieceBlocks;
    const uint32_t row = lane / (kPerBlock * kPieceBlocks);
    at = row * row_bytes + (block * kMxBlock + in_block * kChunk) * sizeof(T);
    to = (block * kTile + row) * kLaneBytes + in_block * (kLaneBytes / kPerBlock);
    const uint32_t half = in_block % kHalves, piece = in_block / kHalves;  // of chunk in_block, whose scale the lane has
    scale_to = steps * kMSub * kCodeBytes + (piece * kPieceBlocks + block) * kTile + half * kPieceRows + row;
  }

  __device__ uint32_t step_of(uint32_t unit) const {
    const uint32_t turned = unit / kMSub + turn;
    return turned < steps ? turned : turned - steps;
  }

  // A unit past the last one is zeros; so are rows past the last, which are past the tensor's end. Past K is the next row: its
  // codes are finite, and meet zeros of W.
  __device__ void load(Unit& into, uint32_t unit) const {
    const uint32_t step = step_of(unit);
    const uint32_t from = unit < steps * kMSub ? (first_row + unit % kMSub * kTile) * row_bytes + step * kStep * sizeof(T) : x_bytes;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      into[c] = dev::load_b128(x, at, from + c / kHalves * kPieceK * sizeof(T) + c % kHalves * kPieceRows * row_bytes);
  }

  __device__ void make(const Unit& given, uint32_t unit) const {
    constexpr int kOfPiece = kPieceBlocks * kTile * kLaneBytes, kOfHalf = kPieceRows * kLaneBytes;
    uint32_t codes[kChunks];
    const uint32_t byte = Encoder<T>::encode(given, lane, codes);
    const uint32_t index = step_of(unit) * kMSub + unit % kMSub;
    uint8_t* const codes_to = lds + index * kCodeBytes + to;
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
      *reinterpret_cast<uint32_t*>(codes_to + c / kHalves * kOfPiece + c % kHalves * kOfHalf) = codes[c];
    lds[index * dev::kWaveSize + scale_to] = static_cast<uint8_t>(byte);
  }
};

/// kLoadSteps steps of 16 rows of W, as a lane has them. With kWide a step's scales are a word, that of lane group g in byte g.
template <bool kWide>
struct Weights {
  dev::u32x4 codes[kLoadSteps];
  uint32_t scales[kLoadSteps];

  __device__ void load(const Panel<1>& w, uint32_t step, uint32_t end, uint32_t k) {
    if constexpr (kWide) {
      const dev::u32x4 words =
          dev::load_b128(w.scales, w.scale_at[0] - w.group, step < end ? step * (kStep / kMxBlock) : w.scale_bytes);
#pragma unroll
      for (int s = 0; s < kLoadSteps; ++s) scales[s] = words[s];
    }
#pragma unroll
    for (int s = 0; s < kLoadSteps; ++s) {
      const uint32_t index = step + s;
      const bool exists = index < end;
      const bool has_block = kWide || index * (kStep / kMxBlock) + w.group < k / kMxBlock;
      codes[s] = dev::load_b128(w.payload, has_block ? w.data_at[0] : dev::kOutOfRange,
                                exists ? index * (kWide ? kStepBytes : w.payload_stride) : w.payload_bytes);
      if constexpr (!kWide)
        scales[s] = dev::load_u8(w.scales, has_block ? w.scale_at[0] : dev::kOutOfRange,
                                 exists ? w.scale_step(index) : w.scale_bytes);
    }
  }

  /// The scale of step s, in the low byte.
  __device__ uint32_t scale(int s, uint32_t group) const { return kWide ? scales[s] >> (8 * group) : scales[s]; }
};

#endif  // __gfx950__

template <class T, int kMSub, bool kWide>
__global__ __launch_bounds__(kMadeWaves * dev::kWaveSize) void mxfp4_made(
    [[maybe_unused]] const T* x, [[maybe_unused]] const uint8_t* wq, [[maybe_unused]] const uint8_t* ws,
    [[maybe_unused]] uint32_t m, [[maybe_unused]] uint32_t n, [[maybe_unused]] uint32_t k,
    [[maybe_unused]] uint32_t options, [[maybe_unused]] dev::bf16* out) {
#if defined(__gfx950__)
  const Plan plan(options, n, k);
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const uint32_t columns = options >> 16, waves = columns << plan.log2_splits;
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t part = wave & ((1u << plan.log2_splits) - 1), wave_column = wave >> plan.log2_splits;
  const uint32_t row0 = blockIdx.y * (kTile * kMSub);
  const uint32_t column0 = (blockIdx.x * columns + wave_column) * kTile;
  const uint32_t steps = (k + kStep - 1) / kStep;
  const uint32_t begin = steps * part >> plan.log2_splits, end = steps * (part + 1) >> plan.log2_splits;

  const Panel<1> w(wq, ws, column0, n, k, lane, !kWide && plan.shuffled, plan);
  Weights<kWide> ring[2];
  {
    const Maker<T, kMSub> maker(x, lds, row0, m, k, steps, lane);
    const uint32_t units = steps * kMSub;
    Unit made[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) maker.load(made[j], wave + j * waves);
    __builtin_amdgcn_sched_barrier(0);
    uint32_t unit = wave;
    for (; unit + kAhead * waves < units; unit += kAhead * waves) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        maker.make(made[j], unit + j * waves);
        maker.load(made[j], unit + (kAhead + j) * waves);
        __builtin_amdgcn_sched_barrier(0);
      }
    }
    // Loads return in order: X, which is made meanwhile, before W.
    ring[0].load(w, begin, end, k);
    __builtin_amdgcn_sched_barrier(0);
    ring[1].load(w, begin + kLoadSteps, end, k);
    __builtin_amdgcn_sched_barrier(0);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (unit + j * waves < units) maker.make(made[j], unit + j * waves);
  }
  __syncthreads();

  dev::f32x4 acc[kMSub] = {};
  const uint8_t* const x_scales = lds + steps * kMSub * kCodeBytes;
  const auto multiply = [&](const Weights<kWide>& of, int i, uint32_t step) {
#pragma unroll
    for (int a = 0; a < kMSub; ++a) {
      const uint32_t at = (step * kMSub + a) * dev::kWaveSize + lane;
      const dev::u32x4 codes = *reinterpret_cast<const dev::u32x4*>(lds + at * kLaneBytes);
      const uint32_t scale = x_scales[at];
      acc[a] = dev::mfma_scaled_e2m1(of.codes[i], of.scale(i, w.group), codes, scale, acc[a]);
    }
  };
  uint32_t step = begin;
  for (; step + 2 * kLoadSteps < end; step += 2 * kLoadSteps) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < kLoadSteps; ++i) multiply(ring[j], i, step + j * kLoadSteps + i);
      ring[j].load(w, step + (2 + j) * kLoadSteps, end, k);
      __builtin_amdgcn_sched_barrier(0);
    }
  }
  const auto multiply_rest = [&](const Weights<kWide>& of, uint32_t first) {
    if (first + kLoadSteps <= end) {
#pragma unroll
      for (int i = 0; i < kLoadSteps; ++i) multiply(of, i, first + i);
      return;
    }
#pragma unroll
    for (int i = 0; i < kLoadSteps - 1; ++i)
      if (first + i < end) multiply(of, i, first + i);
  };
  multiply_rest(ring[0], step);
  if (step + kLoadSteps < end) multiply_rest(ring[1], step + kLoadSteps);

  if (plan.log2_splits != 0) __syncthreads();  // the sums take X's place
  const uint32_t row = row0 + lane % kTile, column = column0 + lane / kTile * dev::kColumnsPerLane;
  dev::f32x4* const sums = reinterpret_cast<dev::f32x4*>(lds) + (wave_column * kMSub << plan.log2_splits) * dev::kWaveSize;
  dev::add_parts(sums, acc, part, 1u << plan.log2_splits, lane, [&](uint32_t t, dev::f32x4 sum) {
    if (row + t * kTile < m) dev::store_columns(out, sum, row + t * kTile, column, n, plan.aligned_output);
  });
#endif
}

}  // namespace hf::mxfp4
