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

#include "hipforge/device/early_start.h"
#include "stream_sums.h"

namespace hf::decode_attention {

/// Grid: (split.blocks(), ceil(M / kRows), B * Hkv), in clusters of split.cluster.value; block: split.warps warps; Layout::shared_bytes.
template <class Half, int kD, Format kFormat, int kBlockN, int kEights>
__global__ void __launch_bounds__(Layout<Half, kD, kFormat, kBlockN, kEights>::kMostWarps * 32, 1)
    decode_stream(const __grid_constant__ Problem p, const Split split, const uint32_t groups, const bool whole_pieces) {
  using L = Layout<Half, kD, kFormat, kBlockN, kEights>;
  using Element = typename L::Element;
  constexpr int kTile = L::kTile, kUnits = kTile / kTileN, kKeys = kTile / 8, kChunks = kD / 16, kRows = 2 * kEights;  // keys, rows of a lane
  constexpr bool kRowScales = L::kRowScales, kInt4 = L::kInt4, kScaled = L::kScaled;
  constexpr float kSlack = kRowScales ? 0.f : 1.f, kRaised = L::kRaised;
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

  wait_copies<0>();
  __syncthreads();  // the rings are read
  const Sums<L> own{acc, maximum, total, shifted, gain, v_scale_of_head};
  add_up<Half, L>(p, split, tokens, RowsOf{head, row0, rows}, own, shared, statistics);
}

}  // namespace hf::decode_attention
