// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 for few rows of X on sm_90: every multiprocessor streams its share of W's rows once.
//
//            K, in steps of 128 (one line of a row)                 A block has consecutive rows of W, as many as the others
//          0     1     2     3     4     5    ...                   (+- 1), and visits them in passes of kTiles x 8.
//        +-----+-----+-----+-----+-----+-----+--                    2^k_shift warps share the steps of a pass: warp w takes
//  rows  | w 0 | w 1 | ... | w15 | w 0 | w 1 |     one pass         steps w, w + 2^k_shift, ...; with fewer than all warps,
//   of W |     |     |     |     |     |     |                      groups of them take different passes at once.
//        +-----+-----+-----+-----+-----+-----+--                    A warp keeps kSlots - 1 steps of W in flight in a ring of
//        | w 0 | ...                               next pass        its own in shared memory (cp.async, 16 bytes a lane), which
//        +-----+--                                                  is not emptied between passes.
//
// Products: mma.m16n8k16 on f16, to which e4m3 converts without loss. The 16 rows are X's, the 8 columns rows of W. Of a block
// of 32 k, which has one scale in each operand, lane 4 g + t holds bytes 8 t to 8 t + 7 of rows g: two instructions, whose order
// of k is the same in both operands. Each block is summed from zero in float32 and then multiplied by 2^(sx + sw - 254): the four
// bytes of a step are added at once, and a byte is a float's exponent. Bytes outside 64 to 191, rare, are scaled one by one.
// X's lanes come from L2 a step ahead; its rows past M repeat the last one, and W's past N are read as zeros.
// Sums of the warps meet in shared memory once a pass, and are added in the order of the warps: results are deterministic.
//
// Bytes moved: N K (1 + 1/32) of W once for each kRows rows of X, M K (1 + 1/32) of X per block from L2, 2 M N written. Bound:
// W over the memory's bandwidth.
#pragma once

#include <type_traits>

#include "hipforge/device/vector.h"
#include "stream.h"

