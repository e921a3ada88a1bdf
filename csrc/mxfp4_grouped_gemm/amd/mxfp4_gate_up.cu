// The first grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, with SwiGLU and MX-FP8 quantisation in its
// epilogue, for gfx950 and gfx942. A variant serves one number of slots per work-group (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/amd/gate_up_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=16 or 32"
#endif

static constexpr auto& mxfp4_gate_up_out = hf::moe::gate_up<HF_ROWS / hf::moe::kTile, hf::moe::Elements::e2m1>;
HF_EXPORT(mxfp4_gate_up_out);
