// Grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, for gfx950 and a K of 128 to 512.
// ../../mxfp8_grouped_gemm/amd/stream_kernel.h has the kernel and its entry. A variant serves one K (HF_STEPS of 128).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/amd/stream_kernel.h"

#ifndef HF_STEPS
#error "build a variant: -DHF_STEPS=1, 2, 3 or 4"
#endif

static constexpr auto& mxfp4_grouped_stream_out = hf::moe::grouped_stream<HF_STEPS, hf::moe::Elements::e2m1>;
HF_EXPORT(mxfp4_grouped_stream_out);
