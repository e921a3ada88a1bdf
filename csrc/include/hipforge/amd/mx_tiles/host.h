// The host's side of a GEMM in tiles: the size of its grid and workspace, and the kernel's argument from tensors that have been
// checked.
#pragma once

#include "hipforge/amd/last_group.h"
#include "hipforge/amd/mx_tiles/kernel.h"
#include "hipforge/amd/split_k.h"
#include "hipforge/host/operand.h"
#include "hipforge/module.h"

namespace hf::tiles {

// A tile's resources count its own rows: 256 of kMaxK elements stay below 2^31 bytes.
constexpr int64_t kMaxK = 1 << 22, kMaxRows = int64_t{1} << 24;

/// The launch of tiles of C over [m, n, k] with k_splits parts of K.
template <class C>
struct Launch {
  static_assert((C::kBlockM > C::kBlockN ? C::kBlockM : C::kBlockN) * kMaxK < (int64_t{1} << 31));

  int64_t m, n, k, k_splits;

  int64_t steps() const { return ceil_div(k, C::kStep); }
  uint32_t row_tiles() const { return ceil_div(m, C::kBlockM); }
  uint32_t column_tiles() const { return ceil_div(n, C::kBlockN); }
  uint64_t tiles() const { return uint64_t{row_tiles()} * column_tiles(); }
  uint32_t groups() const { return static_cast<uint32_t>(tiles() * k_splits); }
  uint64_t part_bytes() const { return groups() * uint64_t{C::kPartBytes}; }
  uint64_t workspace_bytes() const { return part_bytes() + tiles() * dev::meeting_words(k_splits) * sizeof(uint64_t); }

  /// `workspace` is null where there is one split.
  Problem problem(const Tensor& out, const Tensor& xq, const Tensor& xs, const Tensor& wq, const Tensor& ws,
                  const OptionalTensor& bias, uint8_t* workspace, bool shuffled) const {
    return {.out = static_cast<dev::bf16*>(out.data()),
            .partials = workspace,
            .words = reinterpret_cast<uint64_t*>(workspace + part_bytes()),
            .number = launch_number(),
            .bias = bias.has_value() ? static_cast<const dev::bf16*>((*bias).data()) : nullptr,
            .xq = xq.data<uint8_t>(),
            .xs = static_cast<const uint8_t*>(xs.data()),
            .wq = wq.data<uint8_t>(),
            .ws = static_cast<const uint8_t*>(ws.data()),
            .m = static_cast<uint32_t>(m),
            .n = static_cast<uint32_t>(n),
            .k = static_cast<uint32_t>(k),
            .row_tiles = row_tiles(),
            .column_tiles = column_tiles(),
            .log2_splits = static_cast<uint32_t>(__builtin_ctzll(static_cast<unsigned long long>(k_splits))),
            .aligned_scales = k % (kWordBlocks * kMxBlock) == 0 && aligned_to(xs.data(), kWordBlocks) &&
                              aligned_to(ws.data(), kWordBlocks),
            .shuffled = shuffled,
            .aligned_output = n % 8 == 0 && aligned_to(out.data(), 16),
            .half_output = out.dtype() == HF_F16,
            .x_scale_step = xs.numel() > 1,
            .w_scale_step = ws.numel() > 1};
  }
};

}  // namespace hf::tiles
