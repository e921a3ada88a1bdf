// Decode attention on sm_90: every warp streams its own keys through a ring in shared memory, and a cluster adds up the parts.
//
//              keys of a sequence, in steps of kTile                   A cluster of up to 16 blocks has 8 or 16 rows (the query
//        +----+----+----+----+----+----+----+----+--                   heads that share a KV head, and their tokens) of a sequence
//  part  |         0         |         1         |   ...               and KV head; a block has one part of the keys, or
//        +----+----+----+----+----+----+----+----+--                   several, and its warps take their steps in turn.
//  warp  | w0 | w1 | w2 | w3 | w0 | w1 | w2 | w3 |
//        +----+----+----+----+----+----+----+----+--                   A slot of a warp's ring holds a step of K and of V:
//
//   scores^T [kTile x rows] = K [kTile x D] Q^T      mma.m16n8k16: lane 4 g + t has keys 8 k + g of rows 2 t and 2 t + 1
//   out^T    [D x rows]    += V^T [D x kTile] P^T    movmatrix makes this operand of the weights; a lane keeps its rows
//
// Rows are the N of an instruction, 8 for up to 8 rows, so that a call with few of them does half of the products and keeps half
// of the sums. The k index of a product may be permuted where both operands agree: of K a lane takes whole 16-byte pieces t,
// t + 4, ... of keys g and g + 8, and of Q the same elements. Fp8 becomes f16, exactly; Q is brought into f16's range by a power
// of 2 for each row, so that its bf16 values stay exact but for those below 2^-29 of the row's largest. Of V a lane takes the
// bytes of columns 16 g to 16 g + 15 of four keys, and pairs those of two keys while it converts; 16-bit V comes by
// ldmatrix.trans. Weights are rounded to f16 (at most 2^15, or with a scale per row so that the row's largest is in
// [2^14, 2^15)), over a bf16 cache to bf16.
// Scales stay out of the products:
//   q.(s k + t) = s (q.k) + t sum(q)        sum p (s v + t) = sum (p s) v + sum p t
//
// Pieces of a key lie at piece ^ swizzle(key) of its 128 bytes: no read meets a bank twice.
//
// Bytes: 2 D (fp8) or 4 D per key and KV head, each read once; memory is the bound. A warp has a step of K
// and V under way while it multiplies another: 8 warps have 32 KiB per multiprocessor, about bandwidth times latency. With 128 KiB
// the GPU read 4 to 20 % more slowly (measured).
//
// A single sequence waits for one trip to memory after another: lengths, pages and Q are asked for together, Q before K and V,
// because loads return in order; a row's maximum stays where no score exceeds it by more than 1, which saves the exchange between
// lanes in most steps.
//
// The end: warps add up in shared memory; each block of a cluster leaves its part of a run of columns with the block that adds that
// run up, always in the same order. With more parts than a cluster has blocks, clusters write theirs and decode_merge adds them up.
#pragma once

#include <type_traits>

#include "../../mxfp8_gemm/nvidia/stream.h"
#include "hipforge/device/early_start.h"
#include "row_output.h"

namespace hf::decode_attention {

enum class Format { half, fp8, rows, int4 };

constexpr int kMostGroups = 8;  // words of scales of an int4 row

/// Every thread of the cluster's blocks meets the others. The runtime's own functions are called without
/// cooperative_groups.h, which has three times the text of everything else and a third of the compile time.
__device__ __forceinline__ void meet_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
/// Where block `block` of the cluster has what this one has at `address`, in shared memory.
template <typename T>
__device__ __forceinline__ T* in_block(T* address, uint32_t block) {
  return static_cast<T*>(__cluster_map_shared_rank(address, block));
}

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
  static constexpr bool kInt4 = kFormat == Format::int4;
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
  static constexpr int kWordsBytes = kTile * (kInt4 ? 4 * kMostGroups : kFormat == Format::rows ? 4 : 0);
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

__device__ __forceinline__ void copy_word_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from),
               "r"(bytes));
}

/// d += a b, 16 x 16 by 16 x 8 with float32 sums.
template <class Element>
__device__ __forceinline__ void add_product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, dev::f16>) {
    multiply_add(d, a, b0, b1);
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two floats as a pair of elements, the first one in the low half.
template <class Element>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<Element, dev::f16>) {
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  }
  return pair;
}

/// 0xFFFF for each half of a pair that is infinite or NaN.
template <class Element>
__device__ __forceinline__ uint32_t specials(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, dev::f16> ? 0x7C00 : 0x7F80;
  return ((pair & kExponent) == kExponent ? 0xFFFF : 0) | ((pair >> 16 & kExponent) == kExponent ? 0xFFFF0000 : 0);
}

/// A value that is computed once and kept: the compiler would compute it again where it is used, in every step.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ const uint8_t* kept(const uint8_t* address) {
  asm volatile("" : "+l"(address));
  return address;
}

/// Loads that stay where they are written.
__device__ __forceinline__ uint2 loaded_now(const uint2* from) {
  uint2 value;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
}
__device__ __forceinline__ uint32_t loaded_now(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}
__device__ __forceinline__ float loaded_now(const float* from) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

/// kCount neighbouring words, by loads as wide as their place allows.
template <int kCount>
__device__ __forceinline__ void words_of(const uint32_t* from, uint32_t (&to)[kCount]) {
  constexpr int kWidth = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kCount; i += kWidth) {
    if constexpr (kWidth == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    } else if constexpr (kWidth == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from + i);
      to[i] = two.x, to[i + 1] = two.y;
    } else {
      to[i] = from[i];
    }
  }
}

