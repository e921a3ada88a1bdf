// The first GEMM of a mixture of experts with its activation: q[slot], scales[slot] = fp8 of SwiGLU(A[slot / a_div]
// W[expert]^T + bias[expert]), on gfx950 and gfx942, with scales of the operands' kind: MX-FP8, or f32 or e8m0 for each 128 results.
// Products, gathering and padding are as in split_kernel.h.
//
//        W[expert]   16 gate columns | 16 gate | 16 up | 16 up     of one block of 32 results (interleaved: 64 rows of W)
//                    +---------------+---------+-------+-------+
//   A rows of up to  | wave 0        | wave 1  | wave 2| wave 3|   part 0 of K
//   8, 16 or 32      | wave 4        | wave 5  | wave 6| wave 7|   part 1 of K
//                    +---------------+---------+-------+-------+
//                              sums in LDS: 16 slots x 64 columns, a part each
//   epilogue: two waves for each 16 slots, a lane has 4 results of a slot and 8 neighbouring lanes one MX block
//
// Up to kMaxGroups work-groups may share a block of results, each with a part of K for all its waves; and where 128 results share
// a scale, those of its four blocks of 32 meet too:
//
//   results of one scale   | block 0                | block 1                | block 2        | block 3        |
//   work-groups            | part 0 of K | part 1   | part 0 of K | part 1   | ...                             |
//                             \             \             \  sums  /
//                              +--- the last to arrive: a lane has 4 results of a slot, 32 neighbouring lanes a scale
//
// They leave their sums in a workspace, and the last one adds them in the order of the parts (last_group.h) and goes on to the
// epilogue:
//
//   partials  [slot][results of one scale][block of 32 of them][group][64 columns] of float32, only of slots that exist
//   words     behind them, [slot][results of one scale][work-groups that meet - 1]; a pass over a tile uses those of its first
//             slot, which is in no other tile
//
// The last 128 results may be fewer, a multiple of 32, with one, two or four work-groups for each part of K: of 96 one multiplies
// nothing and meets the others.
// Gate and up are rounded to bf16 where two launches would store them, so that results equal those of two launches.
// Grid: blocks of 32 results times groups x min(tiles, num_valid).
//
// Bytes: per tile an expert's weight byte is loaded once for every 16 kRowTiles slots; the 8 bytes that two launches write
// and read between them for each result are saved. Memory is the bound, as in split_kernel.h; with fewer work-groups than
// compute units, the bytes that a compute unit can have in flight. A part stores and reads 256 bytes for each slot.
#pragma once

#include "split_kernel.h"
#include "hipforge/amd/hip.h"
#include "hipforge/amd/last_group.h"
#include "hipforge/device/fp8_scale.h"
#include "hipforge/device/mx_encode.h"
#include "hipforge/device/swiglu.h"

