"""aiter's path of :mod:`hipforge.ops.mxfp8_dense`, with the grouped GEMM's functions as aiter has them there."""

from hipforge.ops.grouped_gemm_mxfp8 import *  # noqa: F403
from hipforge.ops.mxfp8_dense import *  # noqa: F403
