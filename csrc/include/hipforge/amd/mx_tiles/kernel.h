// MX-FP8 GEMM for any M: out = X W^T in large tiles that pass through LDS, on the scaled 32 x 32 x 64 MFMA of gfx950.
//
//              W rows n0 ..            one work-group: (32 kRowTiles kRowWaves) rows of X (M) by (32 kColumnTiles
//            +---------+---------+     kColumnWaves) rows of W (N), for the K steps of its split
//     X rows | wave 0  | wave 1  |     one wave: kRowTiles x kColumnTiles accumulators of 32 x 32
//     m0 ..  +---------+---------+
//            | wave 2  | wave 3  |     LDS: two to four stages of (BM + BN) rows x 128 k, and the scale bytes of 16 steps
//            +---------+---------+
//
// W is the instruction's A operand: a lane ends with four neighbouring columns of one output row at a time.
//
// A stage is filled by loads that go straight to LDS, 1 KiB (8 whole rows) each. They write lane after lane, so what
// is swizzled is where a lane loads from: the 16-byte chunk c of row r lies in slot c ^ (r / 2 % 8), and the 16 lanes
// that LDS serves together touch all 64 banks once. Scale bytes come 64 to a row (16 steps), because a cache line is
// the least that L2 delivers; word d of row r lies in slot d ^ (r / 4 % 8). Reads of operands have no bank conflicts.
//
// One step, 128 k, is two halves of 64 with registers of their own:
//   first half:  multiply half 0 | read half 1 of this stage from LDS
//   barrier:     this stage is read by all, the next one has arrived
//   second half: multiply half 1 | read half 0 of the next stage
// A stage's loads for a later step are spread evenly over the step that follows its release: a compute unit can have 32 KiB
// in flight, and a wave that must wait to issue a load issues no matrix instruction either. Where LDS holds two stages
// only (256 x 256), the waves meet once more as soon as W's rows are read, and W's part is loaded from there on.
//
// Neighbouring work-groups share rows of X or of W. If all of them take the steps in the same order, all wait for HBM for
// every line. So every window of four steps begins at another step in neighbouring work-groups: at a window's first step
// each of them waits for HBM, for lines that the others then find in L2.
//
// Bytes: a work-group loads (BM + BN) 128 bytes per step, of which its XCD's L2 has most: the work-groups of an XCD are
// neighbouring tiles. 256 x 256: 64 KiB for 128 matrix instructions of 64 cycles on four SIMDs, 32 bytes a cycle. L2 is
// modelled to deliver that much for 32 compute units (docs/time-model.md), so its delivery, HBM's latency and the matrix
// pipe are near each other; with smaller tiles L2 is the bound.
// Instructions per matrix instruction, counted over one whole tile at K = 4096: 10.2 for 256 x 256, 13.8 for 128 x 192,
// 17.6 for 128 x 128, 30.0 for 128 x 64, 50.5 for 64 x 64.
//
// Results leave through LDS, so that every store is a whole line. With split K a work-group leaves its f32 sums in a
// workspace, as its lanes hold them, and the last of a tile's work-groups adds them in the order of the splits
// (last_group.h): 4 BM BN bytes written and read again for each split, by one launch. An XCD has neighbouring tiles of one
// part of K, and each begins at another of its tiles, so that all of them have a share of the additions.
//
// Tails: each tile's resources cover exactly its own rows, so rows past M and N read 0, and any tensor size works; a
// lane whose chunk is past K, or past the last step of its split, is out of range too. Scales past the end are 0.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/last_group.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/amd/mx.h"
#include "hipforge/amd/mx_tiles/lds.h"
#include "hipforge/amd/mx_tiles/place.h"
#include "hipforge/amd/wave.h"

