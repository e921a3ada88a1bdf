"""Tune the skinny fp8 GEMM; the same as ``hipforge tune skinny_gemm_fp8``. Run with --help for its options."""

from hipforge.ops.fp8_skinny_gemm.tuner import command

if __name__ == "__main__":
    command()
