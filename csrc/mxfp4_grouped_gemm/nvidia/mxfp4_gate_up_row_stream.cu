// The first grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8, with SwiGLU and MX quantisation in its epilogue, on
// sm_90. mxfp8_grouped_gemm/nvidia/row_stream_kernel.h has the kernel. A variant multiplies up to HF_ROWS slots of an expert at once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/nvidia/row_stream_kernel.h"
#include "e2m1.h"

#if !defined(HF_ROWS)
#error "build a variant: -DHF_ROWS=8 or 16"
#endif

static constexpr auto& mxfp4_gate_up_row_stream_out = hf::moe::gate_up_row_stream_out<HF_ROWS, hf::row_stream::E2m1>;
HF_EXPORT(mxfp4_gate_up_row_stream_out);
