"""Tune the skinny fp8 GEMM; the same as ``hipforge tune fp8_skinny_gemm``. Run with --help for its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("fp8_skinny_gemm")()
