"""``hipforge time``: the modelled microseconds of one op at one shape."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from hipforge import archs, devices
from hipforge.cli.profile_subjects import SUBJECTS, parse_shape, refusal
from hipforge.errors import ConfigError

_SHAPES = "\n".join(
    f"  {op:<22}{','.join(subject.shape):<18}as in {','.join(map(str, subject.example))}"
    for op, subject in SUBJECTS.items()
)


@click.command("time", epilog=f"\b\nSHAPE by OP:\n{_SHAPES}")
@click.argument("op", type=click.Choice(sorted(SUBJECTS)), metavar="OP")
@click.argument("shape")
@click.option("--arch", type=click.Choice(list(archs.ARCHS)), help="Emulate it; default as HIPFORGE_EMULATE says.")
@click.option("--cold", "start", flag_value="cold", default=True, help="Operands start in HBM (the default).")
@click.option("--warm", "start", flag_value="mall", help="Operands start in the Infinity Cache.")
@click.option("--json", "as_json", is_flag=True, help="Print the times as JSON.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Also write a picture (needs matplotlib).")
def command(op: str, shape: str, arch: str | None, start: str, as_json: bool, picture: Path | None) -> None:
    """Model how long OP takes at SHAPE on an MI355X (gfx950) or an MI300X (gfx942)."""
    from hipforge import emulator
    from hipforge.emulator.timing import Start, machine, report
    from hipforge.emulator.timing.context import gpu_of

    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"time works on the emulator, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
    of = machine(gpu_of(device.arch_of()))
    level: Start = "mall" if start == "mall" else "cold"
    subject = SUBJECTS[op]
    call = subject.call(*parse_shape(shape, subject.shape, subject.example))
    with emulator.timed(of, level) as timed:
        result = call()
    if result is None or not timed.capture.launches():
        raise ConfigError(f"{op} ran no kernel for {shape} on {device.arch_of()}: {refusal(call)}")
    timing = timed.result
    if as_json:
        click.echo(json.dumps(timing.as_dict(), indent=1))
    else:
        click.echo(report.text(timing, report.hottest(timed.capture, of, level)))
    if picture is not None:
        report.plot(timed.capture, timing, of, level, picture)
