// A token's result from the rows of its slots: out[t] = sum over i of weights[t, i] * rows[t k + i], slots without a local
// expert left out.
//
//   one wave per token and 512 columns (256 of fp32, 64 on the path for unaligned data); lane l owns the neighbouring
//   columns of a 16-byte load, c0 .. c7
//
//   rows  | slot t k     | c0 .. c7 | ... |      loads of kAhead slots in flight, then added in the order of the slots,
//         | slot t k + 1 | c0 .. c7 | ... |      product and sum each rounded to fp32, so that the result has one value
//
// A lane looks up one slot; a ballot tells the wave which slots count. Only their rows are read, others add 0: a sum that
// begins at +0 is never -0, so that adding 0 changes nothing, and no load waits behind a branch.
// Bytes per result: k rows read, one written; memory is the bound.
#include "hipforge/device/buffer.h"
#include "hipforge/device/early_start.h"
#include "hipforge/device/element.h"
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/device/wave.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

#if !defined(HF_INPUT) || !defined(HF_OUTPUT)
#error "build with -DHF_INPUT and -DHF_OUTPUT, each f32, f16 or bf16"
#endif

// Every operation rounds on its own, as torch's do.
#pragma clang fp contract(off)

namespace {

using Input = HF_ELEMENT(HF_INPUT);
using Output = HF_ELEMENT(HF_OUTPUT);
constexpr int kThreads = hf::dev::kWaveSize;
constexpr int kChunk = 16 / sizeof(Input);  // columns of a lane
constexpr int kAhead = 4;

// The kernel takes these one by one, in this order: all are in SGPRs when a wave starts (kernel-argument preload).
struct Arguments {
  const Input* rows;
  const float* weights;     // null: 1
  const void* ids;          // null: every slot counts
  const void* expert_map;   // null: an expert is its own number
  Output* out;
  int32_t experts, local;   // ids, and local numbers, from here on are of no expert; -1: only negative ones are
  uint32_t cols, choices;
  bool wide_ids, wide_map;  // int64
};

__device__ inline int64_t index_at(const void* from, int64_t at, bool wide) {
  return wide ? static_cast<const int64_t*>(from)[at] : static_cast<const int32_t*>(from)[at];
}

// The slots of a token from `base` on, one per lane: which count (a mask for the wave), and the lane's own weight, which is 0
// for those that do not.
struct Slots {
  hf::dev::LaneMask used;
  float weight;

  __device__ Slots(const Arguments& a, int64_t first, uint32_t base, uint32_t lane) {
    const int64_t slot = first + base + lane;
    bool counts = base + lane < a.choices;
    weight = counts && a.weights ? a.weights[slot] : 1.f;
    if (counts && a.ids) {
      const int64_t id = index_at(a.ids, slot, a.wide_ids);
      counts = id >= 0 && (a.experts < 0 || id < a.experts);
      if (counts && a.expert_map) {
        const int64_t own = index_at(a.expert_map, id, a.wide_map);
        counts = own >= 0 && (a.local < 0 || own < a.local);
      }
    }
    if (!counts) weight = 0.f;
    used = hf::dev::lanes_with(counts);
  }

  // That of slot base + i, in a scalar register.
  __device__ float weight_of(uint32_t i) const {
    return hf::dev::of_lane(weight, i);
  }
};

template <class T>
__device__ inline T load(hf::dev::Buffer buffer, uint32_t offset) {
  if constexpr (sizeof(T) == 16) {
    return __builtin_bit_cast(T, hf::dev::load_b128(buffer, offset, 0));
  } else if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, hf::dev::load_b32(buffer, offset, 0));
  } else {
    return __builtin_bit_cast(T, static_cast<uint16_t>(hf::dev::load_u16(buffer, offset, 0)));
  }
}

template <int kWidth>
__global__ __launch_bounds__(kThreads) void moe_combine_kernel(
    const Input* rows, const float* weights, const void* ids, const void* expert_map, Output* out, int32_t experts,
    int32_t local, uint32_t cols, uint32_t choices, bool wide_ids, bool wide_map) {
  const Arguments a{rows, weights, ids, expert_map, out, experts, local, cols, choices, wide_ids, wide_map};
  hf::dev::let_next_start();
  hf::dev::wait_for_predecessor();
  using In = hf::dev::Vector<Input, kWidth>;
  using Out = hf::dev::Vector<Output, kWidth>;
  using F32 = hf::dev::Vector<float, kWidth>;
  const int64_t token = blockIdx.x, first = token * a.choices;
  const uint32_t lane = threadIdx.x;
  const uint32_t col = (blockIdx.y * kThreads + lane) * kWidth;
  const uint32_t row_bytes = a.cols * sizeof(Input);
  const bool inside = col < a.cols;
  F32 sum = {};
  for (uint32_t base = 0; base < a.choices; base += kThreads) {
    const Slots slots(a, first, base, lane);
    const Input* row = a.rows + (first + base) * a.cols;
    const uint32_t count = min(a.choices - base, static_cast<uint32_t>(kThreads));
    for (uint32_t group = 0; group < count; group += kAhead) {
      const hf::dev::LaneMask used = slots.used >> group;
      const auto of_group = hf::dev::make_buffer(row, min(count - group, static_cast<uint32_t>(kAhead)) * row_bytes);
      In loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        loaded[i] = load<In>(of_group, (used >> i & 1) && inside ? i * row_bytes + col * static_cast<uint32_t>(sizeof(Input))
                                                                 : hf::dev::kOutOfRange);
      row += int64_t{kAhead} * a.cols;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const F32 values = hf::dev::converted<F32>(loaded[i]);
        sum = sum + (a.weights ? values * slots.weight_of(group + i) : values);
      }
    }
  }
  if (inside) *reinterpret_cast<Out*>(a.out + token * a.cols + col) = hf::dev::converted<Out>(sum);
}