namespace hf::moe {

constexpr int kGateUpTiles = 4;  // of 16 rows of W
constexpr int kMaxParts = kMaxWaves / kGateUpTiles;
constexpr int kResults = kMxBlock;  // columns of a work-group
constexpr int kQuads = kResults / dev::kColumnsPerLane;
constexpr uint32_t kColumns = 2 * kResults;  // of gate and up
constexpr int kMaxGroups = 4;                // that share K
constexpr int kWavesPerSimd = 2;             // 256 registers a wave: work-groups of four waves would take more
#if defined(__gfx942__)
constexpr int kLineWavesPerSimd = 1;
#else
// With three line_wave.h would lose what its loads gain; older compilers may not fit it into 128 registers.
constexpr int kLineWavesPerSimd = __clang_major__ >= 22 ? 4 : 1;
#endif

static_assert(kGateUpTiles * kTile == 2 * kResults);
static_assert(kTile * kQuads == 2 * dev::kWaveSize, "two waves hold the results");
static_assert(kMaxParts == 2);

/// Whether each 128 results of a slot share a scale, and not each 32.
constexpr bool has_fp8_blocks(Scales scales) { return scales == Scales::kBlocks || scales == Scales::kBlocksE8m0; }

/// Results that share a scale, and work-groups that have them, without those that share K.
constexpr int scale_results(Scales scales) { return has_fp8_blocks(scales) ? dev::kFp8Block : kMxBlock; }
constexpr int log2_members(Scales scales) { return has_fp8_blocks(scales) ? 2 : 0; }

static_assert(kResults << log2_members(Scales::kBlocks) == dev::kFp8Block && kResults << log2_members(Scales::kMx) == kMxBlock);

using UnalignedFour = dev::f32x4 __attribute__((aligned(4)));

/// What follows First: a problem without an output, whose n is that of gate and up together, a multiple of 64. Slots have
/// n / 2 results, and a scale for each scale_results of them.
struct GateUpRest : Rest {
  uint8_t* out;     // [slots, n / 2], at a multiple of 4 bytes
  uint8_t* scales;  // [slots, scales]: bytes or, of Scales::kBlocks, floats
  Activation activation;
  uint32_t log2_groups;  // of the work-groups that share a block of results
  float* partials;       // for several of them, as words and number
  uint64_t* words;
  uint64_t number;  // of the launch
};

struct GateUpProblem : First, GateUpRest {};

/// Scales of a slot.
template <Scales kScales>
__host__ __device__ constexpr uint32_t scales_of_slot(uint32_t n) {
  constexpr uint32_t kEach = 2 * scale_results(kScales);
  return (n + kEach - 1) / kEach;
}

/// Blocks of 32 results that have work-groups: all of a slot, and one without results where those of one scale are three.
template <Scales kScales>
constexpr uint32_t result_blocks(uint32_t n) {
  const uint32_t blocks = n / kColumns, last = blocks & ((1u << log2_members(kScales)) - 1);
  return blocks + (last == 3 ? 1 : 0);
}

/// Log2 of the work-groups that have the results of one scale, of which `left` are to come, in columns of gate and up.
template <Scales kScales>
__device__ inline uint32_t log2_members_of(uint32_t left) {
  if constexpr (log2_members(kScales) == 0) return 0;
  return left > 2 * kColumns ? 2 : left > kColumns ? 1 : 0;
}

/// Floats of the partial sums, and words to meet, of `groups` work-groups for each block of results.
template <Scales kScales>
constexpr uint64_t partial_floats(uint64_t slots, uint32_t n, uint64_t groups) {
  const uint64_t meet = groups << log2_members(kScales);
  return meet == 1 ? 0 : slots * scales_of_slot<kScales>(n) * meet * kColumns;
}
template <Scales kScales>
constexpr uint64_t meeting_words(uint64_t slots, uint32_t n, uint64_t groups) {
  return slots * scales_of_slot<kScales>(n) * dev::meeting_words(static_cast<uint32_t>(groups << log2_members(kScales)));
}

#if defined(__gfx950__) || defined(__gfx942__)

/// Four gate and four up columns of a slot or, interleaved, eight neighbouring ones of both.
struct Eight {
  dev::f32x4 first, second;
};

/// The sums that kGroups work-groups have stored, added in their order; `at`: the lane's offset in the first part.
template <int kGroups>
__device__ inline Eight added(dev::Buffer parts, uint32_t at, uint32_t to_second) {
  constexpr uint32_t kPartBytes = kColumns * sizeof(float);
  Eight loaded[kGroups];
#pragma unroll
  for (uint32_t g = 0; g < kGroups; ++g)
    loaded[g] = {dev::load_part(parts, at, g * kPartBytes), dev::load_part(parts, at + to_second, g * kPartBytes)};
  Eight total = loaded[0];
#pragma unroll
  for (int g = 1; g < kGroups; ++g) total.first += loaded[g].first, total.second += loaded[g].second;
  return total;
}

/// The same for a number of groups that is known late.
__device__ __forceinline__ Eight added(dev::Buffer parts, uint32_t at, uint32_t to_second, uint32_t log2_groups) {
  if (log2_groups == 0) return added<1>(parts, at, to_second);
  return log2_groups == 1 ? added<2>(parts, at, to_second) : added<kMaxGroups>(parts, at, to_second);
}

/// SwiGLU and quantisation of a lane's four results of a slot from `result` on, of n / 2; neighbouring lanes have those that share
/// a scale, and all call it.
template <Scales kScales>
__device__ __forceinline__ void finish(const dev::Late<GateUpProblem>& p, Eight total, uint32_t n, bool interleaved,
                                       uint32_t expert, uint32_t slot, uint32_t result, bool exists) {
  constexpr bool kFp8Blocks = has_fp8_blocks(kScales);
  constexpr int kLanes = scale_results(kScales) / dev::kColumnsPerLane;
  // Rounded as a separate launch would store them.
  const auto rounded = [&](dev::f32x4 sum, uint32_t w_column) {
    if (p.biases != nullptr && (!kFp8Blocks || exists))
      sum += *reinterpret_cast<const UnalignedFour*>(p.biases + uint64_t{expert} * n + w_column);
    return __builtin_convertvector(__builtin_convertvector(sum, dev::bf16x4), dev::f32x4);
  };
  const uint32_t w_column = interleaved ? 2 * result : result;
  dev::f32x4 gate = rounded(total.first, w_column);
  dev::f32x4 up = rounded(total.second, w_column + (interleaved ? dev::kColumnsPerLane : n / 2));
  if (interleaved) {
    const dev::f32x4 low = gate, high = up;
    gate = __builtin_shufflevector(low, high, 0, 2, 4, 6);
    up = __builtin_shufflevector(low, high, 1, 3, 5, 7);
  }
  const Activation activation{p.activation.power, p.activation.beta, p.activation.limit, p.activation.modified};
  float values[dev::kColumnsPerLane];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < dev::kColumnsPerLane; ++i) {
    values[i] = dev::swiglu(gate[i], up[i], activation);
    amax = dev::larger(amax, dev::magnitude_bits(values[i]));
  }
  const uint64_t at = uint64_t{slot} * (n / 2) + result;
  uint32_t codes;
  if constexpr (kFp8Blocks) {
    const float largest = dev::fp8_scale(dev::largest_of_lanes<kLanes>(exists ? amax : 0));
    const bool first_of_scale = exists && result % dev::kFp8Block == 0;
    const uint64_t at_scale = uint64_t{slot} * scales_of_slot<kScales>(n) + result / dev::kFp8Block;
    const float scale = dev::stored_scale(p.scales, at_scale, largest, kScales == Scales::kBlocksE8m0, first_of_scale);
#pragma unroll
    for (int i = 0; i < dev::kColumnsPerLane; ++i) values[i] = dev::over_scale(values[i], scale);
    codes = dev::encode_fp8x4<dev::Fp8Format::e4m3>(values, dev::kE4m3Limit);
  } else {
    const uint32_t byte = dev::e4m3_block_scale(dev::largest_of_lanes<kLanes>(amax));
#pragma unroll
    for (int i = 0; i < dev::kColumnsPerLane; ++i) values[i] *= dev::e8m0_inverse(byte);
    codes = dev::encode_mx_e4m3x4(values, byte);
    if (exists && result % kMxBlock == 0) p.scales[at / kMxBlock] = static_cast<uint8_t>(byte);
  }
  if (exists) *reinterpret_cast<uint32_t*>(p.out + at) = codes;
}