/// Nibbles kOdd and kOdd + 4 of a word as elements code * scale + shift, rounded once.
template <int kOdd>
__device__ __forceinline__ uint32_t elements_of(uint32_t word, uint32_t factors, uint32_t shifts) {
  constexpr uint32_t kBias = 0x64006400;  // 1024, whose last bit is 1; a nibble at bit 4 is 16 code
  const uint32_t raised = (word & (0x000F000Fu << 4 * kOdd)) | kBias;
  uint32_t codes, elements;
  if constexpr (kOdd == 0) {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(codes) : "r"(raised), "r"(kBias));
  } else {
    constexpr uint32_t kSixteenth = 0x2C002C00, kLess = 0xD400D400;  // 1 / 16, -64
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(codes) : "r"(raised), "r"(kSixteenth), "r"(kLess));
  }
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(elements) : "r"(codes), "r"(factors), "r"(shifts));
  return elements;
}

/// The larger, or the sum, over the eight lanes that share two rows.
__device__ __forceinline__ float largest_of_row(float value) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
__device__ __forceinline__ float sum_of_row(float value) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

/// A matrix of 8 x 8 halves, of which lane 4 g + t has columns 2 t and 2 t + 1 of row g, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t other;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
  return other;
}

/// The scale and the shift in a row's word.
__device__ __forceinline__ float2 scale_and_shift(uint32_t word) {
  dev::f16 scale, shift;
  scale.bits = static_cast<uint16_t>(word), shift.bits = static_cast<uint16_t>(word >> 16);
  return make_float2(static_cast<float>(scale), static_cast<float>(shift));
}

/// What a row's sums go with; maximum is what weights 2^(score - maximum) were taken from.
struct __align__(16) Statistics {
  float maximum, total, shifted, scale;  // scale: of V, where it has one for all keys
};

