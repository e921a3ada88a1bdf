"""Tune decode attention; the same as ``hipforge tune decode_attention_fp8``. Run with --help for its options."""

from hipforge.tuning.families.decode_attention import command

if __name__ == "__main__":
    command()
