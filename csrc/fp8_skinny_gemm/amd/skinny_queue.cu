// Skinny fp8 GEMM for gfx942 and gfx950; queue_kernel.h has the picture. A variant serves one (op_m, a_lanes, b_lanes,
// ops), given as the digits of HF_TILE: 16138 is (16, 1, 3, 8).
#include "hipforge/amd/hip.h"
#include "hipforge/amd/launch.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"
#include "../guards.h"
#include "queue_kernel.h"

#ifndef HF_TILE
#error "build a variant: -DHF_TILE=8124"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::skinny;

namespace {

void check_waves(int64_t count, const char* name) {
  HF_CHECK(count >= 1 && count <= kMostWaves, name, " must be 1 to ", kMostWaves, " waves; got ", count);
}

}  // namespace

/// out fp16 [m, n]; a e4m3 [m, k]; b e4m3 [k, n] with stride(0) == 1; scale fp32 [1]; workspace fp32
/// [split_k consumers, m, n], or None for packed fp16 atomics on out (then n must be even and out holds what is added to).
void skinny_gemm_fp8_out(Tensor out, Tensor a, Tensor b, Tensor scale, OptionalTensor workspace, bool accumulate,
                         int64_t split_k, int64_t op_m, int64_t a_lanes, int64_t b_lanes, int64_t ops,
                         int64_t a_producers, int64_t b_producers, int64_t consumers, int64_t qsize, int64_t workgroups,
                         hipStream_t stream) {
  constexpr int kOpM = HF_TILE / 1000, kALanes = HF_TILE / 100 % 10, kBLanes = HF_TILE / 10 % 10, kOps = HF_TILE % 10;
  using S = Shape<kOpM, kALanes, kBLanes, kOps>;
  const Operands of = check_operands(out, a, b, scale);
  const auto [m, n, k, pitch, b_bytes] = of;
  HF_CHECK(op_m == kOpM && a_lanes == kALanes && b_lanes == kBLanes && ops == kOps, "this variant has op_m = ", kOpM,
           ", a_lanes = ", kALanes, ", b_lanes = ", kBLanes, ", ops = ", kOps, "; got ", op_m, ", ", a_lanes, ", ", b_lanes,
           ", ", ops);
  check_waves(a_producers, "a_producers");
  check_waves(b_producers, "b_producers");
  check_waves(consumers, "consumers");
  const int64_t waves = a_producers + b_producers + consumers;
  HF_CHECK(waves <= S::kMaxWaves, "a_producers + b_producers + consumers must be at most ",
           static_cast<int64_t>(S::kMaxWaves), " waves (", S::kMaxWaves == kMostWaves ? "1024 threads" : "a lane's sums "
           "take the registers of more", "); got ", waves, " (", a_producers, " + ", b_producers, " + ", consumers, ")");
  HF_CHECK(qsize * a_lanes >= a_producers && qsize * b_lanes >= b_producers && qsize >= consumers,
           "qsize must be at least a_producers / a_lanes, b_producers / b_lanes and consumers, or waves have no slot of "
           "their own; got qsize ", qsize, " for ", a_producers, " / ", a_lanes, ", ", b_producers, " / ", b_lanes, " and ",
           consumers);
  const int64_t lds_limit = hf::arch_of(b.device_index()).is("gfx950") ? 160 * 1024 : 64 * 1024;
  HF_CHECK(qsize <= lds_limit && S::lds_bytes(static_cast<uint32_t>(qsize)) <= lds_limit, "the queue needs ",
           static_cast<int64_t>(S::lds_bytes(1)), " bytes of LDS per slot; qsize = ", qsize, " exceeds the ", lds_limit,
           " bytes of a work-group");
  const int64_t blocks = hf::ceil_div(k, S::kBlockK);
  HF_CHECK(split_k >= 1 && split_k <= blocks, "split_k must be 1 to the number of k blocks, ceil(k / ",
           static_cast<int64_t>(S::kBlockK), ") = ", blocks, "; got ", split_k);
  HF_CHECK(workgroups >= 1, "workgroups must be at least 1; got ", workgroups);
  const int64_t slices = split_k * consumers;
  if (workspace) {
    hf::check_operand(*workspace, "workspace", HF_F32, {slices, m, n}, " = [split_k * consumers, m, n]");
  } else {
    HF_CHECK(n % 2 == 0, "packed fp16 atomics need an even n; got ", n, ": pass a workspace (the deterministic mode)");
    HF_CHECK(hf::aligned_to(out.data(), 4), "packed fp16 atomics need out to start at a multiple of 4 bytes");
    HF_CHECK(accumulate, "the atomic mode adds to out: accumulate must be true, and out zero where nothing is to be added");
  }

  const int64_t row_tiles = hf::ceil_div(m, S::kTileM), column_tiles = hf::ceil_div(n, S::kColumns);
  const int64_t tiles = row_tiles * column_tiles * split_k;
  // The sequence number of a part counts every k block of a work-group's run, times b_lanes.
  HF_CHECK(tiles * blocks <= (int64_t{1} << 29), "m, n, k and split_k make ", tiles, " tiles of up to ", blocks,
           " k blocks; their product must be at most 2^29");
  const auto u32 = [](int64_t value) { return static_cast<uint32_t>(value); };
  const int64_t grid = tiles < workgroups ? tiles : workgroups;
  const Problem problem{.m = u32(m),
                        .n = u32(n),
                        .k = u32(k),
                        .pitch = u32(pitch),
                        .a_bytes = u32(a.bytes()),
                        .b_bytes = u32(b_bytes),
                        .row_tiles = hf::Divisor::of(u32(row_tiles)),
                        .column_tiles = hf::Divisor::of(u32(column_tiles)),
                        .split_k = u32(split_k),
                        .blocks = u32(blocks),
                        .split_blocks = u32(blocks / split_k),
                        .run = u32(tiles / grid),
                        .longer_runs = u32(tiles % grid),
                        .a_producers = u32(a_producers),
                        .b_producers = u32(b_producers),
                        .consumers = u32(consumers),
                        .qsize = u32(qsize)};
  float* partials = workspace.data<float>();
  hf::launch(skinny_gemm<S>, {dim3(u32(grid)), dim3(u32(waves * hf::dev::kWaveSize)), S::lds_bytes(u32(qsize)), stream},
             out.data<_Float16>(), a.data<uint8_t>(), b.data<uint8_t>(), scale.data<float>(), partials, problem);
  if (!partials) return;
  hf::launch(reduce_partials, {hf::ceil_div(m * n, kReduceThreads * kReducePerThread), kReduceThreads, 0, stream},
             out.data<_Float16>(), partials, scale.data<float>(), static_cast<uint64_t>(m * n), u32(slices), accumulate);
}
HF_EXPORT(skinny_gemm_fp8_out);
