// Skinny fp8 GEMM whose K is split over the waves of a work-group: D [m, n] = [D +] scale A B, in one launch.
//
//                 k ->
//               | wave 0 | wave 1 | ... | last wave |   each wave: all kRows x columns outputs over its part of k
//   A rows m0.. |========|========|     |===========|   \
//   B cols n0.. |========|========|     |===========|   /  loads straight into the matrix instructions' operands
//                    \        \     LDS      /
//                     +--- sums in the order of the waves ---> D[m0 .., n0 ..]
//
// B is the instruction's A operand, so that a lane has one row of D and four neighbouring columns. A step is 128 k: one cache
// line of each column. There are two tiles:
//
//   kEdge = 16 (for more than 8 rows): 16 columns by 16 rows. Lane l loads bytes 16 (l / 16) .. + 15 of column (row) l % 16,
//     and those 64 past them.
//   kEdge = 8: 8 columns by 8 rows, whose halves of a step fill the other rows and columns of the instruction:
//
//       B     bytes 0 .. 63   64 .. 127        A likewise. Of the 16 x 16 products the two 8 x 8 on the diagonal are
//     col n0   |  row 0   |   |  row 8   |     used, and added: the first half of k with itself, the second with itself.
//     ...      |  ...     |   |  ...     |     One load of 1 KiB is 8 whole cache lines.
//     col n0+7 |  row 7   |   |  row 15  |
//
// Grid: ceil(n / columns) x 2^log2_splits x ceil(m / kRows). Where columns are few, work-groups share the k of a tile and meet
// in the same launch (last_group.h); sums are added in the order of the parts, so results depend only on operands and
// configuration. `columns` may be fewer than an instruction's: the others are out of range and cost no traffic.
//
// Bytes: B once for every kRows rows; A once for each work-group from L2: with `columns` columns it reads kRows / columns bytes
// of A for each byte of B. The bound is memory: a wave has kAhead steps in flight and reloads the registers of each step once
// it has multiplied it; the 32 KiB that a compute unit of the model of time can have in flight are 32 steps of 8 columns.
// Instructions of a wave: for each step a load per piece of operand, whose offset is a constant, and, for 64 k of a tile, two
// matrix instructions (gfx950 with kEdge = 16: one for 128 k). Behind the last products are one trip through LDS, whose reads
// are in flight together, and the store, whose address is known before the barrier.
//
// k is a multiple of 32: a last, partial step loads with offsets out of range past k. Columns and rows past the end are out of
// the resources' ranges; with a pitch of at most kMaxPitch no offset wraps.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/fp8_mfma.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/last_group.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/amd/wave.h"

namespace hf::skinny {

using dev::f32x4;
using dev::u32x4;

constexpr int kStep = 128;
constexpr int kHalfStep = kStep / 2;
constexpr int kLaneBytes = sizeof(u32x4);
constexpr int kMostColumnTiles = 4;
constexpr int kMostRows = 32;
constexpr int64_t kMaxPitch = 1 << 24;

static_assert((kMostColumnTiles * 16 + 1) * kMaxPitch < int64_t{dev::kOutOfRange}, "offsets past the last column do not wrap");

/// What a wave keeps in registers. kEdge, kRowTiles, kColumnTiles: as in Wave.
constexpr int pieces(int edge) { return edge / 8; }  // of a tile and step: loads of 16 bytes
constexpr int step_registers(int edge, int row_tiles, int column_tiles) {
  return pieces(edge) * (row_tiles + column_tiles) * (kLaneBytes / 4);
}
/// 16 waves have 128 registers each, 8 have 256.
constexpr int max_waves(int edge, int row_tiles, int column_tiles) {
  return step_registers(edge, row_tiles, column_tiles) <= 16 ? 16 : 8;
}
/// Steps of straight code, and how many steps are in flight, a divisor of them: as many as the registers beside sums and
/// addresses allow.
constexpr int kRun = 8;
// Whether the first steps of the next run are loaded during this one: clang 21 would put up to 92 registers into scratch.
constexpr bool kKeepsFull = __clang_major__ >= 22;
constexpr int steps_ahead(int edge, int row_tiles, int column_tiles) {
  const int registers = max_waves(edge, row_tiles, column_tiles) == 16 ? 96 : 160;
  const int steps = registers / step_registers(edge, row_tiles, column_tiles);
  return steps >= kRun ? kRun : steps >= kRun / 2 ? kRun / 2 : kRun / 4;
}

/// Four columns of one row: what a lane adds up of a tile. A tile has kSlots of them, in kParts parts of k.
constexpr int slots(int edge) { return edge * edge / 4; }
constexpr int parts(int edge) { return 16 / edge; }
constexpr uint32_t tile_bytes(int edge) { return slots(edge) * sizeof(f32x4); }

/// A launch's scalars in one word. accumulate: D is added to. aligned_output: four neighbouring columns of D can be stored at
/// once.
constexpr uint32_t pack_options(uint32_t log2_waves, uint32_t log2_splits, bool accumulate, bool aligned_output,
                                uint32_t columns) {
  return log2_waves | log2_splits << 8 | uint32_t{accumulate} << 12 | uint32_t{aligned_output} << 13 | columns << 16;
}

/// On device pointers. A kernel takes the members one by one, in this order: those up to `scale` are in SGPRs when a wave starts
/// (kernel-argument preload; the module's flags ask for them), so that its first loads wait for no argument.
struct Problem {
  const uint8_t *b, *a;
  uint32_t m, n, k, pitch;
  uint32_t options;  // of pack_options
  _Float16* out;
  const float* scale;
  uint8_t* workspace;     // split_stride bytes for each tile of D; none without splits
  uint64_t number;        // of the launch
  uint32_t column_tiles;  // of D: work-groups along n