template <int kWidth>
void launch(Arguments a, int64_t tokens, int64_t cols, bool programmatic, hipStream_t stream) {
  constexpr int64_t kColumns = kThreads * kWidth, kMaxGridY = 65535;
  static_assert(kMaxGridY * kColumns * kAhead * sizeof(Input) < hf::dev::kOutOfRange, "offsets have 32 bits");
  const int64_t pieces = (cols + kColumns - 1) / kColumns;
  HF_CHECK(pieces <= kMaxGridY, "rows have ", cols, " columns; at most ", kMaxGridY * kColumns, " are taken",
           kWidth == 1 ? " on the path for unaligned data" : "");
  a.cols = static_cast<uint32_t>(cols);
  hf::Launch at{dim3(static_cast<uint32_t>(tokens), static_cast<uint32_t>(pieces)), kThreads, 0, stream};
  hf::may_start_early(at, programmatic);
  hf::launch(moe_combine_kernel<kWidth>, at, a.rows, a.weights,
             a.ids, a.expert_map, a.out, a.experts, a.local, a.cols, a.choices, a.wide_ids, a.wide_map);
}

}  // namespace

/// out [T, N]; rows [T k, N]; weights float32 [T, k]; ids int32 or int64 [T, k]; expert_map int32 or int64 [experts].
/// experts and local are -1 where ids, and the numbers in expert_map, have no upper limit.
void moe_combine_out(hf::Tensor out, hf::Tensor rows, hf::OptionalTensor weights, hf::OptionalTensor ids,
                     hf::OptionalTensor expert_map, int64_t top_k, int64_t experts, int64_t local, bool programmatic,
                     hipStream_t stream) {
  HF_CHECK_ARCH(rows, HF_ARCHS);
  hf::check_operand(rows, "rows", hf::dev::dtype_of<Input>, {"T * k", "N"});
  HF_CHECK(top_k >= 1 && rows.size(0) % top_k == 0, "rows must have k = ", top_k, " for each token; got ", rows);
  const int64_t tokens = rows.size(0) / top_k, cols = rows.size(1);
  HF_CHECK(tokens < int64_t{1} << 31, "rows must be of fewer than 2^31 tokens; got ", tokens);
  hf::check_operand(out, "out", hf::dev::dtype_of<Output>, {tokens, cols});
  hf::check_not_in_place({out, "out"}, {{rows, "rows"}});
  Arguments a = {};
  HF_CHECK(experts >= -1 && experts < int64_t{1} << 31, "experts must be -1, for no limit, to 2^31 - 1; got ", experts);
  a.experts = static_cast<int32_t>(experts);
  HF_CHECK(local >= -1 && local < int64_t{1} << 31, "local must be -1, for no limit, to 2^31 - 1; got ", local);
  a.local = static_cast<int32_t>(local);
  if (weights) {
    hf::check_operand(*weights, "weights", HF_F32, {tokens, top_k});
    hf::check_not_in_place({out, "out"}, {{*weights, "weights"}});
    a.weights = weights.data<const float>();
  }
  if (ids) {
    hf::check_operand(*ids, "ids", hf::kIndex, {tokens, top_k});
    a.ids = ids.value().data();
    a.wide_ids = ids.value().dtype() == HF_I64;
  }
  if (expert_map) {
    HF_CHECK(ids.has_value(), "expert_map needs ids, whose experts it maps");
    hf::check_operand(*expert_map, "expert_map", hf::kIndex, {experts});
    a.expert_map = expert_map.value().data();
    a.wide_map = expert_map.value().dtype() == HF_I64;
  }
  if (tokens == 0 || cols == 0) return;
  a.rows = rows.data<const Input>();
  a.out = out.data<Output>();
  a.choices = static_cast<uint32_t>(top_k);
  const bool vector = cols % kChunk == 0 && hf::aligned_to(rows.data(), 16) && hf::aligned_to(out.data(), 16);
  vector ? launch<kChunk>(a, tokens, cols, programmatic, stream) : launch<1>(a, tokens, cols, programmatic, stream);
}
HF_EXPORT(moe_combine_out);
