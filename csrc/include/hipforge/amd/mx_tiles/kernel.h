// MX GEMM for any M: out = X W^T in large tiles that pass through LDS, on the scaled 32 x 32 x 64 MFMA of gfx950, with operands
// in e4m3 or e2m1 (formats.h).
//
//              W rows n0 ..            one work-group: (32 kRowTiles kRowWaves) rows of X (M) by (32 kColumnTiles
//            +---------+---------+     kColumnWaves) rows of W (N), for the K steps of its split
//     X rows | wave 0  | wave 1  |     one wave: kRowTiles x kColumnTiles accumulators of 32 x 32
//     m0 ..  +---------+---------+
//            | wave 2  | wave 3  |     LDS: two to four stages of (BM + BN) rows x 128 bytes, and the scale bytes of 2048 k
//            +---------+---------+
//
// W is the instruction's A operand: a lane ends with four neighbouring columns of one output row at a time.
//
// A stage is filled by loads that go straight to LDS, 1 KiB (8 whole rows) each. They write lane after lane, so the swizzle is
// in the addresses that lanes load from: the 16-byte chunk c of row r lies in slot c ^ (r / 2 % 8), and the 16 lanes that LDS
// serves together touch all 64 banks once. Scale bytes come 64 to a row (2048 k), because a cache line is the least that L2
// delivers; word d of row r lies in slot d ^ (r / 4 % 8). Shuffled scales keep their order in LDS: 256 bytes for 32 rows and a
// step. Reads of operands have no bank conflicts.
//
// One step, 128 bytes of each row (128 k of e4m3, 256 of e2m1), is two halves of 64 with registers of their own:
//   first half:  multiply half 0 | read half 1 of this stage from LDS
//   barrier:     this stage is read by all, the next one has arrived
//   second half: multiply half 1 | read half 0 of the next stage
// A stage's loads for a later step are spread evenly over the step that follows its release: a compute unit can have 32 KiB in
// flight, and a wave that must wait to issue a load issues no matrix instruction either. Where LDS holds only two stages (256 x
// 256), the waves meet once more as soon as W's rows are read, and load W's part from there on.
//
// Neighbouring work-groups share rows of X or of W. If all took the steps in the same order, all would wait for HBM for every
// line. So neighbouring work-groups begin a window of four steps at different steps: at its first step each waits for HBM, for
// lines that the others then find in L2.
//
// Bytes: a work-group loads (BM + BN) 128 bytes per step, of which its XCD's L2 has most: the work-groups of an XCD are
// neighbouring tiles. 256 x 256: 64 KiB for 128 matrix instructions of 64 cycles (e2m1: 256 of 32) on four SIMDs, 32 bytes
// a cycle. L2 is modelled to deliver that much for 32 compute units (docs/time-model.md), so its delivery, HBM's latency and
// the matrix pipe are near each other; with smaller tiles L2 is the bound.
// Instructions per matrix instruction of e4m3, counted over one whole tile at K = 4096: 10.4 for 256 x 256, 12.5 for
// 192 x 256, 13.6 for 192 x 128, 14.0 for 128 x 192, 18.0 for 128 x 128, 30.7 for 128 x 64, 52.4 for 64 x 64. Of e2m1 at
// K = 8192: 7.6, 9.1, 9.4, 9.7 and 12.3 for the first five, 20.7 for 64 x 128, 36.4 for 64 x 64, 38.7 for 32 x 64.
//
// Results leave through LDS, so that every store is a whole line. With split K a work-group leaves its f32 sums in a
// workspace, as its lanes hold them, and the last of a tile's work-groups adds them in the order of the splits
// (last_group.h): 4 BM BN bytes written and read again for each split, by one launch. An XCD has neighbouring tiles of one part
// of K. Each XCD begins at another of its tiles, so that all of them share the additions.
//
// Tails: each tile's resources cover exactly its own rows, so rows past M and N read 0, and any tensor size works; a
// lane whose chunk is past K, or past the last step of its split, is out of range too. Scales past the end are replaced by 0,
// since the next row or padding there may be NaN.
#pragma once