  __device__ uint32_t log2_waves() const { return options & 0xFF; }
  __device__ uint32_t log2_splits() const { return options >> 8 & 0xF; }
  __device__ bool accumulate() const { return options >> 12 & 1; }
  __device__ bool aligned_output() const { return options >> 13 & 1; }
  __device__ uint32_t columns() const { return options >> 16; }
};

/// Bytes of the workspace for a work-group's tiles of D, `bytes` of sums in each of an even number of parts: the sums, and the
/// words where the parts meet.
__host__ __device__ constexpr uint32_t split_stride(uint32_t bytes, uint32_t splits) {
  return splits * (bytes + static_cast<uint32_t>(sizeof(uint64_t)));
}
static_assert(split_stride(tile_bytes(8), 2) % 16 == 0 && dev::meeting_words(8) <= 8);

/// One wave's outputs: kColumnTiles kEdge columns by kRowTiles kEdge rows. Register i of acc[c][r]: column 4 (lane / 16) + i and
/// row lane % 16 of the instruction's tile.
template <int kEdge, int kRowTiles, int kColumnTiles>
struct Wave {
  static_assert(kEdge == 8 || kEdge == 16);
  static constexpr int kPieces = pieces(kEdge), kAhead = steps_ahead(kEdge, kRowTiles, kColumnTiles);
  static_assert(kAhead * step_registers(kEdge, kRowTiles, kColumnTiles) <= 160, "beside sums and addresses, of 256");
  static_assert(kRun % kAhead == 0, "a step of the next run is in the registers of one of this run");
  static_assert((kRun + kAhead - 1) * kStep + (kPieces - 1) * kHalfStep < 4096, "offsets of loads are immediate");

  struct Step {
    u32x4 b[kColumnTiles][kPieces], a[kRowTiles][kPieces];
  };

  const dev::Buffer b, a;  // over the work-group's columns and rows
  const uint32_t chunk;    // of the lane: k of its first byte in a step
  uint32_t b_offset, a_offset;
  const uint32_t pitch, k;
  f32x4 acc[kColumnTiles][kRowTiles] = {};

  __device__ __forceinline__ void load(Step& to, uint32_t at, int ahead) const {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        to.b[c][i] = dev::load_b128(b, b_offset + ahead * kStep + i * kHalfStep, at + c * kEdge * pitch);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        to.a[r][i] = dev::load_b128(a, a_offset + ahead * kStep + i * kHalfStep, at + r * kEdge * k);
  }

  __device__ __forceinline__ void multiply(const Step& step) {
#if defined(__gfx950__)
    if constexpr (kPieces == 2) {
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
          acc[c][r] = dev::mfma_e4m3_16x16x128(step.b[c][0], step.b[c][1], step.a[r][0], step.a[r][1], acc[c][r]);
      return;
    }
#endif
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) acc[c][r] = dev::mfma_e4m3_16x16x64(step.b[c][i], step.a[r][i], acc[c][r]);
  }

