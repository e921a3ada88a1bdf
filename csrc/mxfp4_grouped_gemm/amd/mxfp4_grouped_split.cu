// Grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, for gfx950 and gfx942, K split over the waves of a
// work-group. A variant serves one number of slots per work-group (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/amd/split_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16 or 32"
#endif

static constexpr auto& mxfp4_grouped_split_out = hf::moe::grouped_split<HF_ROWS / hf::moe::kTile, hf::moe::Elements::e2m1>;
HF_EXPORT(mxfp4_grouped_split_out);
