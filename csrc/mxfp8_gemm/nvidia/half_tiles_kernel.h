// Y[M, N] = X[M, K] W[N, K]^T from MX-FP8 for many rows on sm_90, in one launch: both operands become f16 on their way to wgmma.
//
//            X: kRows rows          A block has kColumns = 128 kBlocks rows of W, kRows of X and a part of K, in steps of 128. The copy
//          (columns of wgmma)       engine brings codes of W and of X to a ring each, and the scales of 512 k, 16 bytes of a row, to a
//         +-----------------+       third. Two groups of four warps multiply: W is the left operand, in registers, which each group
//  W:     | group 0         |       makes of its codes. A third group makes X of its codes, in the 128-byte swizzle that wgmma reads;
//  rows   |                 |       of a fourth one thread asks for all that comes.
//         +-----------------+
//         | group 1         |       Lane 4 g + t of a warp makes its rows' block t of 32 k, which has one scale; so the k of a product
//         |                 |       of 16 are four of each block, in W and in X alike: k 32 t + 4 j + i of a step are the lane's i-th of
//         +-----------------+       product j. 16 bytes of 8 rows, chunks 2 t or 2 t + 1, meet no bank twice.
//
// A row's f16 are its codes times 2^(s - largest + 7), `largest` the largest scale of the row in this part of K: exact down to 2^-15,
// for scales down to largest - 22. So all of K is summed in the tensor core in float32, and one multiplication by a row's unit of X
// and one by that of W end it. A block with a smaller scale is made zeros, and its step is marked if it has other codes than zeros; at
// the end the products of such blocks are added in float32. A scale of 255 makes the row's unit a NaN; NaN codes are f16 NaNs.
//
// A cluster of `splits` blocks shares K: each gets what the others have of its rows of X and adds in the order of k.
//
// Bytes moved: N K (1 + 1/32) of W once for each kRows of X, (N / kColumns) M K (1 + 1/32) of X from L2, 2 M N written. Bound: for few
// rows W over the memory's bandwidth; for many f16 wgmma, 1,024 kBlocks cycles for a step of 128 rows of X, beside which shared memory
// moves 2 bytes for each code of W, 4 for each of X, and 2 for each product of 64 rows of W that a code of X is in.
#pragma once

#include "half_ring.h"

namespace hf::half_tiles {

/// Puts results of 16 columns, rows of W, by 8 rows, rows of X, into shared memory as lines of 64 columns in the 128-byte swizzle: of
/// each line the warp has two chunks of 16 bytes.
__device__ __forceinline__ void put_results(uint32_t lines, const float* sums, const float* bias) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(sums[2 * i + 1] + bias[i]), "f"(sums[2 * i] + bias[i]));
  const uint32_t to = lines + lane % 8 * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]) : "memory");
}

/// Stores `eights` times 8 rows of 64 columns from there, by four warps.
__device__ __forceinline__ void store_lines(const Problem& p, uint32_t lines, int eights, int m0, int n0) {
  const int thread = threadIdx.x % 128, chunk = thread % 8, n = n0 + chunk * 8;
#pragma unroll 4
  for (int row = thread / 8; row < eights * 8; row += 16) {
    const uint4 v = load_shared<uint4>(lines + row * 128 + (chunk ^ row % 8) * 16);
    if (m0 + row >= p.m || n >= p.n) continue;
    dev::bf16* const to = p.out + size_t(m0 + row) * p.n + n;
    if (p.whole_stores) {
      *reinterpret_cast<uint4*>(to) = v;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (n + e < p.n)
          reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>((e < 2 ? v.x : e < 4 ? v.y : e < 6 ? v.z : v.w) >> (e % 2 * 16));
    }
  }
}

/// A sum in units of rows whose largest scales are x and w, in units of 1.
__device__ __forceinline__ float in_ones(float sum, int x, int w) {
  return x == kNan || w == kNan ? __int_as_float(0x7fc00000) : scaled(sum, static_cast<uint32_t>(x - 7), static_cast<uint32_t>(w - 7));
}

