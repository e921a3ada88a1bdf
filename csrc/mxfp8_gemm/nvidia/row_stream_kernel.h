// Y[M, N] = X[M, K] W[N, K]^T for few rows of X on sm_90: every multiprocessor streams its share of W's rows once.
//
//            K, in steps of Step::kLine bytes of each row           A block has consecutive rows of W, as many as the others
//          0     1     2     3     4     5    ...                   (+- 1), and visits them in passes of kTiles x 8.
//        +-----+-----+-----+-----+-----+-----+--                    2^k_shift warps share the steps of a pass: warp w takes
//  rows  | w 0 | w 1 | ... | w15 | w 0 | w 1 |     one pass         steps w, w + 2^k_shift, ...; with fewer than all warps,
//   of W |     |     |     |     |     |     |                      groups of them take different passes at once.
//        +-----+-----+-----+-----+-----+-----+--                    A warp keeps kSlots - 1 steps of W in flight in a ring of
//        | w 0 | ...                               next pass        its own in shared memory (cp.async, 16 bytes a lane), which
//        +-----+--                                                  is not emptied between passes.
//
// A Step has the formats and the products: e4m3_step.h here, e2m1_step.h of the MXFP4 GEMM. X's lanes come from L2 a step ahead;
// its rows past M repeat the last one, and W's past N are read as zeros. Sums of the warps meet in shared memory once a pass, and
// are added in the order of the warps: results are deterministic.
//
// Bytes moved: W and its scales once for each kRows rows of X, X per block from L2, 2 M N written; for MX-FP8 N K (1 + 1/32) and
// M K (1 + 1/32), for MXFP4 weights N K (1/2 + 1/32). Bound: W over the memory's bandwidth.
#pragma once

#include "hipforge/device/vector.h"
#include "hipforge/module.h"
#include "row_step.h"

namespace hf::row_stream {

struct Problem {
  void* out;
  const uint8_t *x, *xs, *w, *ws;
  const void* factor;  // what a Step adds to sums or multiplies them by: a bias or one scale
  int m, n, k;
  int x_pitch, w_pitch;  // bytes from row to row
  int k_shift;     // log2 of the warps that share the steps of K
  int base, more;  // rows of W of a block, and how many blocks have one more
};

/// How a variant spreads over a multiprocessor: 16 warps where their registers fit, with about 6 KiB of ring each.
template <int ROWS, int TILES, int LINE = kStep>
struct Layout {
  static constexpr int kWarps = ROWS <= 16 && TILES <= 3 ? 16 : 8;
  static constexpr int kSlots = (TILES == 1 ? 4 : TILES == 2 ? (kWarps == 16 ? 3 : 4) : (kWarps == 16 ? 2 : 3)) * (kStep / LINE);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kPassRows = TILES * kTileRows;
  static constexpr int kSlotBytes = kPassRows * LINE;
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

/// Checks how a launch over n rows of W, which messages call `rows`, is spread.
inline void check_spread(int warps, int64_t sharers, int64_t blocks, int64_t n, const char* rows) {
  HF_CHECK(sharers >= 1 && sharers <= warps && (sharers & (sharers - 1)) == 0, "sharers must be a power of two up to ", warps,
           "; got ", sharers);
  HF_CHECK(blocks >= 1 && blocks <= n, "blocks must be between 1 and ", rows, " = ", n, "; got ", blocks);
}

inline void check_shared(int64_t bytes, int64_t blocks) {
  HF_CHECK(bytes <= kMostShared, "a block keeps the scales of its rows of W, and X where it is made, in shared memory, ", bytes,
           " bytes in all with blocks = ", blocks, "; sm_90 has ", kMostShared, ": give more blocks or fewer rows of X");
}

/// A pass's rows of W: where their scales are in shared memory, and which of the block's rows they are.
struct PassRows {
  const uint8_t* scales;
  int pitch, first, last;  // bytes of a row of scales; the first row; the block's last
};

/// Puts a warp's sums, of rows g + 8 h of X and rows 8 i + 2 t + j of W in lane 4 g + t, into [ROWS][TILES x 8] floats.
template <int TILES, int GROUPS, int HALVES>
__device__ __forceinline__ void put_sums(const float (&sums)[TILES][GROUPS][4], std::integral_constant<int, HALVES>, int lane,
                                         float* to) {
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        to[(h * 8 + lane / 4) * TILES * kTileRows + i * kTileRows + 2 * (lane % 4) + j] = sums[i][h / 2][h % 2 * 2 + j];
}

/// Sums of products whose 16 rows are W's, two tiles (the last may be alone), and whose 8 columns are rows of X.
template <int ROWS, int TILES>
struct Pairs {
  static constexpr int kHalves = ROWS / 8, kPairs = (TILES + 1) / 2;
  using Sums = float[kPairs][kHalves][4];