#include "hipforge/amd/buffer.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/last_group.h"
#include "hipforge/amd/mfma.h"
#include "hipforge/device/mx.h"
#include "hipforge/device/mx_shuffled.h"
#include "hipforge/amd/mx_tiles/config.h"
#include "hipforge/amd/mx_tiles/formats.h"
#include "hipforge/amd/mx_tiles/lds.h"
#include "hipforge/amd/mx_tiles/place.h"
#include "hipforge/amd/wave.h"

namespace hf::tiles {

#if defined(__gfx950__)

// Rows first .. first + (at most) count of one operand, as resources over exactly these rows. Shuffled or not, rows from a
// multiple of 32 on follow those before.
struct Side {
  dev::Buffer payload, scales;

  __device__ Side(const uint8_t* data, const uint8_t* scale_data, uint32_t first, uint32_t count, uint32_t rows,
                  uint32_t row_bytes, uint32_t scale_rows, uint32_t scale_row_bytes) {
    payload = dev::make_buffer(data + uint64_t{first} * row_bytes, min(count, rows - first) * row_bytes);
    scales = dev::make_buffer(scale_data + uint64_t{first} * scale_row_bytes, min(count, scale_rows - first) * scale_row_bytes);
  }
};

__device__ inline uint32_t rounded_up(uint32_t value, uint32_t to) { return (value + to - 1) / to * to; }

template <class C>
struct Tile {
  using Format = typename C::Format;
  static constexpr bool kTakesShuffled = Format::kTakesShuffled;
  static constexpr int kStep = C::kStep, kStepWords = C::kStepWords, kScaleSteps = C::kScaleSteps;

  struct Operands {
    dev::u32x4 x[C::kRowTiles][2], w[C::kColumnTiles][2];
  };
  struct Scales {
    uint32_t x[C::kRowTiles][kStepWords], w[C::kColumnTiles][kStepWords];
  };

  static constexpr int kMatrixes = C::kRowTiles * C::kColumnTiles;
  static constexpr int kReads = 2 * (C::kRowTiles + C::kColumnTiles);

  const uint32_t lds;  // address of the work-group's LDS
  const bool shuffled;  // W
  const uint32_t k;
  const Side x_side, w_side;
  const uint32_t begin, end;  // steps
  const uint32_t phase;  // of the work-group in a window
  const bool aligned_scales;
  const uint32_t lane, wave;
  const uint32_t limit;          // byte of a row past which a lane loads nothing
  const uint32_t load_byte;      // the lane's byte in a step of a row, when it loads
  const uint32_t x_load_offset, w_load_offset;  // of the lane in the first rows that its wave loads
  const uint32_t load_to;        // where these rows lie in the first stage
  const uint32_t x_first, w_first;  // the wave's rows of X and W in a stage
  const uint32_t read_base;      // of the lane's row in a tile, and of the chunk that it reads first there
  uint32_t stage = 0, load_stage = 0;  // bytes: of the step that is multiplied, and of the step that is loaded
  uint32_t load_at, w_load_at;   // byte of a row where the step that is loaded starts; the same in W's order
  uint32_t x_lane_load, w_lane_load;  // the lane's offsets for it
  f32x16 acc[C::kRowTiles][C::kColumnTiles] = {};
  Operands half[2];
  Scales scales, next_scales;

