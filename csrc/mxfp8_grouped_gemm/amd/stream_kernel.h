// MX-FP8 grouped GEMM of a mixture of experts for a short K, on gfx950: rows of W stream past slots that stay in registers.
// out[slot] = A[slot / a_div] W[expert]^T (+ bias[expert]) (* weight[slot]).
//
//                          | k = 0 .. 128 kSteps - 1 |
//   A rows of 16 slots     |=========================|   in registers for all of the wave's tiles
//   W[expert] rows n0 ..   |=========================|   tile 0 of wave 0, then of the waves beside it
//                  n0 + 64 |=========================|   tile 1 of wave 0: in flight while tile 0 is multiplied
//             ...
//
// With a K of few steps a work-group of one tile per wave mostly waits: for its start (one each 17 ns on an XCD, modelled, in
// which its compute units receive 14 KB), its slots, its rows of A and its store, in turn. Here a wave waits for them once and
// then has kAhead tiles in flight.
//
// W may be e2m1, half the bytes: a lane has 32 neighbouring k of a step then, 16 bytes.
//
// Of at most 8 slots and an even number of steps, tiles of e4m3 come in loads of whole lines, as in line_wave.h.
//
// Grid as for split_kernel.h, which finds the slots; a work-group has kSide waves side by side, and tile_columns columns.
// Bytes: an expert's weight once for every 16 slots of a tile; A once per work-group, from cache.
//
// Tails: tiles past the last column are out of range and not stored; slots that do not exist read 0 and are not stored.
#pragma once

#include <type_traits>

#include "split_kernel.h"

namespace hf::moe {

constexpr int kMostSteps = 4;  // of K: registers decide
constexpr int kSide = 4;           // waves of a work-group
constexpr int kMostColumns = 512;  // of a work-group

#if defined(__gfx950__)

// A K of kSteps steps of 16 rows as a lane holds it: 16 bytes at 16 (l / 16) of each half of a step, of e2m1 of each step, and its
// row's scales, a word for each step.
template <int kSteps, Elements kElements>
struct ShortRows {
  using Pieces = wave_split::WPieces<kElements>;
  static constexpr uint32_t kStepBytes = wave_split::row_bytes(kElements, wave_split::kStep);

  dev::u32x4 pieces[kSteps][Pieces::kCount], scales;

  __device__ __forceinline__ void load(dev::Buffer payload, uint32_t at, uint32_t from, dev::Buffer all_scales, uint32_t scale_at,
                                       uint32_t scales_from) {
    scales = dev::load_b128(all_scales, scale_at, scales_from);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < Pieces::kCount; ++i)
        pieces[s][i] = dev::load_b128(payload, at + s * kStepBytes + i * Pieces::kStride, from);
    __builtin_amdgcn_sched_barrier(0);  // in the order of their use: loads return in order
  }

  __device__ uint32_t scale(int step, uint32_t group) const { return scales[step] >> 8 * group; }

  __device__ __forceinline__ dev::f32x4 times(const ShortRows<kSteps, Elements::e4m3>& b, uint32_t group) const {
    dev::f32x4 sums = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const dev::i32x8 other = dev::mfma_operand(b.pieces[s][0], b.pieces[s][1]);
      if constexpr (kElements == Elements::e2m1)
        sums = dev::mfma_scaled_e2m1_e4m3(pieces[s][0], scale(s, group), other, b.scale(s, group), sums);
      else
        sums = dev::mfma_scaled_e4m3(dev::mfma_operand(pieces[s][0], pieces[s][1]), scale(s, group), other, b.scale(s, group),
                                     sums);
    }
    // Opaque: clang 22 would move the instructions, and with them the lanes' scales, to where only lanes with a slot are
    // active.
    return dev::lane_vector_here(sums);
  }
};

// The same of 16 rows of W in loads of whole lines, and of 8 of A: line_wave.h has the layout.
template <int kSteps, int kHalves>
struct LineRows {
  static_assert(kSteps % 2 == 0);
  dev::u32x4 pieces[kHalves][kSteps], scales[kHalves];

  __device__ __forceinline__ void load(dev::Buffer payload, uint32_t at, uint32_t from, dev::Buffer all_scales, uint32_t scale_at,
                                       uint32_t scales_from) {
    constexpr uint32_t kK = kSteps * wave_split::kStep, kScaleBytes = kK / kMxBlock;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
      scales[h] = dev::load_b128(all_scales, scale_at, scales_from + h * wave_split::kLineRows * kScaleBytes);
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        pieces[h][s] = dev::load_b128(payload, at + s * wave_split::kStep, from + h * wave_split::kLineRows * kK);
    __builtin_amdgcn_sched_barrier(0);  // in the order of their use: loads return in order
  }

