// MX-FP8 grouped GEMM of a mixture of experts for few slots of an expert, on sm_90, and the first one with SwiGLU and MX
// quantisation in its epilogue. pass_stream_kernel.h has the kernel.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "pass_stream_kernel.h"

static constexpr auto& mxfp8_grouped_pass_stream_out = hf::moe::grouped_pass_stream_out<hf::row_stream::E4m3>;
HF_EXPORT(mxfp8_grouped_pass_stream_out);

static constexpr auto& mxfp8_gate_up_pass_stream_out = hf::moe::gate_up_pass_stream_out<hf::row_stream::E4m3>;
HF_EXPORT(mxfp8_gate_up_pass_stream_out);