  __device__ Tile(uint32_t shared, const Problem& p, uint32_t row0, uint32_t column0, uint32_t first_step,
                  uint32_t last_step, uint32_t rotation)
      : lds(shared),
        shuffled(kTakesShuffled && p.shuffled),
        k(p.k),
        x_side(p.xq, p.xs, row0, C::kBlockM, p.m, row_bytes(), p.m, blocks()),
        w_side(p.wq, p.ws, column0, C::kBlockN, p.n, row_bytes(), shuffled ? rounded_up(p.n, kShuffledPaddedRows) : p.n,
               shuffled ? shuffled_columns() : blocks()),
        begin(first_step),
        end(last_step),
        phase(rotation),
        aligned_scales(p.aligned_scales),
        lane(threadIdx.x % dev::kWaveSize),
        wave(dev::uniform(threadIdx.x / dev::kWaveSize)),
        limit(min(row_bytes(), last_step * kStepBytes)),
        load_byte((lane % kRowChunks ^ load_row() / 2 % kRowChunks) * kChunk),
        x_load_offset(load_row() * row_bytes() + load_byte),
        w_load_offset(shuffled ? load_row() / kShuffledRows * kShuffledRows * row_bytes() +
                                     load_row() % kShuffledRows * kChunk + load_byte * kShuffledRows
                               : x_load_offset),
        load_to(shared + wave * (kLoadRows * kStepBytes)),
        x_first(wave / C::kColumnWaves * (C::kRowTiles * kTile)),
        w_first(C::kBlockM + wave % C::kColumnWaves * (C::kColumnTiles * kTile)),
        read_base(lane % kTile * kStepBytes + (lane / kTile ^ lane / 2 % kRowChunks) * kChunk) {
    load_next(first_step);
  }

  __device__ uint32_t row_bytes() const { return k / Format::kPerByte; }
  __device__ uint32_t blocks() const { return k / kMxBlock; }
  __device__ uint32_t load_row() const { return wave * kLoadRows + lane / kRowChunks; }
  __device__ uint32_t shuffled_columns() const { return rounded_up(blocks(), kShuffledScaleColumns); }

  // --- from memory to LDS ---
  // Which k the step is for: each whole window of steps starts elsewhere.
  __device__ __forceinline__ uint32_t k_step(uint32_t step) const {
    const uint32_t index = step - begin, window = index & ~(kWindow - 1);
    const uint32_t turned = window + (index + phase) % kWindow;
    return begin + (begin + window + kWindow <= end ? turned : index);
  }

  // The loads that follow are for `step`.
  __device__ __forceinline__ void load_next(uint32_t step) {
    load_at = k_step(step) * kStepBytes;
    w_load_at = kTakesShuffled && shuffled ? load_at * kShuffledRows : load_at;
    const bool exists = load_byte + load_at < limit;
    x_lane_load = exists ? x_load_offset : dev::kOutOfRange;
    w_lane_load = kTakesShuffled ? exists ? w_load_offset : dev::kOutOfRange : x_lane_load;
  }

  // The t-th load of the wave for that step; rows of X first.
  template <int t>
  __device__ __forceinline__ void load() const {
    constexpr bool kIsX = t < C::kXLoads;
    constexpr int kAfter = (kIsX ? t : t - C::kXLoads) * C::kWaves * kLoadRows;
    load_b128_to_lds<((kIsX ? 0 : C::kBlockM) + kAfter) * kStepBytes>(
        load_to + load_stage, kIsX ? x_side.payload : w_side.payload, kIsX ? x_lane_load : w_lane_load, kAfter * row_bytes(),
        kIsX ? load_at : w_load_at);
  }

  static __device__ __forceinline__ uint32_t stage_after(uint32_t bytes) {
    return bytes == (C::kStages - 1) * C::kStageBytes ? 0 : bytes + C::kStageBytes;
  }

  __device__ __forceinline__ uint32_t scale_buffer(uint32_t step) const {
    return lds + C::kStages * C::kStageBytes + (step - begin) / kScaleSteps % C::kScaleBuffers * C::kScaleBytes;
  }