  __device__ uint32_t scale(int half, int step, uint32_t byte) const {
    const uint32_t first = scales[half][step], second = scales[half][step + 1];
    return __builtin_amdgcn_perm(second, first, byte);
  }

  __device__ __forceinline__ dev::f32x4 times(const LineRows<kSteps, 1>& b, uint32_t byte) const {
    dev::f32x4 sums[kHalves] = {};
#pragma unroll
    for (int s = 0; s < kSteps; s += 2)
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
        sums[h] = dev::mfma_scaled_e4m3(dev::mfma_operand(pieces[h][s], pieces[h][s + 1]), scale(h, s, byte),
                                        dev::mfma_operand(b.pieces[0][s], b.pieces[0][s + 1]), b.scale(0, s, byte), sums[h]);
    return dev::lane_vector_here(wave_split::line_total(sums));  // as in ShortRows
  }
};

// The columns of a work-group for 16 slots, one to a lane % 16, or 8.
template <int kSteps, Elements kW, bool kLines = false>
__device__ __forceinline__ void stream(uint32_t slot, bool exists, uint32_t expert, const Pass& pass, uint32_t tile_columns,
                                       uint32_t wave, uint32_t lane) {
  constexpr uint32_t kK = kSteps * wave_split::kStep, kScales = kK / kMxBlock, kSideColumns = kSide * kTile;
  constexpr uint32_t kRowBytes = wave_split::row_bytes(kW, kK);
  constexpr int kAhead = (kSteps <= 2 ? 3 : 2) + (kW == Elements::e2m1);
  using OfA = std::conditional_t<kLines, LineRows<kSteps, 1>, ShortRows<kSteps, Elements::e4m3>>;
  using OfW = std::conditional_t<kLines, LineRows<kSteps, wave_split::kLineHalves>, ShortRows<kSteps, kW>>;
  constexpr uint32_t kRows = kLines ? wave_split::kLineRows : kTile;
  const uint32_t group = lane / kTile, n = pass.n, first = blockIdx.x * tile_columns, columns = min(tile_columns, n - first);
  const uint32_t in_row = kLines ? wave_split::in_line(lane) : group * wave_split::kPieceBytes;  // of e2m1 too
  const uint32_t which = kLines ? wave_split::scale_byte(lane) : group;
  const bool stores = exists && lane % kTile < kRows;
  const uint64_t w_row = uint64_t{expert} * n + first;
  const dev::Buffer w = dev::make_buffer(pass.w + w_row * kRowBytes, columns * kRowBytes);
  const dev::Buffer ws = dev::make_buffer(pass.w_scales + w_row * kScales, columns * kScales);
  const uint32_t w_at = lane % kRows * kRowBytes + in_row, ws_at = lane % kRows * kScales;
  uint32_t column = wave * kTile;
  OfA a;
  OfW ring[kAhead];
  const uint32_t row = pass.a_div == 1 ? slot : slot / pass.a_div;
  a.load(dev::make_buffer(pass.a, pass.a_rows * kK), exists ? row * kK + in_row : dev::kOutOfRange, 0,
         dev::make_buffer(pass.a_scales, pass.a_rows * kScales), exists ? row * kScales : dev::kOutOfRange, 0);
  const auto load = [&](int t, uint32_t from) { ring[t].load(w, w_at, from * kRowBytes, ws, ws_at, from * kScales); };
#pragma unroll
  for (int t = 0; t < kAhead; ++t) load(t, column + t * kSideColumns);
  const Late& late = arguments_here();
  dev::bf16* const out = late.out;
  const float* const weights = late.slot_weights;
  const float* const biases = late.biases;
  const bool aligned = late.aligned_output;
  const float weight = weights != nullptr && exists ? weights[slot] : 1.f;
  while (column < columns) {
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      dev::f32x4 sums = ring[t].times(a, which);
      load(t, column + kAhead * kSideColumns);
      const uint32_t in_n = first + column + group * dev::kColumnsPerLane;
      if (stores && column < columns) {
        if (biases != nullptr) {
          const float* const bias = biases + uint64_t{expert} * n + in_n;
#pragma unroll
          for (int i = 0; i < dev::kColumnsPerLane; ++i)
            if (in_n + i < n) sums[i] += bias[i];
        }
        dev::store_columns(out, weights != nullptr ? sums * weight : sums, slot, in_n, n, aligned);
      }
      column += kSideColumns;
    }
  }
}