namespace hf::tiles {

constexpr int kTile = 32;
constexpr int kStep = 128;      // k of one stage
constexpr int kHalf = kStep / 2;  // k of one matrix instruction
constexpr int kChunk = 16;      // bytes that one lane moves
constexpr int kRowChunks = kStep / kChunk;
constexpr int kLoadRows = dev::kWaveSize / kRowChunks;  // rows that one load instruction fills
constexpr int kMaxStages = 4;
constexpr int kScaleSteps = 16;  // steps whose scales are in LDS together
constexpr int kScaleRowBytes = kScaleSteps * kStep / kMxBlock;
constexpr int kScaleLoadRows = dev::kWaveSize * 4 / kScaleRowBytes;
constexpr int kScaleKeys = 8;  // words of a row are swizzled by its number / kScaleLoadRows % kScaleKeys
constexpr uint32_t kWindow = 4;  // steps that neighbouring work-groups take in different orders

static_assert(kLoadRows == 8 && kScaleLoadRows == 4 && kScaleRowBytes == 64);

/// What a launch computes, on device pointers; the kernel's only argument.
struct Problem {
  dev::bf16* out;
  uint8_t* partials;      // float32 [tiles, splits, C::kBlockM C::kBlockN]; null where there is one split
  uint64_t* words;        // meeting_words(splits) for each tile
  uint64_t number;        // of the launch
  const dev::bf16* bias;  // null for none
  const uint8_t *xq, *xs, *wq, *ws;
  uint32_t m, n, k;
  uint32_t row_tiles, column_tiles, log2_splits;
  uint32_t aligned_scales;  // rows of both scale tensors start at a multiple of 4 bytes
  uint32_t aligned_output;  // 16 bytes of an output row can be stored at once
};

template <int kRowWaves_, int kColumnWaves_, int kRowTiles_, int kColumnTiles_>
struct Config {
  static constexpr int kRowWaves = kRowWaves_, kColumnWaves = kColumnWaves_;
  static constexpr int kRowTiles = kRowTiles_, kColumnTiles = kColumnTiles_;
  static constexpr int kWaves = kRowWaves * kColumnWaves, kThreads = kWaves * dev::kWaveSize;
  static constexpr int kBlockM = kRowWaves * kRowTiles * kTile, kBlockN = kColumnWaves * kColumnTiles * kTile;
  static constexpr int kRows = kBlockM + kBlockN;
  static constexpr uint32_t kPartBytes = kBlockM * kBlockN * sizeof(float);
  static constexpr int kStageBytes = kRows * kStep, kScaleBytes = kRows * kScaleRowBytes;
  static constexpr int kXLoads = kBlockM / kLoadRows / kWaves, kWLoads = kBlockN / kLoadRows / kWaves;
  static constexpr int kLoads = kXLoads + kWLoads;  // of one wave and step
  static constexpr int kMaxLds = 160 * 1024;
  static constexpr int stages(int n) { return n == 2 || n * kStageBytes + 2 * kScaleBytes <= kMaxLds ? n : stages(n - 1); }
  static constexpr int kStages = stages(kMaxStages);
  static constexpr int kScaleBuffers = kStages * kStageBytes + 2 * kScaleBytes <= kMaxLds ? 2 : 1;
  // With two stages only, the rows of W are handed back as soon as they are read, so that loads never run dry.
  static constexpr bool kEarlyRows = kStages == 2;
  static constexpr int kLdsBytes = kStages * kStageBytes + kScaleBuffers * kScaleBytes;
  static constexpr int kXScaleLoads = kBlockM / kScaleLoadRows / kWaves, kWScaleLoads = kBlockN / kScaleLoadRows / kWaves;
  static constexpr int kScaleLoads = kXScaleLoads + kWScaleLoads;  // of one wave and kScaleSteps steps

  static_assert(kWaves % 2 == 0 && kXLoads * kLoadRows * kWaves == kBlockM && kWLoads * kLoadRows * kWaves == kBlockN,
                "waves share the rows evenly, and the swizzle of a wave's rows is the same in all its loads");
  static_assert(kXScaleLoads * kScaleLoadRows * kWaves == kBlockM && kWScaleLoads * kScaleLoadRows * kWaves == kBlockN);
  static_assert(kLdsBytes <= kMaxLds);
};

#if defined(__gfx950__)

using f32x16 = float __attribute__((ext_vector_type(16)));

// Rows first .. first + (at most) kCount of one operand, as resources over exactly these rows.
struct Side {
  dev::Buffer payload, scales;