  // The u-th load of the wave of the scales of kScaleSteps steps from `step`; needs aligned scales.
  // `blocks` is opaque, so that the loads' offsets are not kept in scalar registers over the loop.
  template <int u>
  __device__ __forceinline__ void load_scale(uint32_t step, uint32_t blocks) const {
    constexpr bool kIsX = u < C::kXScaleLoads;
    constexpr int kAfter = (kIsX ? u : u - C::kXScaleLoads) * C::kWaves;  // loads
    const uint32_t j = wave + kAfter;
    const uint32_t offset =
        (wave * kScaleLoadRows + lane / kScaleRowWords) * blocks + (lane % kScaleRowWords ^ j % kScaleKeys) * sizeof(uint32_t);
    load_b32_to_lds<((kIsX ? 0 : C::kBlockM) + kAfter * kScaleLoadRows) * kScaleRowBytes>(
        scale_buffer(step) + wave * (kScaleLoadRows * kScaleRowBytes), kIsX ? x_side.scales : w_side.scales, offset,
        kAfter * kScaleLoadRows * blocks, step * (kStep / kMxBlock));
  }

  // The same for W's where they are shuffled: one tile of them, 32 rows and one step, as it is in memory.
  template <int u>
  __device__ __forceinline__ void load_shuffled_scale(uint32_t step, uint32_t to, uint32_t columns) const {
    constexpr int kAfter = u * C::kWaves;  // loads
    const uint32_t j = wave + kAfter;
    load_b32_to_lds<kAfter * kShuffledScaleBytes>(
        to + wave * kShuffledScaleBytes, w_side.scales, lane * sizeof(uint32_t),
        j / kScaleSteps * kShuffledScaleRows * columns, (step + j % kScaleSteps) * kShuffledScaleBytes);
  }

  // The scales of kCount rows at any alignment.
  template <int kCount>
  __device__ __forceinline__ void load_scale_bytes(uint32_t step, uint32_t to, dev::Buffer from) const {
    const uint32_t first_block = step * (kStep / kMxBlock);
    // A number of this loop's own: clang 22 would take the loop's step for the scalar operand of a load to LDS elsewhere.
    const uint32_t of_row = dev::lane_value_here(blocks());
    for (uint32_t i = dev::lane_value_here(threadIdx.x); i < kCount * kScaleRowWords; i += C::kThreads) {
      const uint32_t row = i / kScaleRowWords, block = first_block + i % kScaleRowWords * kWordBlocks;
      uint32_t word = 0;
#pragma unroll
      for (uint32_t b = 0; b < kWordBlocks; ++b)
        word |= dev::load_u8(from, block + b < of_row ? row * of_row + block + b : dev::kOutOfRange, 0) << 8 * b;
      const uint32_t slot = i % kScaleRowWords ^ row / kScaleLoadRows % kScaleKeys;
      *in_lds<uint32_t>(to + row * kScaleRowBytes + slot * sizeof(uint32_t)) = word;
    }
  }

  __device__ __forceinline__ void load_scales(uint32_t step) const {
    if constexpr (!Format::kScaled) return;
    const uint32_t w_scales = scale_buffer(step) + C::kBlockM * kScaleRowBytes, of_row = dev::wave_value_here(blocks());
    if (kTakesShuffled && shuffled) {
      const uint32_t columns = dev::wave_value_here(shuffled_columns());
      repeat<C::kWScaleLoads>([&](auto u) { load_shuffled_scale<u()>(step, w_scales, columns); });
      if (aligned_scales)
        repeat<C::kXScaleLoads>([&](auto u) { load_scale<u()>(step, of_row); });
      else
        load_scale_bytes<C::kBlockM>(step, scale_buffer(step), x_side.scales);
    } else if (aligned_scales) {
      repeat<C::kScaleLoads>([&](auto u) { load_scale<u()>(step, of_row); });
    } else {
      load_scale_bytes<C::kBlockM>(step, scale_buffer(step), x_side.scales);
      load_scale_bytes<C::kBlockN>(step, w_scales, w_side.scales);
    }
  }

