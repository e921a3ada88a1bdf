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
// row_step.h has the products of a step. X's lanes come from L2 a step ahead; its rows past M repeat the last one, and W's past
// N are read as zeros. Sums of the warps meet in shared memory once a pass, and are added in the order of the warps: results are
// deterministic.
//
// Bytes moved: N K (1 + 1/32) of W once for each kRows rows of X, M K (1 + 1/32) of X per block from L2, 2 M N written. Bound:
// W over the memory's bandwidth.
#pragma once

#include "hipforge/device/vector.h"
#include "../row_stream_kernel.h"
#include "row_place.h"
#include "row_source.h"

namespace hf::made_stream {

struct Problem {
  dev::bf16* out;
  const uint8_t *x, *xs, *w, *ws;
  const dev::bf16* bias;
  int m, n, k;
  int k_shift;     // log2 of the warps that share the steps of K
  int base, more;  // rows of W of a block, and how many blocks have one more
  int ahead_rows, ahead_bytes;  // of a block's W: whose begin L2 is asked for ahead of X, and bytes of each
};

/// Sets what L2 is asked for: while a block waits for its predecessor and makes X, the ring has only its first slots and memory
/// would be idle. 64 KiB of a block were best, of more rows rather than of longer pieces; where a block has little more than that
/// in all, and in an ordinary launch, which waits for nothing, there is none; nor where X is copied and the ring full ahead of it.
inline void ask_ahead(Problem& problem, bool programmatic) {
  constexpr int64_t kBytes = 64 * 1024, kMostRows = 64, kLeast = 200 * 1024;
  const int64_t rows = problem.base;
  if (!programmatic || rows * problem.k < kLeast) return;
  problem.ahead_rows = static_cast<int>(rows < kMostRows ? rows : kMostRows);
  problem.ahead_bytes = static_cast<int>(kBytes / problem.ahead_rows / kStep * kStep);
}

using row_stream::added, row_stream::Columns, row_stream::Factors, row_stream::in_range, row_stream::kFewRows;
using row_stream::LaneOfW, row_stream::Layout, row_stream::multiply_pairs, row_stream::multiply_step, row_stream::Pairs, row_stream::Part, row_stream::put_sums;
using row_stream::scale_word, row_stream::shared_bytes;

/// X's part of a step from shared memory: a lane's rows of codes and of scales begin at x and xs; `at`: codes of a row before it.
template <int ROWS>
struct MadePart : Part<ROWS> {
  using Part<ROWS>::kHalves;

  __device__ __forceinline__ void load(const uint32_t (&x)[kHalves], const uint32_t (&xs)[kHalves], uint32_t at) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int b = 0; b < 4; ++b) this->bytes[h][b] = load_shared<uint2>(x[h] + at + b * kBlock);
      this->scales[h] = load_shared<uint32_t>(xs[h] + at / kBlock);
    }
  }
};