  __device__ Side(const uint8_t* data, const uint8_t* scale_data, uint32_t first, uint32_t count, uint32_t rows,
                  uint32_t k) {
    const uint32_t here = min(count, rows - first), blocks = k / kMxBlock;
    payload = dev::make_buffer(data + uint64_t{first} * k, here * k);
    scales = dev::make_buffer(scale_data + uint64_t{first} * blocks, here * blocks);
  }
};

template <class C>
struct Tile {
  struct Operands {
    dev::u32x4 x[C::kRowTiles][2], w[C::kColumnTiles][2];
  };
  struct Scales {
    uint32_t x[C::kRowTiles], w[C::kColumnTiles];
  };

  static constexpr int kMatrixes = C::kRowTiles * C::kColumnTiles;
  static constexpr int kReads = 2 * (C::kRowTiles + C::kColumnTiles);

  const uint32_t lds;  // address of the work-group's LDS
  const Side x_side, w_side;
  const uint32_t k, begin, end;  // steps
  const uint32_t phase;  // of the work-group in a window
  const bool aligned_scales;
  const uint32_t lane, wave;
  const uint32_t k_limit;        // k past which a lane loads nothing
  const uint32_t load_k;         // the lane's k in a step, when it loads
  const uint32_t load_offset;    // of the lane in the first rows that its wave loads
  const uint32_t load_to;        // where these rows lie in the first stage
  const uint32_t x_first, w_first;  // the wave's rows of X and W in a stage
  const uint32_t read_base;      // of the lane's row in a tile, and of the chunk that it reads first there
  uint32_t stage = 0, load_stage = 0;  // bytes: of the step that is multiplied, and of the step that is loaded
  uint32_t load_at;              // k of the step that is loaded
  uint32_t lane_load;            // the lane's offset for it
  f32x16 acc[C::kRowTiles][C::kColumnTiles] = {};
  Operands half[2];
  Scales scales, next_scales;

  __device__ Tile(uint32_t shared, const Problem& p, uint32_t row0, uint32_t column0, uint32_t first_step,
                  uint32_t last_step, uint32_t rotation)
      : lds(shared),
        x_side(p.xq, p.xs, row0, C::kBlockM, p.m, p.k),
        w_side(p.wq, p.ws, column0, C::kBlockN, p.n, p.k),
        k(p.k),
        begin(first_step),
        end(last_step),
        phase(rotation),
        aligned_scales(p.aligned_scales),
        lane(threadIdx.x % dev::kWaveSize),
        wave(dev::uniform(threadIdx.x / dev::kWaveSize)),
        k_limit(min(p.k, last_step * kStep)),
        load_k((lane % kRowChunks ^ (wave * kLoadRows + lane / kRowChunks) / 2 % kRowChunks) * kChunk),
        load_offset((wave * kLoadRows + lane / kRowChunks) * p.k + load_k),
        load_to(shared + wave * (kLoadRows * kStep)),
        x_first(wave / C::kColumnWaves * (C::kRowTiles * kTile)),
        w_first(C::kBlockM + wave % C::kColumnWaves * (C::kColumnTiles * kTile)),
        read_base(lane % kTile * kStep + (lane / kTile ^ lane / 2 % kRowChunks) * kChunk) {
    load_next(first_step);
  }

  // --- from memory to LDS ---
  // Which k the step is for: each whole window of steps starts elsewhere.
  __device__ __forceinline__ uint32_t k_step(uint32_t step) const {
    const uint32_t index = step - begin, window = index & ~(kWindow - 1);
    const uint32_t turned = window + (index + phase) % kWindow;
    return begin + (begin + window + kWindow <= end ? turned : index);
  }

