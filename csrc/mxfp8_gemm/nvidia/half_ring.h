// The rings of the MX-FP8 GEMM that multiplies as f16 on sm_90 (half_tiles_kernel.h), their producer, and the group that makes X.
#pragma once

#include "hipforge/device/vector.h"
#include "stream.h"
#include "team.h"
#include "wgmma.h"

namespace hf::half_tiles {

constexpr int kStep = 128, kBlock = 32, kSpan = 4;  // kSpan: steps whose scales are copied at once
constexpr int kScaleLine = 16;  // bytes of a row's scales of a span, the least that the copy engine takes
constexpr int kGroups = 2, kConsumers = kGroups * 128, kConverters = 128, kProducer = kConsumers + kConverters;
constexpr int kThreads = kProducer + 128;
constexpr int kAtStart = 65536 / kThreads / 8 * 8;  // registers of a thread
constexpr int kMostSplits = 8;
constexpr int kAtTop = 134, kLeast = 112;  // a scale's exponent as that of a float: of the largest scale, of the least that is exact
constexpr int kNan = 255, kLeastPlain = 74, kMostPlain = 194;  // largest scales whose units are multiplied as floats
static_assert(kStep / kBlock == 4, "the scales of a row in a step are a word");

struct Problem {
  dev::bf16* out;
  const dev::bf16* bias;
  const uint8_t *x, *xs, *w, *ws;
  int m, n, k;
  int splits, tiles_m;
  bool w_first;       // W may be read before the predecessor has ended
  bool whole_stores;  // eight neighbours of a row start at a multiple of 16 bytes
};

/// What the copy engine reads: codes and scales of X and W.
struct Maps {
  CUtensorMap x, w, x_scales, w_scales;
};

/// ROWS of X; BLOCKS of 64 rows of W in a group; stages of W and of X, as codes and as f16.
template <int ROWS, int BLOCKS, int STAGES_W, int STAGES_X>
struct Layout {
  static constexpr int kRows = ROWS, kBlocks = BLOCKS, kColumns = kGroups * BLOCKS * 64;
  static constexpr int kStagesW = STAGES_W, kStagesX = STAGES_X, kSlots = 3;
  static constexpr int kBytesW = kColumns * kStep, kBytesX = ROWS * kStep, kBytesMade = 2 * kBytesX, kAtom = kBytesX;
  static constexpr int kSlotBytes = (kColumns + ROWS) * 16, kOfX = kColumns * 16;
  static constexpr int kXAt = STAGES_W * kBytesW, kMadeAt = kXAt + STAGES_X * kBytesX, kScalesAt = kMadeAt + STAGES_X * kBytesMade;
  static constexpr int kUnitsAt = kScalesAt + kSlots * kSlotBytes, kMarksAt = kUnitsAt + (ROWS + kColumns) * 4;
  static constexpr int kBarriersAt = kMarksAt + 16;
  static constexpr int kBarriers = 2 * (STAGES_W + 2 * STAGES_X + kSlots);
  static constexpr int kBytes = kBarriersAt + kBarriers * 8 + 1024;  // stages start at a multiple of 1,024
  static constexpr int kSums = ROWS / 2, kEights = ROWS / 8;       // of a block of W's rows in a lane; rows of X by 8
  static constexpr int kOfConsumer = 208, kOfConverter = 72, kOfProducer = 24;
  static_assert(2 * kOfConsumer + kOfConverter + kOfProducer <= 4 * kAtStart);
  static constexpr int kOfEight = BLOCKS * kConsumers * 16;  // bytes of the sums of 8 rows of X; their results have half as many
  static_assert(ROWS % 64 == 0 && ROWS <= 128 && kColumns <= 256 && kBytes <= kMostShared);
  /// Whether sums that up to `splits` blocks send each other, and results, fit in the place of the stages.
  static constexpr bool fit(int splits) {
    const int eights = (kEights + splits - 1) / splits;
    return (2 * (splits > 1 ? splits : 0) + 1) * eights * kOfEight / 2 <= kScalesAt && (splits == 1 || fit(splits - 1));
  }
};

/// Addresses in shared memory.
template <class L>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ explicit Shared(uint32_t at) : base(at) {}
  __device__ __forceinline__ uint32_t w(int slot) const { return base + slot * L::kBytesW; }
  __device__ __forceinline__ uint32_t x(int slot) const { return base + L::kXAt + slot * L::kBytesX; }
  __device__ __forceinline__ uint32_t made(int slot) const { return base + L::kMadeAt + slot * L::kBytesMade; }
  __device__ __forceinline__ uint32_t scales(int slot) const { return base + L::kScalesAt + slot * L::kSlotBytes; }
  __device__ __forceinline__ uint32_t unit(int row) const { return base + L::kUnitsAt + row * 4; }
  __device__ __forceinline__ uint32_t marks(int i) const { return base + L::kMarksAt + i * 4; }
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + L::kBarriersAt + i * 8; }
  __device__ __forceinline__ uint32_t full_w(int slot) const { return barrier(slot); }
  __device__ __forceinline__ uint32_t full_x(int slot) const { return barrier(L::kStagesW + slot); }
  __device__ __forceinline__ uint32_t full_made(int slot) const { return barrier(L::kStagesW + L::kStagesX + slot); }
  __device__ __forceinline__ uint32_t full_scales(int slot) const { return barrier(L::kStagesW + 2 * L::kStagesX + slot); }
  static constexpr int kToEmpty = L::kBarriers / 2 * 8;
};

