"""Tune the MoE grouped GEMM over fp8; the same as ``hipforge tune fp8_grouped_gemm``. --help has its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("fp8_grouped_gemm")()
