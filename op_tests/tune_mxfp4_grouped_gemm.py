"""Tune the MoE grouped GEMM with MXFP4 weights: ``hipforge tune mxfp4_grouped_gemm``. --help has its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("mxfp4_grouped_gemm")()
