"""Tune the MoE grouped GEMM over fp8; the same as ``hipforge tune fp8_grouped_gemm``. --help has its options."""

from hipforge.tuning.families.fp8_grouped_gemm import command

if __name__ == "__main__":
    command()