  // Called ahead of loads whose offsets have constant parts. Opaque, so that the compiler leaves these parts to the load
  // instructions; added ahead of a loop they would take 14 more registers.
  __device__ __forceinline__ void use_offsets_here() {
    b_offset = dev::lane_value_here(b_offset);
    a_offset = dev::lane_value_here(a_offset);
  }

  // Loads the first kAhead of kCount steps from `at`; `meanwhile` is called with them in flight.
  template <int kCount, class Meanwhile>
  __device__ __forceinline__ void load_first(Step (&steps)[kAhead], uint32_t at, Meanwhile meanwhile) {
    use_offsets_here();
#pragma unroll
    for (int i = 0; i < kAhead && i < kCount; ++i) {
      load(steps[i], at, i);
      __builtin_amdgcn_sched_barrier(0);  // in the order of their use, here and below: loads return in order
    }
    meanwhile();
  }

  // kCount whole steps from `at`, the first of which are in flight. Each one's registers take the step kAhead further on; past
  // the kCount steps only with kMore.
  template <int kCount, bool kMore>
  __device__ __forceinline__ void run_steps(Step (&steps)[kAhead], uint32_t at) {
    use_offsets_here();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      multiply(steps[i % kAhead]);
      if (kMore || i + kAhead < kCount) load(steps[i % kAhead], at, i + kAhead);
      __builtin_amdgcn_sched_barrier(0);
    }
  }

  // `count` steps, below kRun.
  template <int kCount, class Meanwhile>
  __device__ __forceinline__ void run_rest(uint32_t first, uint32_t count, Meanwhile meanwhile) {
    if constexpr (kCount < kRun) {
      asm volatile("" : "+s"(count));  // compares in a row, not a switch, whose branches are cold code
      if (__builtin_expect(count == kCount, 0)) {
        Step steps[kAhead];
        load_first<kCount>(steps, first * kStep, meanwhile);
        run_steps<kCount, false>(steps, first * kStep);
      } else {
        run_rest<kCount + 1>(first, count, meanwhile);
      }
    }
  }

  // The last step, with k % kStep of its k.
  __device__ void run_tail(uint32_t step) {
    const uint32_t at = step * kStep;
    Step last;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const bool exists = at + chunk + i * kHalfStep < k;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
        last.b[c][i] = dev::load_b128(b, exists ? b_offset + i * kHalfStep : dev::kOutOfRange, at + c * kEdge * pitch);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        last.a[r][i] = dev::load_b128(a, exists ? a_offset + i * kHalfStep : dev::kOutOfRange, at + r * kEdge * k);
    }
    multiply(last);
  }

  /// The steps from `begin`, at most k / kStep, to `end`.
  template <class Meanwhile>
  __device__ __forceinline__ void run(uint32_t begin, uint32_t end, Meanwhile meanwhile) {
    const uint32_t whole = min(end, k / kStep);
    uint32_t step = begin;
    if constexpr (kKeepsFull) {
      if (step + kRun <= whole) {
        Step steps[kAhead];
        load_first<kRun>(steps, step * kStep, meanwhile);
        for (; step + 2 * kRun <= whole; step += kRun) run_steps<kRun, true>(steps, step * kStep);
        run_steps<kRun, false>(steps, step * kStep);
        step += kRun;
      }
    } else {
      for (; step + kRun <= whole; step += kRun) {
        Step steps[kAhead];
        load_first<kRun>(steps, step * kStep, meanwhile);
        run_steps<kRun, false>(steps, step * kStep);
      }
    }
    if (step < whole) run_rest<1>(step, whole - step, meanwhile);
    if (whole < end) run_tail(whole);
  }
};

/// line * pitch for a line below 16 and a pitch that is a multiple of 16, at most kMaxPitch: one 24-bit multiplication.
__device__ __forceinline__ uint32_t line_offset(uint32_t line, uint32_t pitch) {
  constexpr uint32_t kUnit = 16, kFactor = (1 << 24) - 1;
  static_assert(kMaxPitch / kUnit <= kFactor);
  return line * (pitch / kUnit & kFactor) * kUnit;
}