/// A place in a ring of COUNT.
template <int COUNT>
struct Turn {
  int slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == COUNT) slot = 0, parity ^= 1;
  }
};

/// The steps of a part of K.
struct Part {
  int first, count;
  __device__ __forceinline__ Part(const Problem& p, int split) {
    const int all = p.k / kStep;
    first = all * split / p.splits, count = all * (split + 1) / p.splits - first;
  }
  __device__ __forceinline__ bool starts_span(int i) const { return i == 0 || (first + i) % kSpan == 0; }
  __device__ __forceinline__ bool ends_span(int i) const { return i + 1 == count || (first + i) % kSpan == kSpan - 1; }
};

/// The largest bytes of four words, by their place in a word, and that of one word.
__device__ __forceinline__ uint32_t most_of(const uint4& v) { return __vmaxu4(__vmaxu4(v.x, v.y), __vmaxu4(v.z, v.w)); }
__device__ __forceinline__ uint32_t most_of(uint32_t v) { return max(max(v & 255, v >> 8 & 255), max(v >> 16 & 255, v >> 24)); }
/// 2^(e - 127) twice in f16, and 0 for a scale that is not exact.
__device__ __forceinline__ uint32_t factor_of(int e) {
  const float by = __int_as_float(e < kLeast ? 0 : e << 23);
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(by));
  return pair;
}
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
__device__ __forceinline__ bool has_codes(const uint4& v) { return ((v.x | v.y | v.z | v.w) & 0x7f7f7f7fu) != 0; }
/// Marks a step: one of 64 bits.
template <class L>
__device__ __forceinline__ void mark(const Shared<L>& shared, int step) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(shared.marks(step >> 5 & 1)), "r"(1u << (step & 31)) : "memory");
}
__device__ __forceinline__ void store_chunk(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
/// An arrival of the warp, where `all` say so; without a branch, at which ptxas would end products under way.
__device__ __forceinline__ void arrive_of_warp(uint32_t barrier, bool all = true) {
  __syncwarp();
  asm volatile("{.reg .pred p; .reg .b64 state; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 state, [%0];}" ::"r"(barrier),
               "r"(static_cast<int>(all && threadIdx.x % 32 < kArrivals)) : "memory");
}

/// d += A B^T for 64 rows of A, in registers, N of B and 16 k.
template <int N>
struct HalfProduct;
#define HF_PRODUCTS(N, A0, A1, A2, A3, B)                                                                                      \
  template <>                                                                                                                  \
  struct HalfProduct<N> {                                                                                                      \
    static __device__ __forceinline__ void start(float (&d)[N / 2], const uint32_t* a, uint64_t b) {                           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" HF_TEXT_##N "}, {%" #A0 ", %" #A1 ", %" #A2        \
                   ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                                                                         \
                   : HF_SUMS_##N(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
    }                                                                                                                          \
  };
HF_PRODUCTS(64, 32, 33, 34, 35, 36)
HF_PRODUCTS(128, 64, 65, 66, 67, 68)
#undef HF_PRODUCTS


/// Whether a phase of this parity has ended.
__device__ __forceinline__ bool has_ended(uint32_t barrier, int parity) {
  uint32_t ended;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
  return ended;
}

/// What one thread asks for: steps of one operand, and scales of spans.
template <class L>
struct Producer {
  const Shared<L>& shared;
  const Maps& maps;
  const Part& part;
  const int m0, n0;
  Turn<L::kStagesW> w{};
  Turn<L::kStagesX> x{};
  Turn<L::kSlots> span{};
  int w_step = 0, x_step = 0, scales_step = 0;  // the next ones
  static constexpr int kToEmpty = Shared<L>::kToEmpty;

  __device__ __forceinline__ bool ask_w() {
    const uint32_t full = shared.full_w(w.slot);
    if (w_step == part.count || !has_ended(full + kToEmpty, w.parity ^ 1)) return false;
    arrive_expecting(full, L::kBytesW);
    copy_tile(shared.w(w.slot), maps.w, (part.first + w_step++) * kStep, n0, full);
    w.advance();
    return true;
  }
  __device__ __forceinline__ bool ask_x() {
    const uint32_t full = shared.full_x(x.slot);
    if (x_step == part.count || !has_ended(full + kToEmpty, x.parity ^ 1)) return false;
    arrive_expecting(full, L::kBytesX);
    copy_tile(shared.x(x.slot), maps.x, (part.first + x_step++) * kStep, m0, full);
    x.advance();
    return true;
  }
  __device__ __forceinline__ bool ask_scales() {
    const uint32_t full = shared.full_scales(span.slot), to = shared.scales(span.slot);
    if (scales_step >= part.count || !has_ended(full + kToEmpty, span.parity ^ 1)) return false;
    const int at = (part.first + scales_step) / kSpan;
    arrive_expecting(full, L::kSlotBytes);
    copy_tile(to, maps.w_scales, at * kScaleLine, n0, full);
    copy_tile(to + L::kOfX, maps.x_scales, at * kScaleLine, m0, full);
    scales_step = (at + 1) * kSpan - part.first;
    span.advance();
    return true;
  }
  __device__ __forceinline__ bool is_done() const { return w_step == part.count && x_step == part.count && scales_step >= part.count; }
};

/// What the asking thread does before the block meets: what it asks for does not wait until the others know of the barriers.
template <class L>
__device__ __forceinline__ void ask_first(const Problem& p, Producer<L>& producer) {
  if (p.w_first)
    while (producer.ask_w()) {}
  wait_for_predecessor();
  producer.ask_scales(), producer.ask_x();
  if (!p.w_first) producer.ask_w();
}

/// And after it: all else that comes.
template <class L>
__device__ __forceinline__ void ask_rest(Producer<L>& producer) {
  while (!producer.is_done()) {
    bool asked = producer.ask_scales();
    asked |= producer.ask_x();
    asked |= producer.ask_w();
    if (!asked) asm volatile("nanosleep.u32 40;");
  }
}

/// The largest scales of rows in the spans that a part has steps of, of which a thread has every `of`-th from the `at`-th on.
/// row_of(i) is negative where there is none.
template <int COUNT, class RowOf>
__device__ __forceinline__ void find_largest(const Problem& p, const uint8_t* scales, const Part& part, int at, int of, int (&largest)[COUNT],
                                             const RowOf& row_of) {
  constexpr int kAtOnce = COUNT == 1 ? 4 : 2;
  uint32_t most[COUNT] = {};
  const int last = (part.first + part.count - 1) / kSpan;
#pragma unroll 1
  for (int span = part.first / kSpan + at; span <= last; span += kAtOnce * of) {
    uint4 v[kAtOnce][COUNT];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const bool there = row_of(i) >= 0 && span + j * of <= last;
        v[j][i] = there ? __ldcg(reinterpret_cast<const uint4*>(scales + size_t(row_of(i)) * (p.k / kBlock)) + span + j * of) : uint4{};
      }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) most[i] = __vmaxu4(most[i], most_of(v[j][i]));
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) largest[i] = static_cast<int>(most_of(most[i]));
}

