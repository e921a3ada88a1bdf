"""Tune the MXFP4 GEMM; the same as ``hipforge tune mxfp4_gemm``. Run with --help for its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("mxfp4_gemm")()
