"""Tune how a MoE layer's first product divides K: ``hipforge tune gate_up_split``. Run with --help for its options."""

from hipforge.cli.tune import command_of

if __name__ == "__main__":
    command_of("gate_up_split")()
