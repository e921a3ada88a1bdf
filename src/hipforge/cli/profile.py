"""``hipforge profile``: counts of one op at one shape on the emulator, with the bounds they imply."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import click

from hipforge import devices, plots
from hipforge.cli import output
from hipforge.cli.options import PICTURE_OPTION
from hipforge.cli.profile_subjects import call_of, refusal, subject_command
from hipforge.errors import ConfigError


@subject_command("profile")
@click.option("--listing", is_flag=True, help="Also print every instruction with its counts.")
@output.WIDE_OPTION
@PICTURE_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print the counters as JSON.")
def command(
    op: str, shape: str, arch: str | None, listing: bool, wide: bool, picture: Path | None, as_json: bool
) -> None:
    """Count what OP does at SHAPE on the emulator, and print the bounds that implies."""
    from hipforge import emulator
    from hipforge.emulator import report

    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"profile counts on the emulator, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
    call = call_of(op, shape)
    timing = contextlib.nullcontext() if picture is None else emulator.timed()
    with timing as timed, emulator.counters(per_pc=listing) as counted:
        call()
    counts = counted.result
    if not counts.launches:
        raise ConfigError(f"{op} ran no kernel for {shape} on {device.arch_of()}: {refusal(op, call)}")
    found = report.profile(counts, device.arch_of())
    if picture is not None and timed is not None:
        plots.profile(found, timed.result.kernel_us, f"{op} {shape}", picture)
    if as_json:
        click.echo(json.dumps(counts.as_dict(), indent=1))
        return
    click.echo(report.text(found, output.name_columns(wide)))
    if listing:
        click.echo("\n" + report.listing(counts))