/// Grid: (split.blocks(), ceil(M / kRows), B * Hkv), in clusters of split.cluster.value; block: split.warps warps; Layout::shared_bytes.
template <class Half, int kD, Format kFormat, int kBlockN, int kEights>
__global__ void __launch_bounds__(Layout<Half, kD, kFormat, kBlockN, kEights>::kMostWarps * 32, 1)
    decode_stream(const __grid_constant__ Problem p, const Split split, const uint32_t groups, const bool whole_pieces) {
  using L = Layout<Half, kD, kFormat, kBlockN, kEights>;
  using Element = typename L::Element;
  constexpr int kTile = L::kTile, kUnits = kTile / kTileN, kKeys = kTile / 8, kChunks = kD / 16, kRows = 2 * kEights;  // keys, rows of a lane
  constexpr bool kRowScales = kFormat == Format::rows, kInt4 = L::kInt4, kScaled = !kRowScales && !kInt4;
  constexpr float kSlack = kRowScales ? 0.f : 1.f;
  constexpr float kRaised = L::kF16 && !kRowScales ? 14.f : 0.f;  // weights are at most 2^kRaised
  // Products that need not wait for each other; alike for any number of rows, which do not change each other's bits.
  constexpr bool kTwoChains = kUnits == 1 && kD <= 128;
  extern __shared__ __align__(128) uint8_t shared[];
  dev::let_next_start();
  if (split.cluster.value > 1) __cluster_barrier_arrive_relaxed();  // this block runs: others may write to it
  // Row words come through L1, which a word read too early would leave in it beside a new key's.
  bool waits = !kRowScales && !kInt4 && p.new_keys != 0;
  const auto wait_once = [&] {
    if (waits) dev::wait_for_predecessor();
    waits = false;
  };
  if (!waits) dev::wait_for_predecessor();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t batch = p.kv_heads.quotient(blockIdx.z), head = blockIdx.z - batch * p.kv_heads.value;
  const Tokens tokens(p, batch);
  const uint32_t rows = p.group * tokens.count, row0 = blockIdx.y * L::kRows;
  if (row0 >= rows) return wait_once();  // the grid is for the most tokens that a sequence has; a cluster ends as one

  // The keys that some token sees, and those that every one sees.
  const int32_t given = p.seqlens[batch];
  const uint32_t length = given < 0 ? 0 : min(static_cast<uint32_t>(given), p.max_keys);
  const uint32_t hidden = p.causal ? tokens.count - 1 : 0;  // keys after the first token's own
  const bool windowed = p.window != kNoWindow;  // otherwise where to begin is known before the length
  uint32_t begin = 0, whole_begin = 0;
  if (windowed) {
    begin = kept(length > hidden + p.window ? length - hidden - p.window : 0), whole_begin = length > p.window ? length - p.window : 0;
  }
  const uint32_t whole_end = length > hidden ? length - hidden : 0;

  // This warp's steps: the blocks take them in turn, the warps of one those next to each other.
  const uint32_t base = begin / kTileN * kTileN, steps = (length - base + kTile - 1) / kTile;
  const uint32_t stride = split.stride.value, first = blockIdx.x * warps + warp;
  const uint32_t items = first < min(steps, stride) ? split.stride.quotient(steps - first + stride - 1) : 0;
  const auto key_of_unit = [&](uint32_t unit) { return base + (first + unit / kUnits * stride) * kTile + unit % kUnits * kTileN; };

  uint8_t* const ring = shared + warp * L::kRingBytes;
  Statistics* const statistics = reinterpret_cast<Statistics*>(shared + L::ring_bytes(warps));
  uint2* const query_shared = reinterpret_cast<uint2*>(statistics + warps * L::kRows);

  // Lane i has the page of unit i (16 keys) of each 32.
  const int32_t* const table = p.block_tables + uint64_t{batch} * p.max_pages;
  const auto page_of = [&](uint32_t unit) {
    const uint32_t index = p.page_size.quotient(key_of_unit(unit));
    return index < p.max_pages ? static_cast<uint32_t>(table[index]) : batch;
  };
  uint32_t asked = 0, pages = page_of(lane), next_pages = 0, offsets;
  const auto find_offsets = [&] {
    const uint32_t key = key_of_unit(asked * kUnits + lane);
    offsets = key - p.page_size.quotient(key) * p.page_size.value;
    if (asked * kUnits + 32 < items * kUnits) next_pages = page_of(asked * kUnits + 32 + lane);
  };
  find_offsets();

  // A lane copies piece lane % 8 of every fourth key, or lane % 4 of every eighth.
  const uint32_t wide_row = lane / 8, end_row = lane / 4;
  const uint32_t wide_to = L::kWide > 0 ? kept(L::wide_place(wide_row, lane % 8)) : 0, end_to = L::kEnd ? kept(L::end_place(end_row, lane % 4)) : 0;
  const auto first_piece = [&](const Cache& cache) { return L::kWide > 0 ? uint64_t{wide_row} * cache.slot_stride + lane % 8 * 16 : 0; };
  const uint8_t* const side_of[2] = {kept(p.k.data + head * p.k.head_stride + first_piece(p.k)),
                                     kept(p.v.data + head * p.v.head_stride + first_piece(p.v))};

  // Copies 16 keys of one side; keys that no token sees are zeros, their scales included.
  const auto copy_unit = [&](auto whole, int side, uint8_t* slot, int u, uint32_t key, uint32_t page, uint32_t offset) {
    const Cache& cache = side ? p.v : p.k;
    uint8_t* const tile = slot + side * L::kRowsBytes;
    [[maybe_unused]] uint8_t* const words = slot + 2 * L::kRowsBytes + side * L::kWordsBytes;
    const auto bytes = [&](uint32_t own, int count) {
      return decltype(whole)::value || (key + own >= begin && key + own < length) ? count : 0;
    };
    const uint8_t* const from = side_of[side] + page * cache.page_stride + uint64_t{offset} * cache.slot_stride;
    if constexpr (kInt4) {  // rows start at any word, or all at 16 bytes
      const auto copy_each = [&](uint8_t* to, uint32_t pitch, uint32_t of_key, uint32_t first, uint32_t at, auto size) {
        const uint32_t own = at / of_key, each = at - own * of_key;
        uint8_t* const place = to + 4 * (u * kTileN + own) * pitch + size * each;
        const uint8_t* const source = from + own * cache.slot_stride + size * (first + each);
        if constexpr (size == 16) {
          copy_async(place, source, bytes(own, 16));
        } else {
          copy_word_async(place, source, bytes(own, 4));
        }
      };
      const auto copy_rows = [&](auto size) {
        constexpr uint32_t kEach = L::kNibbleWords * 4 / size;
        const uint32_t scales = groups * 4 / size;
#pragma unroll
        for (uint32_t at = lane; at < kTileN * kEach; at += 32) copy_each(tile, L::kNibblePitch, kEach, scales, at, size);
        for (uint32_t at = lane; at < kTileN * scales; at += 32) copy_each(words, kMostGroups, scales, 0, at, size);
      };
      if (whole_pieces) {
        copy_rows(std::integral_constant<uint32_t, 16>{});
      } else {
        copy_rows(std::integral_constant<uint32_t, 4>{});
      }
    }
#pragma unroll
    for (int i = 0; i < 4 && L::kWide > 0; ++i) {  // four keys further, the third bit of the swizzle turns
      const uint32_t own = wide_row + 4 * i;
      const uint8_t* const row = from + uint64_t{4u * i} * cache.slot_stride;
#pragma unroll
      for (int b = 0; b < L::kWide; ++b)
        copy_async(tile + (wide_to ^ i % 2 * 64) + (u * kTileN + 4 * i) * 128 + b * L::kWideStep, row + 128 * b, bytes(own, 16));
    }
#pragma unroll
    for (int i = 0; i < 2 && L::kEnd; ++i)
      copy_async(tile + L::kEndAt + end_to + (u * kTileN + 8 * i) * 64,
                 from - first_piece(cache) + uint64_t{end_row + 8 * i} * cache.slot_stride + L::kWide * 128 + lane % 4 * 16,
                 bytes(end_row + 8 * i, 16));
    if constexpr (kRowScales) {
      const uint32_t own = lane % kTileN;
      if (lane < kTileN)
        copy_word_async(words + (u * kTileN + own) * 4,
                        cache.rows + head * cache.rows_head_stride + page * cache.rows_page_stride +
                            uint64_t{offset + own} * cache.rows_slot_stride,
                        bytes(own, 4));
    }
  };
  const auto ask_next = [&](int slot) {
    if (asked < items) {
      uint8_t* const to = ring + slot * L::kSlotBytes;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint32_t unit = asked * kUnits + u, key = key_of_unit(unit);
        const uint32_t page = __shfl_sync(~0u, pages, unit % 32), offset = __shfl_sync(~0u, offsets, unit % 32);
        const auto copy_both = [&](auto whole, uint32_t page) {
          copy_unit(whole, 0, to, u, key, page, offset);
          copy_unit(whole, 1, to, u, key, page, offset);
        };
        if (key >= begin && key + kTileN <= length) {
          copy_both(std::true_type{}, page);
        } else {
          copy_both(std::false_type{}, key < length ? page : 0);
        }
      }
      ++asked;
      if (asked * kUnits % 32 == 0) pages = next_pages, find_offsets();
    }
    commit_copies();
  };
  // Q's elements: asked for before K and V, behind which they would arrive.
  uint32_t raw[kEights][kChunks][2];
  float k_scale_of_head = 1.f, v_scale_of_head = 1.f;
  const auto load_query = [&] {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const uint32_t row = min(row0 + 8 * n + g, rows - 1), of_group = tokens.of_group(row), token = row - of_group * tokens.count;
      const ResultRow at(p, tokens, head * p.group + of_group, token, kD);
      const uint2* const from = reinterpret_cast<const uint2*>(static_cast<const Half*>(p.q) + at.offset);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if constexpr (kInt4) {  // elements 0 and 4, then 1 and 5 of a word of eight; of the next product 2 and 6, 3 and 7
          const auto* const pairs = reinterpret_cast<const uint32_t*>(from) + kD / 8 * t + c / 2 * 4 + c % 2;
          raw[n][c][0] = loaded_now(pairs), raw[n][c][1] = loaded_now(pairs + 2);
        } else {
          const uint2 four = loaded_now(from + (t + c / L::kProducts * 4) * L::kProducts + c % L::kProducts);
          raw[n][c][0] = four.x, raw[n][c][1] = four.y;
        }
      }
    }
    if constexpr (kScaled) {
      k_scale_of_head = loaded_now(p.k.scale + p.k.scale_stride * head), v_scale_of_head = loaded_now(p.v.scale + p.v.scale_stride * head);
    }
  };
  const bool late = waits || !L::kKeepQuery;  // which has no registers for it meanwhile
  if (!late) load_query();
