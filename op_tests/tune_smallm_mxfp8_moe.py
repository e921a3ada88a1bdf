"""Tune the MoE grouped GEMM over MX-FP8; the same as ``hipforge tune smallm_mxfp8_moe``. --help has its options."""

from hipforge.ops.mxfp8_grouped.tuner import command

if __name__ == "__main__":
    command()
