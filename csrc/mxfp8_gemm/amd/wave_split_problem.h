// The problem of the kernels that split K over waves (wave_split_kernel.h), for host and device.
#pragma once

#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/module.h"
#include "hipforge/device/mx.h"
#include "hipforge/amd/wave.h"
#include "../guards.h"

namespace hf::wave_split {

constexpr int kTile = 16;
constexpr int kStep = 128;
constexpr int kBlocks = kStep / kMxBlock;  // of a step: the bytes of one scale word

constexpr int64_t kMaxK = 1 << 22;
constexpr int kTileBytes = kTile * kTile * sizeof(float);

static_assert(kBlocks == 4, "one dword holds the scales of a row and step");

/// Which numbers scale the products: x for each row of X, w for a number of rows of W.
enum class Scales {
  kOnce,        // one f32 for a row of X and of W, or for all rows: sums are scaled
  kBlocks,      // f32 for each 128 of K, w for 128 rows
  kBlocksE8m0,  // the same in e8m0
  kMxShared,    // e8m0 for each 32 of K, w for 32 rows
  kMx,          // e8m0 for each 32 of K and row
};

/// The elements of W; those of X are e4m3.
enum class Elements { e4m3, e2m1 };

/// Bytes of a row of `k` elements.
constexpr uint32_t row_bytes(Elements elements, uint32_t k) { return elements == Elements::e2m1 ? k / 2 : k; }

/// Rows of W that share scales.
constexpr uint32_t shared_rows(Scales scales) {
  return scales == Scales::kMxShared ? 32 : scales == Scales::kBlocks || scales == Scales::kBlocksE8m0 ? 128 : 1;
}

/// Bytes of a row of scales over k.
constexpr uint32_t scale_row_bytes(Scales scales, uint32_t k) {
  const uint32_t steps = (k + kStep - 1) / kStep;
  return scales == Scales::kOnce         ? 0
         : scales == Scales::kBlocks     ? steps * sizeof(float)
         : scales == Scales::kBlocksE8m0 ? steps
                                         : k / kMxBlock;
}

/// The arguments of a launch, with device pointers. A kernel takes the members one by one, in this order: kernel-argument
/// preload puts only arguments that are no structures into SGPRs when a wave starts. The module's flags ask for the 14 dwords
/// up to `out`, all that there can be, so that neither a wave's first loads nor its stores wait for an argument from memory.
struct Problem {
  const uint8_t *wq, *ws, *xq, *xs;
  uint32_t m, n, k;
  uint32_t options;  // of pack_options
  dev::bf16* out;
  const dev::bf16* bias;  // null for none

  __device__ uint32_t log2_waves() const { return options & 0xFF; }
  __device__ bool aligned_scales() const { return options & kAlignedScales; }
  __device__ bool aligned_output() const { return options & kAlignedOutput; }
  __device__ bool scales_between_words() const { return options >> 10 & 1; }
  __device__ bool has_bias() const { return options & kHasBias; }
  __device__ bool half_output() const { return options & kHalfOutput; }
  __device__ bool one_x_scale() const { return options & kOneXScale; }
  __device__ bool one_w_scale() const { return options & kOneWScale; }
  __device__ bool prepared_output() const { return options & kPreparedOutput; }
  __device__ uint32_t columns() const { return options >> 16; }