/// Whether units of a row with this largest scale are multiplied as floats.
__device__ __forceinline__ bool plain(int largest) { return (largest >= kLeastPlain && largest <= kMostPlain) || largest == kNan; }

/// Where a thread that makes X has its row of a step, or a half of it where there are 64 rows.
template <class L>
struct RowOfX {
  static constexpr int kOfRow = kConverters / L::kRows, kAtoms = 2 / kOfRow;  // threads of a row; halves of a step's row that a thread has
  const int thread = threadIdx.x - kConsumers, row = thread % L::kRows, first = thread / L::kRows;
};

/// The largest scale that the thread has of its row of X.
template <class L>
__device__ __forceinline__ int largest_of_x(const Problem& p, const Part& part, int m0) {
  const RowOfX<L> mine;
  int found[1];
  find_largest(p, p.xs, part, mine.first, mine.kOfRow, found, [&](int) { return m0 + mine.row < p.m ? m0 + mine.row : -1; });
  return found[0];
}

/// Makes X.
template <class L>
__device__ __forceinline__ void convert(const Problem& p, const Shared<L>& shared, const Part& part, int m0, int found) {
  constexpr int kAtoms = RowOfX<L>::kAtoms;
  const RowOfX<L> mine;
  const int row = mine.row, first = mine.first;
  const bool there = m0 + row < p.m;
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(shared.unit(row)), "r"(there ? found : kAtTop) : "memory");
  asm volatile("bar.sync 2, %0;" ::"n"(kConverters) : "memory");
  const int largest = static_cast<int>(load_shared<uint32_t>(shared.unit(row))), bias = kAtTop - (there ? largest : 0);
  if (largest != 0 && !plain(largest)) store_shared(shared.marks(2), 1);
  const uint32_t of_row = row * kStep + row % 8 * 16;  // of chunk 0; chunk c is at 16 c from there by exclusive or
  Turn<L::kStagesX> x;
  Turn<L::kSlots> span;