  // --- from LDS to registers ---
  // Addresses are computed from one register at each use: kept over the loop they would take 30.
  // One of the kReads reads of a half, from a stage: W's chunks, then X's into registers that the previous half has released.
  // Rows of a tile start at multiples of 32, so that the swizzle is the lane's own.
  __device__ __forceinline__ void read(Operands& to, uint32_t from, int which_half, int index) const {
    const bool is_x = index >= 2 * C::kColumnTiles;
    const int tile = (is_x ? index - 2 * C::kColumnTiles : index) / 2, chunk = which_half * 4 + index % 2 * 2;
    const uint32_t rows = lds + from + (is_x ? x_first : w_first) * kStepBytes;
    (is_x ? to.x[tile] : to.w[tile])[index % 2] =
        in_lds<dev::u32x4>((read_base ^ chunk * kChunk) + rows)[tile * (kTile * kStepBytes / kChunk)];
  }

  __device__ __forceinline__ void read_scales(Scales& to, uint32_t step) const {
    if constexpr (!Format::kScaled) return;
    constexpr uint32_t kWord = sizeof(uint32_t);
    const uint32_t here = scale_buffer(step), in_group = (k_step(step) - begin) % kScaleSteps;
    const uint32_t base = dev::lane_value_here(lane % kTile * kScaleRowBytes + lane % kTile / kScaleLoadRows * kWord);
    const uint32_t x_at = base ^ in_group * (kStepWords * kWord);
    uint32_t w_at = x_at, next_w = kWord;
    if (kTakesShuffled && shuffled) {
      w_at = lane / kTile * (kShuffledScaleBytes / 4) + lane % kShuffledRows * kWord + in_group * kShuffledScaleBytes;
      next_w = kShuffledScaleBytes / 2;
    }
#pragma unroll
    for (int word = 0; word < kStepWords; ++word) {
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t)
        to.x[t][word] = in_lds<uint32_t>((x_at ^ word * kWord) + (here + x_first * kScaleRowBytes))[t * (kTile * kScaleRowWords)];
#pragma unroll
      for (int t = 0; t < C::kColumnTiles; ++t)
        to.w[t][word] =
            in_lds<uint32_t>((w_at ^ word * next_w) + (here + w_first * kScaleRowBytes))[t * (kTile * kScaleRowWords)];
    }
  }

