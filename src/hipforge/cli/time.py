"""``hipforge time``: the microseconds of one op at one shape, modelled on the emulator, measured on a GPU."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipforge import devices, plots
from hipforge.cli.options import PICTURE_OPTION, Output
from hipforge.cli.profile_subjects import SUBJECTS, call_of, parsed, refusal, subject_command
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from hipforge.emulator.timing import Machine, Start
    from hipforge.emulator.timing.context import Timed


@subject_command("time")
@click.option("--cold", "start", flag_value="cold", default=True, help="Operands start in HBM (the default).")
@click.option("--warm", "start", flag_value="mall", help="Operands start in the Infinity Cache.")
@click.option("--beside", nargs=2, metavar="OP SHAPE", help="Compare with this call, side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print the times as JSON.")
@click.option("--trace", "trace", type=Output(), help="Also write the timeline as a Chrome trace.")
@PICTURE_OPTION
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
    """Model how long OP takes at SHAPE on an MI355X (gfx950) or an MI300X (gfx942); on a GPU, measure it there."""
    calls = [(op, shape), *([beside] if beside else [])]
    for each in calls:
        parsed(*each)
    if arch is not None:  # before the device is asked for, which is decided once
        os.environ["HIPFORGE_EMULATE"] = arch
    if devices.current().is_gpu:
        if trace is not None or picture is not None or arch is not None:
            raise ConfigError("--arch, --trace and --plot need the model of time: set HIPFORGE_DEVICE=emulator")
        found = [measured(*each, rotating=start == "cold") for each in calls]
        click.echo(json.dumps([asdict(one) for one in found], indent=1) if as_json else "\n".join(map(_line, found)))
        return
    from hipforge import emulator
    from hipforge.emulator.timing import machine, report
    from hipforge.emulator.timing.context import gpu_of

    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"time works on the emulator and on GPUs, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
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


@dataclass(frozen=True)
class Measurement:
    """Microseconds of a call replayed in a graph, its operands' bytes, and over how many copies of them it went."""

    op: str
    shape: str
    us: float
    operand_bytes: int
    copies: int
    source: str


def measured(op: str, shape: str, rotating: bool) -> Measurement:
    """Measure one call on this machine's GPU.

    Args:
        op: name of a subject.
        shape: its shape.
        rotating: go over so many copies of the operands that each has left the last-level cache; else one copy.

    Raises:
        ConfigError: the op runs no kernel there, or its operands do not fit.
    """
    from hipforge.ops.core.dispatch import explain
    from hipforge.tuning import timing

    call = call_of(op, shape)
    first, named = on_gpu(call.args), on_gpu(call.keywords)
    operand_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors((first, named)))
    if not SUBJECTS[op].own and (how := explain(call.func, *first, **named)).path != "kernel":
        raise ConfigError(f"{op} runs no kernel for {shape} on this GPU: {how.reason}")
    copies = timing.copies_for(operand_bytes) if rotating else 1
    operands = [(first, named), *((on_gpu(call.args), on_gpu(call.keywords)) for _ in range(copies - 1))]
    us = timing.microseconds_per_call(lambda i: call.func(*operands[i][0], **operands[i][1]), copies)
    return Measurement(op, shape, us, operand_bytes, copies, timing.measured_source())


def on_gpu(value: Any) -> Any:
    """Return nested arguments with every tensor as a copy on the GPU."""
    import torch
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda", copy=True), value)


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _line(of: Measurement) -> str:
    where = f"{of.copies} copies of the operands in turn" if of.copies > 1 else "operands in the cache"
    return (
        f"{of.op} {of.shape}: {of.us:.2f} us measured, replayed in a graph, {where}\n"
        f"  {of.operand_bytes} bytes of operands, {of.operand_bytes / of.us * 1e-3:.0f} GB/s; {of.source}"
    )
