"""Another path of :mod:`hipforge.ops.fp8_skinny_gemm`."""

from hipforge.ops.fp8_skinny_gemm import (
    run_skinny_gemm,
    skinny_gemm,
    skinny_gemm_fp8_out,
    skinny_wave_split,
    skinny_wave_split_out,
)

__all__ = ["run_skinny_gemm", "skinny_gemm", "skinny_gemm_fp8_out", "skinny_wave_split", "skinny_wave_split_out"]
