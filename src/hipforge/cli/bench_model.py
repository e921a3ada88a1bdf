"""``hipforge bench-model``: the measured microseconds of a model's decode step on a GPU, op by op and in all."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hipforge import devices
from hipforge.cli import decode_step, output
from hipforge.cli.options import Picture
from hipforge.errors import ConfigError, HipforgeError
from hipforge.jit.demangle import short_name
from hipforge.tuning import timing

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hipforge.cli.decode_model import Model

# Of the logits beside their definition in float64. Only softmax weights are rounded otherwise, by 0.9e-3. Every product
# reads e4m3, whose steps are 0.088 of a value in the mean: a value that is off by e falls on the other side of a step
# with probability e / 0.088 and is then off by a step. So e becomes sqrt(0.088 e): at most 0.088, after any number of
# products. A product of gate and up adds the errors of both, which over many layers gives more (0.167 over the 32 of
# Llama-3.1-8B, measured between one GPU and two): logits are compared over two layers of a kind.
MOST_ERROR = 0.1
LAUNCHES = 20  # of a graph that measures an op alone, at least
AHEAD = 64  # steps that there is room for; a graph is replayed fewer times before it starts over
READ_BYTES = 2 << 30  # over which the read bandwidth is measured
SHOWN_LAYERS = 2  # of a step, in the picture of its kernels over time


Span = tuple[str, float, float]  # a launch: its kernel, and when it started and how long it ran, in microseconds


@dataclass(frozen=True)
class Line:
    """One op of a step: calls of a step, microseconds of all of them in a graph of their own, bytes read.

    ``programmatic_us`` is the same inside :func:`hipforge.programmatic_launch`.
    """

    op: str
    path: str
    calls: int
    step_us: float
    programmatic_us: float | None
    read_bytes: int


@dataclass(frozen=True)
class Step:
    """A decode step for ``batch`` sequences with ``context`` keys each, in one graph.

    Attributes:
        batch: sequences.
        context: keys of each.
        us: of a step.
        programmatic_us: inside :func:`hipforge.programmatic_launch`, where it was asked for.
        floor_us: of reading weights, scales and cache at the card's read bandwidth.
        lines: its ops, each measured alone.
        peers: microseconds by kind of weights, of the best way to write the model in torch, or why there are none.
        one_gpu_us: of the step of the whole model on one GPU, where this one is of several GPUs.
        one_gpu_error: of the logits beside that step's, relatively.
        kernels: name, start and microseconds of each launch of a replay of the better graph, where it was asked for.
        peer_ways: the same of every way, by kind.
    """

    batch: int
    context: int
    us: float
    programmatic_us: float | None
    floor_us: float
    lines: tuple[Line, ...]
    peers: dict[str, float | str]
    one_gpu_us: float | None = None
    one_gpu_error: float | None = None
    kernels: tuple[Span, ...] = ()
    peer_ways: dict[str, dict[str, float | str]] = field(default_factory=dict)

    @property
    def gap_us(self) -> float:
        """Microseconds of the step beyond those of its ops measured alone."""
        return self.us - sum(line.step_us for line in self.lines)

    @property
    def least_us(self) -> float:
        """The shorter of the two."""
        return min(self.us, self.programmatic_us or self.us)


def captured(calls: Iterable[Callable[[], object]], programmatic: bool) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, each of which has run before."""
    import hipforge

    # A step stores one key of each sequence; what is between two steps are launches of torch's.
    with hipforge.programmatic_launch(new_keys=1) if programmatic else contextlib.nullcontext():
        return timing.captured(calls)


def read_bandwidth() -> float:
    """Return bytes per second of a kernel that only reads, measured now."""
    import torch

    from hipforge.cli import read_floor

    source = torch.zeros(READ_BYTES, dtype=torch.uint8, device="cuda")
    return READ_BYTES / read_floor.microseconds([source]) * 1e6


