// A tile of Y = X W^T from MX-FP8 on sm_90: wgmma on e4m3, whose k of 32 is one block of scales.
//
//            W: kGroupsN x kWidth rows                    A block multiplies kRows = 64 kGroupsM rows of X by kColumns rows of W;
//          +--------+--------+ ...                        each group of four warps has 64 rows by kWidth columns of it. A stage
//   X:     | group  | group  |                            has 128 k of the rows of both, in the 128-byte swizzle of wgmma:
//  64 rows |  0, 0  |  0, 1  |                            kStages of them are filled by cp.async, kStages - 1 ahead.
//          +--------+--------+                            Thread 4 g + t of a warp has rows g, g + 8 and columns 8 j + 2 t, + 1.
//  64 rows |  1, 0  |  1, 1  |
//          +--------+--------+
//
// A block of 32 k is summed from zero by one wgmma, in the tensor core's own precision, which has fewer bits than float32,
// multiplied by 2^(sx - 127) and 2^(sw - 127), and added in float32. Scales of a step wait in shared memory as the upper halves
// of floats, which is what a byte is once it is shifted by 7. A step in which a byte is outside 64 to 191 is scaled with care for
// exponents that no float has.
#pragma once

#include "stream.h"

namespace hf::wgmma_tiles {

constexpr int kStep = 128, kBlock = 32, kGroupRows = 64;
static_assert(kStep / kBlock == 4, "the scales of a step are one word");

/// d = A B^T for 64 rows of A, N of B and 32 k, both in shared memory.
template <int N>
struct Product;
template <>
struct Product<16> {
  static __device__ __forceinline__ void start(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7 "
        "}, %8, %9, p, 1, 1;}"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
        : "l"(a), "l"(b));
  }
};
template <>
struct Product<32> {
  static __device__ __forceinline__ void start(float (&d)[16], uint64_t a, uint64_t b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
        "}, %16, %17, p, 1, 1;}"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
          "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15])
        : "l"(a), "l"(b));
  }
};
template <>
struct Product<64> {
  static __device__ __forceinline__ void start(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31 "
        "}, %32, %33, p, 1, 1;}"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]), "=f"(d[8]),
          "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]), "=f"(d[14]), "=f"(d[15]), "=f"(d[16]),
          "=f"(d[17]), "=f"(d[18]), "=f"(d[19]), "=f"(d[20]), "=f"(d[21]), "=f"(d[22]), "=f"(d[23]), "=f"(d[24]),
          "=f"(d[25]), "=f"(d[26]), "=f"(d[27]), "=f"(d[28]), "=f"(d[29]), "=f"(d[30]), "=f"(d[31])
        : "l"(a), "l"(b));
  }
};

