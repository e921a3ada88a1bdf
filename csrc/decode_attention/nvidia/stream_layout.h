// How decode attention's stream divides a call: splits over blocks and warps, a step's place in shared memory.
#pragma once

#include <type_traits>

#include "../../mxfp8_gemm/nvidia/stream.h"
#include "row_output.h"

namespace hf::decode_attention {

enum class Format { half, fp8, rows, int4 };

constexpr int kMostGroups = 8;  // words of scales of an int4 row

/// How many parts the keys of a sequence have: blocks have one split or several, each `waves` of their warps; clusters have blocks.
struct Split {
  static constexpr uint32_t kMostBlocks = 16;  // of a cluster; more than 8 are not portable, but sm_90 has them
  static constexpr uint32_t kFewBlocks = 8;    // which a block with several splits shall lead to
  uint32_t warps, outer;
  Divisor cluster, stride;  // blocks of a cluster; steps from one of a warp to its next

  __host__ Split(uint32_t splits, uint32_t waves, uint32_t most_warps) : warps(waves), stride(Divisor::of(splits * waves)) {
    for (; splits > kFewBlocks && splits % 2 == 0 && 2 * warps <= most_warps; splits /= 2) warps *= 2;
    outer = (splits + kMostBlocks - 1) / kMostBlocks, cluster = Divisor::of((splits + outer - 1) / outer);
  }
  __host__ uint32_t blocks() const { return outer * cluster.value; }  // those past the last split have no keys
};

template <class Half, int kD, Format kFormat, int kBlockN, int kEights>
struct Layout {
  static constexpr bool kQuantised = kFormat != Format::half;
  using Element = std::conditional_t<kQuantised, dev::f16, Half>;  // of products
  static constexpr bool kF16 = std::is_same_v<Element, dev::f16>;
  static constexpr bool kInt4 = kFormat == Format::int4, kRowScales = kFormat == Format::rows;
  static constexpr bool kScaled = !kRowScales && !kInt4;           // by one number for all keys of a head
  static constexpr float kRaised = kF16 && !kRowScales ? 14.f : 0.f;  // weights are at most 2^kRaised
  static constexpr int kHeadDim = kD;
  static constexpr int kNibbleWords = kD / 8, kNibblePitch = kNibbleWords + 4;  // of a key of int4; in shared memory
  static constexpr int kRowBytes = kInt4 ? 4 * kNibblePitch : kQuantised ? kD : 2 * kD;
  static constexpr int kPieces = kInt4 ? kD / 32 : kRowBytes / 64;  // of a key that a lane multiplies, of 16 bytes; words of int4
  static constexpr int kProducts = kQuantised && !kInt4 ? 4 : 2;    // of a piece
  static constexpr int kWide = kInt4 ? 0 : kRowBytes / 128;        // runs of 128 bytes of a key
  static constexpr bool kEnd = !kInt4 && kRowBytes % 128 != 0;   // and one of 64
  static constexpr int kMostSlot = 16 * 1024;          // so that three slots of four warps fit

  static constexpr int fitting(int keys) { return keys > kTileN && 2 * keys * kRowBytes > kMostSlot ? fitting(keys / 2) : keys; }
  static constexpr int kTile = fitting(kBlockN);  // keys of a step
  static constexpr int kRowsBytes = kTile * kRowBytes;
  static constexpr int kWordsBytes = kTile * (kInt4 ? 4 * kMostGroups : kRowScales ? 4 : 0);
  static constexpr int kSlotBytes = 2 * (kRowsBytes + kWordsBytes);
  static constexpr int kSlots = 2;
  static constexpr int kRingBytes = kSlots * kSlotBytes;
  static constexpr int kRows = 8 * kEights;     // of q, that a block has
  static constexpr int kSums = kRows * kD;      // floats
  static constexpr int kWidth = kEights * kD;   // in proportion to the registers of sums and of Q
  static constexpr bool kKeepQuery = kWidth <= 256;  // in registers
  static constexpr int kByShared = 220 * 1024 / (kMaxWaves * kRingBytes + 4096);
  static constexpr int kHeld = kWidth + (kTile / kTileN - 1) * 32 * kEights;  // with the scores
  static constexpr int kByRegisters = kHeld <= 128 ? 4 : kHeld <= 192 && kQuantised ? 3 : 2;
  static constexpr int kBlocks = kByShared < 1 ? 1 : kByShared < kByRegisters ? kByShared : kByRegisters;
  static_assert(kD % 64 == 0 && kTile % kTileN == 0 && (kInt4 || kRowBytes % 64 == 0));

  /// Rings, whose place the sums of the warps take; then the rows' statistics, Q, and where a cluster meets.
  __host__ __device__ static constexpr uint32_t ring_bytes(int warps) {
    const int sums = warps * kSums * 4, rings = warps * kRingBytes;
    return rings > sums ? rings : sums;
  }
  __host__ __device__ static constexpr uint32_t meeting_at(int warps) {
    return ring_bytes(warps) + warps * kRows * 16 + (kKeepQuery ? 0 : kQueryBytes);
  }
  __host__ static constexpr uint32_t shared_bytes(int warps, bool in_cluster) {
    return meeting_at(warps) + (in_cluster ? kMeetingBytes : 0);
  }
  static constexpr int kMostWarps = kMaxWaves * kBlocks;  // of a block, which is then alone on its multiprocessor
  static constexpr int kQueryBytes = kD / 16 * kEights * 32 * 8;
  /// Where the blocks of a cluster leave what this one adds up: of each, some runs of 32 columns and their rows' statistics.
  static constexpr int kMeetingBytes = (kSums * 4 + Split::kMostBlocks * 8 * 16) + (kSums / 32 + Split::kMostBlocks) * 16;

  /// Where a piece of a key, one of the first eight of a run of 8 keys, is in it: of the 128 bytes that `key` has, or of those
  /// that two keys share.
  __device__ __forceinline__ static uint32_t wide_place(uint32_t key, uint32_t piece) {
    return key * 128 + ((piece ^ (key & 6) ^ (key & 1) * 5) << 4);
  }
  __device__ __forceinline__ static uint32_t end_place(uint32_t key, uint32_t piece) {
    return key / 2 * 128 + (((piece | (key & 1) << 2) ^ (key & 6)) << 4);
  }
  static constexpr int kWideStep = kTile * 128, kEndAt = kWide * kWideStep;  // bytes of the wide runs of a step, and of all
  /// Column of the second product's tile n that lanes of index g have.
  __device__ __forceinline__ static constexpr uint32_t column(int n, uint32_t g) {
    if (!kQuantised) return 8 * n + g;
    if (kInt4) return kD / 8 * g + n;
    return n < 16 * kWide ? n / 16 * 128 + 16 * g + n % 16 : kWide * 128 + 8 * g + n % 8;
  }
  /// Where columns 4 c to 4 c + 3 of a row are among the sums, in floats.
  __device__ __forceinline__ static uint32_t four(uint32_t row, uint32_t c) {
    return row * kD + 4 * (c ^ (row >> 1 & 3));
  }
};

}  // namespace hf::decode_attention
