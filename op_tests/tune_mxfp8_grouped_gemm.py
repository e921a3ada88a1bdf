"""Tune the MoE grouped GEMM over MX-FP8; the same as ``hipforge tune mxfp8_grouped_gemm``. --help has its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("mxfp8_grouped_gemm")()
