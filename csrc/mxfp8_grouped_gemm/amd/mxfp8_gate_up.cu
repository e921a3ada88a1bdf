// The first grouped MX-FP8 GEMM of a mixture of experts with SwiGLU and MX quantisation in its epilogue, for gfx950 and
// gfx942. gate_up_kernel.h has the kernel and its entry. A variant serves one number of slots per work-group (HF_ROWS).
#include "hipforge/amd/hip.h"
#include "hipforge/module.h"
#include "gate_up_kernel.h"

#ifndef HF_ROWS
#error "build a variant: -DHF_ROWS=8, 16 or 32"
#endif

// 8 slots are half of a tile, by line_wave.h.
static constexpr auto& mxfp8_gate_up_out =
    hf::moe::gate_up<(HF_ROWS + 8) / hf::moe::kTile, hf::moe::Elements::e4m3, HF_ROWS == 8>;
HF_EXPORT(mxfp8_gate_up_out);
