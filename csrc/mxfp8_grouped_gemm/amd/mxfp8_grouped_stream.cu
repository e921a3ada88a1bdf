// MX-FP8 grouped GEMM of a mixture of experts for gfx950 and a K of 128 to 512. stream_kernel.h has the kernel and its entry. A
// variant serves one K (HF_STEPS of 128).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "stream_kernel.h"

#ifndef HF_STEPS
#error "build a variant: -DHF_STEPS=1, 2, 3 or 4"
#endif

static constexpr auto& mxfp8_grouped_stream_out = hf::moe::grouped_stream<HF_STEPS, hf::moe::Elements::e4m3>;
HF_EXPORT(mxfp8_grouped_stream_out);