/// What the tensor core left out of a sum: products of the marked steps with a block whose scale is not exact.
__device__ __noinline__ float left_out(const Problem& p, int first, int count, int m, int n, int largest_x, int largest_w, uint64_t marks) {
  const auto first_of = [](uint32_t pair) {
    float v;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(v) : "r"(pair));
    return v;
  };
  float sum = 0;
#pragma unroll 1
  for (int block = first * 4; block < (first + count) * 4; ++block) {
    if (!(marks >> (block / 4 & 63) & 1)) continue;
    const uint32_t x = __ldcg(p.xs + size_t(m) * (p.k / kBlock) + block), w = __ldcg(p.ws + size_t(n) * (p.k / kBlock) + block);
    if (static_cast<int>(x) - largest_x >= kLeast - kAtTop && static_cast<int>(w) - largest_w >= kLeast - kAtTop) continue;
    const uint16_t* const of_x = reinterpret_cast<const uint16_t*>(p.x + size_t(m) * p.k + block * kBlock);
    const uint16_t* const of_w = reinterpret_cast<const uint16_t*>(p.w + size_t(n) * p.k + block * kBlock);
    float products = 0;
#pragma unroll 1
    for (int k = 0; k < kBlock / 2; ++k) {
      uint32_t a, b, unused;
      halves_of(__ldcg(of_x + k), a, unused), halves_of(__ldcg(of_w + k), b, unused);
      products += first_of(a) * first_of(b), products += first_of(a >> 16) * first_of(b >> 16);
    }
    sum += scaled(products, x, w);
  }
  return sum;
}

__device__ __forceinline__ void add_to(float (&sum)[4], const uint4& more) {
  sum[0] += __uint_as_float(more.x), sum[1] += __uint_as_float(more.y), sum[2] += __uint_as_float(more.z), sum[3] += __uint_as_float(more.w);
}
__device__ __forceinline__ void store_cluster(uint32_t address, const uint4& v) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/// Where a lane that multiplies has its rows of W in the block: those of further blocks are 64 apart.
template <class L>
struct RowsOfW {
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int of_warp = group * L::kBlocks * 64 + threadIdx.x % 128 / 32 * 16;
  __device__ __forceinline__ int operator()(int i) const { return of_warp + i / 2 * 64 + i % 2 * 8 + g; }
};

/// The largest scales of the lane's rows of W.
template <class L>
__device__ __forceinline__ void largest_of_w(const Problem& p, const Part& part, int n0, int (&largest)[2 * L::kBlocks]) {
  const RowsOfW<L> row_of;
  find_largest(p, p.ws, part, row_of.t, 4, largest, [&](int i) { return n0 + row_of(i) < p.n ? n0 + row_of(i) : -1; });
#pragma unroll
  for (int i = 0; i < 2 * L::kBlocks; ++i)
#pragma unroll
    for (int other = 1; other < 4; other *= 2) largest[i] = max(largest[i], __shfl_xor_sync(~0u, largest[i], other));
}

template <class L>
__device__ __forceinline__ void multiply(const Problem& p, const Shared<L>& shared, const Part& part, int split, int m0, int n0,
                                         int (&largest)[2 * L::kBlocks]) {
  const RowsOfW<L> row_of;
  const int group = row_of.group, g = row_of.g, t = row_of.t, of_warp = row_of.of_warp;
#pragma unroll
  for (int i = 0; i < 2 * L::kBlocks; ++i) {
    if (n0 + row_of(i) >= p.n) largest[i] = kAtTop;
    if (!plain(largest[i])) store_shared(shared.marks(2), 1);
    if (t == 0) store_shared(shared.unit(L::kRows + row_of(i)), largest[i]);
  }
  int bias[2 * L::kBlocks];
#pragma unroll
  for (int i = 0; i < 2 * L::kBlocks; ++i) bias[i] = n0 + row_of(i) < p.n ? kAtTop - largest[i] : kAtTop;
  float sums[L::kBlocks][L::kSums] = {};
  uint32_t made_w[2][8], codes[2][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) made_w[i / 8][i % 8] = 0;
  const uint32_t of_row = (of_warp + g) * kStep + (32 * t ^ 16 * g), of_scale = (of_warp + g) * 16 + t;
  Turn<L::kStagesW> w;
  Turn<L::kStagesX> made;
  Turn<L::kSlots> span;
  int before = 0;  // where the X of the step before is
  const auto load = [&](uint32_t of_stage, int unit) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      load_words(codes[r], ((of_stage + of_row) ^ 16 * (unit / L::kBlocks)) + (unit % L::kBlocks * 64 + r * 8) * kStep);
  };