/// Where a lane's four columns of D go, and how many of them exist: none, or all four where D can be stored at once.
struct Place {
  uint64_t at;  // elements from the first one of D
  uint32_t columns;
};

/// The sum of kCount summands from `at` of `sums`, kStride apart, in their order; up to 16 of them are read at once.
template <uint32_t kCount, uint32_t kStride>
__device__ __forceinline__ f32x4 sum_of(const f32x4* sums, uint32_t at) {
  constexpr uint32_t kInFlight = kCount < 16 ? kCount : 16;
  const f32x4* first = sums + dev::lane_value_here(at);  // opaque: keeps the reads here that sums of other counts begin with too
  f32x4 total;
#pragma unroll
  for (uint32_t begin = 0; begin < kCount; begin += kInFlight) {
    f32x4 read[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) read[i] = first[(begin + i) * kStride];
    __builtin_amdgcn_sched_barrier(0);
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) total = begin + i == 0 ? read[i] : total + read[i];
  }
  return total;
}

/// The same for kParts summands of each wave, with a constant number of waves where they are added.
template <uint32_t kParts, uint32_t kStride, uint32_t kMostWaves, uint32_t kWaves = 1>
__device__ __forceinline__ f32x4 sum_of_waves(const f32x4* sums, uint32_t at, uint32_t waves) {
  if constexpr (kWaves < kMostWaves)
    if (waves != kWaves) return sum_of_waves<kParts, kStride, kMostWaves, 2 * kWaves>(sums, at, waves);
  return sum_of<kWaves * kParts, kStride>(sums, at);
}