__device__ __forceinline__ void order_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish() {
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/// Where a tile of lines of 128 bytes is, in the 128-byte swizzle: groups of 8 lines are 1,024 bytes apart.
__device__ __forceinline__ uint64_t tile_at(const void* shared) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

template <int GROUPS_M, int GROUPS_N, int WIDTH, int STAGES>
struct Layout {
  static constexpr int kGroupsM = GROUPS_M, kGroupsN = GROUPS_N, kWidth = WIDTH, kStages = STAGES;
  static constexpr int kThreads = GROUPS_M * GROUPS_N * 128;
  static constexpr int kRows = GROUPS_M * kGroupRows, kColumns = GROUPS_N * WIDTH, kLines = kRows + kColumns;
  static constexpr int kStageBytes = kLines * kStep, kScaleBytes = kLines * 8;
  static constexpr int kCopies = kLines / (kThreads / 8);
  static constexpr int kBytes = STAGES * kStageBytes + 2 * kScaleBytes + 1024;  // stages start at a multiple of 1,024
  static_assert(kLines % (kThreads / 8) == 0, "every thread copies 16 bytes of as many lines");
  static_assert(kStageBytes % 1024 == 0 && WIDTH * kStep % 1024 == 0, "a group's tile starts at a whole swizzle");
  static_assert(kBytes <= kMostShared);
};

// A byte's exponent as a float's upper half, and the two floats of a pair of them.
__device__ __forceinline__ uint32_t upper(uint32_t scales, int b) { return ((scales >> (8 * b)) & 255) << 7; }
__device__ __forceinline__ float first_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
/// 2^e for e of -127 to 127.
__device__ __forceinline__ float power(int e) { return __int_as_float(max((e + 127) << 23, 0x00400000)); }

/// A row's elements, or some address and that there are none: zeros.
struct Line {
  const uint8_t* start;
  bool there;
};

/// Where a thread stands in a tile.
template <class L>
struct Place {
  int thread, group_m, group_n, warp, g, t;
  __device__ __forceinline__ Place()
      : thread(threadIdx.x), group_m(thread / 128 % L::kGroupsM), group_n(thread / 128 / L::kGroupsM), warp(thread % 128 / 32),
        g(thread % 32 / 4), t(thread % 4) {}
  /// The row of X of sum i, and the column among those of its group.
  __device__ __forceinline__ int row(int i) const { return group_m * kGroupRows + warp * 16 + g + (i % 4 < 2 ? 0 : 8); }
  __device__ __forceinline__ int column(int i) const { return i / 4 * 8 + 2 * t + i % 2; }
};

/// Sums a tile over k. lines.payload(line) is a Line and lines.scales(line) the scales of a row that may be read, for the kRows
/// lines of X and then those of W; `unaligned` has L::kBytes. whole_words: scales are read as words.
template <class L, class Lines>
__device__ __forceinline__ void multiply_tile(const Lines& lines, int k, bool whole_words, uint8_t* unaligned,
                                              const Place<L>& place, float (&sums)[L::kWidth / 2]) {
  constexpr int kSums = L::kWidth / 2, kScaleRows = (L::kLines + L::kThreads - 1) / L::kThreads;
  uint8_t* const shared = unaligned + (1024 - (static_cast<uint32_t>(__cvta_generic_to_shared(unaligned)) & 1023)) % 1024;
  uint32_t* const tables = reinterpret_cast<uint32_t*>(shared + L::kStages * L::kStageBytes);
  const int thread = place.thread, group_m = place.group_m, group_n = place.group_n, warp = place.warp, g = place.g, t = place.t;
  const int steps = (k + kStep - 1) / kStep;

  // Lines of a stage: first those of X, then W's. Past the ends of M, N and K they are zeros.
  const auto fill = [&](int step) {
    if (step < steps) {
      uint8_t* const stage = shared + step % L::kStages * L::kStageBytes;
      const int chunk = thread % 8, at = step * kStep + chunk * 16;
#pragma unroll
      for (int j = 0; j < L::kCopies; ++j) {
        const int line = j * (L::kThreads / 8) + thread / 8;
        const Line from = lines.payload(line);
        const bool there = from.there && at < k;
        copy_async(stage + line * kStep + ((chunk ^ (line & 7)) * 16), from.start + (there ? at : 0), there ? 16 : 0);
      }
    }
    commit_copies();
  };
  uint32_t scales[kScaleRows];
  const auto load_scales = [&](int step) {
#pragma unroll
    for (int j = 0; j < kScaleRows; ++j) {
      const int line = j * L::kThreads + thread;
      if (line >= L::kLines || step >= steps) continue;
      const uint8_t* const from = lines.scales(line) + step * 4;
      if (whole_words) {
        scales[j] = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else {
        uint32_t word = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) word |= uint32_t(step * kStep + b * kBlock < k ? __ldg(from + b) : 127) << (8 * b);
        scales[j] = word;
      }
    }
  };
#pragma unroll
  for (int s = 0; s < L::kStages - 1; ++s) fill(s);
  load_scales(0);
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0;
  for (int step = 0; step < steps; ++step) {
    uint32_t* const table = tables + step % 2 * (L::kScaleBytes / 4);
    bool usual = true;
#pragma unroll
    for (int j = 0; j < kScaleRows; ++j) {
      const int line = j * L::kThreads + thread;
      if (line >= L::kLines) continue;
      const uint32_t word = scales[j];
      usual = usual && ((word ^ (word << 1)) & 0x80808080u) == 0x80808080u;  // a byte's upper two bits differ: 64 to 191
      *reinterpret_cast<uint2*>(table + line * 2) =
          make_uint2(upper(word, 0) | upper(word, 1) << 16, upper(word, 2) | upper(word, 3) << 16);
    }
    load_scales(step + 1);
    wait_copies<L::kStages - 2>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what cp.async wrote
    const bool careful = __syncthreads_or(!usual);
    fill(step + L::kStages - 1);
    const uint8_t* const stage = shared + step % L::kStages * L::kStageBytes;
    const uint64_t a = tile_at(stage + group_m * kGroupRows * kStep), b = tile_at(stage + (L::kRows + group_n * L::kWidth) * kStep);
    const uint32_t* const of_x = table + (group_m * kGroupRows + warp * 16 + g) * 2;
    const uint2 xs0 = *reinterpret_cast<const uint2*>(of_x), xs1 = *reinterpret_cast<const uint2*>(of_x + 16);
    const uint32_t of_w = static_cast<uint32_t>(__cvta_generic_to_shared(table + (L::kRows + group_n * L::kWidth + 2 * t) * 2));
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float d[kSums];
      order_registers();
      Product<L::kWidth>::start(d, a + 2 * block, b + 2 * block);  // 32 bytes further in each line, in units of 16
      finish();
      const uint32_t pair0 = block < 2 ? xs0.x : xs0.y, pair1 = block < 2 ? xs1.x : xs1.y;
      // The scales of W are read for each block: kept for all four, they would take 4 registers for each 8 columns.
      if (!careful) {
        const float x0 = block % 2 ? second_of(pair0) : first_of(pair0), x1 = block % 2 ? second_of(pair1) : first_of(pair1);
#pragma unroll
        for (int j = 0; j < kSums / 4; ++j) {
          uint32_t pair_w0, pair_w1;
          asm volatile("ld.shared.u32 %0, [%2];\n\tld.shared.u32 %1, [%2 + 8];"
                       : "=r"(pair_w0), "=r"(pair_w1) : "r"(of_w + j * 64 + block / 2 * 4));
          const float w0 = block % 2 ? second_of(pair_w0) : first_of(pair_w0), w1 = block % 2 ? second_of(pair_w1) : first_of(pair_w1);
          float* const to = sums + 4 * j;
          to[0] = fmaf(d[4 * j], x0 * w0, to[0]);
          to[1] = fmaf(d[4 * j + 1], x0 * w1, to[1]);
          to[2] = fmaf(d[4 * j + 2], x1 * w0, to[2]);
          to[3] = fmaf(d[4 * j + 3], x1 * w1, to[3]);
        }
      } else {
        const int shift = 16 * (block & 1) + 7, e0 = (pair0 >> shift) & 255, e1 = (pair1 >> shift) & 255;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          uint32_t pair_w;
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair_w) : "r"(of_w + i / 4 * 64 + i % 2 * 8 + block / 2 * 4));
          const int of_column = (pair_w >> shift) & 255, of_row = i % 4 < 2 ? e0 : e1, e = of_column + of_row - 254;
          const float scaled_sum = d[i] * power(e >> 1) * power(e - (e >> 1));
          sums[i] += of_column == 255 || of_row == 255 ? __int_as_float(0x7fc00000) : scaled_sum;
        }
      }
    }
  }
}

}  // namespace hf::wgmma_tiles
