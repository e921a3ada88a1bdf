"""``hipforge tune``: the tuners of the op families, one subcommand per op family.

Help and wrong words are answered from the text of a tuner's module: importing it takes seconds, because of torch.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import click

import hipforge
from hipforge import ops
from hipforge.cli.options import Picture, SuggestingGroup
from hipforge.settings import FORMER_TABLES
from hipforge.tuning.options import CELLS, OPTIONS

# family -> module whose ``TUNER`` is its tuner
TUNERS: dict[str, str] = {table: f"hipforge.tuning.families.{home}" for table, home in ops.families().items()}
MEASURED = "On a GPU cells are measured; elsewhere a model ranks them and rows say so."


class TunerGroup(SuggestingGroup):
    """One subcommand per family."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the op families that have a tuner."""
        return list(TUNERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a family's command, or None if there is none of that name."""
        name = FORMER_TABLES.get(cmd_name, cmd_name)
        return command_of(name) if name in TUNERS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each family with the first sentence of its tuner's module, importing no tuner."""
        with formatter.section("Commands"):
            lines = ((name, _text(name).partition("\n\n")[0].replace("\n", " ")) for name in TUNERS)
            formatter.write_dl(list(lines))


@functools.cache
def _module(family: str) -> ast.Module:
    place = Path(hipforge.__file__).parent.joinpath(*TUNERS[family].split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _text(family: str) -> str:
    return re.sub(r":\w+:`|`", "", ast.get_docstring(_module(family)) or "")


@functools.cache
def command_of(family: str) -> click.Command:
    """Return a family's tuner as a command, ``hipforge tune FAMILY``; its help is the docstring of the tuner."""
    assigned = (one for one in _module(family).body if isinstance(one, ast.Assign))
    words = next(ast.literal_eval(one.value) for one in assigned if ast.unparse(one.targets[0]) == "OPTIONS")
    own = [option for word in words for option in OPTIONS[word]]

    def run(output: Path, **given: Any) -> None:
        def tuner() -> Any:
            from hipforge.tuning.work import tuner_of

            return tuner_of(family)

        wanted = CELLS[words[0]](tuner, **{option.name: given.pop(option.name) for option in own})
        from hipforge.tuning import driver

        count = driver.tune(tuner(), wanted, output, say=click.echo, **given)
        name = f"HIPFORGE_CONFIG_{family.upper()}"
        click.echo(f"{count} rows written to {output}; {name}={output} makes ops use them")

    path = click.Path(path_type=Path)
    common: list[click.Parameter] = [
        click.Option(["-o", "--output"], type=path, required=True, help="Table to merge rows into."),
        *own,
        click.Option(
            ["--compare"], is_flag=True, help="Keep the output's configuration unless the new one clearly wins."
        ),
        click.Option(["--min-improvement-pct"], default=3.0, show_default=True, help="What clearly is, in percent."),
        click.Option(["--gains-only"], is_flag=True, help="Leave out rows that do not clearly beat the default rule."),
        click.Option(["--resume"], is_flag=True, help="Skip cells that the output already has."),
        click.Option(
            ["--workers"], default=1, show_default=True, type=click.IntRange(min=1), help="Processes (emulator only)."
        ),
        click.Option(["--ray"], metavar="ADDRESS", help="Run on this Ray cluster: auto or HOST:PORT (emulator only)."),
        click.Option(["--plot", "picture"], type=Picture(), help="Draw the candidates' times here (needs matplotlib)."),
    ]
    return click.Command(family, params=common, help=_text(family), epilog=MEASURED, callback=run)


command = TunerGroup("tune", help="Search configurations of an op and write its tuned table.")
