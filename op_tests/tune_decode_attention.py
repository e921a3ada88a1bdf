"""Tune decode attention; the same as ``hipforge tune decode_attention_fp8``. Run with --help for its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("decode_attention_fp8")()
