"""aiter's path of :mod:`hipforge.ops.mxfp8_gemm`, with the grouped GEMM's functions as aiter has them there."""

from hipforge.ops.mxfp8_gemm import *  # noqa: F403
from hipforge.ops.mxfp8_grouped_gemm import grouped_gemm_mxfp8 as grouped_gemm_mxfp8
from hipforge.ops.mxfp8_grouped_gemm import grouped_mxfp8_linear as grouped_mxfp8_linear
from hipforge.ops.mxfp8_grouped_gemm import smallm_mxfp8_moe_grouped_gemm as smallm_mxfp8_moe_grouped_gemm
