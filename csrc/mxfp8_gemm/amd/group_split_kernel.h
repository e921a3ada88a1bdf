// MX-FP8 GEMM whose K is split over work-groups and their waves: out = X W^T for 16 to 64 rows of X, in one launch, gfx950.
//
//                 k ->
//               |  work-group 0: wave 0 | 1 | 2 | 3 |  work-group 1: wave 0 | 1 | 2 | 3 |   (or four work-groups)
//   X rows m0.. |=======|=======|=======|=======|=======|=======|=======|=======|   \  16 kRowTiles rows of X and up to
//   W rows n0.. |=======|=======|=======|=======|=======|=======|=======|=======|   /  16 kColumnTiles of W
//                   \       \  LDS  /       /        \       \  LDS  /       /
//                    +--- sum of group 0 --+          +--- sum of group 1 --+
//                               \      workspace, last_group.h     /
//                                +-- the last one adds them in order --> out[m0 .., n0 ..]
//
// Each wave multiplies as in wave_split_kernel.h. In that kernel a work-group reads all of K of its rows of X, for only 24 rows
// of W where N = 6,144 occupies 256 compute units. Two work-groups that share K can have 48 rows of W each, and each reads half
// of X.
// Grid: ceil(n / columns) x ceil(m / (16 kRowTiles)) x parts of K. columns is 16 kColumnTiles or, with two tiles, 24.
//
// Bytes: W once for every 16 kRowTiles rows of X; X once for every `columns` rows of W, from L2; 4 bytes for each output and
// part, stored and read. A compute unit has 32 KiB in flight (modelled): the bound is its share of W and X, (columns + rows)
// K / parts bytes. Instructions of one wave (counted): 150 to 320, and 14 to 43 for each step.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "hipforge/amd/last_group.h"
#include "wave_split_kernel.h"
#include "wave_split_output.h"

namespace hf::group_split {

using wave_split::kTile;
using wave_split::kTileBytes;
using wave_split::Problem;
using wave_split::Scales;

constexpr int kLog2Waves = 2, kWaves = 1 << kLog2Waves;
constexpr int kMostSplits = 4;

/// Bytes of one part of a work-group's sums.
constexpr uint32_t part_bytes(uint32_t tiles) { return tiles * kTileBytes; }

/// LDS of a work-group: the waves' sums, and a word that says whether it is the last.
constexpr uint32_t lds_bytes(uint32_t tiles) { return kWaves * part_bytes(tiles) + sizeof(uint32_t); }

#if defined(__gfx950__)

/// The sum of all parts of a lane's four outputs, in order; `own` is this work-group's, the others are loaded.
template <int kSplits, int kCount>
__device__ __forceinline__ void add_others(dev::f32x4 (&own)[kCount], dev::Buffer parts, const uint32_t (&at)[kCount],
                                           uint32_t split, uint32_t bytes) {
  // Otherwise the compiler moves the loads that all numbers of parts share before the branch, and waits for them there.
  asm volatile("" : "+s"(split) : "n"(kSplits));
  dev::f32x4 loaded[kCount][kSplits];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int s = 0; s < kSplits; ++s)
      loaded[i][s] = dev::load_part(parts, split == s ? dev::kOutOfRange : at[i], s * bytes);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dev::f32x4 sum = split == 0 ? own[i] : loaded[i][0];
#pragma unroll
    for (int s = 1; s < kSplits; ++s) sum += split == s ? own[i] : loaded[i][s];
    own[i] = sum;
  }
}

/// What the meeting needs, loaded behind a run's first loads.
struct MeetingArguments : wave_split::Nothing {
  float* partials;
  uint64_t *words, number;

  __device__ MeetingArguments(float* of_partials, uint64_t* of_words, uint64_t of_launch)
      : partials(of_partials), words(of_words), number(of_launch) {}
  __device__ __forceinline__ void operator()() const { dev::wave_values_loaded_here(partials, words, number); }
};

