"""Tune decode attention over an int4 cache; as ``hipforge tune decode_attention_int4``. Run with --help for options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("decode_attention_int4")()