/// Work-groups of 2^log2_waves waves, at most max_waves; LDS: parts(kEdge) tile_bytes(kEdge) for each wave and tile.
template <int kEdge, int kRowTiles, int kColumnTiles>
__global__ __launch_bounds__(max_waves(kEdge, kRowTiles, kColumnTiles) * dev::kWaveSize) void skinny_wave_split(
    const uint8_t* b, const uint8_t* a, uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t options, _Float16* out,
    const float* scale, uint8_t* workspace, uint64_t number, uint32_t column_tiles) {
  const Problem p{b, a, m, n, k, pitch, options, out, scale, workspace, number, column_tiles};
  constexpr uint32_t kSlots = slots(kEdge), kParts = parts(kEdge), kTiles = kRowTiles * kColumnTiles;
  constexpr uint32_t kAll = kTiles * kSlots, kBytes = kTiles * tile_bytes(kEdge);
  constexpr bool kOnePass = kAll <= dev::kWaveSize;  // of each thread over the slots
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  auto* sums = reinterpret_cast<f32x4*>(lds);  // [waves, kParts, kTiles, kSlots]
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  const uint32_t log2_waves = p.log2_waves(), log2_splits = p.log2_splits(), split = blockIdx.y;
  const uint32_t column0 = blockIdx.x * p.columns(), columns = min(p.columns(), p.n - column0);
  const uint32_t row0 = blockIdx.z * (kEdge * kRowTiles), rows = min(uint32_t{kEdge * kRowTiles}, p.m - row0);
  // The lane's line of an operand's tile, and its 16 bytes of half a step.
  const uint32_t line = lane % 16 % kEdge, group = lane / 16, half = lane % 16 / kEdge;
  const uint32_t chunk = half * kHalfStep + group * kLaneBytes;

  Wave<kEdge, kRowTiles, kColumnTiles> mine{
      .b = dev::make_buffer(p.b + uint64_t{column0} * p.pitch, (columns - 1) * p.pitch + p.k),
      .a = dev::make_buffer(p.a + uint64_t{row0} * p.k, rows * p.k),
      .chunk = chunk,
      .b_offset = line_offset(line, p.pitch) + chunk,
      .a_offset = line_offset(line, p.k) + chunk,
      .pitch = p.pitch,
      .k = p.k};
  const uint32_t steps = (p.k + kStep - 1) / kStep, part = (split << log2_waves) + wave;
  const auto first_step = [&](uint32_t of) { return steps * of >> (log2_waves + log2_splits); };
  // Operands of the epilogue are loaded behind the first operands, where the wait for them costs nothing.
  const float factor = __builtin_bit_cast(float, dev::load_constant(reinterpret_cast<const int32_t*>(p.scale)));
  mine.run(first_step(part), first_step(part + 1),
           [&] { dev::wave_values_loaded_here(factor, p.workspace, p.number, p.column_tiles); });

  // With kEdge = 8, lane groups 0 and 1 hold the columns of the first half of k, whose rows are in lanes 0 to 7; groups 2 and 3
  // hold the others.
  if (group * 4 / kEdge == half) {
    const uint32_t slot = group % (kEdge / 4) * kEdge + line;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        sums[((wave * kParts + half) * kTiles + c * kRowTiles + r) * kSlots + slot] = mine.acc[c][r];
  }
  const auto place_of = [&](uint32_t at) {
    const uint32_t tile = at / kSlots, slot = at % kSlots;
    const uint32_t row = row0 + tile % kRowTiles * kEdge + slot % kEdge;
    const uint32_t column = tile / kRowTiles * kEdge + slot / kEdge * dev::kColumnsPerLane;
    return Place{uint64_t{row} * p.n + column0 + column, row < p.m && column < columns ? columns - column : 0};
  };
  Place only;  // computed here, not behind the barrier
  if constexpr (kOnePass) {
    only = place_of(threadIdx.x);
    asm volatile("" : "+v"(only.at), "+v"(only.columns));
  }
  __syncthreads();

  const auto store = [&](uint32_t at, f32x4 total) {
    const Place to = kOnePass ? only : place_of(at);
    if (to.columns == 0) return;
    total *= factor;
    if (p.accumulate()) {
#pragma unroll
      for (uint32_t i = 0; i < dev::kColumnsPerLane; ++i)
        if (i < to.columns) total[i] += static_cast<float>(p.out[to.at + i]);
    }
    using Halves = _Float16 __attribute__((ext_vector_type(dev::kColumnsPerLane)));
    const Halves rounded = __builtin_convertvector(total, Halves);
    if (p.aligned_output()) {
      *reinterpret_cast<Halves*>(p.out + to.at) = rounded;
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < dev::kColumnsPerLane; ++i)
      if (i < to.columns) p.out[to.at + i] = rounded[i];
  };
  const uint32_t threads = dev::kWaveSize << log2_waves;  // blockDim is an argument in memory
  const auto each_slot = [&](auto what) {
    if constexpr (kOnePass) {
      if (threadIdx.x < kAll) what(uint32_t{threadIdx.x});
    } else {
      for (uint32_t at = threadIdx.x; at < kAll; at += threads) what(at);
    }
  };
  const auto sum_at = [&](uint32_t at) {
    return sum_of_waves<kParts, kAll, max_waves(kEdge, kRowTiles, kColumnTiles)>(sums, at, 1u << log2_waves);
  };
  if (log2_splits == 0) {
    each_slot([&](uint32_t at) { store(at, sum_at(at)); });
    return;
  }

  const uint32_t tile_of_d = blockIdx.z * dev::wave_value_here(p.column_tiles) + blockIdx.x;
  uint8_t* shared = p.workspace + uint64_t{tile_of_d} * split_stride(kBytes, 1u << log2_splits);
  const dev::Buffer to_all = dev::make_buffer(shared, kBytes << log2_splits);
  each_slot([&](uint32_t at) { dev::store_part(sum_at(at), to_all, at * sizeof(f32x4), split * kBytes); });

  auto* words = reinterpret_cast<uint64_t*>(shared + (kBytes << log2_splits));
  // `told` is written behind a barrier that the readers of the sums have reached.
  if (!dev::is_last_group(words, split, log2_splits, p.number, threadIdx.x == 0, reinterpret_cast<uint32_t*>(lds))) return;
  const uint32_t last = (1u << log2_splits) - 1;
  each_slot([&](uint32_t at) {
    constexpr uint32_t kAtOnce = 4;
    f32x4 total = {};
    for (uint32_t first = 0; first <= last; first += kAtOnce) {
      f32x4 sum[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)  // the last part again where there are fewer
        sum[i] = dev::load_part(to_all, at * sizeof(f32x4), min(first + i, last) * kBytes);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i == 0)
          total = sum[i];
        else if (first + i <= last)
          total += sum[i];
    }
    store(at, total);
  });
}

}  // namespace hf::skinny
