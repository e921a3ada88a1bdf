"""Tune the MXFP4 GEMM that quantises X in its launch: ``hipforge tune mxfp4_made``. Run with --help for its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("mxfp4_made")()