  static constexpr uint32_t kAlignedScales = 1 << 8, kAlignedOutput = 1 << 9, kHasBias = 1 << 14;
  static constexpr uint32_t kPreparedOutput = 1 << 15;  // stored by PreparedOutput
  // Options of scales that are not MX's: out and bias are f16; the scale of Scales::kOnce is that of all rows.
  static constexpr uint32_t kHalfOutput = 1 << 11, kOneXScale = 1 << 12, kOneWScale = 1 << 13;
};

static_assert(__builtin_offsetof(Problem, bias) == 14 * sizeof(uint32_t), "all before the bias is preloaded");

/// The bias of a launch that has one, loaded here. Taken from the kernel's argument it would be loaded in every launch, where a
/// wave's sums are complete, and waited for.
__device__ inline const dev::bf16* bias_here() { return dev::arguments_here<Problem>().bias; }

/// log2_waves: of the waves that share a K. aligned_scales: rows of both scale tensors start at a multiple of 4 bytes.
/// aligned_output: four neighbouring outputs can be stored at once. columns: of a work-group. scales_between_words: the scale
/// tensors start at a multiple of 4 bytes, their rows do not.
constexpr uint32_t pack_options(uint32_t log2_waves, bool aligned_scales, bool aligned_output, uint32_t columns,
                                bool scales_between_words = false) {
  return log2_waves | uint32_t{aligned_scales} << 8 | uint32_t{aligned_output} << 9 | uint32_t{scales_between_words} << 10 |
         columns << 16;
}

/// The options that the operands decide; `mx`: the scales are e8m0 for each 32 of K.
inline uint32_t options_of(const Tensor& out, const Tensor& xs, const Tensor& ws, int64_t n, int64_t k, bool mx) {
  const bool words = aligned_to(xs.data(), 4) && aligned_to(ws.data(), 4), whole_steps = k % kStep == 0;
  const bool aligned_output = n % dev::kColumnsPerLane == 0 && aligned_to(out.data(), 8);
  return pack_options(0, !mx || (words && whole_steps), aligned_output, 0, mx && words && !whole_steps);
}

/// The problem of operands that were checked.
inline Problem problem_of(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                          const OptionalTensor& bias, uint32_t options) {
  return {.wq = wq.data<uint8_t>(),
          .ws = static_cast<const uint8_t*>(ws.data()),
          .xq = xq.data<uint8_t>(),
          .xs = static_cast<const uint8_t*>(xs.data()),
          .m = static_cast<uint32_t>(xq.size(0)),
          .n = static_cast<uint32_t>(wq.size(0)),
          .k = static_cast<uint32_t>(xq.size(1)),
          .options = options | (bias.has_value() ? Problem::kHasBias : 0),
          .out = static_cast<dev::bf16*>(out.data()),
          .bias = bias.has_value() ? static_cast<const dev::bf16*>((*bias).data()) : nullptr};
}

/// The problem of MX operands whose shapes were checked.
inline Problem mx_problem(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                          const OptionalTensor& bias) {
  const int64_t n = wq.size(0), k = xq.size(1);
  HF_CHECK(k <= kMaxK, "K must be at most ", kMaxK, "; got ", k);
  mxfp8::check_bias(bias, n, out);
  return problem_of(out, xq, xs, wq, ws, bias, options_of(out, xs, ws, n, k, true));
}

/// `more`: what the kernel takes besides.
template <class Kernel, class... More>
void launch(Kernel kernel, const Problem& p, dim3 grid, int64_t waves, uint32_t lds, hipStream_t stream, More... more) {
  HF_CHECK(grid.y < 1u << 16, "a grid has at most 65,535 blocks of rows; M = ", p.m, " makes ", grid.y);
  hf::launch(kernel, {grid, static_cast<uint32_t>(waves) * dev::kWaveSize, lds, stream}, p.wq, p.ws, p.xq, p.xs, p.m, p.n,
             p.k, p.options, p.out, p.bias, more...);
}

constexpr int kMostColumnTiles = 5;

/// Registers decide: a wave has 128, 256 or, with three tiles of columns or more, 512.
constexpr int max_waves(int row_tiles, int column_tiles = 1) {
  return row_tiles * column_tiles == 1 ? 16 : column_tiles > 2 ? 4 : 8;
}

inline void check_waves(int64_t waves, int most, int64_t rows, int64_t columns = kTile) {
  HF_CHECK((waves == 1 || waves == 2 || waves == 4 || waves == 8 || waves == 16) && waves <= most,
           "waves must be 1, 2, 4, 8 or 16, at most ", most, " with ", rows, " rows and ", columns, " columns; got ", waves);
}

}  // namespace hf::wave_split