template <int kRowTiles, int kColumnTiles, Scales kScales = Scales::kMx>
__device__ __forceinline__ void multiply_tile(const Problem& p, float* partials, uint64_t* words, uint64_t number) {
  constexpr uint32_t kTiles = kRowTiles * kColumnTiles, kPartBytes = part_bytes(kTiles);
  constexpr int kTilesOfWave = (kTiles + kWaves - 1) / kWaves;
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  auto* const sums = reinterpret_cast<dev::f32x4*>(lds);
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t log2_parts = p.log2_waves(), columns = p.columns(), split = blockIdx.z;
  const uint32_t column0 = blockIdx.x * columns, row0 = blockIdx.y * (kTile * kRowTiles);
  using Rows = wave_split::NeighbouringRows<kRowTiles, kTile, kScales>;
  const uint32_t in_lane = wave_split::lane_offset(p.k, lane);
  wave_split::Wave<kRowTiles, Rows, kTile, kColumnTiles, kScales> mine(
      Rows(p.xq, p.xs, row0, p.m, p.k, in_lane, lane), wave_split::rows_of(p.wq, column0, columns, p.n, p.k),
      wave_split::scale_rows_of<kScales>(p.ws, column0, columns, p.n, p.k), p.k, in_lane, lane,
      column0 % wave_split::shared_rows(kScales));
  const uint32_t part = split * kWaves + wave;
  mine.run(wave_split::first_step(p.k, part, log2_parts), wave_split::first_step(p.k, part + 1, log2_parts),
           p.aligned_scales(), p.scales_between_words(), MeetingArguments{partials, words, number});

  const uint32_t log2_splits = log2_parts - kLog2Waves, group = blockIdx.y * gridDim.x + blockIdx.x;
  const dev::Buffer parts = dev::make_buffer(reinterpret_cast<uint8_t*>(partials) + ((uint64_t{group} * kPartBytes) << log2_splits),
                                             kPartBytes << log2_splits);
  const uint32_t in_tile = lane * sizeof(dev::f32x4);
  const auto row_of = [&](int i) { return row0 + lane % kTile + (wave + i * kWaves) % kRowTiles * kTile; };
  const auto column_of = [&](int i) {
    return (wave + i * kWaves) / kRowTiles * kTile + lane / kTile * dev::kColumnsPerLane;
  };
  wave_split::OutputScales<kScales> scales[kTilesOfWave];
#pragma unroll
  for (int i = 0; i < kTilesOfWave; ++i) scales[i] = {p, row_of(i), column0 + column_of(i)};
  dev::leave_part(sums, mine.acc, wave, lane);
  // A wave adds up every fourth tile, and keeps the sums until the parts meet.
  dev::f32x4 total[kTilesOfWave];
  uint32_t at[kTilesOfWave];
#pragma unroll
  for (int i = 0; i < kTilesOfWave; ++i) {
    const uint32_t t = wave + i * kWaves;
    const bool exists = kTiles % kWaves == 0 || t < kTiles;
    at[i] = exists ? in_tile + t * kTileBytes : dev::kOutOfRange;
    total[i] = dev::sum_of_tile<kWaves, kTiles>(sums, exists ? t : 0, lane);
    if (exists) dev::store_part(total[i], parts, at[i], split * kPartBytes);
  }
  auto* const told = reinterpret_cast<uint32_t*>(lds + kWaves * kPartBytes);
  if (!dev::is_last_group(words + (uint64_t{group} << log2_splits) - group, split, log2_splits, number, threadIdx.x == 0, told))
    return;

  if (log2_splits == 1)
    add_others<2>(total, parts, at, split, kPartBytes);
  else
    add_others<kMostSplits>(total, parts, at, split, kPartBytes);
#pragma unroll
  for (int i = 0; i < kTilesOfWave; ++i) {
    const uint32_t column = column_of(i);
    if (at[i] != dev::kOutOfRange && column < columns)
      wave_split::store<kScales>(p, scales[i].applied(p, total[i]), row_of(i), column0 + column);
  }
}

#endif

