// Decode attention on sm_90: every warp streams its own keys through a ring in shared memory, and a cluster adds up the parts.
//
//              keys of a sequence, in steps of kTile                   A cluster of up to 16 blocks has 16 query rows (the query
//        +----+----+----+----+----+----+----+----+--                   heads that share a KV head, and their tokens) of a sequence
//  part  |         0         |         1         |   ...               and KV head; a block has one part of the keys, and its
//        +----+----+----+----+----+----+----+----+--                   warps take the part's steps in turn.
//  warp  | w0 | w1 | w2 | w3 | w0 | w1 | w2 | w3 |
//        +----+----+----+----+----+----+----+----+--                   A slot of a warp's ring holds a step of K and of V:
//
//   scores [16 rows x kTile] = Q [16 x D] K^T        mma.m16n8k16: lane 4 g + t has rows g and g + 8, keys 8 j + 2 t and + 1
//   out    [16 rows x D]    += P [16 x kTile] V      the scores' lanes are those of the second product's operand
//
// The k index of a product may be permuted where both operands agree: of K a lane takes whole 16-byte pieces t, t + 4, ... of key
// 8 j + g, and of Q the same elements. Fp8 becomes f16, exactly; Q is brought into f16's range by a power of 2 for each row, so
// that its bf16 values stay exact but for those below 2^-29 of the row's largest. Of V a lane takes the bytes of columns 16 g to
// 16 g + 15 of four keys, and pairs those of two keys while it converts; 16-bit V comes by ldmatrix.trans. Weights are rounded to
// f16 (scaled by 2^14, or with a scale per row so that the row's largest is in [2^14, 2^15)), over a bf16 cache to bf16.
// Scales stay out of the products:
//   q.(s k + t) = s (q.k) + t sum(q)        sum p (s v + t) = sum (p s) v + sum p t
//
// Pieces of a key lie at piece ^ swizzle(key) of its 128 bytes: no read meets a bank twice.
//
// Bytes: 2 D (fp8) or 4 D per key and KV head, each read once; memory is the bound. A multiprocessor gets 15 of them a cycle;
// of D = 128 in fp8, a key takes about 20 of the 68 instructions that it issues meanwhile, 2 of them products. The ring of a block
// is 64 to 200 KiB, so that 128 to 200 KiB are under way per multiprocessor, several times bandwidth times latency.
//
// The end: warps add up in shared memory, the blocks of a cluster through each other's, always in the same order. With more
// parts than a cluster has blocks, clusters write theirs and decode_merge adds them up.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "../../mxfp8_gemm/nvidia/stream.h"
#include "hipforge/device/early_start.h"
#include "row_output.h"

namespace hf::decode_attention {

enum class Format { half, fp8, rows, int4 };

constexpr int kMostGroups = 8;  // words of scales of an int4 row

/// How many parts the keys of a sequence have: `splits` of them, as clusters of blocks.
struct Split {
  static constexpr uint32_t kMostBlocks = 16;  // of a cluster; more than 8 are not portable, but sm_90 has them
  uint32_t splits, outer, cluster;

  __host__ explicit Split(uint32_t splits)
      : splits(splits), outer((splits + kMostBlocks - 1) / kMostBlocks), cluster((splits + outer - 1) / outer) {}
  __host__ uint32_t parts() const { return outer * cluster; }  // those past `splits` have no keys
};

template <class Half, int kD, Format kFormat, int kBlockN>
struct Layout {
  static constexpr bool kQuantised = kFormat != Format::half;
  using Element = std::conditional_t<kQuantised, dev::f16, Half>;  // of products
  static constexpr bool kF16 = std::is_same_v<Element, dev::f16>;
  static constexpr bool kInt4 = kFormat == Format::int4;
  static constexpr int kNibbleWords = kD / 8, kNibblePitch = kNibbleWords + 1;  // of a key of int4; in shared memory
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
  static constexpr int kSlots = kSlotBytes <= 5 * 1024 ? 4 : 3;
  static constexpr int kRingBytes = kSlots * kSlotBytes;
  static constexpr bool kKeepQuery = kD <= 128;  // in registers
  static constexpr int kSums = kBlockM * kD;     // floats
  static constexpr int kBlocks = kMaxWaves * kRingBytes > 100 * 1024 ? 1 : kMaxWaves * kRingBytes > 70 * 1024 ? 2 : 3;
  static_assert(kD % 64 == 0 && kTile % kTileN == 0 && (kInt4 || kRowBytes % 64 == 0));

