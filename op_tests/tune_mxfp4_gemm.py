"""Tune the MXFP4 GEMM; the same as ``hipforge tune mxfp4_gemm``. Run with --help for its options."""

from hipforge.tuning.families.mxfp4_gemm import command

if __name__ == "__main__":
    command()