#endif

/// Work-groups of kGateUpTiles waves for each of kParts parts of K; 16 kRowTiles slots at a time, or kLines as in split_kernel.h.
template <int kRowTiles, int kParts, Scales kScales, Elements kW = Elements::e4m3, bool kLines = false>
__device__ __forceinline__ void gate_and_up(const First& leading) {
  static_assert(kParts == 1 || kParts == kMaxParts);
  static_assert(2 * kRowTiles <= kGateUpTiles, "two waves hold the results of a row tile");
#if defined(__gfx950__) || defined(__gfx942__)
  constexpr uint32_t kPassSlots = slots_at_once(kRowTiles, kLines), kSlotsOfTile = kPassSlots / kRowTiles;
  __shared__ dev::f32x4 sums[kParts][kGateUpTiles][kRowTiles][dev::kWaveSize];
  __shared__ uint32_t told;
  constexpr int kLineScaleWords = kLines ? kParts * kGateUpTiles * wave_split::kLineScaleBytes / sizeof(dev::u32x4) : 1;
  __shared__ [[maybe_unused]] dev::u32x4 line_scales[kLineScaleWords];
  const uint32_t lane = threadIdx.x % dev::kWaveSize, wave = dev::uniform(threadIdx.x / dev::kWaveSize);
  uint32_t log2_groups;
  bool interleaved;
  const auto also = [&](const Late& p) {
    const auto& late = reinterpret_cast<const dev::Late<GateUpProblem>&>(p);
    interleaved = late.activation.interleaved;
    log2_groups = late.log2_groups;
    dev::wave_values_loaded_here(interleaved, log2_groups);
  };
  for_each_group(leading, lane, also, [&](const Slots& slots, uint32_t expert, Pass pass) {
    constexpr bool kFp8Blocks = has_fp8_blocks(kScales);
    const uint32_t tile = wave % kGateUpTiles, part = wave / kGateUpTiles;
    const uint32_t block = blockIdx.x >> log2_groups, of_groups = blockIdx.x & ((1u << log2_groups) - 1);
    const uint32_t result0 = block * kResults;
    for (uint32_t first = 0;;) {
      const uint32_t k = pass.k, n = pass.n;
      const bool has_results = !kFp8Blocks || result0 < n / 2;
      uint32_t row[kRowTiles];
      bool exists[kRowTiles];
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const uint32_t slot = slots.of_lane(first + t * kTile, lane, kSlotsOfTile);
        row[t] = pass.a_div == 1 ? slot : slot / pass.a_div;
        exists[t] = first + t * kTile + lane % kSlotsOfTile < slots.count;
      }
      const uint32_t up0 = tile >= kGateUpTiles / 2 ? n / 2 - kResults : 0;
      const uint32_t column0 = (interleaved ? 2 * result0 : result0 + up0) + tile * kTile;
      const uint64_t w_row = uint64_t{expert} * n + column0;
      const uint32_t w_bytes = wave_split::row_bytes(kW, k);
      dev::f32x4 acc[kRowTiles];
      multiply_part<kRowTiles, kLines, false, kScales, kW>(
          acc, pass, row, exists, dev::make_buffer(pass.w + w_row * w_bytes, kTile * w_bytes),
          pass.scales_of_w<kScales>(expert, column0, kTile), of_groups * kParts + part, log2_groups + (kParts - 1), has_results, lane,
          line_scales + (kLines ? wave * (kLineScaleWords / (kParts * kGateUpTiles)) : 0));
      const auto& p = dev::arguments_here<GateUpProblem>();
      const uint32_t thread = dev::lane_value_here(threadIdx.x);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) sums[part][tile][t][lane] = acc[t];
      __syncthreads();
      const bool adds = wave < 2 * kRowTiles;
      // The lane's slot, and where its columns are in the work-group's 64 and in W.
      const uint32_t at_slot = thread / kQuads, quad = thread % kQuads, in_tile = at_slot % kTile;
      const bool has_slot = adds && at_slot < kPassSlots && first + at_slot < slots.count;
      const auto column_of = [&](uint32_t of) { return (interleaved ? 2 * dev::kColumnsPerLane : dev::kColumnsPerLane) * of; };
      const uint32_t column = column_of(quad);
      const uint32_t to_second = interleaved ? dev::kColumnsPerLane : kResults;
      uint32_t slot = 0;
      Eight total = {};
      if (adds) {
        slot = dev::from_lane(slots.each, first + at_slot);
        const auto sum_of = [&](uint32_t of) {
          const uint32_t at = in_tile + of % kTile / dev::kColumnsPerLane * kTile;
          dev::f32x4 sum = sums[0][of / kTile][wave / 2][at];
          if constexpr (kParts == kMaxParts) sum += sums[1][of / kTile][wave / 2][at];
          return sum;
        };
        total = {sum_of(column), sum_of(column + to_second)};
      }
      bool last = true;
      const uint32_t log2_most = log2_groups + log2_members(kScales);  // that meet
      if (log2_most != 0) {
        const uint32_t blocks = scales_of_slot<kScales>(n), scale_block = blockIdx.x >> log2_most;
        const uint32_t of_meeting = blockIdx.x & ((1u << log2_most) - 1);
        const uint32_t log2_meeting =
            log2_groups + log2_members_of<kScales>(n - scale_block * (kColumns << log2_members(kScales)));
        constexpr uint32_t kPartBytes = kColumns * sizeof(float);
        const dev::Buffer parts = dev::make_buffer(p.partials, (p.num_valid * blocks << log2_most) * kPartBytes);
        const auto in_parts = [&](uint32_t of_slot) { return ((of_slot * blocks + scale_block) << log2_most) * kPartBytes; };
        const uint32_t at = has_slot && has_results ? in_parts(slot) + column * sizeof(float) : dev::kOutOfRange;
        const uint32_t second = to_second * sizeof(float);
        if (adds) {
          dev::store_part(total.first, parts, at, of_meeting * kPartBytes);
          dev::store_part(total.second, parts, at + second, of_meeting * kPartBytes);
        }
        const uint32_t pass_slot = dev::of_lane(slots.each, first);
        uint64_t* const words = p.words + ((uint64_t{pass_slot} * blocks + scale_block) * ((1u << log2_most) - 1));
        last = dev::is_last_group(words, of_meeting, log2_meeting, p.number, thread == 0, &told);
        if constexpr (kFp8Blocks) {
          constexpr uint32_t kLanes = dev::kFp8Block / dev::kColumnsPerLane, kSlots = dev::kWaveSize / kLanes;
          constexpr uint32_t kAtOnce = kParts * kGateUpTiles * kSlots;
          const uint32_t end = min(slots.count - first, kPassSlots);
          for (uint32_t base = last ? wave * kSlots : end; base < end; base += kAtOnce) {
            const uint32_t mine_at = base + thread % dev::kWaveSize / kLanes, in_scale = thread % kLanes;
            const uint32_t result = scale_block * dev::kFp8Block + in_scale * dev::kColumnsPerLane;
            const bool has = mine_at < end && result < n / 2;
            const uint32_t its_slot = dev::from_lane(slots.each, first + mine_at);
            const uint32_t from = in_parts(its_slot) + ((in_scale / kQuads) << log2_groups) * kPartBytes +
                                  column_of(in_scale % kQuads) * sizeof(float);
            finish<kScales>(p, added(parts, has ? from : dev::kOutOfRange, second, log2_groups), n, interleaved, expert,
                            its_slot, result, has);
          }
        } else if (last && adds) {
          total = added(parts, at, second, log2_groups);
        }
      }
      if constexpr (!kFp8Blocks)
        if (last && adds) finish<kScales>(p, total, n, interleaved, expert, slot, result0 + dev::kColumnsPerLane * quad, has_slot);
      __syncthreads();  // the next sums take the same LDS
      if ((first += kPassSlots) >= slots.count) return;
      pass = Pass(arguments_here());
    }
  });
