"""The ``hipforge`` command line: one file per command."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from hipforge.cli.main import cli

    cli()