  // The loads that follow are for `step`.
  __device__ __forceinline__ void load_next(uint32_t step) {
    load_at = k_step(step) * kStep;
    lane_load = load_k + load_at < k_limit ? load_offset : dev::kOutOfRange;
  }

  // The t-th load of the wave for that step; rows of X first.
  template <int t>
  __device__ __forceinline__ void load() const {
    constexpr bool kIsX = t < C::kXLoads;
    constexpr int kAfter = (kIsX ? t : t - C::kXLoads) * C::kWaves * kLoadRows;
    load_b128_to_lds<((kIsX ? 0 : C::kBlockM) + kAfter) * kStep>(load_to + load_stage, kIsX ? x_side.payload : w_side.payload,
                                                               lane_load, kAfter * k, load_at);
  }

  static __device__ __forceinline__ uint32_t stage_after(uint32_t bytes) {
    return bytes == (C::kStages - 1) * C::kStageBytes ? 0 : bytes + C::kStageBytes;
  }

  __device__ __forceinline__ uint32_t scale_buffer(uint32_t step) const {
    return lds + C::kStages * C::kStageBytes + (step - begin) / kScaleSteps % C::kScaleBuffers * C::kScaleBytes;
  }

  // The u-th load of the wave of the scales of kScaleSteps steps from `step`; needs aligned scales.
  template <int u>
  __device__ __forceinline__ void load_scale(uint32_t step) const {
    constexpr bool kIsX = u < C::kXScaleLoads;
    constexpr int kAfter = (kIsX ? u : u - C::kXScaleLoads) * C::kWaves;  // loads
    const uint32_t blocks = k / kMxBlock, j = wave + kAfter;
    const uint32_t offset = (wave * kScaleLoadRows + lane / kScaleSteps) * blocks + (lane % kScaleSteps ^ j % kScaleKeys) * 4;
    load_b32_to_lds<((kIsX ? 0 : C::kBlockM) + kAfter * kScaleLoadRows) * kScaleRowBytes>(
        scale_buffer(step) + wave * (kScaleLoadRows * kScaleRowBytes), kIsX ? x_side.scales : w_side.scales, offset,
        kAfter * kScaleLoadRows * blocks, step * (kStep / kMxBlock));
  }

  // All of them, at any alignment.
  __device__ __forceinline__ void load_scales(uint32_t step) const {
    if (aligned_scales) {
      repeat<C::kScaleLoads>([&](auto u) { load_scale<u()>(step); });
      return;
    }
    const uint32_t blocks = k / kMxBlock, first_block = step * (kStep / kMxBlock);
    for (uint32_t i = dev::lane_value_here(threadIdx.x); i < C::kRows * kScaleSteps; i += C::kThreads) {
      const uint32_t row = i / kScaleSteps, block = first_block + i % kScaleSteps * 4;
      const bool is_x = row < C::kBlockM;
      const uint32_t from = (is_x ? row : row - C::kBlockM) * blocks;
      uint32_t word = 0;
#pragma unroll
      for (uint32_t b = 0; b < 4; ++b) {
        const uint32_t at = block + b < blocks ? from + block + b : dev::kOutOfRange;
        word |= (row < C::kBlockM ? dev::load_u8(x_side.scales, at, 0) : dev::load_u8(w_side.scales, at, 0)) << 8 * b;
      }
      const uint32_t slot = i % kScaleSteps ^ row / kScaleLoadRows % kScaleKeys;
      *in_lds<uint32_t>(scale_buffer(step) + row * kScaleRowBytes + slot * 4) = word;
    }
  }

  // --- from LDS to registers ---
  // Addresses are made from one register where they are used: kept over the loop, all of them would be 30.
  // One of the kReads reads of a half, from a stage: W's chunks, then X's into registers that the half before has left.
  // Rows of a tile start at multiples of 32, so that the swizzle is the lane's own.
  __device__ __forceinline__ void read(Operands& to, uint32_t from, int which_half, int index) const {
    const bool is_x = index >= 2 * C::kColumnTiles;
    const int tile = (is_x ? index - 2 * C::kColumnTiles : index) / 2, chunk = which_half * 4 + index % 2 * 2;
    const uint32_t rows = lds + from + (is_x ? x_first : w_first) * kStep;
    (is_x ? to.x[tile] : to.w[tile])[index % 2] =
        in_lds<dev::u32x4>((read_base ^ chunk * kChunk) + rows)[tile * (kTile * kStep / kChunk)];
  }

