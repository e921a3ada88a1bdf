"""Tune the MoE grouped GEMM over MX-FP8; the same as ``hipforge tune smallm_mxfp8_moe``. --help has its options."""

from hipforge.tuning.smallm_mxfp8_moe import command

if __name__ == "__main__":
    command()
