"""``hipforge trace``: what one wave of an op executes on the emulator, with the registers of one lane."""

from __future__ import annotations

import os

import click

from hipforge import devices
from hipforge.cli.profile_subjects import SUBJECTS, call_of, subject_command
from hipforge.errors import ConfigError


class _Address(click.ParamType):
    name = "address"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else int(value, 0)
        except ValueError:
            self.fail(f"{value!r} is not an address; examples: 0x1234, 4660", param, ctx)


@subject_command("trace")
@click.option("--kernel", default="", help="Only kernels whose symbol contains this.")
@click.option("--workgroup", default=0, show_default=True, type=click.IntRange(min=0), help="Counted with x fastest.")
@click.option("--wave", default=0, show_default=True, type=click.IntRange(min=0), help="Within the work-group.")
@click.option("--lane", default=0, show_default=True, type=click.IntRange(0, 63), help="Whose registers to print.")
@click.option("--from", "first", type=_Address(), default=0, help="Begin when the wave first reaches this address.")
@click.option(
    "--count", default=0, type=click.IntRange(min=0), help="Stop printing after so many instructions; 0: never."
)
def command(
    op: str, shape: str, arch: str | None, kernel: str, workgroup: int, wave: int, lane: int, first: int, count: int
) -> None:
    """Print the instructions that one wave of OP executes at SHAPE, each with the registers it touches afterwards.

    Addresses are those of `hipforge disasm`; shapes are those of `hipforge profile`.
    """
    from hipforge import emulator

    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    if devices.current().kind != "emulator":
        raise ConfigError(f"trace runs on the emulator, not on {devices.current().kind}; set HIPFORGE_DEVICE=emulator")
    call = call_of(op, shape)
    printed, begun = 0, first == 0

    def sink(line: str) -> None:
        nonlocal printed, begun
        begun = begun or int(line.split(maxsplit=1)[0], 16) == first
        if begun and (count == 0 or printed < count):
            printed += 1
            click.echo(line)

    with emulator.trace(sink, kernel=kernel, workgroup=workgroup, wave=wave, lane=lane):
        result = call()
    if not printed and result is None and not SUBJECTS[op].own:
        raise ConfigError(f"{op} ran no kernel for {shape}; `hipforge profile {op} {shape}` says why")
    if not printed:
        raise ConfigError(
            f"no instruction of work-group {workgroup}, wave {wave}" + (f" at {first:#x}" if first else "")
            + " was executed; `hipforge disasm` lists the addresses"
        )  # fmt: skip
