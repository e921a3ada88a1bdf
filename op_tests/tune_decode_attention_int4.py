"""Tune decode attention over an int4 cache; as ``hipforge tune decode_attention_int4``. Run with --help for options."""

from hipforge.tuning.families.decode_attention.int4 import command

if __name__ == "__main__":
    command()
