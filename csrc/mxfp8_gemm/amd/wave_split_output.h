// The results of wave_split_kernel.h: their scales, bias and stores.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/amd/wave_parts.h"
#include "wave_split_problem.h"

namespace hf::wave_split {

template <class T>
__device__ inline void store_as(const Problem& p, dev::f32x4 values, uint32_t row, uint32_t column) {
  if (p.has_bias()) {
    const T* bias = reinterpret_cast<const T*>(bias_here());
#pragma unroll
    for (int i = 0; i < dev::kColumnsPerLane; ++i)
      if (column + i < p.n) values[i] += static_cast<float>(bias[column + i]);
  }
  dev::store_columns(reinterpret_cast<T*>(p.out), values, row, column, p.n, p.aligned_output());
}

/// The factors of the sums of four outputs, for Scales::kOnce.
template <Scales kScales>
struct OutputScales {
  dev::f32x4 w;
  float x;

  OutputScales() = default;
  __device__ __forceinline__ OutputScales(const Problem& p, uint32_t row, uint32_t column) {
    if constexpr (kScales == Scales::kOnce) {
      const bool one_w = p.one_w_scale();
      const dev::Buffer of_x = dev::make_buffer(p.xs, p.one_x_scale() ? sizeof(float) : p.m * sizeof(float));
      const dev::Buffer of_w = dev::make_buffer(p.ws, one_w ? sizeof(float) : p.n * sizeof(float));
      x = __builtin_bit_cast(float, dev::load_b32(of_x, p.one_x_scale() ? 0 : row * sizeof(float), 0));
      w = __builtin_bit_cast(dev::f32x4, dev::load_b128(of_w, one_w ? 0 : column * sizeof(float), 0));
    }
  }

  // The first use of the loaded numbers, which waits for them.
  __device__ __forceinline__ dev::f32x4 factors(const Problem& p) const {
    return (p.one_w_scale() ? dev::f32x4(w[0]) : w) * x;
  }
  __device__ __forceinline__ dev::f32x4 applied(const Problem& p, dev::f32x4 sums) const {
    if constexpr (kScales != Scales::kOnce) return sums;
    return sums * factors(p);
  }
};

template <Scales kScales = Scales::kMx>
__device__ inline void store(const Problem& p, dev::f32x4 values, uint32_t row, uint32_t column) {
  if (row >= p.m) return;
  if (kScales != Scales::kMx && p.half_output())
    store_as<dev::f16>(p, values, row, column);
  else
    store_as<dev::bf16>(p, values, row, column);
}

constexpr int kPreparedWaves = 4;

/// Whether a wave with these tiles has the registers of PreparedOutput.
constexpr bool has_prepared_output(int row_tiles, int column_tiles) { return row_tiles < 4 && column_tiles > 2; }

/// Fours of a row in LDS (PreparedOutput): rows start in different banks.
constexpr uint32_t prepared_stride(uint32_t column_tiles) { return column_tiles * kTile / dev::kColumnsPerLane + 1; }

/// LDS of PreparedOutput.
constexpr uint32_t prepared_bytes(uint32_t rows, uint32_t column_tiles) {
  return kPreparedWaves * rows * prepared_stride(column_tiles) * sizeof(dev::f32x4);
}

/// The results of work-groups of kPreparedWaves waves, where scales are all that is applied to sums and rows allow stores of four
/// columns, a "four". A wave asks for its scales behind its first operands and prepares all else while operands are on their way, so
/// that its last operand is followed by products, sums and stores alone. A store has whole rows, which fill the sectors that they touch:
///
///   LDS, for each wave | row 0: its fours, one unused | row 1: ...
///   a store of a wave  | row 0: 16 or 32 lanes, a four each | row 1 | ... 64 lanes        and the next waves' rows behind
///
/// can_prepare_output says which problems allow it.
template <int kRowTiles, int kColumnTiles, Scales kScales>
struct PreparedOutput {
  static constexpr int kRows = kRowTiles * kTile, kFours = kColumnTiles * kTile / dev::kColumnsPerLane;
  static constexpr int kLanesOfRow = kFours <= 16 ? 16 : 32, kRowsAtOnce = kPreparedWaves * dev::kWaveSize / kLanesOfRow;
  static constexpr int kStores = kRows / kRowsAtOnce;
  static constexpr uint32_t kStride = prepared_stride(kColumnTiles);
  static_assert(kFours <= kLanesOfRow && kRows % kRowsAtOnce == 0);