  __device__ __forceinline__ void read_scales(Scales& to, uint32_t step) const {
    const uint32_t here = scale_buffer(step), word = (k_step(step) - begin) % kScaleSteps * 4;
    const uint32_t base = lane % kTile * kScaleRowBytes + lane % kTile / kScaleLoadRows * 4;
    const uint32_t at = dev::lane_value_here(base) ^ word;
#pragma unroll
    for (int t = 0; t < C::kRowTiles; ++t)
      to.x[t] = in_lds<uint32_t>(at + (here + x_first * kScaleRowBytes))[t * (kTile * kScaleRowBytes / 4)];
#pragma unroll
    for (int t = 0; t < C::kColumnTiles; ++t)
      to.w[t] = in_lds<uint32_t>(at + (here + w_first * kScaleRowBytes))[t * (kTile * kScaleRowBytes / 4)];
  }

  // Lanes of the upper half of the wave hold the odd blocks: their byte comes to the bottom, that of the other half of
  // the step two bytes above it.
  __device__ __forceinline__ void take_scales() {
#pragma unroll
    for (int t = 0; t < C::kRowTiles; ++t) scales.x[t] = next_scales.x[t] >> lane / kTile * 8;
#pragma unroll
    for (int t = 0; t < C::kColumnTiles; ++t) scales.w[t] = next_scales.w[t] >> lane / kTile * 8;
  }

  template <int kWhichHalf>
  __device__ __forceinline__ void multiply(int index) {
    constexpr int kE4m3 = 0, kByte = kWhichHalf * 2;
    const int r = index / C::kColumnTiles, c = index % C::kColumnTiles;
    const Operands& from = half[kWhichHalf];
    acc[r][c] = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(
        dev::mfma_operand(from.w[c][0], from.w[c][1]), dev::mfma_operand(from.x[r][0], from.x[r][1]), acc[r][c], kE4m3,
        kE4m3, kByte, static_cast<int32_t>(scales.w[c]), kByte, static_cast<int32_t>(scales.x[r]));
  }

  // When the wave issues the loads of a step, counted in its matrix instructions: evenly over a step's time from where rows
  // of the stage are free, because a compute unit can have only 32 KiB in flight. Those past the step's end go out in the
  // next one. With two stages they have less time to arrive, and go out in three quarters of a step.
  static constexpr int kSlots = 2 * kMatrixes, kMeet = C::kEarlyRows ? (kMatrixes * 3 + 7) / 8 : kMatrixes;
  static constexpr int kSpread = C::kStages == 2 ? kSlots * 3 / 4 : kSlots;
  // The order of loads: W's rows are free first.
  static constexpr int loaded(int order) { return order < C::kWLoads ? C::kXLoads + order : order - C::kWLoads; }
  static constexpr int load_slot(int order) { return kMeet + order * kSpread / C::kLoads; }
  static constexpr int loads_between(int first, int last) {
    int count = 0;
    for (int order = 0; order < C::kLoads; ++order) count += load_slot(order) >= first && load_slot(order) < last;
    return count;
  }
  static_assert(load_slot(C::kLoads - 1) - kSlots < kMeet && load_slot(C::kWLoads) >= kMatrixes);

  template <int kSlot>
  __device__ __forceinline__ void load_in_slot(uint32_t step) {
    if constexpr (kSlot == kMeet) {
      load_stage = stage;
      load_next(step + C::kStages);
    }
    repeat<C::kLoads>([&](auto order) {
      constexpr int kAt = load_slot(order());
      if constexpr (kAt == kSlot || kAt == kSlot + kSlots) load<loaded(order())>();
    });
  }

