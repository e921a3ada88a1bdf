// MX-FP8 grouped GEMM of a mixture of experts for few slots of an expert, on sm_90. row_stream_kernel.h has the kernel. A variant
// multiplies up to HF_ROWS slots of an expert at once.
#include "hipforge/device/hip.h"
#include "hipforge/device/launch.h"
#include "hipforge/module.h"
#include "row_stream_kernel.h"

#if !defined(HF_ROWS)
#error "build a variant: -DHF_ROWS=8 or 16"
#endif

static constexpr auto& mxfp8_grouped_row_stream_out = hf::moe::grouped_row_stream_out<HF_ROWS, hf::row_stream::E4m3>;
HF_EXPORT(mxfp8_grouped_row_stream_out);