/// Work-groups of kWaves waves; LDS: lds_bytes. k a multiple of 32, at most 2^22. `partials`: part_bytes for each work-group,
/// those of a result side by side; `words`: meeting_words for each result; `number`: of this launch.
template <int kRowTiles, int kColumnTiles>
__global__ __launch_bounds__(kWaves * dev::kWaveSize) void mxfp8_group_split(
    [[maybe_unused]] const uint8_t* wq, [[maybe_unused]] const uint8_t* ws, [[maybe_unused]] const uint8_t* xq,
    [[maybe_unused]] const uint8_t* xs, [[maybe_unused]] uint32_t m, [[maybe_unused]] uint32_t n, [[maybe_unused]] uint32_t k,
    [[maybe_unused]] uint32_t options, [[maybe_unused]] dev::bf16* out, [[maybe_unused]] const dev::bf16* bias,
    [[maybe_unused]] float* partials, [[maybe_unused]] uint64_t* words, [[maybe_unused]] uint64_t number) {
#if defined(__gfx950__)
  multiply_tile<kRowTiles, kColumnTiles>(Problem{wq, ws, xq, xs, m, n, k, options, out, bias}, partials, words, number);
#endif
}

/// The same with scales that are not MX's; k a multiple of 16.
template <int kRowTiles, int kColumnTiles, Scales kScales>
__global__ __launch_bounds__(kWaves * dev::kWaveSize) void fp8_group_split(
    [[maybe_unused]] const uint8_t* wq, [[maybe_unused]] const uint8_t* ws, [[maybe_unused]] const uint8_t* xq,
    [[maybe_unused]] const uint8_t* xs, [[maybe_unused]] uint32_t m, [[maybe_unused]] uint32_t n, [[maybe_unused]] uint32_t k,
    [[maybe_unused]] uint32_t options, [[maybe_unused]] dev::bf16* out, [[maybe_unused]] const dev::bf16* bias,
    [[maybe_unused]] float* partials, [[maybe_unused]] uint64_t* words, [[maybe_unused]] uint64_t number) {
#if defined(__gfx950__)
  multiply_tile<kRowTiles, kColumnTiles, kScales>(Problem{wq, ws, xq, xs, m, n, k, options, out, bias}, partials, words, number);
#endif
}

/// Checks the sizes of work-groups with kRowTiles tiles of rows and the workspace, and launches the kernel with as many tiles
/// of columns as they need; p.options has all but these sizes.
template <int kRowTiles, class Kernel>
void launch_groups(const Kernel (&kernels)[3], Problem p, const OptionalTensor& workspace, int64_t rows, int64_t columns,
                   int64_t k_splits, hipStream_t stream) {
  constexpr int kRows = kRowTiles * kTile;
  static_assert(kRows * wave_split::kMaxK < (int64_t{1} << 31), "a work-group's rows are within one resource");
  HF_CHECK(rows == kRows, "this variant of the module has rows = ", kRows, "; got ", rows);
  HF_CHECK(columns == 16 || columns == 24 || columns == 32 || columns == 48, "columns must be 16, 24, 32 or 48; got ", columns);
  HF_CHECK(k_splits == 2 || k_splits == 4, "k_splits must be 2 or 4; got ", k_splits);
  check_k_splits(k_splits, ceil_div(p.k, wave_split::kStep), p.k);
  p.options |= wave_split::pack_options(kLog2Waves + __builtin_ctzll(k_splits), false, false, static_cast<uint32_t>(columns));
  const uint32_t column_tiles = ceil_div(columns, kTile), tiles = kRowTiles * column_tiles;
  const dim3 grid(ceil_div(p.n, columns), ceil_div(p.m, kRows), static_cast<uint32_t>(k_splits));
  const uint64_t results = uint64_t{grid.x} * grid.y, bytes = results * k_splits * part_bytes(tiles);
  uint8_t* const partials = check_split_workspace(
      workspace, bytes + results * dev::meeting_words(static_cast<uint32_t>(k_splits)) * sizeof(uint64_t), k_splits);
  wave_split::launch(kernels[column_tiles - 1], p, grid, kWaves, lds_bytes(tiles), stream, reinterpret_cast<float*>(partials),
                     reinterpret_cast<uint64_t*>(partials + bytes), launch_number());
}

}  // namespace hf::group_split