  // Without branches: where there is one, the compiler moves matrix instructions past it. The last steps load and read
  // what does not exist: zeros, without traffic, into a stage and registers that are free.
  __device__ __forceinline__ void multiply_step(uint32_t step) {
    constexpr int kWReads = 2 * C::kColumnTiles;
    // All reads go behind the first three quarters of the half, so that no wave waits for them at its end.
    constexpr int kReading = kMatrixes - kMatrixes / 4;
    static_assert(!C::kEarlyRows || kMeet * kReads / kReading >= kWReads, "W is read when the waves meet");
    take_scales();
    repeat<kMatrixes>([&](auto index) {
      constexpr int i = index();
      if constexpr (C::kEarlyRows && i == kMeet) meet_after_reads<kMeet * kReads / kReading - kWReads>();
      multiply<0>(i);
#pragma unroll
      for (int j = i * kReads / kReading; j < (i + 1) * kReads / kReading && j < kReads; ++j) read(half[1], stage, 1, j);
      load_in_slot<i>(step);
      __builtin_amdgcn_sched_barrier(0);
    });
    wait_and_meet<(C::kStages - 2) * C::kLoads + loads_between(0, kMatrixes)>();
    read_scales(next_scales, step + 1);
    const uint32_t next = stage_after(stage);
    repeat<kMatrixes>([&](auto index) {
      constexpr int i = index();
      multiply<1>(i);
#pragma unroll
      for (int j = i * kReads / kMatrixes; j < (i + 1) * kReads / kMatrixes; ++j) read(half[0], next, 0, j);
      load_in_slot<kMatrixes + i>(step);
      __builtin_amdgcn_sched_barrier(0);
    });
    stage = next;
  }

  __device__ __forceinline__ void run() {
    load_scales(begin);
    repeat<C::kStages>([&](auto at) {
      repeat<C::kLoads>([&](auto order) {
        if constexpr (at() < C::kStages - 1 || load_slot(order()) < kSlots) load<loaded(order())>();
      });
      if constexpr (at() < C::kStages - 1) {
        load_stage = stage_after(load_stage);
        load_next(begin + at() + 1);
      }
    });
    wait_and_meet<(C::kStages - 2) * C::kLoads + loads_between(0, kSlots)>();
#pragma unroll
    for (int j = 0; j < kReads; ++j) read(half[0], stage, 0, j);
    read_scales(next_scales, begin);
    for (uint32_t step = begin;;) {
      // Two buffers of scales: the other one was left before the last barrier.
      if (C::kScaleBuffers == 2 && step + kScaleSteps < end) load_scales(step + kScaleSteps);
      const uint32_t chunk_end = min(step + kScaleSteps, end);
      do multiply_step(step);
      while (++step < chunk_end);
      if (step >= end) break;
      if (C::kScaleBuffers == 1) {
        meet_after_reads<0>();
        load_scales(step);
        wait_and_meet<0>();
        read_scales(next_scales, step);
      }
    }
  }

  // --- from registers through LDS to memory ---
  // One band of 32 rows at a time as f32, in a part of LDS that is the wave's own.
  static constexpr int kColumns = C::kColumnTiles * kTile, kBandRow = kColumns + 4;
  static_assert(C::kWaves * kTile * kBandRow * 4 + sizeof(uint32_t) <= C::kLdsBytes);

