"""``hipforge time``: the modelled microseconds of one op at one shape."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hipforge import devices, plots
from hipforge.cli.profile_subjects import call_of, parsed, refusal, subject_command
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from hipforge.emulator.timing import Machine, Start
    from hipforge.emulator.timing.context import Timed


@subject_command("time")
@click.option("--cold", "start", flag_value="cold", default=True, help="Operands start in HBM (the default).")
@click.option("--warm", "start", flag_value="mall", help="Operands start in the Infinity Cache.")
@click.option("--beside", nargs=2, metavar="OP SHAPE", help="Compare with this call, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print the times as JSON.")
@click.option("--trace", "trace", type=click.Path(path_type=Path), help="Also write the timeline as a Chrome trace.")
@plots.OPTION
def command(
    op: str,
    shape: str,
    arch: str | None,
    start: str,
    beside: tuple[str, str] | None,
    as_json: bool,
    trace: Path | None,
    picture: Path | None,
) -> None:
    """Model how long OP takes at SHAPE on an MI355X (gfx950) or an MI300X (gfx942)."""
    if beside:
        parsed(*beside)
    from hipforge import emulator
    from hipforge.emulator.timing import machine, report
    from hipforge.emulator.timing.context import gpu_of

    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"time works on the emulator, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
    of = machine(gpu_of(device.arch_of()))
    level: Start = "mall" if start == "mall" else "cold"
    with contextlib.nullcontext() if picture is None else emulator.counters() as counted:
        timed = _time(op, shape, of, level)
    other = _time(*beside, of, level) if beside else None
    if as_json:
        both = [timed.result.as_dict(), other.result.as_dict()] if other else timed.result.as_dict()
        click.echo(json.dumps(both, indent=1))
    elif other and beside:
        names = (f"{op} {shape}", f"{beside[0]} {beside[1]}")
        click.echo(report.compare(names, (timed.result, other.result)))
    else:
        click.echo(report.text(timed.result, report.hottest(timed.capture, of, level)))
    if trace is not None:
        trace.write_text(json.dumps(report.chrome_trace(timed.capture, of, level)))
    if picture is not None and counted is not None:
        plots.timeline(timed, of, level, counted.result, f"{op} {shape}", picture)


def _time(op: str, shape: str, of: Machine, level: Start) -> Timed:
    from hipforge import emulator

    call = call_of(op, shape)
    with emulator.timed(of, level) as timed:
        call()
    if not timed.capture.launches():
        raise ConfigError(f"{op} ran no kernel for {shape} on {of.arch}: {refusal(op, call)}")
    return timed