#endif
}

template <int kRowTiles, int kParts, bool kLines>
__global__ __launch_bounds__(kParts * kGateUpTiles * dev::kWaveSize, kLines ? kLineWavesPerSimd : 1) void mxfp8_gate_up(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns_of_both, uint32_t depth, GateUpRest) {
  gate_and_up<kRowTiles, kParts, Scales::kMx, Elements::e4m3, kLines>(
      {sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns_of_both, depth});
}

/// The same with scales that are not MX's.
template <int kRowTiles, int kParts, Scales kScales>
__global__ __launch_bounds__(kParts * kGateUpTiles * dev::kWaveSize, kWavesPerSimd) void fp8_gate_up(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns_of_both, uint32_t depth, GateUpRest) {
  static_assert(kScales != Scales::kOnce, "its results share a scale with those of many work-groups");
  gate_and_up<kRowTiles, kParts, kScales>(
      {sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns_of_both, depth});
}

/// mxfp8_gate_up with W in e2m1.
template <int kRowTiles, int kParts>
__global__ __launch_bounds__(kParts * kGateUpTiles * dev::kWaveSize) void mxfp4_gate_up(
    const int32_t* sorted_ids, const int32_t* expert_ids, const int32_t* padded, const uint8_t* w, const uint8_t* w_scales,
    uint32_t num_valid, uint32_t block_m, uint32_t columns_of_both, uint32_t depth, GateUpRest) {
  gate_and_up<kRowTiles, kParts, Scales::kMx, Elements::e2m1>(
      {sorted_ids, expert_ids, padded, w, w_scales, num_valid, block_m, columns_of_both, depth});
}