  __device__ __forceinline__ void stage_band(uint32_t band, int r) const {
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const dev::f32x4 values = {acc[r][c][4 * i], acc[r][c][4 * i + 1], acc[r][c][4 * i + 2], acc[r][c][4 * i + 3]};
        const uint32_t column = c * kTile + i * 8 + lane / kTile * 4;
        *in_lds<dev::f32x4>(band + (lane % kTile * kBandRow + column) * 4) = values;
      }
    }
  }

  // --- the parts of a split K: fragments of four neighbouring outputs in the order of the registers ---
  static constexpr int kFragments = 4 * kMatrixes;
  static constexpr uint32_t kFragmentBytes = dev::kWaveSize * sizeof(dev::f32x4);

  __device__ __forceinline__ uint32_t in_part() const {
    return wave * (kFragments * kFragmentBytes) + dev::lane_index() * sizeof(dev::f32x4);
  }

  __device__ __forceinline__ void store_part(dev::Buffer parts, uint32_t split) const {
    const uint32_t at = in_part();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const f32x16& of = acc[f / 4 / C::kColumnTiles][f / 4 % C::kColumnTiles];
      const dev::f32x4 values = {of[f % 4 * 4], of[f % 4 * 4 + 1], of[f % 4 * 4 + 2], of[f % 4 * 4 + 3]};
      dev::store_part(values, parts, at + f % 4 * kFragmentBytes, split * C::kPartBytes + f / 4 * 4 * kFragmentBytes);
      if (f % 4 == 3) __builtin_amdgcn_sched_barrier(0);  // or every offset takes a scalar register
    }
  }

  // As stage_band, from what kSplits work-groups have stored: from memory even the own part, since sums that are also
  // accumulators would take registers of the loop.
  template <int kSplits>
  __device__ __forceinline__ void add_band(uint32_t band, uint32_t r, dev::Buffer parts) const {
    constexpr int kOfBand = 4 * C::kColumnTiles, kAtOnce = kSplits == 8 ? 2 : 4;
    const uint32_t here = dev::lane_index(), from = in_part() + r * (kOfBand * kFragmentBytes);
#pragma unroll
    for (int first = 0; first < kOfBand; first += kAtOnce) {
      dev::f32x4 loaded[kAtOnce][kSplits];
#pragma unroll
      for (int f = 0; f < kAtOnce; ++f)
#pragma unroll
        for (int s = 0; s < kSplits; ++s)
          loaded[f][s] = dev::load_part(parts, from + f * kFragmentBytes, s * C::kPartBytes + first * kFragmentBytes);
#pragma unroll
      for (int f = 0; f < kAtOnce; ++f) {
        dev::f32x4 sum = loaded[f][0];
#pragma unroll
        for (int s = 1; s < kSplits; ++s) sum += loaded[f][s];
        const uint32_t column = (first + f) * 8 + here / kTile * 4;
        *in_lds<dev::f32x4>(band + (here % kTile * kBandRow + column) * 4) = sum;
      }
      __builtin_amdgcn_sched_barrier(0);
    }
  }

  // The lane's kVector neighbouring outputs of a pass over the band whose first row is `row0`.
  template <bool kAligned>
  __device__ __forceinline__ void store_piece(dev::bf16* out, const dev::bf16* bias, uint32_t band, uint32_t pass, uint32_t row0,
                                              uint32_t column0, uint32_t rows, uint32_t n) const {
    constexpr int kVector = kChunk / sizeof(dev::bf16), kLanesPerRow = kColumns / kVector;
    using Floats = float __attribute__((ext_vector_type(kVector)));
    const uint32_t index = pass * dev::kWaveSize + lane, band_row = index / kLanesPerRow;
    const uint32_t at = index % kLanesPerRow * kVector, row = row0 + band_row, column = column0 + at;
    if (band_row >= kTile || row >= rows || column >= n) return;
    Floats values;
#pragma unroll
    for (int j = 0; j < kVector; j += 4)
      *reinterpret_cast<dev::f32x4*>(reinterpret_cast<float*>(&values) + j) =
          *in_lds<dev::f32x4>(band + (band_row * kBandRow + at + j) * 4);
    dev::bf16* to = out + uint64_t{row} * n + column;
    if (kAligned) {
      if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] += static_cast<float>(bias[column + j]);
      }
      *reinterpret_cast<dev::bf16x8*>(to) = __builtin_convertvector(values, dev::bf16x8);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (column + j >= n) return;
      to[j] = static_cast<dev::bf16>(bias == nullptr ? values[j] : values[j] + static_cast<float>(bias[column + j]));
    }
  }

  __device__ __forceinline__ void store_band(const dev::Late<Problem>& p, uint32_t band, uint32_t row0, uint32_t column0) const {
    constexpr int kLanesPerRow = kColumns * sizeof(dev::bf16) / kChunk;
    constexpr int kPasses = (kTile * kLanesPerRow + dev::kWaveSize - 1) / dev::kWaveSize;
    if (p.aligned_output) {
#pragma unroll 4
      for (uint32_t pass = 0; pass < kPasses; ++pass) store_piece<true>(p.out, p.bias, band, pass, row0, column0, p.m, p.n);
    } else {
#pragma unroll 1
      for (uint32_t pass = 0; pass < kPasses; ++pass) store_piece<false>(p.out, p.bias, band, pass, row0, column0, p.m, p.n);
    }
  }

  __device__ __forceinline__ uint32_t own_band() const { return lds + wave * (kTile * kBandRow * 4); }

  __device__ __forceinline__ void store(const dev::Late<Problem>& p, uint32_t row0, uint32_t column0) const {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      stage_band(own_band(), r);
      store_band(p, own_band(), row0 + x_first + r * kTile, column0 + w_first - C::kBlockM);
    }
  }

  __device__ __forceinline__ void store_sums(const dev::Late<Problem>& p, dev::Buffer parts, uint32_t row0, uint32_t column0) const {
#pragma unroll 1
    for (uint32_t r = 0; r < C::kRowTiles; ++r) {
      if (p.log2_splits == 1)
        add_band<2>(own_band(), r, parts);
      else if (p.log2_splits == 2)
        add_band<4>(own_band(), r, parts);
      else
        add_band<8>(own_band(), r, parts);
      store_band(p, own_band(), row0 + x_first + r * kTile, column0 + w_first - C::kBlockM);
    }
  }
};

