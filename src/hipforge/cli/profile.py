"""``hipforge profile``: counts of one op at one shape on the emulator, with the bounds they imply."""

from __future__ import annotations

import json
import os

import click

from hipforge import archs, devices
from hipforge.cli.profile_subjects import SUBJECTS, parse_shape, refusal
from hipforge.errors import ConfigError

_SHAPES = "\n".join(
    f"  {op:<22}{','.join(subject.shape):<18}as in {','.join(map(str, subject.example))}"
    for op, subject in SUBJECTS.items()
)


@click.command("profile", epilog=f"\b\nSHAPE by OP:\n{_SHAPES}")
@click.argument("op", type=click.Choice(sorted(SUBJECTS)), metavar="OP")
@click.argument("shape")
@click.option("--arch", type=click.Choice(list(archs.ARCHS)), help="Emulate it; default as HIPFORGE_EMULATE says.")
@click.option("--listing", is_flag=True, help="Also print every instruction with its counts.")
@click.option("--json", "as_json", is_flag=True, help="Print the counters as JSON.")
def command(op: str, shape: str, arch: str | None, listing: bool, as_json: bool) -> None:
    """Count what OP does at SHAPE on the emulator, and print the bounds that implies."""
    from hipforge import emulator
    from hipforge.emulator import report

    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"profile counts on the emulator, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
    subject = SUBJECTS[op]
    call = subject.call(*parse_shape(shape, subject.shape, subject.example))
    with emulator.counters(per_pc=listing) as counted:
        result = call()
    counts = counted.result
    if result is None or not counts.launches:
        raise ConfigError(f"{op} ran no kernel for {shape} on {device.arch_of()}: {refusal(call)}")
    if as_json:
        click.echo(json.dumps(counts.as_dict(), indent=1))
        return
    click.echo(report.text(report.profile(counts, device.arch_of())))
    if listing:
        click.echo("\n" + report.listing(counts))
