"""Tune the small-M MX-FP8 GEMM; the same as ``hipforge tune smallm_mxfp8``. Run with --help for its options."""

from hipforge.ops.mxfp8_dense.tuner import command

if __name__ == "__main__":
    command()
