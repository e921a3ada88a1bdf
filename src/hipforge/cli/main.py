"""The ``hipforge`` command and its table of subcommands; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import io
import logging
import sys
from typing import Any

import click

from hipforge import __version__, settings
from hipforge.cli.options import SuggestingGroup
from hipforge.errors import HipforgeError

# name -> (module, one-line help shown without importing it)
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("hipforge.cli.demo", "Build the MX-FP8 GEMV, run it on decode shapes, check every number."),
    "doctor": ("hipforge.cli.doctor", "List toolchains, devices and settings, and why each was taken or refused."),
    "explain": ("hipforge.cli.explain", "Say which path an op takes at a shape, and why not another."),
    "build": ("hipforge.cli.build", "Build modules ahead of their first call."),
    "inspect": ("hipforge.cli.inspect", "Show registers, spills, LDS and occupancy of a module's kernels."),
    "cache": ("hipforge.cli.cache", "List, measure, prune, clear the cache, or explain a miss."),
    "profile": ("hipforge.cli.profile", "Count instructions and bytes of an op on the emulator."),
    "time": ("hipforge.cli.time", "Model the microseconds of an op on an MI355X or MI300X."),
    "time-model": ("hipforge.cli.time_model", "Model a decode step of a model, op by op, from its config.json."),
    "bench": ("hipforge.cli.bench", "Measure, or model, the shapes that have published times; write a report."),
    "bench-model": ("hipforge.cli.bench_model", "Measure a decode step of a model on a GPU, op by op."),
    "new-op": ("hipforge.cli.new_op", "Write a working tuned op as a template for a new one."),
    "disasm": ("hipforge.cli.disasm", "Print a module's machine code, with source lines where it has them."),
    "trace": ("hipforge.cli.trace", "Print what one wave of an op executes on the emulator, with register values."),
    "aiter": ("hipforge.cli.aiter", "List, build and test the modules of an aiter checkout, on the emulator."),
    "tune": ("hipforge.cli.tune", "Search configurations of an op and write its tuned table."),
}


class LazyGroup(SuggestingGroup):
    """A click group whose commands live in modules that are imported on use; each has a ``command`` object."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in table order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command, or None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; what the output's encoding lacks is replaced."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                utf8 = stream.encoding.lower().replace("-", "") == "utf8"
                stream.reconfigure(errors="backslashreplace" if utf8 else "replace")
        return super().main(*args, **kwargs)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list from the table, importing nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; hipforge's own errors become one message and exit status 1."""
        try:
            return super().invoke(ctx)
        except HipforgeError as error:
            raise click.ClickException(str(error)) from error


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hipforge")
@click.option("-v", "--verbose", is_flag=True, help="Log what is built, loaded and waited for.")
def cli(verbose: bool) -> None:
    """GPU ops for AMD Instinct, built on their first call, and an emulator for machines without one."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")
    settings.warn_of_mistyped()