#pragma unroll 1
  for (int step = 0; step < part.count; ++step) {
    if (part.starts_span(step)) wait_phase(shared.full_scales(span.slot), span.parity);
    const uint32_t scales = shared.scales(span.slot) + of_scale + (part.first + step) % kSpan * 4;
    uint32_t by[L::kBlocks][2];
    int least = kAtTop;
#pragma unroll
    for (int i = 0; i < L::kBlocks; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t scale;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale) : "r"(scales + (i * 64 + r * 8) * 16));
        const int e = static_cast<int>(scale) + bias[2 * i + r];
        by[i][r] = factor_of(e), least = min(least, e);
      }
    wait_phase(shared.full_w(w.slot), w.parity);
    if (__any_sync(~0u, least < kLeast)) {
#pragma unroll
      for (int i = 0; i < L::kBlocks; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t from = shared.w(w.slot) + of_row + (i * 64 + r * 8) * kStep;
          if (by[i][r] == 0 && (has_codes(load_shared<uint4>(from)) || has_codes(load_shared<uint4>(from ^ 16))))
            mark(shared, part.first + step);
        }
    }
    if (part.ends_span(step)) {
      arrive_of_warp(shared.full_scales(span.slot) + Shared<L>::kToEmpty);
      span.advance();
    }
    // Products of a pair of 16 k are under way while the registers of the next are made; codes are loaded a unit ahead.
    constexpr int kUnits = 2 * L::kBlocks;  // of 64 rows by 64 k
    const uint32_t of_stage = shared.w(w.slot), let_go = shared.full_w(w.slot) + Shared<L>::kToEmpty;
    w.advance();
#pragma unroll
    for (int half_unit = 0; half_unit < 2 * kUnits; ++half_unit) {
      const int half = half_unit % 2, unit = half_unit / 2, i = unit % L::kBlocks, atom = unit / L::kBlocks;
      uint32_t(&a)[8] = made_w[half];
      if (half == 0) load(of_stage, unit);
      wait_products<1>();
#pragma unroll
      for (int e = 0; e < 8; ++e) asm volatile("" : "+r"(a[e])::"memory");  // products read them until here
      if (half_unit == 1) arrive_of_warp(shared.full_made(before) + Shared<L>::kToEmpty, step > 0);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t low, high;
          halves_of(codes[r][2 * half + j], low, high);
          a[4 * j + r] = times(low, by[i][r]), a[4 * j + 2 + r] = times(high, by[i][r]);
        }
      if (half_unit == 2 * kUnits - 1) arrive_of_warp(let_go);
      if (half_unit == 0) wait_phase(shared.full_made(made.slot), made.parity);
      const uint64_t x = tile_at(shared.made(made.slot) + atom * L::kAtom) + 4 * half;
#pragma unroll
      for (int e = 0; e < 8; ++e) asm volatile("" : "+r"(a[e])::"memory");  // made before the products start
      order_registers();
#pragma unroll
      for (int j = 0; j < 2; ++j) HalfProduct<L::kRows>::start(sums[i], a + 4 * j, x + 2 * j);
      commit_products();
    }
    before = made.slot;
    made.advance();
  }
