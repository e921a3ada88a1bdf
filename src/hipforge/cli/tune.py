"""``hipforge tune``: the tuners of the op families, one subcommand per op family."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import click

import hipforge
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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each family with the first sentence of its tuner's module, importing no tuner."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(module)) for name, module in TUNERS.items()])


def _first_sentence(module: str) -> str:
    place = Path(hipforge.__file__).parent.joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text()))
    return (text or "").partition("\n\n")[0].replace("\n", " ")


command = TunerGroup("tune", help="Search configurations of an op and write its tuned table.")