namespace hf::row_stream {

constexpr int kStep = 128;    // k of a step: one line of each row of W
constexpr int kTileRows = 8;  // rows of W in a tile
constexpr int kBlock = 32;    // k of an e8m0 scale
constexpr int kLineChunks = kStep / 16;
static_assert(kStep % kBlock == 0 && kStep / kBlock == 4, "the scales of a step are one word");

struct Problem {
  dev::bf16* out;
  const uint8_t *x, *xs, *w, *ws;
  const dev::bf16* bias;
  int m, n, k;
  int k_shift;     // log2 of the warps that share the steps of K
  int base, more;  // rows of W of a block, and how many blocks have one more
};

/// How a variant spreads over a multiprocessor: 16 warps where their registers fit, with about 6 KiB of ring each.
template <int ROWS, int TILES>
struct Layout {
  static constexpr int kHalves = ROWS / 8;               // groups of 8 rows of X
  static constexpr int kGroups = (kHalves + 1) / 2;      // instructions' 16 rows of X
  static constexpr int kWarps = ROWS <= 16 && TILES <= 3 ? 16 : 8;
  static constexpr int kSlots = TILES == 1 ? 4 : TILES == 2 ? (kWarps == 16 ? 3 : 4) : (kWarps == 16 ? 2 : 3);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kPassRows = TILES * kTileRows;
  static constexpr int kSlotBytes = kPassRows * kStep;
  static constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;
  static constexpr int kPart = kPassRows * ROWS;         // floats of a warp's sums
  static constexpr int kScalesAt = kRingBytes + 2 * kWarps * kPart * int(sizeof(float));
  static_assert(kScalesAt + 16 * 1024 <= kMostShared, "16 KiB are left for the scales of W");
};

/// Bytes of shared memory of a block that has `rows` rows of W.
template <int ROWS, int TILES>
constexpr int64_t shared_bytes(int64_t rows, int64_t k) {
  return Layout<ROWS, TILES>::kScalesAt + rows * (k / kBlock) + 2 * 16;  // the run of scales starts anywhere in 16 bytes
}

// Top bits of the bytes are set where a byte is in 64..191: then a sum of two, less 63 + 64, fits in a byte.
__device__ __forceinline__ uint32_t in_range(uint32_t scales) { return scales ^ (scales << 1); }

template <int BYTE>
__device__ __forceinline__ float power_of(uint32_t exponents) {
  const uint32_t bits = BYTE == 3 ? exponents >> 1 : exponents << (23 - 8 * BYTE);
  return __uint_as_float(bits & 0x7f800000u);
}

template <int COUNT, int PITCH>
__device__ __forceinline__ float added(const float* from) {
  float values[COUNT], sum = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = from[i * PITCH];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum += values[i];
  return sum;
}

/// ALIGNED: K is a multiple of a step, so that scales are read as words and no step is cut short.
template <int ROWS, int TILES, bool ALIGNED>
__global__ void __launch_bounds__(Layout<ROWS, TILES>::kThreads, 1) row_stream(const Problem whole) {
  using L = Layout<ROWS, TILES>;
  constexpr int kHalves = L::kHalves, kGroups = L::kGroups, kWarps = L::kWarps, kSlots = L::kSlots;
  extern __shared__ __align__(128) uint8_t shared[];
  const Problem p = [&] {  // of this block's rows of X
    Problem mine = whole;
    const int row = blockIdx.y * ROWS;
    mine.m = min(whole.m - row, ROWS);
    mine.x += size_t(row) * whole.k, mine.xs += size_t(row) * (whole.k / kBlock), mine.out += size_t(row) * whole.n;
    return mine;
  }();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int sharers = 1 << p.k_shift, part = warp & (sharers - 1), team = warp >> p.k_shift;
  const int teams = kWarps >> p.k_shift, team_shift = __ffs(kWarps) - 1 - p.k_shift;
  const int block = static_cast<int>(blockIdx.x);
  const int first = block * p.base + min(block, p.more), rows = p.base + (block < p.more);
  const int passes = (rows + L::kPassRows - 1) / L::kPassRows, rounds = (passes + teams - 1) >> team_shift;
  const int steps = ((p.k + kStep - 1) / kStep - part + sharers - 1) >> p.k_shift;
  const int items = ((passes - team + teams - 1) >> team_shift) * steps;
  const int scale_pitch = p.k / kBlock, step_bytes = sharers * kStep;

  uint8_t* const ring = shared + warp * kSlots * L::kSlotBytes;
  float* const parts = reinterpret_cast<float*>(shared + L::kRingBytes);

  // The scales of the block's rows are one run of bytes.
  const size_t run = size_t(first) * scale_pitch, run_end = run + size_t(rows) * scale_pitch, run_base = run & ~size_t(15);
  for (size_t at = run_base + threadIdx.x * 16; at < run_end; at += L::kThreads * 16)
    copy_async(shared + L::kScalesAt + (at - run_base), p.ws + at, static_cast<int>(min(run_end - at, size_t(16))));
  commit_copies();
  const uint8_t* const scales = shared + L::kScalesAt + (run - run_base);

  // The next step to ask for: this lane's 16 bytes of every fourth row.
  int ask_step = 0, left = items, rows_left = rows - team * L::kPassRows - lane / kLineChunks;
  int k_left = p.k - part * kStep - lane % kLineChunks * 16;
  const uint8_t* ask = p.w + size_t(first + team * L::kPassRows + lane / kLineChunks) * p.k + (p.k - k_left);
  const int64_t pass_bytes = int64_t(p.k) * (teams * L::kPassRows) - int64_t(steps - 1) * step_bytes;
  // Chunks of a row are swapped in pairs by the row, so that the 8-byte loads of half a warp meet no bank twice.
  const auto chunk_at = [](int row, int chunk) { return row * kStep + ((chunk ^ ((row & 3) << 1)) * 16); };
  uint8_t* const ask_to = ring + chunk_at(lane / kLineChunks, lane % kLineChunks);
  static_assert(32 / kLineChunks == 4, "a copy of a warp has four rows, whose swap is that of the first");
  const auto ask_next = [&](int slot) {
    if (left > 0) {
      const uint8_t* from = ask;
#pragma unroll
      for (int j = 0; j < TILES * 2; ++j) {
        copy_async(ask_to + slot * L::kSlotBytes + j * 4 * kStep, from, rows_left > j * 4 && (ALIGNED || k_left > 0) ? 16 : 0);
        from += int64_t(p.k) * 4;
      }
      --left;
      if (++ask_step == steps) {
        ask_step = 0, ask += pass_bytes, rows_left -= teams * L::kPassRows, k_left += (steps - 1) * step_bytes;
      } else {
        ask += step_bytes, k_left -= step_bytes;
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < kSlots - 1; ++s) ask_next(s);
  let_next_start();
  wait_for_predecessor();  // from here on, X may be read and the output written

  uint2 x_next[kHalves][4];
  uint32_t xs_next[kHalves];
  const uint8_t *x_from[kHalves], *xs_from[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = min(g + 8 * h, p.m - 1);
    x_from[h] = p.x + size_t(row) * p.k + part * kStep + 8 * t;
    xs_from[h] = p.xs + size_t(row) * scale_pitch + part * 4;
  }
  // The four scale bytes of a row from step k0 on; past K they are 1.
  const auto scale_word = [&](const uint8_t* from, int k0) {
    if (ALIGNED) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) word |= uint32_t(k0 + b * kBlock < p.k ? from[b] : 127) << (8 * b);
    return word;
  };
  const auto load_x = [&](int step) {
    const int at = step * step_bytes, k0 = part * kStep + at;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int b = 0; b < 4; ++b)
        x_next[h][b] = ALIGNED || k0 + b * kBlock < p.k ? __ldg(reinterpret_cast<const uint2*>(x_from[h] + at + b * kBlock))
                                                        : make_uint2(0, 0);
      xs_next[h] = scale_word(xs_from[h] + at / kBlock, k0);
    }
  };
  if (items > 0) load_x(0);
  wait_copies<kSlots - 1>();
  __syncthreads();  // the scales of W are there