#pragma unroll
  for (int s = 0; s < L::kSlots - 1; ++s) {
    if (asked < items && key_of_unit(asked * kUnits) + kTile + p.new_keys > length) wait_once();
    ask_next(s);
  }
  wait_once();  // from here on, Q and the new keys may be read and the output written
  if (late) load_query();

  // Q: of row g of each eight, as an operand; and of the lane's rows 8 n + 2 t + r, what their scores are multiplied with and the
  // keys that they see.
  uint32_t query[L::kKeepQuery ? kChunks : 1][kEights][2], low[kRows], high[kRows];
  float factor[kRows], query_sum[kRows];
  const float scale = kScaled ? p.factor * scale_in_logits(k_scale_of_head) : p.factor;
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
    uint32_t words[kChunks][2];  // of two elements
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      words[c][0] = kInt4 ? __byte_perm(raw[n][c][0], raw[n][c][1], 0x5410) : raw[n][c][0];
      words[c][1] = kInt4 ? __byte_perm(raw[n][c][0], raw[n][c][1], 0x7632) : raw[n][c][1];
    }
    float own_factor = scale, own_sum = 0.f;
    if constexpr (L::kQuantised) {
      const auto element = [&](int c, int i) {
        Half half;
        half.bits = static_cast<uint16_t>(words[c][i / 2] >> 16 * (i % 2));
        return static_cast<float>(half);
      };
      float largest = 0.f;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          largest = fmaxf(largest, fabsf(element(c, i)));
          if constexpr (kRowScales) own_sum += element(c, i);
        }
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if constexpr (kRowScales) own_sum += __shfl_xor_sync(~0u, own_sum, distance);
      }
      // The power of 2 that brings the largest into [2^14, 2^15), as far as a float has it and its inverse.
      const uint32_t exponent = __float_as_uint(largest) >> 23;
      const uint32_t power = exponent == 255 ? 127 : min(268 - exponent, 253u);
      const float raise = __uint_as_float(power << 23);
      own_factor = __uint_as_float((254 - power) << 23) * (kRowScales ? 1.f : scale);
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float even = element(c, 2 * h) * raise, odd = element(c, 2 * h + 1) * raise;
          words[c][h] = pair_of<dev::f16>(even, odd);
        }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if constexpr (L::kKeepQuery) {
        query[c][n][0] = words[c][0], query[c][n][1] = words[c][1];
      } else if (warp == 0) {
        query_shared[(c * kEights + n) * 32 + lane] = make_uint2(words[c][0], words[c][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * n + i;
      factor[r] = __shfl_sync(~0u, own_factor, 4 * (2 * t + i));
      query_sum[r] = kRowScales ? __shfl_sync(~0u, own_sum, 4 * (2 * t + i)) : 0.f;
      const uint32_t row = min(row0 + 8 * n + 2 * t + i, rows - 1), token = row - tokens.of_group(row) * tokens.count;
      const uint32_t after = p.causal ? tokens.count - 1 - token : 0;
      high[r] = length > after ? length - after : 0;
      low[r] = high[r] > p.window ? high[r] - p.window : 0;
    }
  }
  if constexpr (!L::kKeepQuery) __syncthreads();

  float acc[kD / 16][kEights][4] = {}, maximum[kRows], total[kRows] = {}, shifted[kRows] = {}, peak[kRows] = {}, gain[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) maximum[r] = -kInfinity, gain[r] = 1.f;
  // Where a lane finds its pieces: of K t of key g, and of V g of keys 2 t and 2 t + 1 (16-bit V: of key lane % 8, every other).
  const uint32_t k_wide = kept(L::wide_place(g, t)), k_end = L::kEnd ? kept(L::end_place(g, t)) : 0;
  uint32_t v_wide[2], v_end[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v_wide[i] = kept(L::kQuantised ? L::wide_place(2 * t + i, g) : L::wide_place(lane % 8, lane / 16) + lane / 8 % 2 * 1024);
    v_end[i] = L::kEnd ? kept(L::end_place(2 * t + i, g / 2) + g % 2 * 8) : 0;
  }
  if (split.cluster.value > 1) __cluster_barrier_wait();  // they do, while the first keys are under way
  int slot = 0;
  for (uint32_t item = 0; item < items; ++item) {
    const uint32_t key0 = base + (first + item * stride) * kTile;
    ask_next(slot == 0 ? L::kSlots - 1 : slot - 1);
    wait_copies<L::kSlots - 1>();
    __syncwarp();
    const uint8_t* const keys = ring + slot * L::kSlotBytes;
    const uint8_t* const values = keys + L::kRowsBytes;
    const auto* const words = reinterpret_cast<const uint32_t*>(values + L::kRowsBytes);  // of K, then of V

    float sums[kUnits][kEights][4] = {}, others[kUnits][kEights][4] = {};
    const auto score = [&](int k, int r) -> float& { return sums[k / 2][r / 2][k % 2 * 2 + r % 2]; };  // of key 8 k + g
    constexpr int kVector = L::kPieces % 4 == 0 ? 4 : 2;  // words of int4 in a load
    uint32_t k_words[kUnits][2][kVector];
    uint32_t k_scale[kKeys][2];  // of a lane's two parts of a key
    if constexpr (kInt4) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k)
#pragma unroll
        for (int part = 0; part < 2; ++part) k_scale[k][part] = words[(8 * k + g) * kMostGroups + (2 * t + part) * groups / 8];
    }
