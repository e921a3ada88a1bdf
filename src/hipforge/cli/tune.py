"""``hipforge tune``: the tuners of :mod:`hipforge.tuning`, one subcommand per op family."""

from __future__ import annotations

import importlib

import click

from hipforge.ops import FAMILIES

# table -> module whose ``command`` is its tuner
TUNERS: dict[str, str] = {
    **{table: f"hipforge.ops.{room.name}.tuner" for room in FAMILIES for table in room.tables},
    "decode_attention_fp8": "hipforge.tuning.decode_attention",
}


class TunerGroup(click.Group):
    """Imports a tuner when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the op families that have a tuner."""
        return list(TUNERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one tuner, or None if there is none of that name."""
        if cmd_name not in TUNERS:
            return None
        tuner: click.Command = importlib.import_module(TUNERS[cmd_name]).command
        return tuner


command = TunerGroup("tune", help="Search configurations of an op and write its tuned table.")