  /// Rings, whose place the sums of the warps and then of the block take; then the rows' statistics, and Q.
  __host__ __device__ static constexpr uint32_t ring_bytes(int warps) {
    const int sums = (warps + 1) * kSums * 4, rings = warps * kRingBytes;
    return rings > sums ? rings : sums;
  }
  __host__ static constexpr uint32_t shared_bytes(int warps) {
    return ring_bytes(warps) + (warps + 1) * kBlockM * 16 + (kKeepQuery ? 0 : kD / 16 * 512);
  }
  static_assert(kMaxWaves * kRingBytes + (kMaxWaves + 1) * kBlockM * 16 + kD / 16 * 512 <= kMostShared);

  /// Where a piece of a key is in a step.
  __device__ __forceinline__ static uint32_t place(uint32_t key, uint32_t piece) {
    const uint32_t swizzle = (key & 6) ^ (key & 1) * 5;
    if (!kEnd || piece < 8 * kWide) return piece / 8 * (kTile * 128) + key * 128 + (((piece & 7) ^ swizzle) << 4);
    const uint32_t of_line = (piece & 3) | (key & 1) << 2;  // two keys share 128 bytes
    return kWide * kTile * 128 + key / 2 * 128 + ((of_line ^ (key & 6)) << 4);
  }
  /// Column of the second product's tile n that lanes of index g have.
  __device__ __forceinline__ static constexpr uint32_t column(int n, uint32_t g) {
    if (!kQuantised) return 8 * n + g;
    if (kInt4) return kD / 8 * g + n;
    return n < 16 * kWide ? n / 16 * 128 + 16 * g + n % 16 : kWide * 128 + 8 * g + n % 8;
  }
  /// Where columns 4 c to 4 c + 3 of a row are among the sums, in floats.
  __device__ __forceinline__ static uint32_t four(uint32_t row, uint32_t c) {
    return row * kD + 4 * (c ^ (c >> 3 & 3) ^ ((row & 1) << 2 | (row & 2)));
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

/// Nibbles 0 and 4 of a word as elements code * scale + shift, rounded once.
__device__ __forceinline__ uint32_t elements_of(uint32_t word, uint32_t factors, uint32_t shifts) {
  constexpr uint32_t kBias = 0x64006400;  // 1024, whose last bit is 1
  const uint32_t raised = (word & 0x000F000Fu) | kBias;
  uint32_t codes, elements;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(codes) : "r"(raised), "r"(kBias));
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(elements) : "r"(codes), "r"(factors), "r"(shifts));
  return elements;
}

/// The larger, or the sum, over the four lanes that share a row.
__device__ __forceinline__ float largest_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

/// The scale and the shift in a row's word.
__device__ __forceinline__ float2 scale_and_shift(uint32_t word) {
  dev::f16 scale, shift;
  scale.bits = static_cast<uint16_t>(word), shift.bits = static_cast<uint16_t>(word >> 16);
  return make_float2(static_cast<float>(scale), static_cast<float>(shift));
}

/// What a row's sums go with; maximum is what weights 2^(score - maximum) were taken from.
struct __align__(16) Statistics {
  float maximum, total, shifted, unused;
};

/// Grid: (parts, ceil(M / 16), B * Hkv), in clusters of split.cluster; block: 1, 2 or 4 warps; Layout::shared_bytes.
template <class Half, int kD, Format kFormat, int kBlockN>
__global__ void __launch_bounds__(kMaxWaves * 32, Layout<Half, kD, kFormat, kBlockN>::kBlocks)
    decode_stream(const __grid_constant__ Problem p, const Split split, const uint32_t groups) {
  using L = Layout<Half, kD, kFormat, kBlockN>;
  using Element = typename L::Element;
  constexpr int kTile = L::kTile, kEights = kTile / 8, kUnits = kTile / kTileN, kChunks = kD / 16;
  constexpr bool kRows = kFormat == Format::rows, kInt4 = L::kInt4, kScaled = !kRows && !kInt4;
  constexpr float kRaised = L::kF16 ? 14.f : 0.f;  // weights are at most 2^kRaised
  extern __shared__ __align__(128) uint8_t shared[];
  dev::let_next_start();
  dev::wait_for_predecessor();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t batch = p.kv_heads.quotient(blockIdx.z), head = blockIdx.z - batch * p.kv_heads.value;
  const Tokens tokens(p, batch);
  const uint32_t rows = p.group * tokens.count, row0 = blockIdx.y * kBlockM;
  if (row0 >= rows) return;  // the grid is for the most tokens that a sequence has; a cluster ends as one

  // The keys that some token sees, those that every one sees, and this warp's steps.
  const int32_t given = p.seqlens[batch];
  const uint32_t length = given < 0 ? 0 : min(static_cast<uint32_t>(given), p.max_keys);
  const uint32_t hidden = p.causal ? tokens.count - 1 : 0;  // keys after the first token's own
  const uint32_t begin = length > hidden + p.window ? length - hidden - p.window : 0;
  const uint32_t whole_begin = length > p.window ? length - p.window : 0, whole_end = length > hidden ? length - hidden : 0;
  const uint32_t base = begin / kTileN * kTileN, steps = (length - base + kTile - 1) / kTile;
  const uint32_t each = (steps + split.splits - 1) / split.splits, first = min(blockIdx.x * each, steps);
  const uint32_t of_block = min(each, steps - first), items = of_block > warp ? (of_block - warp + warps - 1) / warps : 0;
  const uint32_t first_key = base + (first + warp) * kTile, stride = warps * kTile;

  uint8_t* const ring = shared + warp * L::kRingBytes;
  Statistics* const statistics = reinterpret_cast<Statistics*>(shared + L::ring_bytes(warps));
  uint4* const query_shared = reinterpret_cast<uint4*>(statistics + (warps + 1) * kBlockM);

  const int32_t* const table = p.block_tables + uint64_t{batch} * p.max_pages;
  const auto page_at = [&](uint32_t key) -> uint32_t {
    if (p.max_pages == 0) return batch;
    return key < length ? static_cast<uint32_t>(table[p.page_size.quotient(key)]) : 0;
  };
  uint32_t ask_key = first_key, asked = 0, pages[kUnits];
  const auto look_up = [&] {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) pages[u] = page_at(ask_key + u * kTileN);
  };
  // Keys that no token sees are zeros, their scales included.
  const auto exists = [&](uint32_t key) { return key >= begin && key < length; };
  const auto ask_next = [&](int slot) {
    if (asked < items) {
      uint8_t* const to = ring + slot * L::kSlotBytes;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint32_t key = ask_key + u * kTileN, in_page = key - p.page_size.quotient(key) * p.page_size.value;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const Cache& cache = which ? p.v : p.k;
          const uint8_t* const from = cache.data + head * cache.head_stride + pages[u] * cache.page_stride + uint64_t{in_page} * cache.slot_stride;
          uint8_t* const tile = to + which * L::kRowsBytes;
          if constexpr (kInt4) {  // rows start at any word
            const auto copy_words = [&](uint8_t* words, uint32_t pitch, uint32_t of_key, uint32_t from_word, uint32_t at) {
              const uint32_t own = at / of_key, word = at - own * of_key;
              copy_word_async(words + 4 * ((u * kTileN + own) * pitch + word), from + own * cache.slot_stride + 4 * (from_word + word),
                              exists(key + own) ? 4 : 0);
            };
#pragma unroll
            for (uint32_t at = lane; at < kTileN * L::kNibbleWords; at += 32) copy_words(tile, L::kNibblePitch, L::kNibbleWords, groups, at);
            for (uint32_t at = lane; at < kTileN * groups; at += 32)
              copy_words(to + 2 * L::kRowsBytes + which * L::kWordsBytes, kMostGroups, groups, 0, at);
            continue;
          }
#pragma unroll
          for (int i = 0; i < 4 && L::kWide > 0; ++i) {
            const uint32_t own = lane / 8 + 4 * i;
            const int bytes = exists(key + own) ? 16 : 0;
            const uint8_t* const row = from + own * cache.slot_stride + lane % 8 * 16;
#pragma unroll
            for (int b = 0; b < L::kWide; ++b) copy_async(tile + L::place(u * kTileN + own, 8 * b + lane % 8), row + 128 * b, bytes);
          }
#pragma unroll
          for (int i = 0; i < 2 && L::kEnd; ++i) {
            const uint32_t own = lane / 4 + 8 * i;
            copy_async(tile + L::place(u * kTileN + own, 8 * L::kWide + lane % 4),
                       from + own * cache.slot_stride + L::kWide * 128 + lane % 4 * 16, exists(key + own) ? 16 : 0);
          }
        }
        if constexpr (kRows) {  // lanes 0 to 15 ask for the words of K, the others for those of V
          const Cache& cache = lane / kTileN ? p.v : p.k;
          const uint32_t own = lane % kTileN;
          copy_word_async(to + 2 * L::kRowsBytes + lane / kTileN * L::kWordsBytes + (u * kTileN + own) * 4,
                          cache.rows + head * cache.rows_head_stride + pages[u] * cache.rows_page_stride +
                              uint64_t{in_page + own} * cache.rows_slot_stride,
                          exists(key + own) ? 4 : 0);
        }
      }
      ++asked;
      ask_key += stride;
      if (asked < items) look_up();
    }
    commit_copies();
  };
  if (items > 0) look_up();
