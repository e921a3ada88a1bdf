"""Tune the skinny fp8 GEMM; the same as ``hipforge tune fp8_skinny_gemm``. Run with --help for its options."""

from hipforge.tuning.families.fp8_skinny_gemm import command

if __name__ == "__main__":
    command()
