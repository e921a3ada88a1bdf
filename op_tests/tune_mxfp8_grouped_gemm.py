"""Tune the MoE grouped GEMM over MX-FP8; the same as ``hipforge tune mxfp8_grouped_gemm``. --help has its options."""

from hipforge.tuning.families.mxfp8_grouped_gemm import command

if __name__ == "__main__":
    command()