#pragma unroll
  for (int s = 0; s < L::kSlots - 1; ++s) ask_next(s);

  // Q: rows g and g + 8, what their scores are multiplied with, and the keys they see.
  uint32_t query[L::kKeepQuery ? kChunks : 1][4], low[2], high[2];
  float factor[2], query_sum[2];
  {
    uint32_t words[2][kChunks][2];  // of two elements
    const float scale = kScaled ? p.factor * p.k.scale[p.k.scale_stride * head] : p.factor;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t row = min(row0 + g + 8 * r, rows - 1), of_group = row / tokens.count, token = row - of_group * tokens.count;
      const ResultRow at(p, tokens, head * p.group + of_group, token, kD);
      const uint2* const from = reinterpret_cast<const uint2*>(static_cast<const Half*>(p.q) + at.offset);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if constexpr (kInt4) {  // elements 0 and 4, then 1 and 5 of a word of eight; of the next product 2 and 6, 3 and 7
          const auto* const low = reinterpret_cast<const uint32_t*>(from) + kD / 8 * t + c / 2 * 4 + c % 2;
          words[r][c][0] = __byte_perm(low[0], low[2], 0x5410), words[r][c][1] = __byte_perm(low[0], low[2], 0x7632);
        } else {
          const uint2 four = from[(t + c / L::kProducts * 4) * L::kProducts + c % L::kProducts];
          words[r][c][0] = four.x, words[r][c][1] = four.y;
        }
      }
      const uint32_t after = p.causal ? tokens.count - 1 - token : 0;
      high[r] = length > after ? length - after : 0;
      low[r] = high[r] > p.window ? high[r] - p.window : 0;
      factor[r] = scale;
      query_sum[r] = 0.f;
    }
    if constexpr (L::kQuantised) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto element = [&](int c, int i) {
          Half half;
          half.bits = static_cast<uint16_t>(words[r][c][i / 2] >> 16 * (i % 2));
          return static_cast<float>(half);
        };
        float largest = 0.f, sum = 0.f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(element(c, i))), sum += element(c, i);
        query_sum[r] = sum_of_row(sum);
        // The power of 2 that brings the largest into [2^14, 2^15), as far as a float has it and its inverse.
        const uint32_t exponent = __float_as_uint(largest_of_row(largest)) >> 23;
        const uint32_t power = exponent == 255 ? 127 : min(268 - exponent, 253u);
        const float raise = __uint_as_float(power << 23);
        factor[r] = __uint_as_float((254 - power) << 23);
        if constexpr (!kRows) factor[r] *= scale;
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float even = element(c, 2 * h) * raise, odd = element(c, 2 * h + 1) * raise;
            words[r][c][h] = pair_of<dev::f16>(even, odd);
          }
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint4 chunk = make_uint4(words[0][c][0], words[1][c][0], words[0][c][1], words[1][c][1]);
      if constexpr (L::kKeepQuery) {
        query[c][0] = chunk.x, query[c][1] = chunk.y, query[c][2] = chunk.z, query[c][3] = chunk.w;
      } else if (warp == 0) {
        query_shared[c * 32 + lane] = chunk;
      }
    }
    if constexpr (!L::kKeepQuery) __syncthreads();
  }

  float acc[kD / 8][4] = {}, maximum[2] = {-kInfinity, -kInfinity}, total[2] = {}, shifted[2] = {}, peak[2] = {}, gain[2] = {1.f, 1.f};
  uint32_t key0 = first_key;
  int slot = 0;
  for (uint32_t item = 0; item < items; ++item, key0 += stride) {
    ask_next(slot == 0 ? L::kSlots - 1 : slot - 1);
    wait_copies<L::kSlots - 1>();
    __syncwarp();
    const uint8_t* const keys = ring + slot * L::kSlotBytes;
    const uint8_t* const values = keys + L::kRowsBytes;
    const auto* const words = reinterpret_cast<const uint32_t*>(values + L::kRowsBytes);  // of K, then of V

    float scores[kEights][4] = {};
    const auto* const k_words = reinterpret_cast<const uint32_t*>(keys);
    uint32_t k_scale[kEights][2];  // of a lane's two parts of a key
    if constexpr (kInt4) {
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int part = 0; part < 2; ++part) k_scale[j][part] = words[(8 * j + g) * kMostGroups + (2 * t + part) * groups / 8];
    }
