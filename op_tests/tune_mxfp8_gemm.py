"""Tune the small-M MX-FP8 GEMM; the same as ``hipforge tune mxfp8_gemm``. Run with --help for its options."""

from hipforge.tuning.families.mxfp8_gemm import command

if __name__ == "__main__":
    command()
