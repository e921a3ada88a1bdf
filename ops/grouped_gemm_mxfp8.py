"""The earlier path of :mod:`hipforge.ops.mxfp8_grouped_gemm`."""

from hipforge.ops.mxfp8_grouped_gemm import *  # noqa: F403