  const Problem& p;
  const uint32_t row0, column0, wave, lane;
  OutputScales<kScales> scales[kStores];
  dev::f32x4 factors[kStores];
  uint32_t in_part, in_lds, in_out;  // where the wave leaves its sums; of the first store

  __device__ PreparedOutput(const Problem& problem, uint32_t first_row, uint32_t first_column, uint32_t of_wave, uint32_t of_lane)
      : p(problem), row0(first_row), column0(first_column), wave(of_wave), lane(of_lane) {}

  __device__ uint32_t row() const { return (wave * dev::kWaveSize + lane) / kLanesOfRow; }
  __device__ uint32_t four() const { return lane % kLanesOfRow; }
  __device__ uint32_t column() const { return column0 + four() * dev::kColumnsPerLane; }

  __device__ __forceinline__ void first_asked() {
#pragma unroll
    for (int i = 0; i < kStores; ++i) scales[i] = {p, row0 + row() + i * kRowsAtOnce, column()};
  }

  __device__ __forceinline__ void operator()() {
    in_part = dev::lane_value_here((wave * kRows + lane % kTile) * kStride + lane / kTile);
    in_lds = dev::lane_value_here(row() * kStride + min<uint32_t>(four(), kFours - 1));
    const uint32_t at = ((row0 + row()) * p.n + column()) * sizeof(dev::bf16);
    const bool exists = four() * dev::kColumnsPerLane < p.columns() && column() < p.n;
    in_out = dev::lane_value_here(exists ? at : dev::kOutOfRange);
#pragma unroll
    for (int i = 0; i < kStores; ++i)
      if constexpr (kScales == Scales::kOnce) factors[i] = dev::lane_vector_here(scales[i].factors(p));
  }

  __device__ __forceinline__ void add_and_store(dev::f32x4* sums, const dev::f32x4 (&acc)[kRowTiles * kColumnTiles]) const {
    // Rows past the last one are out of range.
    const dev::Buffer to = dev::make_buffer(p.out, p.m * p.n * sizeof(dev::bf16));
#pragma unroll
    for (int t = 0; t < kRowTiles * kColumnTiles; ++t)
      sums[in_part + t % kRowTiles * kTile * kStride + t / kRowTiles * (kTile / dev::kColumnsPerLane)] = acc[t];
    __syncthreads();
    // All are loaded before the first is waited for.
    dev::f32x4 parts[kStores][kPreparedWaves];
#pragma unroll
    for (int i = 0; i < kStores; ++i)
#pragma unroll
      for (int w = 0; w < kPreparedWaves; ++w) parts[i][w] = sums[in_lds + (w * kRows + i * kRowsAtOnce) * kStride];
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      dev::f32x4 total = parts[i][0];
#pragma unroll
      for (int w = 1; w < kPreparedWaves; ++w) total += parts[i][w];
      if constexpr (kScales == Scales::kOnce) total *= factors[i];
      const uint32_t from_first = i * kRowsAtOnce * p.n * sizeof(dev::bf16);
      __builtin_amdgcn_raw_buffer_store_b64(__builtin_bit_cast(dev::u32x2, __builtin_convertvector(total, dev::bf16x4)), to,
                                            static_cast<int32_t>(in_out), static_cast<int32_t>(from_first), 0);
    }
  }
};

/// Whether PreparedOutput can store what work-groups of `waves` make of p. Each wave needs a whole step of K, which calls first_asked.
inline bool can_prepare_output(const Problem& p, int64_t waves) {
  constexpr uint64_t kMostRowsPast = 64;  // the last one, whose offsets do not wrap
  constexpr uint32_t kWanted = Problem::kAlignedScales | Problem::kAlignedOutput;
  constexpr uint32_t kUnwanted = Problem::kHasBias | Problem::kHalfOutput;
  return waves == kPreparedWaves && (p.options & (kWanted | kUnwanted)) == kWanted && p.k >= kPreparedWaves * kStep &&
         (p.m + kMostRowsPast) * p.n * sizeof(dev::bf16) < uint64_t{1} << 31;
}

}  // namespace hf::wave_split