  int w_at[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) w_at[b] = chunk_at(g, 2 * b + t / 2) + t % 2 * 8;
  int slot = 0, done = 0;
  for (int round = 0; round < rounds; ++round) {
    const int pass = round * teams + team;
    float sums[TILES][kGroups][4] = {};
    if (pass < passes) {
      const int row0 = pass * L::kPassRows + 2 * t;  // W's rows of this lane's sums: row0, row0 + 1, and those 8 i further
      const uint8_t* const scale_column = scales + part * 4;
      for (int step = 0; step < steps; ++step) {
        ask_next(slot == 0 ? kSlots - 1 : slot - 1);
        uint32_t usual = 0x80808080u, xs[kHalves], a[4][kGroups][2][4];
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          xs[h] = xs_next[h];
          usual &= in_range(xs[h]) & in_range(xs[h] + 0x01010101u);
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            const uint2 bytes = x_next[h][b];
            halves_of(bytes.x, a[b][h / 2][0][h % 2], a[b][h / 2][0][h % 2 + 2]);
            halves_of(bytes.y, a[b][h / 2][1][h % 2], a[b][h / 2][1][h % 2 + 2]);
          }
        }
        if (kHalves == 1) {
#pragma unroll
          for (int b = 0; b < 4; ++b) a[b][0][0][1] = a[b][0][0][3] = a[b][0][1][1] = a[b][0][1][3] = 0;
        }
        if (++done < items) load_x(step + 1 == steps ? 0 : step + 1);
        uint32_t sw[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int row = min(row0 + i * kTileRows + j, rows - 1);
            sw[i][j] = scale_word(scale_column + row * scale_pitch + step * step_bytes / kBlock, part * kStep + step * step_bytes);
            usual &= in_range(sw[i][j]);
          }
        const bool fast = __all_sync(~0u, usual == 0x80808080u);
        wait_copies<kSlots - 1>();
        __syncwarp();
        const uint8_t* const here = ring + slot * L::kSlotBytes;
        // Sums of one block of 32 k of tile i.
        const auto multiply = [&](int i, int b, float (&d)[kGroups][4]) {
          const uint2 bytes = *reinterpret_cast<const uint2*>(here + i * kTileRows * kStep + w_at[b]);
          uint32_t w[4];
          halves_of(bytes.x, w[0], w[1]);
          halves_of(bytes.y, w[2], w[3]);
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
#pragma unroll
            for (int c = 0; c < 4; ++c) d[m][c] = 0;
            multiply_add(d[m], a[b][m][0], w[0], w[1]);
            multiply_add(d[m], a[b][m][1], w[2], w[3]);
          }
        };
        if (fast) {
          uint32_t exponents[TILES][kHalves][2];
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
              for (int j = 0; j < 2; ++j) exponents[i][h][j] = (sw[i][j] - 0x40404040u) + (xs[h] - 0x3f3f3f3fu);
          const auto block_of = [&](auto which) {
            constexpr int b = decltype(which)::value;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
              float d[kGroups][4];
              multiply(i, b, d);
#pragma unroll
              for (int h = 0; h < kHalves; ++h)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                  float& sum = sums[i][h / 2][h % 2 * 2 + j];
                  sum = fmaf(d[h / 2][h % 2 * 2 + j], power_of<b>(exponents[i][h][j]), sum);
                }
            }
          };
          block_of(std::integral_constant<int, 0>{}), block_of(std::integral_constant<int, 1>{});
          block_of(std::integral_constant<int, 2>{}), block_of(std::integral_constant<int, 3>{});
        } else {
#pragma unroll
          for (int b = 0; b < 4; ++b)
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
              float d[kGroups][4];
              multiply(i, b, d);
#pragma unroll
              for (int h = 0; h < kHalves; ++h)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                  sums[i][h / 2][h % 2 * 2 + j] += scaled(d[h / 2][h % 2 * 2 + j], sw[i][j] >> (8 * b) & 255, xs[h] >> (8 * b) & 255);
            }
        }
        __syncwarp();  // the slot may be filled again
        slot = slot + 1 == kSlots ? 0 : slot + 1;
      }
    }
    // Two buffers in turn: whoever writes the next round's sums may be ahead of those who read these.
    float* const mine = parts + ((round & 1) * kWarps + warp) * L::kPart;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          mine[(h * 8 + g) * L::kPassRows + i * kTileRows + 2 * t + j] = sums[i][h / 2][h % 2 * 2 + j];
    __syncthreads();
    const float* const all = parts + (round & 1) * kWarps * L::kPart;
    for (int e = threadIdx.x; e < teams * L::kPart; e += L::kThreads) {
      const int at = e % L::kPart, m = at / L::kPassRows, row = (round * teams + e / L::kPart) * L::kPassRows + at % L::kPassRows;
      if (m >= p.m || row >= rows) continue;
      const float* const from = all + (e / L::kPart << p.k_shift) * L::kPart + at;
      float sum = p.k_shift == 4   ? added<16, L::kPart>(from)
                  : p.k_shift == 3 ? added<8, L::kPart>(from)
                  : p.k_shift == 2 ? added<4, L::kPart>(from)
                  : p.k_shift == 1 ? added<2, L::kPart>(from)
                                   : from[0];
      if (p.bias) sum += static_cast<float>(p.bias[first + row]);
      p.out[size_t(m) * p.n + first + row] = static_cast<dev::bf16>(sum);
    }
  }
}

}  // namespace hf::row_stream