def spans(graph: torch.cuda.CUDAGraph) -> tuple[Span, ...]:
    """Return the launches of a replay, in their order; the first starts at 0."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    of_gpu = [one for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    found = sorted((one.time_range.start, one.time_range.elapsed_us(), one.name) for one in of_gpu)
    return tuple((name, start - found[0][0], us) for start, us, name in found)


def shown(step: Step, layers: int) -> list[Span]:
    """Return the launches of :data:`SHOWN_LAYERS` layers in the middle of a step of ``layers``, from 0 on."""
    of_layers = len(step.kernels) * min(1, SHOWN_LAYERS / layers)
    first = int((len(step.kernels) - of_layers) / 2)
    chosen = step.kernels[first : first + math.ceil(of_layers)]
    return [(name, start - chosen[0][1], us) for name, start, us in chosen]


def measure(
    model: Model, batch: int, context: int, bandwidth: float, programmatic: bool, over_time: bool = False
) -> Step:
    """Return a step, measured; ``over_time``: with the launches of a replay."""
    import torch

    from hipforge.cli import decode_ops, decode_twin

    chain = decode_ops.chain(model, batch, context, AHEAD)
    decode_twin.fill(chain, *model.kv_heads)
    reads = [0] * len(chain.ops)
    for _ in range(2):  # what is built, loaded and allocated the first time is not captured
        for number, op in enumerate(chain.ops):
            op.call()
            reads[number] = op.reads()
        first = chain.logits.clone()
        chain.reset()

    def of(calls: list[Callable[[], object]], is_step: bool = False) -> tuple[float, float | None]:
        found: list[float | None] = [None, None]
        for number in range(1 + programmatic):
            graph = captured(calls, bool(number))
            if is_step:
                graph.replay()
                if not torch.equal(chain.logits, first):
                    how = "a programmatic replay" if number else "a replay"
                    raise HipforgeError(f"batch {batch}, context {context}: {how} gives other logits than op by op")
                chain.reset()
            found[number] = timing.replay_us(graph)
            chain.reset()
        return found[0] or 0.0, found[1]

    calls = [op.call for op in chain.ops]
    whole = of(calls, is_step=True)
    if over_time:
        launches = spans(captured(calls, whole[1] is not None and whole[1] < whole[0]))
        chain.reset()
    lines = []
    for name in dict.fromkeys(op.name for op in chain.ops):
        own = [number for number, op in enumerate(chain.ops) if op.name == name]
        # Enough of them that a graph's own start does not count; what moves on has room for so many.
        most = AHEAD // (timing.WARMUP + timing.REPLAYS) if name == decode_ops.MOVES_ON else LAUNCHES
        times = -(-most // len(own))
        us, early = of([chain.ops[number].call for number in own] * times)
        alone = us / times, None if early is None else early / times
        lines.append(Line(name, chain.ops[own[0]].path(), len(own), *alone, sum(reads[number] for number in own)))
    step = Step(batch, context, *whole, sum(reads) / bandwidth * 1e6, tuple(lines), {})
    return replace(step, kernels=launches) if over_time else step


@dataclass(frozen=True)
class Whole:
    """A model on one GPU: microseconds of a step, the better way, and :func:`logits_of` it."""

    us: float
    logits: torch.Tensor


def logits_of(model: Model, batch: int, context: int) -> torch.Tensor:
    """Return the logits of a first step through at most two layers of a kind."""
    from hipforge.cli import decode_ops, decode_twin

    dense, shape = model.shape.layers[0], decode_twin.small(model.shape)
    few = copy.copy(model)
    few.layers = model.layers[: shape.layers[0]] + model.layers[dense : dense + shape.layers[1]]
    few.shape = replace(model.shape, layers=shape.layers)
    chain = decode_ops.chain(few, batch, context)
    decode_twin.fill(chain, *model.kv_heads)
    for op in chain.ops:
        op.call()
    return chain.all_logits().clone()


def error_beside(model: Model, batch: int, context: int, whole: torch.Tensor) -> float:
    """Return how far the logits of a part of a model, with the others, are from :func:`logits_of` the whole model.

    Raises:
        HipforgeError: too far.
    """
    got, want = logits_of(model, batch, context).double(), whole.double()
    error = ((got - want).norm() / want.norm()).item()
    if not error <= MOST_ERROR:
        where = f"batch {batch}, context {context}: the logits of {model.ranks.count} GPUs"
        raise HipforgeError(f"{where} are {error:.3f} from those of one, relatively; at most {MOST_ERROR} is right")
    return error


def measure_cells(
    model: Model,
    cells: Iterable[tuple[int, int]],
    bandwidth: float,
    programmatic: bool,
    on_step: Callable[[Step], None],
    whole: dict[tuple[int, int], Whole] | None = None,
    over_time: bool = False,
) -> list[Step]:
    """Return a step for each (batch, context) that fits, measured; ``whole`` has those of the model on one GPU.

    With ``over_time`` the first step has its launches.

    Raises:
        HipforgeError: the logits are too far from those of the whole model, or a replay's from those op by op.
    """
    import torch

    steps: list[Step] = []
    for batch, context in cells:
        try:
            one = whole[batch, context] if whole else None
            error = None if one is None else error_beside(model, batch, context, one.logits)
            step = measure(model, batch, context, bandwidth, programmatic, over_time and not steps)
            step = replace(step, one_gpu_us=None if one is None else one.us, one_gpu_error=error)
        except torch.OutOfMemoryError:
            click.echo(f"batch {batch}, context {context}: does not fit in this card's memory", err=True)
            continue
        finally:
            _free()
        on_step(step)
        steps.append(step)
    return steps


def measure_peers(
    shape: decode_step.Shape, kind: str, cells: Iterable[tuple[int, int]]
) -> list[dict[str, float | str]]:
    """Return, for each (batch, context), microseconds of a step of the model in torch by way, or why there are none."""
    import torch

    from hipforge.cli import decode_peers

    cells = list(cells)
    def of(way: decode_peers.Way, batch: int, context: int) -> float:
        step = peer.step(way, batch, context)
        for _ in range(2):
            step.run()
        if not (error := step.error()) <= (most := decode_peers.MOST_ERROR[kind]):
            raise HipforgeError(f"a layer adds what is {error:.3f} from float64, relatively; at most {most} is right")
        return timing.replay_us(captured([step.run], False))

    found: list[dict[str, float | str]] = [{} for _ in cells]
    with torch.no_grad():
        try:
            peer = decode_peers.Peer(shape, kind, torch.device("cuda"))
        except torch.OutOfMemoryError:
            return [{"torch.compile": "does not fit in this card's memory"}] * len(cells)
        for way in decode_peers.ways(shape, kind):
            for into, (batch, context) in zip(found, cells, strict=True):
                if batch not in way.sequences:
                    continue
                try:
                    into[way.name] = of(way, batch, context)
                except torch.OutOfMemoryError:
                    into[way.name] = "does not fit in this card's memory"
                except Exception as error:  # a peer's failure must not hide what was measured
                    first = (str(error).splitlines() or [""])[0][:120]
                    into[way.name] = f"{type(error).__name__}: {first}"
                finally:
                    _free()
            torch.compiler.reset()  # compiled code keeps what it has seen
    return found


def best_peer(by_way: dict[str, float | str]) -> float | str:
    """Return the microseconds of the best way, or why there is none."""
    times = [us for us in by_way.values() if not isinstance(us, str)]
    return min(times) if times else "; ".join(f"{way}: {why}" for way, why in by_way.items())


def _free() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _numbers(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"expected positive numbers separated by commas, as 1,8,64; got {text!r}")
    return found


@click.command("bench-model")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--batch", "batches", default="1,8,64", callback=_numbers, show_default=True,
              help="Sequences, separated by commas.")  # fmt: skip
@click.option("--context", "contexts", default="2048", callback=_numbers, show_default=True,
              help="Keys of each sequence, the new token included, separated by commas.")  # fmt: skip
@click.option("--programmatic", is_flag=True, help="Also launch inside hipforge.programmatic_launch().")
@click.option("--layers", type=click.IntRange(1, 1 << 10), help="Cut the model to so many layers of each kind.")
@click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True,
              help="GPUs that share the model (tensor parallel), beside one of them alone; without peers.")  # fmt: skip
@click.option("--sums", type=click.Choice(["products", "norms", "one_shot", "all_reduce"]), default="products",
              show_default=True,
              help="Who adds up: the next product or norm, torch's kernel that reads other GPUs, or NCCL.")  # fmt: skip
@click.option("--peers/--no-peers", default=True, show_default=True,
              help="Also measure the model in torch, bf16 and fp8 weights, each the best of some ways.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
@click.option("--plot", "picture", type=Picture(), help="Also write stacked bars (needs matplotlib).")
@click.option("--timeline", type=Picture(), help="Also write when the kernels of two layers ran (needs matplotlib).")
def command(
    config: Path,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    programmatic: bool,
    layers: int | None,
    tp: int,
    sums: Literal["products", "norms", "one_shot", "all_reduce"],
    peers: bool,
    as_json: bool,
    picture: Path | None,
    timeline: Path | None,
) -> None:
    """Measure a decode step of the model that CONFIG (its config.json) describes, random weights, on this GPU.

    A step of each batch size is one graph: embedding, layers, head, argmax, and the positions of the next token. First
    a model of the same widths with two layers is held to float64. Each op is then measured alone, all its calls in one
    graph over the layers' own operands; the gap is what the step takes beyond their sum. MiniMax-M3 attends in full.
    With --tp torchrun starts a process for each GPU, and the logits are held to those of one GPU.
    """
    shape = replace(decode_step.read(config), sparse=None)
    if shape.projections:
        raise ConfigError(
            f"bench-model measures whole steps, and the attention of {shape.name} models has no op here; "
            "hipforge time-model --without-attention models the rest on the emulator"
        )
    device = devices.current()
    if not device.is_gpu:
        raise ConfigError(
            f"bench-model measures on a GPU, and the device is {device.kind} (HIPFORGE_DEVICE); "
            "hipforge time-model models the same step on the emulator"
        )
    from hipforge.cli import decode_model, decode_peers, decode_twin, read_floor

    if device.arch_of() not in (known := read_floor.archs()):
        raise ConfigError(f"bench-model measures on {', '.join(known)}; the device is {device.arch_of()}")
    import torch

    from hipforge.cli import decode_ranks

    if layers is not None:
        shape = replace(shape, layers=(min(layers, shape.layers[0]), min(layers, shape.layers[1])))
    ranks = decode_ranks.ALONE
    if tp > 1:
        decode_step.divided(shape, tp)
        if not decode_ranks.is_started():
            sys.exit(decode_ranks.start(tp, sys.argv[1:]))
        ranks = decode_ranks.join(tp, sums)
    is_first = ranks.rank == 0
    console, place = output.console(stderr=as_json), torch.device("cuda", torch.cuda.current_device())
    error = decode_twin.check(decode_twin.small(shape), place)
    if not error <= MOST_ERROR:
        raise HipforgeError(f"the logits are {error:.3f} from float64, relatively; at most {MOST_ERROR} is right")
    bandwidth = read_bandwidth()
    header = {
        "model": shape.name, "card": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "read TB/s": round(bandwidth / 1e12, 3), "programmatic": programmatic, "error of the logits": round(error, 4),
        **({"GPUs": tp, "sums": sums} if tp > 1 else {}),
    }  # fmt: skip
    if is_first and not as_json:
        console.print(", ".join(f"{name}: {value}" for name, value in header.items()), highlight=False, soft_wrap=True)

    def on_step(step: Step) -> None:
        if is_first and not as_json:
            _print(console, shape.name, step, bandwidth)

    cells = [(batch, context) for batch in batches for context in contexts]
    with torch.no_grad():
        model = decode_model.Model(shape, decode_model.Random(place))
        drawn = timeline is not None
        steps = measure_cells(model, cells, bandwidth, programmatic, on_step, over_time=drawn and tp == 1)
        if ranks != decode_ranks.ALONE:
            cells = [(step.batch, step.context) for step in steps]
            whole = {
                cell: Whole(step.least_us, logits_of(model, *cell)) for cell, step in zip(cells, steps, strict=True)
            }
            model = decode_model.part(model, ranks)
            _free()
            steps = measure_cells(model, cells, bandwidth, programmatic, on_step, whole, drawn)
        del model
        _free()
    for kind in decode_peers.KINDS if peers and tp == 1 else ():
        found = measure_peers(shape, kind, [(step.batch, step.context) for step in steps])
        steps = [
            replace(step, peers={**step.peers, kind: best_peer(ways)}, peer_ways={**step.peer_ways, kind: ways})
            for step, ways in zip(steps, found, strict=True)
        ]
        _free()
        for step in [] if as_json else steps:
            _print_peer(step, kind)
    if as_json and is_first:
        rows = [{**asdict(step), "gap_us": step.gap_us} for step in steps]
        click.echo(json.dumps({**header, "measured": rows}, indent=1))
    if picture is not None and is_first:
        from hipforge.cli.time_model import plot

        plot(steps, f"{shape.name}, {header['card']}", picture, "measured")
    if timeline is not None and is_first and steps:
        from hipforge import plots

        first = steps[0]
        title = f"{shape.name}, batch {first.batch}, context {first.context}, {header['card']}: two layers of a step"
        launches = [(short_name(name), start, us) for name, start, us in shown(first, sum(shape.layers))]
        plots.kernels(launches, title, timeline)
    if ranks != decode_ranks.ALONE:
        torch.distributed.destroy_process_group()


def _print(console: Console, name: str, step: Step, bandwidth: float) -> None:
    from rich.table import Table

    both = step.programmatic_us is not None
    columns = ("op", "path", "calls", "µs a call", *(["programmatic"] if both else []), "share", "MB read", "TB/s",
               "of reading")  # fmt: skip
    table = Table(title=f"{name}, batch {step.batch}, context {step.context}: measured", box=None)
    for column in columns:
        table.add_column(column, justify="left" if column in ("op", "path") else "right")
    for line in step.lines:
        read = [f"{line.read_bytes / 1e6:.1f}", f"{line.read_bytes / line.step_us * 1e-6:.2f}",
                f"{line.read_bytes / line.step_us * 1e6 / bandwidth:.0%}"] if line.read_bytes else []  # fmt: skip
        second = [f"{(line.programmatic_us or 0) / line.calls:.2f}"] if both else []
        table.add_row(line.op, line.path, str(line.calls), f"{line.step_us / line.calls:.2f}", *second,
                      f"{line.step_us / step.us:.1%}", *read)  # fmt: skip
    gap = [f"{(step.programmatic_us or 0) - sum(line.programmatic_us or 0 for line in step.lines):.0f}"] if both else []
    table.add_row("gap", "", "", f"{step.gap_us:.0f}", *gap, f"{step.gap_us / step.us:.1%}")
    console.print(table)
    for how, us in (("", step.us), ("programmatic: ", step.programmatic_us)):
        if us is not None:
            console.print(f"{how}{us:.0f} µs, {step.batch / us * 1e6:.0f} tokens/s; read floor {step.floor_us:.0f} µs "
                          f"({step.floor_us * bandwidth / 1e15:.2f} GB), share {step.floor_us / us:.1%}",
                          highlight=False)  # fmt: skip
    if step.one_gpu_us is not None:
        ratio = f"{step.one_gpu_us:.0f} µs, {step.one_gpu_us / step.least_us:.2f}× as long"
        error = f"{step.one_gpu_error:.3f}"
        console.print(f"one GPU: {ratio}; logits of two layers are {error} from its own, relatively", highlight=False)


def _print_peer(step: Step, kind: str) -> None:
    us, by_way = step.peers[kind], step.peer_ways[kind]
    said = us
    if not isinstance(us, str):
        shown = [f"{way} {own if isinstance(own, str) else f'{own:.0f}'}" for way, own in by_way.items()]
        speed = f"{us:.0f} µs, {step.batch / us * 1e6:.0f} tokens/s, {us / step.least_us:.2f}× as long"
        said = f"{speed} ({'; '.join(shown)})"
    click.echo(f"batch {step.batch}, context {step.context}: {kind} weights, torch.compile, one graph: {said}")