#pragma unroll
    for (int piece = 0; piece < L::kPieces; ++piece) {
      uint32_t a[L::kProducts][4];
#pragma unroll
      for (int m = 0; m < L::kProducts; ++m) {
        const int c = piece * L::kProducts + m;
        if constexpr (L::kKeepQuery) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = query[c][i];
        } else {
          const uint4 chunk = query_shared[c * 32 + lane];
          a[m][0] = chunk.x, a[m][1] = chunk.y, a[m][2] = chunk.z, a[m][3] = chunk.w;
        }
      }
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        if constexpr (kInt4) {
          const uint32_t word = k_words[(8 * j + g) * L::kNibblePitch + L::kPieces * t + piece];
          const uint32_t scale = k_scale[j][piece * 2 / L::kPieces];
          const uint32_t factors = __byte_perm(scale, scale, 0x1010), shifts = __byte_perm(scale, scale, 0x3232);
#pragma unroll
          for (int m = 0; m < 2; ++m)
            add_product<Element>(scores[j], a[m], elements_of(word >> 8 * m, factors, shifts), elements_of(word >> (8 * m + 4), factors, shifts));
          continue;
        }
        const uint4 bytes = *reinterpret_cast<const uint4*>(keys + L::place(8 * j + g, t + 4 * piece));
        const uint32_t of[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int m = 0; m < L::kProducts; ++m) {
          uint32_t b0, b1;
          if constexpr (L::kQuantised) {
            halves_of(of[m], b0, b1);
          } else {
            b0 = of[2 * m], b1 = of[2 * m + 1];
          }
          add_product<Element>(scores[j], a[m], b0, b1);
        }
      }
    }

    float v_scale[kEights][2], v_shift[kEights][2];
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kRows) {
          const float2 of_k = scale_and_shift(words[8 * j + 2 * t + i]), of_v = scale_and_shift(words[kTile + 8 * j + 2 * t + i]);
          v_scale[j][i] = of_v.x, v_shift[j][i] = of_v.y;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& score = scores[j][2 * r + i];
            score = (score * factor[r] * of_k.x + of_k.y * query_sum[r]) * p.factor;
          }
        } else {
#pragma unroll
          for (int r = 0; r < 2; ++r) scores[j][2 * r + i] *= factor[r];
        }
      }
    if (p.cap != 0.f) {
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float power = power2(scores[j][i] * p.cap_exponent);
          scores[j][i] = p.cap - __fdividef(2.f * p.cap, power + 1.f);
        }
    }
    const auto seen = [&](int j, int i) {  // i: two of row g, two of row g + 8
      const uint32_t key = key0 + 8 * j + 2 * t + i % 2;
      return key >= low[i / 2] && key < high[i / 2];
    };
    const bool all_seen = key0 >= whole_begin && key0 + kTile <= whole_end;
    if (!all_seen) {
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = seen(j, i) ? scores[j][i] : -kInfinity;
    }

    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = maximum[r];
