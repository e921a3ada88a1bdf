// The kernels whose waves split K (wave_split_kernel.h), and their launch.
#pragma once

#include "wave_split_kernel.h"
#include "wave_split_output.h"

namespace hf::wave_split {

template <int kRowTiles, int kColumnTiles, Scales kScales = Scales::kMx>
__device__ __forceinline__ void multiply_tile(const Problem& p) {
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  auto* sums = reinterpret_cast<dev::f32x4*>(lds);
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t log2_waves = p.log2_waves();  // blockDim would be an argument in memory
  const uint32_t columns = kColumnTiles == 1 ? kTile : p.columns();
  const uint32_t column0 = blockIdx.x * columns, row0 = blockIdx.y * (kTile * kRowTiles);
  using Rows = NeighbouringRows<kRowTiles, kTile, kScales>;
  const uint32_t in_lane = lane_offset(p.k, lane);
  Wave<kRowTiles, Rows, kTile, kColumnTiles, kScales> mine(
      Rows(p.xq, p.xs, row0, p.m, p.k, in_lane, lane), rows_of(p.wq, column0, columns, p.n, p.k),
      scale_rows_of<kScales>(p.ws, column0, columns, p.n, p.k), p.k, in_lane, lane, column0 % shared_rows(kScales));
  const auto scales_of = [&](uint32_t t) {
    const uint32_t column = t / kRowTiles * kTile + lane / kTile * dev::kColumnsPerLane;
    return OutputScales<kScales>(p, row0 + lane % kTile + t % kRowTiles * kTile, column0 + column);
  };
  constexpr bool kPrepares = has_prepared_output(kRowTiles, kColumnTiles);
  if constexpr (kPrepares) {
    PreparedOutput<kRowTiles, kColumnTiles, kScales> output(p, row0, column0, wave, lane);
    mine.run(first_step(p.k, wave, log2_waves), first_step(p.k, wave + 1, log2_waves),
             kScales == Scales::kOnce || p.aligned_scales(), p.scales_between_words(), output);
    if (p.prepared_output()) return output.add_and_store(sums, mine.acc);
  }
  // The scales of the first tiles that the wave stores arrive while it multiplies.
  const OutputScales<kScales> first = scales_of(wave), second = scales_of(wave + (1u << log2_waves));
  if constexpr (!kPrepares)
    mine.run(first_step(p.k, wave, log2_waves), first_step(p.k, wave + 1, log2_waves), p.aligned_scales(),
             p.scales_between_words());
  const uint32_t row = row0 + lane % kTile;
  dev::add_parts(sums, mine.acc, wave, 1u << log2_waves, lane, [&](uint32_t t, dev::f32x4 total) {
    const uint32_t column = t / kRowTiles * kTile + lane / kTile * dev::kColumnsPerLane;
    if constexpr (kScales == Scales::kOnce) {
      const bool early = t < 2u << log2_waves;
      total = t == wave ? first.applied(p, total) : early ? second.applied(p, total) : scales_of(t).applied(p, total);
    }
    if (kColumnTiles == 1 || column < columns) store<kScales>(p, total, row + t % kRowTiles * kTile, column0 + column);
  });
}

#if defined(__gfx950__)
constexpr int kMostTilesHere = kMostColumnTiles;
#else
constexpr int kMostTilesHere = 1;
#endif

/// Work-groups of 1 to max_waves waves; LDS: kTileBytes for each wave and tile, none for one wave. k a multiple of 32, at
/// most 2^22. Several tiles of columns: gfx950 only.
template <int kRowTiles, int kColumnTiles>
__global__ __launch_bounds__(max_waves(kRowTiles, kColumnTiles) * dev::kWaveSize) void mxfp8_wave_split(
    const uint8_t* wq, const uint8_t* ws, const uint8_t* xq, const uint8_t* xs, uint32_t m, uint32_t n, uint32_t k,
    uint32_t options, dev::bf16* out, const dev::bf16* bias) {
  if constexpr (kColumnTiles <= kMostTilesHere)
    multiply_tile<kRowTiles, kColumnTiles>(Problem{wq, ws, xq, xs, m, n, k, options, out, bias});
}

/// The same with scales that are not MX's; k a multiple of 16.
template <int kRowTiles, int kColumnTiles, Scales kScales>
__global__ __launch_bounds__(max_waves(kRowTiles, kColumnTiles) * dev::kWaveSize) void fp8_wave_split(
    const uint8_t* wq, const uint8_t* ws, const uint8_t* xq, const uint8_t* xs, uint32_t m, uint32_t n, uint32_t k,
    uint32_t options, dev::bf16* out, const dev::bf16* bias) {
  if constexpr (kColumnTiles <= kMostTilesHere)
    multiply_tile<kRowTiles, kColumnTiles, kScales>(Problem{wq, ws, xq, xs, m, n, k, options, out, bias});
}

/// Checks the sizes of work-groups with kRowTiles tiles of rows, and launches the kernel with as many tiles of columns as
/// they need; p.options has all but these sizes.
template <int kRowTiles, class Kernel>
void launch_groups(const Kernel (&kernels)[kMostColumnTiles], Problem p, const Tensor& wq, int64_t rows, int64_t columns,
                   int64_t waves, hipStream_t stream) {
  constexpr int kRows = kRowTiles * kTile;
  static_assert(kRows * kMaxK < (int64_t{1} << 31) && kMostColumnTiles * kTile * kMaxK < (int64_t{1} << 31),
                "a work-group's rows of X, and of W, are within one resource");
  HF_CHECK(rows == kRows, "this variant of the module has rows = ", kRows, "; got ", rows);
  HF_CHECK(columns >= kTile && columns <= kMostColumnTiles * kTile && columns % dev::kColumnsPerLane == 0,
           "columns must be a multiple of ", dev::kColumnsPerLane, " from ", kTile, " to ", kMostColumnTiles * kTile,
           "; got ", columns);
  const uint32_t column_tiles = ceil_div(columns, kTile);
  HF_CHECK(column_tiles == 1 || arch_of(wq.device_index()).is("gfx950"), "more than 16 columns are for gfx950; got ",
           columns);
  check_waves(waves, max_waves(kRowTiles, static_cast<int>(column_tiles)), kRows, columns);
  p.options |= pack_options(__builtin_ctzll(waves), false, false, static_cast<uint32_t>(columns));
  uint32_t lds = waves > 1 ? static_cast<uint32_t>(waves) * kRowTiles * column_tiles * kTileBytes : 0;
  if (has_prepared_output(kRowTiles, static_cast<int>(column_tiles)) && can_prepare_output(p, waves)) {
    p.options |= Problem::kPreparedOutput;
    lds = prepared_bytes(kRows, column_tiles);
  }
  launch(kernels[column_tiles - 1], p, dim3(ceil_div(p.n, columns), ceil_div(p.m, kRows)), waves, lds, stream);
}

}  // namespace hf::wave_split
