"""Tune decode attention; the same as ``hipforge tune decode_attention_fp8``. Run with --help for its options."""

from hipforge.ops.decode_attention.tuner import command

if __name__ == "__main__":
    command()
