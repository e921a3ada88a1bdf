"""Tune the small-M MX-FP8 GEMM; the same as ``hipforge tune smallm_mxfp8``. Run with --help for its options."""

from hipforge.tuning.smallm_mxfp8 import command

if __name__ == "__main__":
    command()