  /// Adds two tiles' products, the j-th two of a lane's pairs of elements after each other, by `multiply_add`.
  template <class MultiplyAdd>
  static __device__ __forceinline__ void add(const uint32_t (&w)[2][4], const uint32_t (&x)[kHalves][4], float (&sums)[kHalves][4],
                                             MultiplyAdd multiply_add) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint32_t a[4] = {w[0][j], w[1][j], w[0][j + 1], w[1][j + 1]};
        multiply_add(sums[h], a, x[h][j], x[h][j + 1]);
      }
  }

  /// Puts a warp's sums into [ROWS][TILES x 8] floats, of columns 2 t and 2 t + 1, or of every second one (COLUMNS: 1).
  template <int COLUMNS = 2>
  static __device__ __forceinline__ void put(const Sums& sums, int lane, float* to) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int h = 0; h < kHalves; ++h)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
          to[(8 * h + COLUMNS * (lane % 4) + j) * TILES * kTileRows + i * kTileRows + lane / 4] = sums[i / 2][h][i % 2 * 2 + j];
  }
};

template <class Step>
using LayoutOf = Layout<Step::kRows, Step::kTiles, Step::kLine>;

/// Step::kAligned: K is a multiple of a step, so that scales are read as words and no step is cut short.
template <class Step>
__global__ void __launch_bounds__(LayoutOf<Step>::kThreads, 1) row_stream(const Problem whole) {
  using L = LayoutOf<Step>;
  constexpr int ROWS = Step::kRows, kStepK = Step::kStepK, kLine = Step::kLine;
  constexpr int kChunks = kLine / 16, kRowsAtOnce = 32 / kChunks;  // of a line; that a copy of a warp has
  constexpr int kWarps = L::kWarps, kSlots = L::kSlots;
  extern __shared__ __align__(128) uint8_t shared[];
  const Problem p = [&] {  // of this block's rows of X
    Problem mine = whole;
    const int row = blockIdx.y * ROWS;
    mine.m = min(whole.m - row, ROWS);
    mine.x += size_t(row) * whole.x_pitch;
    mine.out = static_cast<typename Step::Result*>(whole.out) + size_t(row) * whole.n;
    if (Step::kScalesX) mine.xs += size_t(row) * (whole.k / kBlock);
    return mine;
  }();
  const auto keep = [](uint32_t value) { return Step::kKeeps ? kept(value) : value; };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sharers = 1 << p.k_shift, part = warp & (sharers - 1), team = warp >> p.k_shift;
  const int teams = kWarps >> p.k_shift, team_shift = __ffs(kWarps) - 1 - p.k_shift;
  const int block = static_cast<int>(blockIdx.x);
  const int first = block * p.base + min(block, p.more), rows = p.base + (block < p.more);
  const int passes = (rows + L::kPassRows - 1) / L::kPassRows, rounds = (passes + teams - 1) >> team_shift;
  const int steps = ((p.k + kStepK - 1) / kStepK - part + sharers - 1) >> p.k_shift;
  const int items = ((passes - team + teams - 1) >> team_shift) * steps;
  const int scale_pitch = p.k / kBlock, step_bytes = keep(sharers * kLine), step_k = keep(sharers * kStepK);

  uint8_t* const ring = shared + warp * kSlots * L::kSlotBytes;
  float* const parts = reinterpret_cast<float*>(shared + L::kRingBytes);

  // The scales of the block's rows are one run of bytes.
  const size_t run = size_t(first) * scale_pitch, run_end = run + size_t(rows) * scale_pitch, run_base = run & ~size_t(15);
  if (Step::kScalesW)
    for (size_t at = run_base + threadIdx.x * 16; at < run_end; at += L::kThreads * 16)
      copy_async(shared + L::kScalesAt + (at - run_base), p.ws + at, static_cast<int>(min(run_end - at, size_t(16))));
  commit_copies();
  const uint8_t* const scales = shared + L::kScalesAt + (run - run_base);

  // The next step to ask for: this lane's 16 bytes of its rows.
  int ask_step = 0, left = items, rows_left = rows - team * L::kPassRows - lane / kChunks;
  const int line_at = part * kLine + lane % kChunks * 16;
  int bytes_left = p.k / (kStepK / kLine) - line_at;
  const uint8_t* ask = p.w + size_t(first + team * L::kPassRows + lane / kChunks) * p.w_pitch + line_at;
  const int64_t pass_bytes = int64_t(p.w_pitch) * (teams * L::kPassRows) - int64_t(steps - 1) * step_bytes;
  const auto ask_to = [&] {
    uint8_t* const to = ring + Step::chunk_at(lane / kChunks, lane % kChunks);
    if constexpr (Step::kKeeps) return kept(shared_address(to));
    else return to;
  }();
  const int team_rows = keep(teams * L::kPassRows);
  const auto ask_next = [&](int slot) {
    if (left > 0) {
      const uint8_t* from = ask;
#pragma unroll
      for (int j = 0; j < L::kPassRows; j += kRowsAtOnce) {
        copy_async(ask_to + slot * L::kSlotBytes + j * kLine, from,
                   rows_left > j && (Step::kAligned || bytes_left > 0) ? 16 : 0);
        from += int64_t(p.w_pitch) * kRowsAtOnce;
      }
      --left;
      if (++ask_step == steps) {
        ask_step = 0, ask += pass_bytes, rows_left -= team_rows, bytes_left += (steps - 1) * step_bytes;
      } else {
        ask += step_bytes, bytes_left -= step_bytes;
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < kSlots - 1; ++s) ask_next(s);
  let_next_start();
  wait_for_predecessor();  // from here on, X may be read and the output written

  Step step_of(p, lane);
  if (items > 0) step_of.load(part * kStepK);
  wait_copies<kSlots - 1>();
  __syncthreads();  // the scales of W are there

  int slot = 0, done = 0;
  for (int round = 0; round < rounds; ++round) {
    const int pass = round * teams + team;
    typename Step::Sums sums = {};
    if (pass < passes) {
      const auto rows_of_w = step_of.rows({scales, scale_pitch, pass * L::kPassRows, rows - 1});
      int k0 = part * kStepK;
      for (int step = 0; step < steps; ++step, k0 += step_k) {
        ask_next(slot == 0 ? kSlots - 1 : slot - 1);
        const int next = ++done == items ? -1 : step + 1 == steps ? part * kStepK : k0 + step_k;
        step_of.multiply(ring + slot * L::kSlotBytes, rows_of_w, k0, next, sums, [] {
          wait_copies<kSlots - 1>();
          __syncwarp();
        });
        __syncwarp();  // the slot may be filled again
        slot = slot + 1 == kSlots ? 0 : slot + 1;
      }
    }
    // Two buffers in turn: whoever writes the next round's sums may be ahead of those who read these.
    float* const mine = parts + ((round & 1) * kWarps + warp) * L::kPart;
    Step::put(sums, lane, mine);
    __syncthreads();
    const float* const all = parts + (round & 1) * kWarps * L::kPart;
    for (int e = threadIdx.x; e < teams * L::kPart; e += L::kThreads) {
      const int at = e % L::kPart, m = at / L::kPassRows, row = (round * teams + e / L::kPart) * L::kPassRows + at % L::kPassRows;
      if (m >= p.m || row >= rows) continue;
      const float* const from = all + (e / L::kPart << p.k_shift) * L::kPart + at;
      const float sum = added<L::kPart>(from, p.k_shift);
      auto* const to = static_cast<typename Step::Result*>(p.out) + size_t(m) * p.n + first + row;
      *to = step_of.result(p, sum, first + row, *to);
    }
  }
}

}  // namespace hf::row_stream