#endif  // __gfx950__

/// Grid: row_tiles column_tiles splits work-groups of C::kThreads; k a multiple of 32, below 2^22.
template <class C>
__global__ __launch_bounds__(C::kThreads, C::kWaves / 4) void mxfp8_gemm([[maybe_unused]] Problem p) {
#if defined(__gfx950__)
  __shared__ __attribute__((aligned(1024))) uint8_t lds[C::kLdsBytes];
  const uint32_t lds_address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>((__attribute__((address_space(3))) uint8_t*)lds));
  const Place<C> at(p, blockIdx.x);
  const uint32_t steps = (p.k + kStep - 1) / kStep;
  const uint32_t begin = dev::uniform(steps * at.split >> p.log2_splits);
  const uint32_t end = dev::uniform(steps * (at.split + 1) >> p.log2_splits);
  Tile<C> computed(lds_address, p, at.row0(), at.column0(), begin, end,
                   (at.row_tile % kGroupRows + at.column_tile) % kWindow);
  computed.run();
  wait_and_meet<0>();  // the stages become room for results
  // Where its results belong is computed again, because the loop fills the scalar registers.
  const dev::Late<Problem>& late = dev::arguments_here<Problem>();
  const Place<C> here(late, dev::wave_value_here(blockIdx.x));
  if (late.log2_splits == 0) {
    computed.store(late, here.row0(), here.column0());
    return;
  }
  const uint32_t parts_of_k = 1u << late.log2_splits;
  const dev::Buffer parts =
      dev::make_buffer(late.partials + uint64_t{here.tile} * parts_of_k * C::kPartBytes, parts_of_k * C::kPartBytes);
  computed.store_part(parts, here.split);
  uint64_t* const words = late.words + uint64_t{here.tile} * dev::meeting_words(parts_of_k);
  auto* const told = reinterpret_cast<uint32_t*>(lds + C::kLdsBytes) - 1;  // behind the bands
  const bool leads = computed.wave == 0 && dev::lane_index() == 0;
  if (dev::is_last_group(words, here.split, late.log2_splits, late.number, leads, told))
    computed.store_sums(late, parts, here.row0(), here.column0());
#endif
}

}  // namespace hf::tiles