/// How a kernel of 16 kRowTiles slots at a time is launched: parts of K in a work-group, and work-groups that share K.
struct GateUpLaunch {
  Activation activation;
  OptionalTensor workspace;
  int64_t rows, parts, groups;
};

/// Checks all but the operands of the product and the results, and launches the kernel of one part of K or of two.
template <int kRowTiles, Scales kScales, class Kernel>
void launch_gate_up(Kernel one, Kernel two, const Problem& gemm, const Tensor& out, const Tensor& out_scales,
                    const GateUpLaunch& how, hipStream_t stream, int most_rows = kRowTiles * kTile) {
  const int64_t slots = gemm.num_valid, parts = how.parts, groups = how.groups, meet = groups << log2_members(kScales);
  HF_CHECK(gemm.k <= wave_split::kMaxK, "K must be at most ", wave_split::kMaxK, "; got ", gemm.k);
  HF_CHECK(parts == 1 || parts == kMaxParts, "parts must be 1 or 2; got ", parts);
  HF_CHECK(groups == 1 || groups == 2 || groups == kMaxGroups, "groups must be 1, 2 or 4; got ", groups);
  HF_CHECK(how.rows == most_rows, "this variant of the module has rows = ", most_rows, "; got ", how.rows);
  check_aligned(out, "out");
  const uint64_t floats = partial_floats<kScales>(slots, gemm.n, groups);
  const uint64_t words = meeting_words<kScales>(slots, gemm.n, groups);
  HF_CHECK(floats * sizeof(float) <= kMaxInt32, "groups = ", groups, " need ", floats * sizeof(float),
           " bytes of partial sums; at most 2^31 - 1 are addressed");
  float* partials = nullptr;
  if (meet > 1)
    partials = reinterpret_cast<float*>(
        check_split_workspace(how.workspace, floats * sizeof(float) + words * sizeof(uint64_t), groups, "groups"));

  if (gemm.grid_rows == 0) return;
  const GateUpRest rest{gemm,
                        out.data<uint8_t>(),
                        static_cast<uint8_t*>(out_scales.data()),
                        how.activation,
                        static_cast<uint32_t>(__builtin_ctzll(static_cast<uint64_t>(groups))),
                        partials,
                        reinterpret_cast<uint64_t*>(partials + floats),
                        launch_number()};
  const dim3 grid(result_blocks<kScales>(gemm.n) * static_cast<uint32_t>(groups), gemm.grid_rows);
  const auto threads = static_cast<uint32_t>(parts) * kGateUpTiles * dev::kWaveSize;
  launch(parts == 1 ? one : two, gemm, rest, grid, threads, 0, stream);
}

