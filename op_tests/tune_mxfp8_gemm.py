"""Tune the small-M MX-FP8 GEMM; the same as ``hipforge tune mxfp8_gemm``. Run with --help for its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("mxfp8_gemm")()