#pragma unroll
    for (int piece = 0; piece < L::kPieces; ++piece) {
      uint32_t b[L::kProducts][kEights][2];
#pragma unroll
      for (int m = 0; m < L::kProducts; ++m)
#pragma unroll
        for (int n = 0; n < kEights; ++n) {
          const int c = piece * L::kProducts + m;
          if constexpr (L::kKeepQuery) {
            b[m][n][0] = query[c][n][0], b[m][n][1] = query[c][n][1];
          } else {
            const uint2 pairs = query_shared[(c * kEights + n) * 32 + lane];
            b[m][n][0] = pairs.x, b[m][n][1] = pairs.y;
          }
        }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint32_t a[L::kProducts][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // keys g and g + 8
          const uint32_t key = kTileN * u + 8 * h + g;
          if constexpr (kInt4) {
            if (piece % kVector == 0) words_of<kVector>(reinterpret_cast<const uint32_t*>(keys) + key * L::kNibblePitch + L::kPieces * t + piece, k_words[u][h]);
            const uint32_t word = k_words[u][h][piece % kVector];
            const uint32_t of = k_scale[2 * u + h][piece * 2 / L::kPieces];
            const uint32_t factors = __byte_perm(of, of, 0x1010), shifts = __byte_perm(of, of, 0x3232);
#pragma unroll
            for (int m = 0; m < 2; ++m)
              a[m][h] = elements_of<0>(word >> 8 * m, factors, shifts), a[m][h + 2] = elements_of<1>(word >> 8 * m, factors, shifts);
          } else {
            const uint32_t at = piece < 2 * L::kWide ? (k_wide ^ piece % 2 * 64) + (key - g) * 128 + piece / 2 * L::kWideStep
                                                     : L::kEndAt + k_end + (key - g) * 64;
            const uint4 bytes = *reinterpret_cast<const uint4*>(keys + at);
            if constexpr (L::kQuantised) {
              halves_of(bytes.x, a[0][h], a[0][h + 2]), halves_of(bytes.y, a[1][h], a[1][h + 2]);
              halves_of(bytes.z, a[2][h], a[2][h + 2]), halves_of(bytes.w, a[3][h], a[3][h + 2]);
            } else {
              a[0][h] = bytes.x, a[0][h + 2] = bytes.y, a[1][h] = bytes.z, a[1][h + 2] = bytes.w;
            }
          }
        }
#pragma unroll
        for (int m = 0; m < L::kProducts; ++m)
#pragma unroll
          for (int n = 0; n < kEights; ++n) add_product<Element>(kTwoChains && m % 2 ? others[u][n] : sums[u][n], a[m], b[m][n][0], b[m][n][1]);
      }
    }
    if constexpr (kTwoChains) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[u][n][i] += others[u][n][i];
    }

    float v_scale[kKeys], v_shift[kKeys];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      float2 of_k;
      if constexpr (kRowScales) {
        const float2 of_v = scale_and_shift(words[kTile + 8 * k + g]);
        of_k = scale_and_shift(word_in_logits(words[8 * k + g])), v_scale[k] = of_v.x, v_shift[k] = of_v.y;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kRowScales) {
          score(k, r) = (score(k, r) * factor[r] * of_k.x + of_k.y * query_sum[r]) * p.factor;
        } else {
          score(k, r) *= factor[r];
        }
      }
    }
    if (p.cap != 0.f) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          score(k, r) = p.cap - __fdividef(2.f * p.cap, power2(score(k, r) * p.cap_exponent) + 1.f);
    }
    const auto seen = [&](int k, int r) { return key0 + 8 * k + g >= low[r] && key0 + 8 * k + g < high[r]; };
    if (key0 < whole_begin || key0 + kTile > whole_end) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k)