#pragma unroll
  for (int i = 0; i < L::kBlocks; ++i) wait_products<0>(sums[i]);
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");  // marks are there, and the stages are not read any more
  const uint4 marks = load_shared<uint4>(shared.marks(0));
  const auto four = [&](int i, int j) {
    const float* const from = sums[i] + 4 * j;
    return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]), __float_as_uint(from[3]));
  };
  // In units of 1.
  if (marks.z == 0) {
    const auto unit = [](int v) { return __uint_as_float(v == kNan ? 0x7fc00000 : v == 0 ? 1 << 15 : (v - 7) << 23); };  // 2^(v - 134)
    float of_w[2 * L::kBlocks];
#pragma unroll
    for (int i = 0; i < 2 * L::kBlocks; ++i) of_w[i] = unit(static_cast<int>(load_shared<uint32_t>(shared.unit(L::kRows + row_of(i)))));
#pragma unroll
    for (int j = 0; j < L::kEights; ++j) {
      const uint2 pair = load_shared<uint2>(shared.unit(8 * j + 2 * t));
      const float of_x[2] = {unit(static_cast<int>(pair.x)), unit(static_cast<int>(pair.y))};
#pragma unroll
      for (int i = 0; i < L::kBlocks; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][4 * j + e] = sums[i][4 * j + e] * of_w[2 * i + e / 2] * of_x[e % 2];
    }
  }
  if (marks.x | marks.y | marks.z) {
    const auto place = [&](int j, int i) { return shared.base + (j * L::kBlocks + i) * (kConsumers * 16) + threadIdx.x * 16; };
#pragma unroll
    for (int j = 0; j < L::kEights; ++j)
#pragma unroll
      for (int i = 0; i < L::kBlocks; ++i) store_chunk(place(j, i), four(i, j));
#pragma unroll 1
    for (int at = 0; at < L::kEights * L::kBlocks * 4; ++at) {
      const int e = at % 4, i = at / 4 % L::kBlocks, j = at / 4 / L::kBlocks;
      const int column = 8 * j + 2 * t + e % 2, row = of_warp + i * 64 + e / 2 * 8 + g;
      if (m0 + column >= p.m || n0 + row >= p.n) continue;
      const int x = static_cast<int>(load_shared<uint32_t>(shared.unit(column)));
      const int w = static_cast<int>(load_shared<uint32_t>(shared.unit(L::kRows + row)));
      const uint32_t of_sum = place(j, i) + e * 4;
      float sum = __uint_as_float(load_shared<uint32_t>(of_sum));
      if (marks.z) sum = in_ones(sum, x, w);
      if (marks.x || marks.y) sum += left_out(p, part.first, part.count, m0 + column, n0 + row, x, w, uint64_t{marks.y} << 32 | marks.x);
      store_shared(of_sum, __float_as_uint(sum));
    }
#pragma unroll
    for (int j = 0; j < L::kEights; ++j)
#pragma unroll
      for (int i = 0; i < L::kBlocks; ++i) {
        const uint4 v = load_shared<uint4>(place(j, i));
        sums[i][4 * j] = __uint_as_float(v.x), sums[i][4 * j + 1] = __uint_as_float(v.y);
        sums[i][4 * j + 2] = __uint_as_float(v.z), sums[i][4 * j + 3] = __uint_as_float(v.w);
      }
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");  // lines take the place of these sums
  }
  if (p.splits > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  float more[L::kBlocks][2] = {};
#pragma unroll
  for (int i = 0; i < 2 * L::kBlocks; ++i)
    if (p.bias && n0 + row_of(i) < p.n) more[i / 2][i % 2] = static_cast<float>(p.bias[n0 + row_of(i)]);
  // Lines of 64 columns, for each block of W's rows together.
  const auto first_of = [&](int block) { return L::kEights * block / p.splits; };
  const int first = first_of(split), count = first_of(split + 1) - first, each = (L::kEights + p.splits - 1) / p.splits;
  const uint32_t all_lines = shared.base + (p.splits > 1 ? p.splits * each * L::kOfEight : 0);
  const auto lines = [&](int i) { return all_lines + (group * L::kBlocks + i) * each * 1024; };
  if (p.splits == 1) {
#pragma unroll
    for (int j = 0; j < L::kEights; ++j)
#pragma unroll
      for (int i = 0; i < L::kBlocks; ++i) put_results(lines(i) + j * 1024, sums[i] + 4 * j, more[i]);
  } else {
    // Sums of 8 rows of X go to the block that stores them, which adds them in the order of k.
    const uint32_t inbox = shared.base + threadIdx.x * 16;
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");  // no block reads its stages any more
#pragma unroll
    for (int j = 0; j < L::kEights; ++j) {
      const int owner = ((j + 1) * p.splits - 1) / L::kEights;
      const uint32_t to = address_in(inbox + (split * each + j - first_of(owner)) * L::kOfEight, owner);
#pragma unroll
      for (int i = 0; i < L::kBlocks; ++i)
        store_cluster(to + i * kConsumers * 16, four(i, j));
    }
    meet_cluster();
#pragma unroll 2
    for (int at = 0; at < count * L::kBlocks; ++at) {
      const int j = at / L::kBlocks, i = at % L::kBlocks;
      float total[4] = {};
#pragma unroll
      for (int from = 0; from < kMostSplits; ++from)
        if (from < p.splits) add_to(total, load_shared<uint4>(inbox + (from * each + j) * L::kOfEight + i * kConsumers * 16));
      const float bias_of[2] = {i ? more[L::kBlocks - 1][0] : more[0][0], i ? more[L::kBlocks - 1][1] : more[0][1]};
      put_results(lines(i) + j * 1024, total, bias_of);
    }
  }
  asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
#pragma unroll
  for (int i = 0; i < L::kBlocks; ++i) store_lines(p, lines(i), count, m0 + first * 8, n0 + group * L::kBlocks * 64 + i * 64);
}

