"""The console that commands print to."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_COLUMNS = 160  # a pipe has no width of its own; tables should not be folded for it


def console(*, stderr: bool = False) -> Console:
    """Return a rich console as wide as the terminal, or wide enough for tables where there is none."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_COLUMNS)
