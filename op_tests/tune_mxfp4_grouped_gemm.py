"""Tune the MoE grouped GEMM with MXFP4 weights: ``hipforge tune mxfp4_grouped_gemm``. --help has its options."""

from hipforge.tuning.families.mxfp4_grouped_gemm import command

if __name__ == "__main__":
    command()
