"""``hipforge time-model``: the modelled microseconds of a model's decode step, op by op and in all."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipforge import archs, devices
from hipforge.cli import decode_step, output
from hipforge.cli.options import Picture
from hipforge.cli.profile_subjects import making_operands
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hipforge.cli import decode_model


@dataclass(frozen=True)
class Line:
    """One op of a step: launches of a call, calls of a step, modelled microseconds of a call and of the step."""

    op: str
    launches: int
    calls: int
    us: float

    @property
    def step_us(self) -> float:
        """Microseconds of all its calls."""
        return self.us * self.calls


@dataclass(frozen=True)
class Step:
    """A decode step for ``batch`` sequences with ``context`` keys each."""

    batch: int
    context: int
    lines: tuple[Line, ...]

    @property
    def us(self) -> float:
        """Modelled microseconds, launches one after another in a graph."""
        return sum(line.step_us for line in self.lines)


def model_step(model: decode_model.Model, batch: int, context: int, known: dict[Any, Line]) -> Step:
    """Return a step; ``known`` keeps the ops that do not depend on the context."""
    from hipforge import emulator
    from hipforge.cli import decode_ops
    from hipforge.emulator.timing import Start

    with making_operands(f"batch {batch} and context {context}"):
        ops = decode_ops.chain(model, batch, context).ops
    calls = Counter(op.name for op in ops)
    lines = []
    for name, op in {op.name: op for op in ops if op.start != "torch"}.items():
        key = (name, batch, context if op.of_context else None)
        if key not in known:
            start: Start = "mall" if op.start == "mall" else "cold"
            with emulator.timed(start=start) as timed:
                op.call()
            known[key] = Line(name, len(timed.capture.launches()), calls[name], timed.result.replay_us)
        lines.append(known[key])
    return Step(batch, context, tuple(lines))


@click.command("time-model")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--batch", "batches", type=click.IntRange(1, 1 << 20), multiple=True, default=(1,),
              help="Sequences; repeatable.")  # fmt: skip
@click.option("--context", "contexts", type=click.IntRange(1, 1 << 24), multiple=True, default=(1024,),
              help="Keys of each sequence, the new token included; repeatable.")  # fmt: skip
@click.option("--tp", type=click.IntRange(1, 1 << 10), default=1, help="GPUs that share the model (tensor parallel).")
@click.option("--without-attention", is_flag=True,
              help="Leave out attention, of a model whose attention has no op here.")  # fmt: skip
@click.option("--arch", type=click.Choice(archs.EMULATED), help="Emulate it; default as HIPFORGE_EMULATE says.")
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
@click.option("--plot", "picture", type=Picture(), help="Also write stacked bars (needs matplotlib).")
def command(
    config: Path,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    tp: int,
    without_attention: bool,
    arch: str | None,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Model a decode step of the model that CONFIG (its config.json) describes, on one GPU of --tp.

    Every op runs on the emulator at the model's own shape, and the model of time says how long it takes. Communication
    between the GPUs is not in it. Where an expert's blocks of 32 columns cannot be divided evenly, the GPU is one that
    has most of them.
    """
    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    shape = decode_step.without_attention(decode_step.read(config), without_attention)
    shape = decode_step.largest_part(shape, tp)
    device = devices.current()
    if device.kind != "emulator":
        raise ConfigError(f"time-model works on the emulator, not on {device.kind}; set HIPFORGE_DEVICE=emulator")
    from hipforge.cli import decode_model

    model = decode_model.Model(shape, decode_model.Untouched())
    console = output.console(stderr=as_json)
    known: dict[Any, Line] = {}
    steps = []
    for batch in batches:
        for context in contexts:
            with console.status(f"batch {batch}, context {context} ..."):
                steps.append(model_step(model, batch, context, known))
            if not as_json:
                _print(console, shape, tp, steps[-1])
    if as_json:
        rows = [{**asdict(step), "us": step.us} for step in steps]
        told = {"model": shape.name, "tp": tp, "arch": device.arch_of(), "notes": shape.notes, "modelled": rows}
        click.echo(json.dumps(told, indent=1))
    if picture is not None:
        plot(steps, ", ".join((shape.name, f"TP{tp}", device.arch_of(), *shape.notes)), picture)


def _print(console: Console, shape: decode_step.Shape, tp: int, step: Step) -> None:
    from rich.table import Table

    title = f"{shape.name} TP{tp}, batch {step.batch}, context {step.context}: modelled, without communication"
    table = Table(title=", ".join((title, *shape.notes)))
    for column in ("op", "launches", "µs", "calls", "µs of the step", "share"):
        table.add_column(column, justify="left" if column == "op" else "right")
    for line in step.lines:
        table.add_row(line.op, str(line.launches), f"{line.us:.2f}", str(line.calls), f"{line.step_us:.0f}",
                      f"{line.step_us / step.us:.0%}")  # fmt: skip
    launches = sum(line.launches * line.calls for line in step.lines)
    table.add_section()
    table.add_row("in all", str(launches), "", "", f"{step.us:.0f}", "")
    console.print(table)


def plot(steps: Sequence[Any], title: str, path: Path, how: str = "modelled") -> None:
    """Write a bar per step, its ops on top of each other; ``how`` their times were found.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(line.op for step in steps for line in step.lines))
    ticks = [f"batch {step.batch}\n{step.context}" for step in steps]
    below = [0.0] * len(steps)
    for number, name in enumerate(names):
        heights = [sum(line.step_us for line in step.lines if line.op == name) / 1e3 for step in steps]
        axes.bar(ticks, heights, bottom=below, label=name, color=colormaps["tab20"](number % 20))
        below = [base + height for base, height in zip(below, heights, strict=True)]
    axes.set_ylabel(f"{how} ms of a decode step")
    axes.set_title(f"{title}: {how}, without communication")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path, dpi=110)