  // Each lane's bytes come to where the instructions take them: one word for each half of the step, whose byte 2 i is the
  // scale of the lane's part of the half's i-th matrix instruction (with e4m3, one word whose byte 2 h is that of half h).
  // Lanes of the upper half of the wave hold the odd blocks.
  __device__ __forceinline__ void take_scales(uint32_t step) {
    if constexpr (!Format::kScaled) return;
    if constexpr (kStepWords == 1) {
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t) scales.x[t][0] = next_scales.x[t][0] >> lane / kTile * 8;
#pragma unroll
      for (int t = 0; t < C::kColumnTiles; ++t) scales.w[t][0] = next_scales.w[t][0] >> lane / kTile * 8;
      return;
    }
    // Blocks past K have scales of the next row or of padding: they may be NaN, which a payload of zeros would not hide.
    const uint32_t left = min<uint32_t>(blocks() - k_step(step) * (kStep / kMxBlock), kStep / kMxBlock);
    const uint64_t exists = ~uint64_t{0} >> (64 - 8 * left);
    // Plain, word h has the bytes of half h. Shuffled, word i has those of instruction i in both halves, each for two rows.
    const uint32_t lanes_byte = shuffled ? lane % kTile / kShuffledRows : lane / kTile;
    uint32_t select = lanes_byte * 0x00010001u + (shuffled ? 0x00040000u : 0x00020000u);
    const uint32_t next_half = shuffled ? 0x00020002u : 0x00040004u;
#pragma unroll
    for (int h = 0; h < kStepWords; ++h) {
      const uint32_t mask = static_cast<uint32_t>(exists >> 32 * h);
#pragma unroll
      for (int t = 0; t < C::kRowTiles; ++t) scales.x[t][h] = next_scales.x[t][h] >> lane / kTile * 8 & mask;
#pragma unroll
      for (int t = 0; t < C::kColumnTiles; ++t)
        scales.w[t][h] = __builtin_amdgcn_perm(next_scales.w[t][kStepWords - 1], next_scales.w[t][0], select) & mask;
      select += next_half;
    }
  }

  // The kSlot-th matrix instruction of a half.
  template <int kWhichHalf, int kSlot>
  __device__ __forceinline__ void multiply() {
    constexpr int kInstruction = kSlot / kMatrixes, r = kSlot % kMatrixes / C::kColumnTiles, c = kSlot % C::kColumnTiles;
    constexpr int kWord = kWhichHalf * kStepWords / 2, kByte = kStepWords == 1 ? kWhichHalf * 2 : kInstruction * 2;
    const Operands& from = half[kWhichHalf];
    acc[r][c] = Format::template multiply<kInstruction, kByte>(from.w[c], scales.w[c][kWord], from.x[r], scales.x[r][kWord],
                                                               acc[r][c]);
  }

  // When the wave issues the loads of a step, counted in its matrix instructions: evenly over a step's time from where rows
  // of the stage are free, because a compute unit can have only 32 KiB in flight. Those past the step's end go out in the
  // next one. With two stages they have less time to arrive, and go out in three quarters of a step.
  static constexpr int kHalfSlots = kMatrixes * Format::kPerByte;
  static constexpr int kSlots = 2 * kHalfSlots, kMeet = C::kEarlyRows ? (kHalfSlots * 3 + 7) / 8 : kHalfSlots;
  static constexpr int kSpread = C::kStages == 2 ? kSlots * 3 / 4 : kSlots;
  // The order of loads: W's rows are free first.
  static constexpr int loaded(int order) { return order < C::kWLoads ? C::kXLoads + order : order - C::kWLoads; }
  static constexpr int load_slot(int order) { return kMeet + order * kSpread / C::kLoads; }
  static constexpr int loads_between(int first, int last) {
    int count = 0;
    for (int order = 0; order < C::kLoads; ++order) count += load_slot(order) >= first && load_slot(order) < last;
    return count;
  }
  static_assert(load_slot(C::kLoads - 1) - kSlots < kMeet && load_slot(C::kWLoads) >= kHalfSlots);

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

  // Without branches: where there is one, the compiler moves matrix instructions past it. The last steps load and read zeros
  // past the end, without traffic, into a free stage and free registers.
  __device__ __forceinline__ void multiply_step(uint32_t step) {
    constexpr int kWReads = 2 * C::kColumnTiles;
    // All reads are issued in the first three quarters of the half, so that no wave waits for them at its end.
    constexpr int kReading = kHalfSlots - kHalfSlots / 4;
    static_assert(!C::kEarlyRows || kMeet * kReads / kReading >= kWReads, "W is read when the waves meet");
    take_scales(step);
    repeat<kHalfSlots>([&](auto index) {
      constexpr int i = index();
      if constexpr (C::kEarlyRows && i == kMeet) meet_after_reads<kMeet * kReads / kReading - kWReads>();
      multiply<0, i>();
#pragma unroll
      for (int j = i * kReads / kReading; j < (i + 1) * kReads / kReading && j < kReads; ++j) read(half[1], stage, 1, j);
      load_in_slot<i>(step);
      __builtin_amdgcn_sched_barrier(0);
    });
    wait_and_meet<(C::kStages - 2) * C::kLoads + loads_between(0, kHalfSlots)>();
    read_scales(next_scales, step + 1);
    const uint32_t next = stage_after(stage);
    repeat<kHalfSlots>([&](auto index) {
      constexpr int i = index();
      multiply<1, i>();
#pragma unroll
      for (int j = i * kReads / kHalfSlots; j < (i + 1) * kReads / kHalfSlots; ++j) read(half[0], next, 0, j);
      load_in_slot<kHalfSlots + i>(step);
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

  // As stage_band, from the sums that kSplits work-groups have stored. The own part comes from memory too, since sums kept in
  // the accumulators would take registers of the loop.
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

  // The lane's kVector neighbouring outputs of a pass over the band whose first row is `row0`, as T.
  template <bool kAligned, class T>
  __device__ __forceinline__ void store_piece(const dev::Late<Problem>& p, uint32_t band, uint32_t pass, uint32_t row0,
                                              uint32_t column0) const {
    constexpr int kVector = kChunk / sizeof(T), kLanesPerRow = kColumns / kVector;
    using Floats = float __attribute__((ext_vector_type(kVector)));
    const uint32_t index = pass * dev::kWaveSize + lane, band_row = index / kLanesPerRow;
    const uint32_t at = index % kLanesPerRow * kVector, row = row0 + band_row, column = column0 + at;
    if (band_row >= kTile || row >= p.m || column >= p.n) return;
    Floats values;
#pragma unroll
    for (int j = 0; j < kVector; j += 4)
      *reinterpret_cast<dev::f32x4*>(reinterpret_cast<float*>(&values) + j) =
          *in_lds<dev::f32x4>(band + (band_row * kBandRow + at + j) * 4);
    if constexpr (!Format::kScaled) {
      const float x_scale = reinterpret_cast<const float*>(p.xs)[row * p.x_scale_step];
      const float* w_scale = reinterpret_cast<const float*>(p.ws);
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        if (kAligned || column + j < p.n) values[j] *= x_scale * w_scale[(column + j) * p.w_scale_step];
    }
    T* to = reinterpret_cast<T*>(p.out) + uint64_t{row} * p.n + column;
    const T* bias = reinterpret_cast<const T*>(p.bias);
    if (kAligned) {
      if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] += static_cast<float>(bias[column + j]);
      }
      using Vector = T __attribute__((ext_vector_type(kVector)));
      *reinterpret_cast<Vector*>(to) = __builtin_convertvector(values, Vector);
      return;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (column + j >= p.n) return;
      to[j] = static_cast<T>(bias == nullptr ? values[j] : values[j] + static_cast<float>(bias[column + j]));
    }
  }

  template <class T>
  __device__ __forceinline__ void store_band_as(const dev::Late<Problem>& p, uint32_t band, uint32_t row0, uint32_t column0) const {
    constexpr int kLanesPerRow = kColumns * sizeof(T) / kChunk;
    constexpr int kPasses = (kTile * kLanesPerRow + dev::kWaveSize - 1) / dev::kWaveSize;
    if (p.aligned_output) {
#pragma unroll 4
      for (uint32_t pass = 0; pass < kPasses; ++pass) store_piece<true, T>(p, band, pass, row0, column0);
    } else {
#pragma unroll 1
      for (uint32_t pass = 0; pass < kPasses; ++pass) store_piece<false, T>(p, band, pass, row0, column0);
    }
  }

  __device__ __forceinline__ void store_band(const dev::Late<Problem>& p, uint32_t band, uint32_t row0, uint32_t column0) const {
    if (!Format::kScaled && p.half_output)
      store_band_as<dev::f16>(p, band, row0, column0);
    else
      store_band_as<dev::bf16>(p, band, row0, column0);
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

/// Grid: row_tiles column_tiles splits work-groups of C::kThreads; k a multiple of 32, below 2^22. The caller is the kernel,
/// and the problem its only argument.
template <class C>
__device__ __forceinline__ void multiply_tile([[maybe_unused]] const Problem& p) {
#if defined(__gfx950__)
  __shared__ __attribute__((aligned(1024))) uint8_t lds[C::kLdsBytes];
  const uint32_t lds_address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>((__attribute__((address_space(3))) uint8_t*)lds));
  const Place<C> at(p, blockIdx.x);
  const uint32_t steps = (p.k + C::kStep - 1) / C::kStep;
  const uint32_t begin = dev::uniform(steps * at.split >> p.log2_splits);
  const uint32_t end = dev::uniform(steps * (at.split + 1) >> p.log2_splits);
  Tile<C> computed(lds_address, p, at.row0(), at.column0(), begin, end,
                   (at.row_tile % kGroupRows + at.column_tile) % kWindow);
  computed.run();
  wait_and_meet<0>();  // the results take the stages' LDS
  // The place of the results is computed again, because the loop fills the scalar registers.
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