#pragma unroll
        for (int r = 0; r < kRows; ++r) score(k, r) = seen(k, r) ? score(k, r) : -kInfinity;
    }

    // The maximum of a row stays where no score exceeds it by more than 1: its weights are then at most twice 2^kRaised.
    bool rises = kRowScales;
    float tops[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tops[r] = score(0, r);
#pragma unroll
      for (int k = 1; k < kKeys; ++k) tops[r] = fmaxf(tops[r], score(k, r));
      rises |= tops[r] > maximum[r] + kSlack;
    }
    float rescale[kRows];
    bool rescales = kRowScales;
    if (kRowScales || __any_sync(~0u, rises)) {
      rescales = true;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float seen_now = largest_of_row(tops[r]), top = seen_now > maximum[r] + kSlack ? seen_now : maximum[r];
        rescale[r] = power2(maximum[r] - finite_base(top));
        maximum[r] = top;
        total[r] *= rescale[r];
        if constexpr (kRowScales) shifted[r] *= rescale[r];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float from = finite_base(maximum[r]) - kRaised;
      float largest = 0.f;
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        float& weight = score(k, r);
        const bool counts = weight != -kInfinity;
        weight = power2(weight - from);
        total[r] += weight;
        if constexpr (kRowScales) {  // a scale that is not seen may be NaN
          shifted[r] += counts ? weight * v_shift[k] : 0.f;
          weight = counts ? weight * v_scale[k] : 0.f;
          largest = fmaxf(largest, fabsf(weight));
        }
      }
      if constexpr (kRowScales) {  // weights times the scales of V in f16's range
        peak[r] = fmaxf(peak[r] * rescale[r], largest_of_row(largest));
        const uint32_t exponent = min(max(__float_as_uint(peak[r]) >> 23, 40u), 254u);
        const float now = __uint_as_float((268 - exponent) << 23);
        rescale[r] *= __fdividef(now, gain[r]);
        gain[r] = now;
#pragma unroll
        for (int k = 0; k < kKeys; ++k) score(k, r) *= now;
      }
    }
    if (kRowScales) {
      rescales = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) rescales |= rescale[r] != 1.f;
      rescales = __any_sync(~0u, rescales);
    }
    if (rescales) {
#pragma unroll
      for (int m = 0; m < kD / 16; ++m)
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[m][n][i] *= rescale[2 * n + i % 2];
    }

    // kSome: some rows see keys that others do not, whose values may be NaN, which a weight of 0 does not hide. Those are taken
    // out of the product; a product of marks for them by 1 for each key that a row sees tells which sums they reach.
    const auto add_values = [&](auto some) {
      constexpr bool kSome = decltype(some)::value;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint32_t weights[kEights][2], ones[kEights][2];
#pragma unroll
        for (int n = 0; n < kEights; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int k = 2 * u + h, r = 2 * n;
            weights[n][h] = transposed(pair_of<Element>(score(k, r), score(k, r + 1)));
            if constexpr (kSome) ones[n][h] = transposed(pair_of<Element>(seen(k, r) ? 1.f : 0.f, seen(k, r + 1) ? 1.f : 0.f));
          }
        // Columns 2 m and 2 m + 1 of a lane: of each, keys 2 t and 2 t + 1, then those 8 further.
        const auto add = [&](int m, uint32_t even0, uint32_t even8, uint32_t odd0, uint32_t odd8) {
          uint32_t a[4] = {even0, odd0, even8, odd8};
          if constexpr (kSome) {
            uint32_t special[4], any = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) special[i] = specials<Element>(a[i]), any |= special[i];
            if (__any_sync(~0u, any != 0)) {
              const uint32_t one = pair_of<Element>(1.f, 1.f);
#pragma unroll
              for (int i = 0; i < 4; ++i) a[i] &= ~special[i], special[i] &= one;
#pragma unroll
              for (int n = 0; n < kEights; ++n) {
                float marked[4] = {};
                add_product<Element>(marked, special, ones[n][0], ones[n][1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][n][i] = marked[i] > 0.f ? __int_as_float(0x7FC00000) : acc[m][n][i];
              }
            }
          }
#pragma unroll
          for (int n = 0; n < kEights; ++n) add_product<Element>(acc[m][n], a, weights[n][0], weights[n][1]);
        };
        if constexpr (kInt4) {
          const uint32_t k0 = u * kTileN + 2 * t;
          const auto* const v_words = reinterpret_cast<const uint32_t*>(values) + k0 * L::kNibblePitch + g * (kD / 64);
          const uint32_t* const v_scales = words + (kTile + k0) * kMostGroups + g * groups / 8;
          uint32_t factors[2], shifts[2];  // of keys 2 t and 2 t + 1, and of those 8 further
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t even = v_scales[8 * h * kMostGroups], odd = v_scales[(8 * h + 1) * kMostGroups];
            factors[h] = __byte_perm(even, odd, 0x5410), shifts[h] = __byte_perm(even, odd, 0x7632);
          }
          uint32_t of_key[2][2][kD / 64];
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i) words_of<kD / 64>(v_words + (8 * h + i) * L::kNibblePitch, of_key[h][i]);
#pragma unroll
          for (int w = 0; w < kD / 64; ++w) {
            uint32_t of[2][2];  // columns 0 to 3 of a pair of keys, and 4 to 7
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t even = of_key[h][0][w], odd = of_key[h][1][w];
              of[h][0] = __byte_perm(even, odd, 0x5410), of[h][1] = __byte_perm(even, odd, 0x7632);
            }
            const auto even = [&](int i, int h) { return elements_of<0>(of[h][i / 4] >> 4 * (i % 4), factors[h], shifts[h]); };
            const auto odd = [&](int i, int h) { return elements_of<1>(of[h][i / 4] >> 4 * (i % 4), factors[h], shifts[h]); };
