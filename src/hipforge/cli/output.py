"""The console that commands print to."""

from __future__ import annotations

import sys

import click
from rich.console import Console

PIPED_COLUMNS = 160  # a pipe has no width of its own; tables should not be folded for it
NARROW_COLUMNS = 80

WIDE_OPTION = click.option("--wide", is_flag=True, help="Print kernel names in full, however long.")


def console(*, stderr: bool = False) -> Console:
    """Return a rich console as wide as the terminal, or wide enough for tables where there is none."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_COLUMNS)


def columns() -> int:
    """Return the terminal's width, or 80 where there is none: for output whose names are shortened to fit."""
    return console().width if sys.stdout.isatty() else NARROW_COLUMNS


def name_columns(wide: bool) -> int | None:
    """Return how long a kernel name on its own line may be; None with ``--wide``, which prints it in full."""
    return None if wide else columns()
