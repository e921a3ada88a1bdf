"""Tune the scaled fp8 GEMM; the same as ``hipforge tune fp8_gemm``. Run with --help for its options."""

from hipforge.tuning.families.fp8_gemm import command

if __name__ == "__main__":
    command()
