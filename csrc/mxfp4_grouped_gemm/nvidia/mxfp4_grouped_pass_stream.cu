// Grouped GEMM of a mixture of experts with W in MXFP4 and A in MX-FP8 for few slots of an expert, on sm_90, and the first one with
// SwiGLU and MX quantisation in its epilogue. mxfp8_grouped_gemm/nvidia/pass_stream_kernel.h has the kernel.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "../../mxfp8_grouped_gemm/nvidia/pass_stream_kernel.h"
#include "e2m1.h"

static constexpr auto& mxfp4_grouped_pass_stream_out = hf::moe::grouped_pass_stream_out<hf::row_stream::E2m1>;
HF_EXPORT(mxfp4_grouped_pass_stream_out);

static constexpr auto& mxfp4_gate_up_pass_stream_out = hf::moe::gate_up_pass_stream_out<hf::row_stream::E2m1>;
HF_EXPORT(mxfp4_gate_up_pass_stream_out);