#endif

/// Work-groups of kSide waves; no LDS. K is kSteps steps, rows of scales are aligned and p.tile_columns is a multiple of
/// 16 kSide; everything else as for multiply_groups.
template <int kSteps, Elements kW>
__device__ __forceinline__ void stream_groups(const First& leading) {
#if defined(__gfx950__)
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  uint32_t tile_columns;
  const auto also = [&](const Late& late) {
    tile_columns = late.tile_columns;
    dev::wave_value_loaded_here(tile_columns);
  };
  for_each_group(leading, lane, also, [&](const Slots& slots, uint32_t expert, const Pass& pass) {
    for (uint32_t first = 0; first < slots.count; first += kTile) {
      if constexpr (kSteps % 2 == 0 && kW == Elements::e4m3) {
        constexpr uint32_t kFew = wave_split::kLineRows;
        if (slots.count - first <= kFew) {
          stream<kSteps, kW, true>(slots.of_lane(first, lane, kFew), first + lane % kFew < slots.count, expert, pass, tile_columns,
                                   wave, lane);
          return;
        }
      }
      stream<kSteps, kW>(slots.of_lane(first, lane), first + lane % kTile < slots.count, expert, pass, tile_columns, wave, lane);
    }
  });
#endif
}

template <int kSteps>
__global__ __launch_bounds__(kSide * dev::kWaveSize) void mxfp8_grouped_stream(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns, uint32_t depth, Rest) {
  stream_groups<kSteps, Elements::e4m3>({sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns, depth});
}

/// mxfp8_grouped_stream with W in e2m1.
template <int kSteps>
__global__ __launch_bounds__(kSide * dev::kWaveSize) void mxfp4_grouped_stream(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns, uint32_t depth, Rest) {
  stream_groups<kSteps, Elements::e2m1>({sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns, depth});
}

/// Checks what the kernel asks of K, scales and columns, and launches it.
template <int kSteps, class Kernel>
void launch_stream(Kernel kernel, Problem problem, int64_t columns, hipStream_t stream) {
  constexpr int kK = kSteps * wave_split::kStep;
  HF_CHECK(problem.k == kK, "K must be a multiple of 128, at most ", kMostSteps * wave_split::kStep,
           "; this variant of the module has K = ", kK, "; got ", problem.k);
  HF_CHECK(problem.options & kAlignedScales, "a_scale and w_scale must start at a multiple of 4 bytes; pass copies of these views");
  HF_CHECK(columns >= kSide * kTile && columns <= kMostColumns && columns % (kSide * kTile) == 0,
           "columns must be a multiple of ", kSide * kTile, " up to ", kMostColumns, "; got ", columns);
  if (problem.grid_rows == 0) return;
  problem.tile_columns = static_cast<uint32_t>(columns);
  launch(kernel, problem, static_cast<const Rest&>(problem), dim3(ceil_div(int64_t{problem.n}, columns), problem.grid_rows),
         kSide * dev::kWaveSize, 0, stream);
}

/// The entry for both formats of W: as grouped_split, with 16 slots at a time; K is 128 kSteps, both scale tensors start at a
/// multiple of 4 bytes; columns of a work-group a multiple of 64 up to 512.
template <int kSteps, Elements kW>
void grouped_stream(Tensor out, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
                    Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor mul_weight_by, OptionalTensor bias,
                    int64_t E, int64_t N, int64_t K, int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m,
                    int64_t columns, hipStream_t stream) {
  static_assert(kSteps >= 1 && kSteps <= kMostSteps);
  constexpr bool kFp4 = kW == Elements::e2m1;
  HF_CHECK_ARCH(w, "gfx950");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, mxfp8::payload_of(w), kFp4};
  Problem problem = checked(given);
  take_output(problem, out, mul_weight_by, given);
  if constexpr (kFp4)
    launch_stream<kSteps>(mxfp4_grouped_stream<kSteps>, problem, columns, stream);
  else
    launch_stream<kSteps>(mxfp8_grouped_stream<kSteps>, problem, columns, stream);
}

}  // namespace hf::moe