#pragma unroll
            for (int i = 0; i < 8; i += 2) add(4 * w + i / 2, even(i, 0), even(i, 1), odd(i, 0), odd(i, 1));
          }
        } else if constexpr (L::kQuantised) {
          const auto add_words = [&](int m, uint32_t v0, uint32_t v1, uint32_t v8, uint32_t v9) {  // of keys 2 t, 2 t + 1, ...
            uint32_t b0[4], b8[4];
            halves_of(__byte_perm(v0, v1, 0x5140), b0[0], b0[1]), halves_of(__byte_perm(v0, v1, 0x7362), b0[2], b0[3]);
            halves_of(__byte_perm(v8, v9, 0x5140), b8[0], b8[1]), halves_of(__byte_perm(v8, v9, 0x7362), b8[2], b8[3]);
            add(m, b0[0], b8[0], b0[1], b8[1]), add(m + 1, b0[2], b8[2], b0[3], b8[3]);
          };
#pragma unroll
          for (int b = 0; b < L::kWide; ++b) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              v[i] = *reinterpret_cast<const uint4*>(values + v_wide[i % 2] + (u * kTileN + i / 2 * 8) * 128 + b * L::kWideStep);
            add_words(8 * b, v[0].x, v[1].x, v[2].x, v[3].x), add_words(8 * b + 2, v[0].y, v[1].y, v[2].y, v[3].y);
            add_words(8 * b + 4, v[0].z, v[1].z, v[2].z, v[3].z), add_words(8 * b + 6, v[0].w, v[1].w, v[2].w, v[3].w);
          }
          if constexpr (L::kEnd) {
            uint2 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              v[i] = *reinterpret_cast<const uint2*>(values + L::kEndAt + v_end[i % 2] + (u * kTileN + i / 2 * 8) * 64);
            add_words(8 * L::kWide, v[0].x, v[1].x, v[2].x, v[3].x), add_words(8 * L::kWide + 2, v[0].y, v[1].y, v[2].y, v[3].y);
          }
        } else {
#pragma unroll
          for (int m = 0; m < kD / 16; ++m) {
            uint32_t b[4];
            const auto at = static_cast<uint32_t>(
                __cvta_generic_to_shared(values + (v_wide[0] ^ m % 4 * 32) + u * kTileN * 128 + m / 4 * L::kWideStep));
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                         : "r"(at)
                         : "memory");
            add(m, b[0], b[1], b[2], b[3]);
          }
        }
      }
    };
    if (max(key0, begin) < whole_begin || min(key0 + kTile, length) > whole_end) {
      add_values(std::true_type{});
    } else {
      add_values(std::false_type{});
    }
    __syncwarp();  // the slot may be filled again
    slot = slot + 1 == L::kSlots ? 0 : slot + 1;
  }

  // The sums of the warps, then of the block.
  wait_copies<0>();
  __syncthreads();  // the rings are read
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float* const own = sums + warp * L::kSums;
    const uint32_t row = r / 2 * 8 + 2 * t + r % 2;
    const float lowered = kRowScales ? 1.f / gain[r] : 1.f;
    const float sum = sum_of_row(total[r]), shift = kRowScales ? sum_of_row(shifted[r]) : 0.f;
    if (g == 0) statistics[warp * L::kRows + row] = {maximum[r] - kRaised, sum, shift, v_scale_of_head};
    const auto value = [&](int c) { return acc[c / 2][r / 2][c % 2 * 2 + r % 2] * lowered; };  // of the lane's column c
    if constexpr (L::kQuantised) {
#pragma unroll
      for (int c = 0; c < kD / 8; c += 4)
        *reinterpret_cast<float4*>(own + L::four(row, L::column(c, g) / 4)) = make_float4(value(c), value(c + 1), value(c + 2), value(c + 3));
    } else {
#pragma unroll
      for (int c = 0; c < kD / 8; ++c) own[L::four(row, 2 * c + g / 4) + g % 4] = value(c);
    }
  }
  __syncthreads();
  constexpr uint32_t kFours = kD / 4, kRuns = kFours / 8;
  const uint32_t own_rows = min(rows - row0, static_cast<uint32_t>(L::kRows)), runs = own_rows * kRuns;
  // Adds up `count` parts of four columns, each with its row's statistics; returns theirs. A lane adds up four parts; of more, lanes
  // that have the same columns each have some of them.
  const auto lanes_log = [](uint32_t count) { return count > 8 ? 2u : count > 4 ? 1u : 0u; };
  const auto added = [&](uint32_t count, const Statistics* first_statistics, uint32_t statistics_step, const float4* first_values,
                         uint32_t values_step, float (&sum)[4]) {
    const uint32_t log = lanes_log(count), step = 1u << log, first = lane / 8 & (step - 1);
    Statistics of[4];
    float4 values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t i = first + j * step;
      of[j] = {-kInfinity, 0.f, 0.f, 0.f}, values[j] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i < count) of[j] = first_statistics[i * statistics_step], values[j] = first_values[i * values_step];
    }
    float largest = fmaxf(fmaxf(of[0].maximum, of[1].maximum), fmaxf(of[2].maximum, of[3].maximum));
    if (log > 0) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
    if (log > 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    const float from = finite_base(largest);
    Statistics all = {largest, 0.f, 0.f, of[0].scale};
    sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float weight = power2(of[j].maximum - from);
      all.total += weight * of[j].total;
      all.shifted += weight * of[j].shifted;
      sum[0] += weight * values[j].x, sum[1] += weight * values[j].y, sum[2] += weight * values[j].z, sum[3] += weight * values[j].w;
    }
    const auto add_across = [&](int distance) {
      all.total += __shfl_xor_sync(~0u, all.total, distance);
      if constexpr (kRowScales) all.shifted += __shfl_xor_sync(~0u, all.shifted, distance);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
    };
    if (log > 0) add_across(8);
    if (log > 1) add_across(16);
    return all;
  };
  const auto finish = [&](uint32_t row, uint32_t c, const Statistics& of, float (&sum)[4]) {
    const uint32_t m = row0 + row, of_group = tokens.of_group(m), token = m - of_group * tokens.count;
    const ResultRow to(p, tokens, head * p.group + of_group, token, kD);
    const RowEnd end(of.maximum, of.total, split.outer == 1 ? p.sinks : nullptr, to.head);
    const float scale = kScaled && end.inverse != 0.f ? end.inverse * of.scale : end.inverse;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = end.inverse == 0.f ? 0.f : (sum[i] + of.shifted) * scale;
    if (split.outer == 1) {
      store_four<Half>(p, to.offset + 4 * c, sum);
      if (c == 0) p.lse[to.lse] = end.lse * kLn2;
      return;
    }
    const uint64_t at = uint64_t{split.cluster.quotient(blockIdx.x)} * p.rows + uint64_t{tokens.first} * (p.kv_heads.value * p.group) +
                        head * p.group * tokens.count + m;
    *reinterpret_cast<float4*>(p.partial + at * kD + 4 * c) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (c == 0) p.partial_lse[at] = end.lse;
  };
  // A run is 32 columns of a row, which eight lanes have. Calls `each` with the runs that those of this lane add up, below `count`.
  static_assert(kFours % 8 == 0 && L::kMostWarps <= 4 * 4 && Split::kMostBlocks <= 4 * 4);
  const auto for_runs = [&](uint32_t count, uint32_t parts_of_each, const auto& each) {
    const uint32_t log = lanes_log(parts_of_each), at_once = 4u >> log, own = lane >> (3 + log);
    const bool stores = (lane / 8 & ((1u << log) - 1)) == 0;
    for (uint32_t i = warp * at_once; i < count; i += warps * at_once) each(min(i + own, count - 1), stores && i + own < count);
  };
  // Run i of a cluster's sums is added up by its block i % cluster, as its run i / cluster, where part p lies at p * own_runs.
  const uint32_t blocks = split.cluster.value, own_runs = split.cluster.quotient(runs + blocks - 1), of_eight = lane % 8;
  float4* const parts = reinterpret_cast<float4*>(shared + L::meeting_at(warps));
  Statistics* const part_statistics = reinterpret_cast<Statistics*>(parts + own_runs * blocks * 8);
  const uint32_t rank = split.cluster.value > 1 ? __clusterRelativeBlockRank() : 0;
  for_runs(runs, warps, [&](uint32_t run, bool stores) {
    const uint32_t row = run / kRuns, c = run % kRuns * 8 + of_eight;
    float sum[4];
    const Statistics all = added(warps, statistics + row, L::kRows, reinterpret_cast<const float4*>(sums + L::four(row, c)), L::kSums / 4, sum);
    if (!stores) return;
    if (split.cluster.value == 1) return finish(row, c, all, sum);
    const uint32_t of_owner = split.cluster.quotient(run), owner = run - of_owner * blocks, at = rank * own_runs + of_owner;
    *in_block(parts + at * 8 + of_eight, owner) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (of_eight == 0) *in_block(part_statistics + at, owner) = all;
  });
  if (split.cluster.value == 1) return;
  meet_cluster();  // the parts are here; nothing of this block is read by another one
  for_runs(own_runs, blocks, [&](uint32_t own, bool stores) {
    const uint32_t run = own * blocks + rank;
    float sum[4];
    const Statistics all = added(blocks, part_statistics + own, own_runs, parts + own * 8 + of_eight, own_runs * 8, sum);
    if (stores && run < runs) finish(run / kRuns, run % kRuns * 8 + of_eight, all, sum);
  });
}

}  // namespace hf::decode_attention
