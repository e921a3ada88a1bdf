// MX-FP8 GEMM for any M on sm_90: out[M, N] = X[M, K] W[N, K]^T (+ bias) in two launches: share_scales.h makes a form of X that is
// multiplied fast, code_tiles_kernel.h multiplies in tiles, which a producer (tile_ring.h) fills and a cluster may share. A
// variant has one tile: HF_TILE = rows of X times 1,000 plus rows of W.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "code_tiles_kernel.h"
#include "share_scales.h"

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::mx_tiles;

#if !defined(HF_TILE)
#error "build a variant: -DHF_TILE=32128, 64128, 64256, 128128 or 128256"
#elif HF_TILE == 32128
using Tile = Ring<32, 2, 4, 2>;
#elif HF_TILE == 64128
using Tile = Ring<64, 2, 3, 2>;
#elif HF_TILE == 64256
using Tile = Ring<64, 4, 4, 1>;
#elif HF_TILE == 128256
using Tile = Ring<128, 2, 6, 1, 2>;
#elif HF_TILE == 128128
using Tile = Ring<128, 2, 7, 1, 2, true>;
#endif
static_assert(HF_TILE == Tile::kRows * 1000 + Tile::kColumns * Tile::kTeam);
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1, kMaxK = int64_t{1} << 24, kMostSplits = 8, kMostTeams = 66;
constexpr int kAheadOfX = 4;  // stages of W, where share_scales starts no earlier than the launch before it ends
constexpr int64_t kScaleLine = 16;  // bytes: rows of scales that the copy engine reads start at multiples of it