/// ALIGNED: K is a multiple of a step, so that scales are read as words and no step is cut short. SOURCE: what X comes from;
/// where it is made here, M is at most ROWS and x_at is its place in shared memory. PLACE: where rows of W are.
template <int ROWS, int TILES, bool ALIGNED, class SOURCE, class PLACE>
__global__ void __launch_bounds__(Layout<ROWS, TILES>::kThreads, 1)
    row_stream(const Problem whole, const SOURCE source, const int x_at, const PLACE place) {
  static_assert(ALIGNED);
  using L = Layout<ROWS, TILES>;
  constexpr int kHalves = Part<ROWS>::kHalves, kGroups = Part<ROWS>::kGroups, kWarps = L::kWarps, kSlots = L::kSlots;
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
  const int scale_pitch = p.k / kBlock, step_bytes = static_cast<int>(kept(sharers * kStep));

  uint8_t* const ring = shared + warp * kSlots * L::kSlotBytes;
  float* const parts = reinterpret_cast<float*>(shared + L::kRingBytes);

  if constexpr (PLACE::kSends) place.find_buffers();
  // What says where W is comes from the launch before.
  if constexpr (PLACE::kChosen) let_next_start(), wait_for_predecessor();
  const typename PLACE::Block here(place, first, rows, lane, p.k);
  const uint8_t* const scales = here.ask_scales(shared + L::kScalesAt, p.ws, first, rows, scale_pitch, L::kThreads);
  commit_copies();

  // The next step to ask for: this lane's 16 bytes of every fourth row.
  int ask_step = 0, left = items, rows_left = rows - team * L::kPassRows - lane / kLineChunks;
  int k_left = p.k - part * kStep - lane % kLineChunks * 16;
  const int w_pitch = here.pitch(p.k);
  const uint8_t* ask = p.w + (here.row(first) + team * L::kPassRows + lane / kLineChunks) * w_pitch + (p.k - k_left);
  const int64_t pass_bytes = int64_t(w_pitch) * (teams * L::kPassRows) - int64_t(steps - 1) * step_bytes;
  const uint32_t ask_to = kept(shared_address(ring) + chunk_at(lane / kLineChunks, lane % kLineChunks));
  const int team_rows = kept(teams * L::kPassRows);
  const auto ask_next = [&](int slot_at) {
    if (left > 0) {
      const uint8_t* from = ask + here.step_jump(part + ask_step * sharers);
#pragma unroll
      for (int j = 0; j < TILES * 2; ++j) {
        copy_async(ask_to + slot_at + j * 4 * kStep, from + here.row_jump(rows_left - j * 4),
                   rows_left > j * 4 && (ALIGNED || k_left > 0) ? 16 : 0);
        from += int64_t(w_pitch) * 4;
      }
      --left;
      if (++ask_step == steps) {
        ask_step = 0, ask += pass_bytes, rows_left -= team_rows, k_left += (steps - 1) * step_bytes;
      } else {
        ask += step_bytes, k_left -= step_bytes;
      }
    }
    commit_copies();
  };
  // X, where it is made here, is asked for behind a part of the ring only: a multiprocessor's loads come in their order.
  constexpr int kAhead = SOURCE::kAhead < kSlots - 1 ? SOURCE::kAhead : kSlots - 1;
#pragma unroll
  for (int s = 0; s < kAhead; ++s) ask_next(s * L::kSlotBytes);
  // Behind the wait the next launch's blocks take nothing from those of this one that are yet to start; around a sum over GPUs it does
  // not pay.
  constexpr bool kNextLate = !PLACE::kChosen && SOURCE::kMade && SOURCE::kAhead == 1 && !PLACE::kSends && !SOURCE::kPolls;
  if constexpr (!PLACE::kChosen && !kNextLate) let_next_start();
  const SharedX made = here.made_x(shared + x_at, p.m, p.k);
  if constexpr (SOURCE::kMade) {
    const int made_rows = here.made_rows(p.m), made_k = here.pitch(p.k);
    const auto weights = source.template ask_weights<L::kThreads>(made_rows, made_k);
    if constexpr (!PLACE::kChosen) {
      if (lane == 0)
        for (int row = warp; row < p.ahead_rows; row += kWarps) ask_l2(p.w + size_t(first + row) * p.k, p.ahead_bytes);
      wait_for_predecessor();
      if (kNextLate) let_next_start();
    }
    auto loaded = [&] {
      if constexpr (SOURCE::kPolls) return source.template load<L::kThreads>(weights, made_rows, made_k);
      else return source.template load<L::kThreads>(made_rows, made_k);
    }();
#pragma unroll
    for (int s = kAhead; s < kSlots - 1; ++s) ask_next(s * L::kSlotBytes);
    source.template make<L::kThreads>(made, weights, loaded, made_rows, made_k, parts);
    __syncthreads();
  } else if constexpr (!PLACE::kChosen) {
    wait_for_predecessor();  // from here on, X may be read and the output written
  }
  uint32_t number = 0;  // of a call whose products are sent
  if constexpr (PLACE::kSends) number = place.begin_call();

  constexpr bool kPair = !PLACE::kChosen && ROWS == 8;  // of tiles, whose rows are those of an instruction
  constexpr int kScales = kPair ? 1 : 2;                // rows of a tile in a lane
  constexpr int kColumns = kPair && SOURCE::kMostRows <= kFewRows ? 1 : 2;  // of a lane, whose rows of X it has
  std::conditional_t<SOURCE::kMade, MadePart<ROWS>, Part<ROWS>> x_next;
  std::conditional_t<SOURCE::kMade, uint32_t, const uint8_t*> x_from[kHalves], xs_from[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = min(kColumns == 1 ? g / 2 : g + 8 * h, p.m - 1);
    if constexpr (SOURCE::kMade) {
      x_from[h] = kept(shared_address(made.codes) + row * made.pitch + part * kStep + 8 * t);
      xs_from[h] = kept(shared_address(made.scales) + row * made.scale_pitch + part * 4);
    } else {
      x_from[h] = p.x + size_t(row) * p.k + part * kStep + 8 * t, xs_from[h] = p.xs + size_t(row) * scale_pitch + part * 4;
    }
  }
  const auto load_x = [&](uint32_t at) {
    if constexpr (SOURCE::kMade) x_next.load(x_from, xs_from, at);
    else x_next.template load<ALIGNED>(x_from, xs_from, at, part * kStep + at, p.k);
  };
  if (items > 0) load_x(0);
  wait_copies<kSlots - 1>();
  __syncthreads();  // the scales of W are there

  const LaneOfW lane_of_w(g, t);
  uint32_t w_at[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) w_at[b] = kept(shared_address(ring) + lane_of_w.at[b]);
  const uint32_t x_lane = kept(8 * t), scale_column = kept(shared_address(scales) + part * 4);
  int slot_at = 0, ask_at = (kSlots - 1) * L::kSlotBytes, done = 0;
  for (int round = 0; round < rounds; ++round) {
    const int pass = round * teams + team;
    float sums[kPair ? (TILES + 1) / 2 : TILES][kGroups][4] = {};
    if (pass < passes) {
      // W's rows of this lane's sums: row0, where tiles are not in pairs row0 + 1, and those 8 i further.
      const int row0 = pass * L::kPassRows + (kPair ? g : 2 * t);
      uint32_t sw_at[TILES][kScales];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < kScales; ++j) sw_at[i][j] = kept(scale_column + min(row0 + i * kTileRows + j, rows - 1) * scale_pitch);
      uint32_t at = 0;  // of a step in a row
      for (int step = 0; step < steps; ++step) {
        ask_next(ask_at);
        const std::conditional_t<kPair, Columns, Factors<ROWS>> x(x_next);
        uint32_t usual = x.usual;
        const uint32_t next_at = step + 1 == steps ? 0 : at + step_bytes;
        if (++done < items) load_x(next_at);
        uint32_t sw[TILES][kScales];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
          for (int j = 0; j < kScales; ++j) {
            sw[i][j] = load_shared<uint32_t>(sw_at[i][j] + at / kBlock);
            usual &= in_range(sw[i][j]);
          }
        const bool fast = __all_sync(~0u, usual == 0x80808080u);
        wait_copies<kSlots - 1>();
        __syncwarp();
        if constexpr (PLACE::kWeighed) {
          float of_step[TILES][kGroups][4] = {};
          multiply_step<ROWS, TILES>(ring + slot_at, lane_of_w, x, sw, fast, of_step);
          const float weight = here.weight(part + step * sharers);
#pragma unroll
          for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int m = 0; m < kGroups; ++m)
#pragma unroll
              for (int c = 0; c < 4; ++c) sums[i][m][c] = fmaf(of_step[i][m][c], weight, sums[i][m][c]);
        } else if constexpr (kPair) {
          uint32_t here_at[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) here_at[b] = w_at[b] + slot_at;
          multiply_pairs<TILES, kColumns>(here_at, x, x_lane, sw, fast, sums);
        } else {
          multiply_step<ROWS, TILES>(ring + slot_at, lane_of_w, x, sw, fast, sums);
        }
        __syncwarp();  // the slot may be filled again
        at = next_at, ask_at = slot_at;
        slot_at = slot_at + L::kSlotBytes == kSlots * L::kSlotBytes ? 0 : slot_at + L::kSlotBytes;
      }
    }
    // Two buffers in turn: whoever writes the next round's sums may be ahead of those who read these.
    float* const mine = parts + ((round & 1) * kWarps + warp) * L::kPart;
    if constexpr (kPair)
      Pairs<ROWS, TILES>::template put<kColumns>(sums, lane, mine);
    else
      put_sums(sums, std::integral_constant<int, kHalves>(), lane, mine);
    __syncthreads();
    const float* const all = parts + (round & 1) * kWarps * L::kPart;
    for (int e = threadIdx.x; e < teams * L::kPart; e += L::kThreads) {
      const int at = e % L::kPart, m = at / L::kPassRows, row = (round * teams + e / L::kPart) * L::kPassRows + at % L::kPassRows;
      if (m >= p.m || row >= rows) continue;
      const float* const from = all + (e / L::kPart << p.k_shift) * L::kPart + at;
      float sum = added<L::kPart>(from, p.k_shift);
      if (p.bias) sum += static_cast<float>(p.bias[first + row]);
      if constexpr (PLACE::kSends)
        place.send(number, m, first + row, p.n, static_cast<dev::bf16>(sum));
      else
        p.out[size_t(m) * p.n + first + row] = static_cast<dev::bf16>(sum);
    }
  }
}

}  // namespace hf::made_stream