#pragma unroll 1
  for (int i = 0; i < part.count; ++i) {
    if (part.starts_span(i)) wait_phase(shared.full_scales(span.slot), span.parity);
    const uint32_t word = load_shared<uint32_t>(shared.scales(span.slot) + L::kOfX + row * kScaleLine + (part.first + i) % kSpan * 4);
    if (part.ends_span(i)) {
      arrive_of_warp(shared.full_scales(span.slot) + Shared<L>::kToEmpty);
      span.advance();
    }
    uint32_t by[4];
    bool low = false;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int e = static_cast<int>(word >> 8 * t & 255) + bias;
      by[t] = factor_of(e), low |= e < kLeast;
    }
    wait_phase(shared.full_x(x.slot), x.parity);
    const uint32_t from = shared.x(x.slot) + of_row;
    if (__any_sync(~0u, low)) {
#pragma unroll 1
      for (int chunk = 0; chunk < 8; ++chunk) {
        const int at = static_cast<int>(word >> 4 * (chunk & 6) & 255) + bias;
        if (at < kLeast && has_codes(load_shared<uint4>(from ^ chunk * 16))) mark(shared, part.first + i);
      }
    }
    wait_phase(shared.full_made(x.slot) + Shared<L>::kToEmpty, x.parity ^ 1);
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      const int atom = kAtoms == 2 ? a : first;
      const uint32_t to = shared.made(x.slot) + atom * L::kAtom + of_row;
      uint32_t codes[4][4];
#pragma unroll
      for (int t = 0; t < 4; ++t) load_words(codes[t], from ^ (32 * t + 16 * atom));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t low_half[4], high_half[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          halves_of(codes[t][j], low_half[t], high_half[t]);
          low_half[t] = times(low_half[t], by[t]), high_half[t] = times(high_half[t], by[t]);
        }
        store_chunk(to ^ 32 * j, make_uint4(low_half[0], low_half[1], low_half[2], low_half[3]));
        store_chunk(to ^ (32 * j + 16), make_uint4(high_half[0], high_half[1], high_half[2], high_half[3]));
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what these threads wrote
    arrive_of_warp(shared.full_x(x.slot) + Shared<L>::kToEmpty);
    arrive_of_warp(shared.full_made(x.slot));
    x.advance();
  }
}

}  // namespace hf::half_tiles