template <class L>
__global__ void __launch_bounds__(kThreads, 1) half_tiles(const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
  extern __shared__ uint8_t unaligned[];
  const Shared<L> shared((shared_address(unaligned) + 1023) & ~1023u);
  static_assert(L::fit(kMostSplits));
  const int split = static_cast<int>(blockIdx.x) % p.splits, tile = static_cast<int>(blockIdx.x) / p.splits;
  const int m0 = tile % p.tiles_m * L::kRows, n0 = tile / p.tiles_m * L::kColumns;
  const Part part(p, split);
  const bool produces = threadIdx.x >= kProducer, converts = !produces && threadIdx.x >= kConsumers, asks = threadIdx.x == kProducer;
  int largest[2 * L::kBlocks] = {};  // of the thread's rows of W, or the first of its row of X
  Producer<L> producer{shared, maps, part, m0, n0};
  if (produces) {
    for (int i = threadIdx.x - kProducer; i < L::kRows; i += 128) store_shared(shared.unit(i), 0);
    if (asks) {
      for (const CUtensorMap* map : {&maps.w, &maps.x, &maps.w_scales, &maps.x_scales})
        asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
      constexpr int kOfConsumers = 8 * kArrivals, kOfConverters = 4 * kArrivals, kToEmpty = Shared<L>::kToEmpty;
      const auto init = [&](uint32_t full, int to_fill, int to_free) { init_barrier(full, to_fill), init_barrier(full + kToEmpty, to_free); };
      for (int i = 0; i < L::kStagesW; ++i) init(shared.full_w(i), 1, kOfConsumers);
      for (int i = 0; i < L::kStagesX; ++i) init(shared.full_x(i), 1, kOfConverters);
      for (int i = 0; i < L::kStagesX; ++i) init(shared.full_made(i), kOfConverters, kOfConsumers);
      for (int i = 0; i < L::kSlots; ++i) init(shared.full_scales(i), 1, kOfConsumers + kOfConverters);
      for (int i = 0; i < 3; ++i) store_shared(shared.marks(i), 0);
      barriers_ready();
    }
    __syncwarp();
    let_next_start();
    if (asks) ask_first(p, producer);
    __syncwarp();
  } else {
    let_next_start();
    if (converts) {
      wait_for_predecessor();
      largest[0] = largest_of_x<L>(p, part, m0);
    } else {
      largest_of_w<L>(p, part, n0, largest);
    }
  }
  __syncthreads();  // barriers are there, and the units of X are zeros
  if (produces) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kOfProducer));
    if (asks) ask_rest(producer);
    __syncwarp();
    if (p.splits > 1) meet_cluster(), meet_cluster();  // as the groups that multiply do
  } else if (converts) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kOfConverter));
    convert(p, shared, part, m0, largest[0]);
    if (p.splits > 1) meet_cluster(), meet_cluster();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kOfConsumer));
    multiply(p, shared, part, split, m0, n0, largest);
  }
}

}  // namespace hf::half_tiles
