"""The kernels of the MXFP4 GEMM, simplest first: ties go to the earlier one."""

from hipforge.ops.mxfp4_gemm.kernels.code_stream import CODE_STREAM
from hipforge.ops.mxfp4_gemm.kernels.row_stream import ROW_STREAM
from hipforge.ops.mxfp4_gemm.kernels.tiles import TILES
from hipforge.ops.mxfp4_gemm.kernels.waves import WAVES

KERNELS = (WAVES, TILES, ROW_STREAM, CODE_STREAM)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