/// out bf16 [M, N]; Xq, Wq e4m3 (or uint8) [M, K], [N, K]; Xs, Ws e8m0 (or uint8) [M, K/32], [N, K/32]; bias bf16 [N] or
/// none; workspace uint8, at least Xq's bytes + 4 ceil(K / 128) (M up to a whole tile) + N 16 ceil(K / 512) + N K where shared + of
/// teams with k_splits > 1 their sums, 4 bytes each, and 1,024, each up to a multiple of 256; tile that of the variant; k_splits:
/// blocks that share K, or teams at most, 1 to 8 and at most one for each 128 of K; programmatic: the launch may start before its
/// predecessor has ended.
void mxfp8_ring_tiles_out(Tensor out, Tensor Xq, Tensor Xs, Tensor Wq, Tensor Ws, OptionalTensor bias, Tensor workspace,
                          int64_t tile, int64_t k_splits, int64_t shared, bool programmatic, hipStream_t stream) {
  const auto shape = hf::mxfp8::check_gemm(out, Xq, Xs, Wq, Ws, kMaxRows, kMaxRows << 24);
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  HF_CHECK(k <= kMaxK, "K must be at most ", kMaxK, "; got ", k);
  HF_CHECK(n <= kMaxRows, "N must be at most ", kMaxRows, "; got ", n);
  HF_CHECK(tile == HF_TILE, "this variant of the module has tile = ", HF_TILE, "; got ", tile);
  const int64_t steps = hf::ceil_div(k, kStep);
  HF_CHECK(k_splits >= 1 && k_splits <= kMostSplits && k_splits <= steps, "k_splits must be 1 to ", kMostSplits,
           " and at most ceil(K / ", kStep, ") = ", steps, "; got ", k_splits);
  hf::mxfp8::check_bias(bias, n, out);
  const int64_t tiles = hf::ceil_div(m, Tile::kRows) * hf::ceil_div(n, Tile::kColumns * Tile::kTeam);
  HF_CHECK(tiles * k_splits <= kMaxRows, "M and N make ", tiles * k_splits, " blocks; a launch has at most ", kMaxRows);
  if (m == 0 || n == 0) return;

  const bool made_scales = shared || k / kBlock % kScaleLine != 0 || !hf::aligned_to(Ws.data(), kScaleLine);
  const int64_t padded = hf::ceil_div(m, Tile::kRows) * Tile::kRows, pitch = hf::ceil_div(steps, kSpan) * kScaleLine;
  const auto whole = [](int64_t bytes) { return hf::ceil_div(bytes, 256) * 256; };
  const int64_t words_at = whole(m * k), scales_at = words_at + whole(steps * padded * 4), codes_at = scales_at + whole(n * pitch);
  const int64_t parts_at = codes_at + whole(shared ? n * k : 0), blocks_of_teams = hf::smaller(tiles * k_splits, kMostTeams) * Tile::kTeam;
  const int64_t there_at = parts_at + (Tile::kTeam > 1 && k_splits > 1 ? blocks_of_teams * Tile::kRows * Tile::kColumns * 4 : 0);
  const int64_t bytes = there_at + (there_at > parts_at ? 1024 : 0);
  hf::check_operand(workspace, "workspace", HF_U8, {"BYTES"}, "", hf::kAligned);
  HF_CHECK(workspace.numel() >= bytes, "workspace must have at least ", bytes, " bytes; got ", workspace.numel());
  uint8_t* const space = workspace.data<uint8_t>();
  const auto words = [&](int64_t from) { return reinterpret_cast<uint32_t*>(space + from); };
  const uint8_t* const codes_of_w = shared ? space + codes_at : Wq.data<uint8_t>();
  const Sharing sharing{
      {Xq.data<uint8_t>(), Xs.data<uint8_t>(), space, words(words_at), static_cast<int>(m), static_cast<int>(steps), 1, static_cast<int>(padded)},
      {Wq.data<uint8_t>(), Ws.data<uint8_t>(), space + codes_at, words(scales_at), static_cast<int>(n), static_cast<int>(pitch / 4), static_cast<int>(pitch / 4), 1},
      static_cast<int>(padded), static_cast<int>(k), shared != 0, words(there_at), there_at > parts_at ? static_cast<int>(blocks_of_teams) : 0};
  static const int processors = [] {
    int device = 0, count = 0;
    HF_HIP(cudaGetDevice(&device));
    HF_HIP(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }();
  const int64_t pieces = hf::ceil_div(k, 512) * 32, turns = hf::ceil_div(pieces, kMostSharing);
  const int64_t threads = hf::ceil_div(hf::ceil_div(pieces, turns), 32) * 32;
  const int64_t of_w = shared ? n : made_scales ? hf::smaller(hf::ceil_div(n * pitch / 4, threads), 8 * processors) : 0;
  hf::Launch at{dim3(static_cast<uint32_t>(padded + of_w)), static_cast<uint32_t>(threads), 0, stream};
  at.programmatic = programmatic;
  hf::launch(turns == 1 ? share_scales<1> : turns == 2 ? share_scales<2> : share_scales<8>, at, sharing);

  const int64_t at_once = k_splits > 1 && Tile::kTeam == 1 ? tiles : hf::smaller(tiles, int64_t{processors} * Tile::kBlocks);
  // Teams take whole tiles in turn; where that leaves some idle at the end they share the last one or two tiles of each.
  const int64_t teams = hf::smaller(hf::smaller(processors / Tile::kTeam, tiles * k_splits), there_at > parts_at ? kMostTeams : kMaxRows);
  const bool even = k_splits == 1 || tiles % teams == 0;
  const int64_t whole_tiles = Tile::kTeam == 1 || even ? tiles : tiles > teams ? (tiles / teams - 1) * teams : 0;
  const Problem problem{out.data<hf::dev::bf16>(), bias.data<hf::dev::bf16>(), static_cast<int>(m), static_cast<int>(n),
                        static_cast<int>(k), static_cast<int>(k_splits), static_cast<int>(tiles), static_cast<int>(whole_tiles),
                        reinterpret_cast<float4*>(space + parts_at), words(there_at),
                        static_cast<int>(programmatic ? Tile::kStages : hf::smaller(Tile::kStages, kAheadOfX)), made_scales,
                        shared != 0, n % 8 == 0 && hf::aligned_to(out.data(), 16)};
  const Maps maps{hf::map_of({space, m, k, k, Tile::kRows / Tile::kTeam, kStep, 1}), hf::map_of({codes_of_w, n, k, k, Tile::kColumns, kStep, 1}),
                  hf::map_of({space + words_at, steps, padded, padded * 4, kSpan, Tile::kRows, 4}),
                  made_scales ? hf::map_of({space + scales_at, n, pitch, pitch, Tile::kColumns, kScaleLine, 1})
                              : hf::map_of({Ws.data<uint8_t>(), n, k / kBlock, k / kBlock, Tile::kColumns, kScaleLine, 1})};
  hf::Launch tiled{dim3(static_cast<uint32_t>(Tile::kTeam > 1 ? teams * Tile::kTeam : at_once * k_splits)), Tile::kThreads, Tile::kBytes, stream};
  tiled.cluster = static_cast<uint32_t>(Tile::kTeam > 1 ? Tile::kTeam : k_splits);
  tiled.programmatic = true;  // it waits for share_scales before it reads what that writes; W, unless it is shared, was there before
  hf::launch(code_tiles<Tile>, tiled, maps, problem);
}
HF_EXPORT(mxfp8_ring_tiles_out);
