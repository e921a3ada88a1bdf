"""``hipforge tune``: the tuners of the op families, one subcommand per op family."""

from __future__ import annotations

import importlib

import click

from hipforge import ops
from hipforge.cli.options import SuggestingGroup
from hipforge.settings import FORMER_TABLES

# family -> module whose ``command`` is its tuner
TUNERS: dict[str, str] = {table: f"hipforge.tuning.families.{home}" for table, home in ops.families().items()}


class TunerGroup(SuggestingGroup):
    """Imports a tuner when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the op families that have a tuner."""
        return list(TUNERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one tuner, or None if there is none of that name."""
        name = FORMER_TABLES.get(cmd_name, cmd_name)
        if name not in TUNERS:
            return None
        tuner: click.Command = importlib.import_module(TUNERS[name]).command
        return tuner


command = TunerGroup("tune", help="Search configurations of an op and write its tuned table.")