#pragma unroll
      for (int j = 0; j < kEights; ++j) top = fmaxf(top, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
      top = largest_of_row(top);
      rescale[r] = power2(maximum[r] - finite_base(top));
      maximum[r] = top;
      total[r] *= rescale[r];
      const float from = finite_base(top) - (kRows ? 0.f : kRaised);
      float largest = 0.f;
      shifted[r] *= rescale[r];
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& weight = scores[j][2 * r + i];
          const bool counts = weight != -kInfinity;
          weight = power2(weight - from);
          total[r] += weight;
          if constexpr (kRows) {  // a scale that is not seen may be NaN
            shifted[r] += counts ? weight * v_shift[j][i] : 0.f;
            weight = counts ? weight * v_scale[j][i] : 0.f;
            largest = fmaxf(largest, fabsf(weight));
          }
        }
      if constexpr (kRows) {  // weights times the scales of V in f16's range
        peak[r] = fmaxf(peak[r] * rescale[r], largest_of_row(largest));
        const uint32_t exponent = min(max(__float_as_uint(peak[r]) >> 23, 40u), 254u);
        const float now = __uint_as_float((268 - exponent) << 23);
        rescale[r] *= __fdividef(now, gain[r]);
        gain[r] = now;
#pragma unroll
        for (int j = 0; j < kEights; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) scores[j][2 * r + i] *= now;
      }
    }
    if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= rescale[i / 2];
    }

    // kSome: some rows see keys that others do not, whose values may be NaN, which a weight of 0 does not hide. Those are taken
    // out of the product; a product of marks for them by 1 for each key that a row sees tells which sums they reach.
    const auto add_values = [&](auto some) {
      constexpr bool kSome = decltype(some)::value;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        uint32_t weights[4], ones[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // keys 2 t of rows g and g + 8, then keys 2 t + 8
          const int j = 2 * u + i / 2, of = i % 2 * 2;
          weights[i] = pair_of<Element>(scores[j][of], scores[j][of + 1]);
          if constexpr (kSome) ones[i] = pair_of<Element>(seen(j, of) ? 1.f : 0.f, seen(j, of + 1) ? 1.f : 0.f);
        }
        const auto add = [&](int n, uint32_t b0, uint32_t b1) {
          if constexpr (kSome) {
            const uint32_t s0 = specials<Element>(b0), s1 = specials<Element>(b1);
            if (__any_sync(~0u, (s0 | s1) != 0)) {
              const uint32_t one = pair_of<Element>(1.f, 1.f);
              float marked[4] = {};
              add_product<Element>(marked, ones, s0 & one, s1 & one);
#pragma unroll
              for (int i = 0; i < 4; ++i) acc[n][i] = marked[i] > 0.f ? __int_as_float(0x7FC00000) : acc[n][i];
              b0 &= ~s0, b1 &= ~s1;
            }
          }
          add_product<Element>(acc[n], weights, b0, b1);
        };
        if constexpr (kInt4) {
          const auto* const v_words = reinterpret_cast<const uint32_t*>(values);
          const uint32_t* const v_scales = words + kTile * kMostGroups + g * groups / 8;
          const uint32_t k0 = u * kTileN + 2 * t;
          uint32_t factors[2], shifts[2];  // of keys 2 t and 2 t + 1, and of those 8 further
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t even = v_scales[(k0 + 8 * h) * kMostGroups], odd = v_scales[(k0 + 8 * h + 1) * kMostGroups];
            factors[h] = __byte_perm(even, odd, 0x5410), shifts[h] = __byte_perm(even, odd, 0x7632);
          }
#pragma unroll
          for (int w = 0; w < kD / 64; ++w) {
            uint32_t of[2][2];  // columns 0 to 3 of a pair of keys, and 4 to 7
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t* const at = v_words + (k0 + 8 * h) * L::kNibblePitch + g * (kD / 64) + w;
              of[h][0] = __byte_perm(at[0], at[L::kNibblePitch], 0x5410), of[h][1] = __byte_perm(at[0], at[L::kNibblePitch], 0x7632);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
              add(8 * w + i, elements_of(of[0][i / 4] >> 4 * (i % 4), factors[0], shifts[0]),
                  elements_of(of[1][i / 4] >> 4 * (i % 4), factors[1], shifts[1]));
          }
        } else if constexpr (L::kQuantised) {
          const auto add_words = [&](int n, const uint32_t (&of)[4]) {  // of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9
            uint32_t b0[4], b1[4];
            halves_of(__byte_perm(of[0], of[1], 0x5140), b0[0], b0[1]);
            halves_of(__byte_perm(of[0], of[1], 0x7362), b0[2], b0[3]);
            halves_of(__byte_perm(of[2], of[3], 0x5140), b1[0], b1[1]);
            halves_of(__byte_perm(of[2], of[3], 0x7362), b1[2], b1[3]);
#pragma unroll
            for (int i = 0; i < 4; ++i) add(n + i, b0[i], b1[i]);
          };
          const auto key_of = [&](int k) { return u * kTileN + 2 * t + k % 2 + k / 2 * 8; };
#pragma unroll
          for (int b = 0; b < L::kWide; ++b) {
            uint4 bytes[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) bytes[k] = *reinterpret_cast<const uint4*>(values + L::place(key_of(k), 8 * b + g));
            add_words(16 * b, {bytes[0].x, bytes[1].x, bytes[2].x, bytes[3].x});
            add_words(16 * b + 4, {bytes[0].y, bytes[1].y, bytes[2].y, bytes[3].y});
            add_words(16 * b + 8, {bytes[0].z, bytes[1].z, bytes[2].z, bytes[3].z});
            add_words(16 * b + 12, {bytes[0].w, bytes[1].w, bytes[2].w, bytes[3].w});
          }
          if constexpr (L::kEnd) {
            uint2 bytes[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
              bytes[k] = *reinterpret_cast<const uint2*>(values + L::place(key_of(k), 8 * L::kWide + g / 2) + g % 2 * 8);
            add_words(16 * L::kWide, {bytes[0].x, bytes[1].x, bytes[2].x, bytes[3].x});
            add_words(16 * L::kWide + 4, {bytes[0].y, bytes[1].y, bytes[2].y, bytes[3].y});
          }
        } else {
          const uint32_t key = u * kTileN + lane % 16;
#pragma unroll
          for (int n = 0; n < kD / 8; n += 2) {
            uint32_t b[4];
            const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(values + L::place(key, n + lane / 16)));
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                         : "r"(at)
                         : "memory");
            add(n, b[0], b[1]);
            add(n + 1, b[2], b[3]);
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
  {
    float* const own = sums + warp * L::kSums;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t row = g + 8 * r;
      const float lowered = kRows ? 1.f / gain[r] : 1.f;
      const float sum = sum_of_row(total[r]), shift = sum_of_row(shifted[r]);
      const float from = maximum[r] == -kInfinity ? -kInfinity : maximum[r] - (kRows ? 0.f : kRaised);
      if (t == 0) statistics[warp * kBlockM + row] = {from, sum, shift, 0.f};
      if constexpr (L::kQuantised) {
#pragma unroll
        for (int n = 0; n < kD / 8; n += 4)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            *reinterpret_cast<float4*>(own + L::four(row, L::column(n, 2 * t + i) / 4)) =
                make_float4(acc[n][2 * r + i] * lowered, acc[n + 1][2 * r + i] * lowered, acc[n + 2][2 * r + i] * lowered,
                            acc[n + 3][2 * r + i] * lowered);
      } else {
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
          *reinterpret_cast<float2*>(own + L::four(row, 2 * n + t / 2) + t % 2 * 2) = make_float2(acc[n][2 * r], acc[n][2 * r + 1]);
      }
    }
  }
  __syncthreads();
  constexpr uint32_t kFours = kD / 4;
  const uint32_t own_rows = min(rows - row0, static_cast<uint32_t>(kBlockM)), fours = own_rows * kFours;
  float* const block_sums = sums + warps * L::kSums;
  Statistics* const block_statistics = statistics + warps * kBlockM;
  // Adds up `count` parts of a row, each with its statistics; returns theirs.
  const auto added = [](uint32_t count, const auto& statistics_of, const auto& four_of, float (&sum)[4]) {
    float largest = -kInfinity;
    for (uint32_t i = 0; i < count; ++i) largest = fmaxf(largest, statistics_of(i).maximum);
    const float from = finite_base(largest);
    Statistics all = {largest, 0.f, 0.f, 0.f};
    sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i) {
      const Statistics one = statistics_of(i);
      const float4 values = four_of(i);
      const float weight = power2(one.maximum - from);
      all.total += weight * one.total;
      all.shifted += weight * one.shifted;
      sum[0] += weight * values.x, sum[1] += weight * values.y, sum[2] += weight * values.z, sum[3] += weight * values.w;
    }
    return all;
  };
  const auto finish = [&](uint32_t row, uint32_t c, const Statistics& of, float (&sum)[4]) {
    const uint32_t m = row0 + row, of_group = m / tokens.count, token = m - of_group * tokens.count;
    const ResultRow to(p, tokens, head * p.group + of_group, token, kD);
    const RowEnd end(of.maximum, of.total, split.outer == 1 ? p.sinks : nullptr, to.head);
    const float scale = kScaled && end.inverse != 0.f ? end.inverse * p.v.scale[p.v.scale_stride * head] : end.inverse;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = end.inverse == 0.f ? 0.f : (sum[i] + of.shifted) * scale;
    if (split.outer == 1) {
      store_four<Half>(p, to.offset + 4 * c, sum);
      if (c == 0) p.lse[to.lse] = end.lse * kLn2;
      return;
    }
    const uint64_t at = uint64_t{blockIdx.x / split.cluster} * p.rows + uint64_t{tokens.first} * (p.kv_heads.value * p.group) +
                        head * p.group * tokens.count + m;
    *reinterpret_cast<float4*>(p.partial + at * kD + 4 * c) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (c == 0) p.partial_lse[at] = end.lse;
  };
  // Whole waves take part, with 8 neighbouring lanes for a block of 32 columns.
  static_assert(kFours % 8 == 0);
  for (uint32_t e = threadIdx.x; e < fours; e += blockDim.x) {
    const uint32_t row = e / kFours, c = e % kFours;
    float sum[4];
    const Statistics all = added(
        warps, [&](uint32_t i) { return statistics[i * kBlockM + row]; },
        [&](uint32_t i) { return *reinterpret_cast<const float4*>(sums + i * L::kSums + L::four(row, c)); }, sum);
    if (split.cluster == 1) {
      finish(row, c, all, sum);
    } else {
      *reinterpret_cast<float4*>(block_sums + L::four(row, c)) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      if (c == 0) block_statistics[row] = all;
    }
  }
  if (split.cluster == 1) return;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  for (uint32_t e = cluster.block_rank() * blockDim.x + threadIdx.x; e < fours; e += split.cluster * blockDim.x) {
    const uint32_t row = e / kFours, c = e % kFours;
    float sum[4];
    const Statistics all = added(
        split.cluster, [&](uint32_t i) { return *cluster.map_shared_rank(block_statistics + row, i); },
        [&](uint32_t i) { return *reinterpret_cast<const float4*>(cluster.map_shared_rank(block_sums + L::four(row, c), i)); }, sum);
    finish(row, c, all, sum);
  }
  cluster.sync();  // what others read stays until they have
}

}  // namespace hf::decode_attention