/// The entry for both formats of W. Writes out[slot] and out_scales[slot] for every slot of a tile in use; other rows stay as
/// they are. out e4m3 in the architecture's format [num_valid_tokens, N/2], out_scales uint8 [num_valid_tokens, N/64]; a_q
/// [M_act, K] and w as in grouped_split; bias float32 [E, N] or None; limit infinite for none; rows, slots at a time; parts of K
/// in a work-group, 1 or 2; groups that share K, 1, 2 or 4, and where there are several a workspace: float32
/// [num_valid_tokens (groups N + 2 (groups - 1) N/64)], with any contents.
template <int kRowTiles, Elements kW, bool kLines = false>
void gate_up(Tensor out, Tensor out_scales, Tensor a_q, Tensor a_scale, Tensor w, Tensor w_scale, Tensor sorted_token_ids,
             Tensor expert_ids, Tensor num_tokens_post_padded, OptionalTensor bias, int64_t E, int64_t N, int64_t K,
             int64_t num_valid_tokens, int64_t M_act, int64_t a_div, int64_t block_m, double alpha, double beta, double limit,
             bool interleaved, OptionalTensor workspace, int64_t rows, int64_t parts, int64_t groups, hipStream_t stream) {
  static_assert(kRowTiles == 1 || kRowTiles == 2);
  constexpr bool kFp4 = kW == Elements::e2m1;
  HF_CHECK_ARCH(w, "gfx950", "gfx942");
  const Operands given{a_q, a_scale, w, w_scale, sorted_token_ids, expert_ids, num_tokens_post_padded, bias, E, N, K,
                       num_valid_tokens, M_act, a_div, block_m, mxfp8::payload_of(w), kFp4};
  const GateUpLaunch how{checked_activation(alpha, beta, limit, interleaved), workspace, rows, parts, groups};
  const Problem gemm = checked(given);
  check_gate_up(out, out_scales, given);
  if constexpr (kFp4)
    launch_gate_up<kRowTiles, Scales::kMx>(mxfp4_gate_up<kRowTiles, 1>, mxfp4_gate_up<kRowTiles, kMaxParts>, gemm, out,
                                           out_scales, how, stream);
  else if (kLines && takes_lines(gemm))
    launch_gate_up<kRowTiles, Scales::kMx>(mxfp8_gate_up<kRowTiles, 1, kLines>, mxfp8_gate_up<kRowTiles, kMaxParts, kLines>, gemm,
                                           out, out_scales, how, stream, wave_split::kLineRows);
  else
    launch_gate_up<kRowTiles, Scales::kMx>(mxfp8_gate_up<kRowTiles, 1, false>, mxfp8_gate_up<kRowTiles, kMaxParts, false>, gemm,
                                           out, out_scales, how, stream, kLines ? wave_split::kLineRows : kRowTiles * kTile);
}

}  // namespace hf::moe
