// Skinny fp8 GEMM for gfx942 and gfx950 with k split over the waves of a work-group; wave_split_kernel.h has the picture. A
// variant serves one number of rows per work-group (HF_ROWS) and 8 to 64 columns.
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "wave_split_kernel.h"

#if !defined(HF_ROWS)
#error "build a variant: -DHF_ROWS=8, 16 or 32"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::skinny;

namespace {

constexpr int kEdge = HF_ROWS == 8 ? 8 : 16;
constexpr int kRowTiles = HF_ROWS / kEdge;
constexpr int64_t kMostColumns = kEdge * kMostColumnTiles;
constexpr int64_t kMostBlocks = (1 << 16) - 1;  // of a grid along y and z

static_assert(HF_ROWS == 8 || HF_ROWS == 16 || HF_ROWS == 32);
static_assert(HF_ROWS * kMaxPitch < int64_t{hf::dev::kOutOfRange}, "a work-group's rows of a are within one resource");

/// One, two or four tiles of columns.
int column_tiles(int64_t columns) { return columns <= kEdge ? 1 : columns <= 2 * kEdge ? 2 : kMostColumnTiles; }

}  // namespace

/// out fp16 [m, n], added to with `accumulate`; a e4m3 [m, k]; b e4m3 [k, n] with stride(0) == 1; scale fp32 [1]; columns a
/// multiple of 8 of each work-group; waves, a power of two, that share its part of k; k_splits work-groups (1, 2, 4 or 8) that
/// share a k, with a workspace that need not be initialised.
void skinny_wave_split_out(Tensor out, Tensor a, Tensor b, Tensor scale, OptionalTensor workspace, bool accumulate,
                           int64_t rows, int64_t columns, int64_t waves, int64_t k_splits, hipStream_t stream) {
  const Operands of = check_operands(out, a, b, scale);
  HF_CHECK(of.pitch <= kMaxPitch, "a column of b must take at most 2^24 bytes; got a pitch of ", of.pitch);
  HF_CHECK(rows == HF_ROWS, "this variant has rows = ", HF_ROWS, "; got ", rows);
  HF_CHECK(columns >= 8 && columns % 8 == 0 && columns <= kMostColumns, "columns must be a multiple of 8, at most ",
           kMostColumns, " with ", HF_ROWS, " rows; got ", columns);
  const int tiles = column_tiles(columns), most_waves = max_waves(kEdge, kRowTiles, tiles);
  HF_CHECK((waves == 1 || waves == 2 || waves == 4 || waves == 8 || waves == 16) && waves <= most_waves,
           "waves must be 1, 2, 4, 8 or 16, at most ", most_waves, " with ", HF_ROWS, " rows and ", columns, " columns; got ",
           waves);
  hf::check_k_splits(k_splits, (of.k + kStep - 1) / kStep, of.k, "split_k");
  const int64_t row_blocks = hf::ceil_div(of.m, HF_ROWS), column_blocks = hf::ceil_div(of.n, columns);
  HF_CHECK(row_blocks <= kMostBlocks, "m must be at most ", kMostBlocks * HF_ROWS, "; got ", of.m);
  const uint32_t sums = static_cast<uint32_t>(kRowTiles * tiles) * tile_bytes(kEdge);
  uint8_t* shared = nullptr;
  if (k_splits > 1) {
    const uint64_t each = split_stride(sums, static_cast<uint32_t>(k_splits));
    const uint64_t bytes = static_cast<uint64_t>(row_blocks * column_blocks) * each;
    shared = hf::check_split_workspace(workspace, bytes, k_splits, "split_k");
  }

  const auto u32 = [](int64_t value) { return static_cast<uint32_t>(value); };
  const bool aligned = of.n % hf::dev::kColumnsPerLane == 0 && hf::aligned_to(out.data(), 8);
  const Problem p{.b = b.data<uint8_t>(),
                  .a = a.data<uint8_t>(),
                  .m = u32(of.m),
                  .n = u32(of.n),
                  .k = u32(of.k),
                  .pitch = u32(of.pitch),
                  .options = pack_options(u32(__builtin_ctzll(waves)), u32(__builtin_ctzll(k_splits)), accumulate, aligned,
                                          u32(columns)),
                  .out = out.data<_Float16>(),
                  .scale = scale.data<float>(),
                  .workspace = shared,
                  .number = hf::launch_number(),
                  .column_tiles = u32(column_blocks)};
  const auto kernel = tiles == 1   ? skinny_wave_split<kEdge, kRowTiles, 1>
                      : tiles == 2 ? skinny_wave_split<kEdge, kRowTiles, 2>
                                   : skinny_wave_split<kEdge, kRowTiles, kMostColumnTiles>;
  hf::launch(kernel,
             {dim3(u32(column_blocks), u32(k_splits), u32(row_blocks)), u32(waves) * hf::dev::kWaveSize,
              u32(waves) * parts(kEdge) * sums, stream},
             p.b, p.a, p.m, p.n, p.k, p.pitch, p.options, p.out, p.scale, p.workspace, p.number, p.column_tiles);
}
HF_EXPORT(skinny_wave_split_out);
