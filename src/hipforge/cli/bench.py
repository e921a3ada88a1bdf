"""``hipforge bench``: the shapes that have published times, measured on a GPU or modelled on the emulator."""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from hipforge import __version__, archs, devices, ops
from hipforge.cli import output
from hipforge.cli.options import Output
from hipforge.errors import ConfigError

if TYPE_CHECKING:
    from hipforge.ops.core.dispatch import Explanation

AMD = "AMD, MI355X"
# Of the model of time beside 1,207 published times: docs/time-model.md.
BAND = "half of the model's times are within 4.5 % of published ones, nine of ten within 12.4 %"


@dataclass(frozen=True)
class Call:
    """A call of a subject of ``hipforge time``; ``start`` is where its operands are: in HBM, or the Infinity Cache."""

    op: str
    shape: str
    start: Literal["cold", "mall"] = "cold"


@dataclass(frozen=True)
class Cell:
    """Calls one after another, and what other kernels take for them.

    Attributes:
        calls: each is timed by itself, and their times are added.
        published_us: microseconds that were published, or None.
        publisher: who published them, and of which GPU.
        goal: the share of them that is to be reached, or None.
        median_goal: the share that the median of all lines with such a goal is to reach, or None.
        figure: what was published: durations of kernels as a profiler shows them, or the interval of whole calls.
        reading_us: modelled durations, added, of kernels that read the calls' weights once and compute nothing, the
            fastest of eight each (``op_tests/helpers/streaming.py``), or None.
        read_bytes: what those kernels read: weights and, in MX formats, their scales.
    """

    calls: tuple[Call, ...]
    published_us: float | None = None
    publisher: str = ""
    goal: float | None = None
    figure: Literal["kernel", "call"] = "call"
    reading_us: float | None = None
    read_bytes: int | None = None
    median_goal: float | None = None


def _ptpc(n: int, k: int, reading: float, *published: float) -> list[Cell]:
    return [
        Cell((Call("fp8_gemm", f"{m},{n},{k}"),), us, AMD, 1.0, "kernel", reading, n * k, 0.85 if m <= 16 else None)
        for m, us in zip((1, 16, 64), published, strict=True)
    ]


def _mx_bytes(*weights: tuple[int, int, int]) -> int:
    """Return the bytes of experts' weights with a scale byte for each 32, given as experts, rows and columns."""
    return sum(experts * n * k * 33 // 32 for experts, n, k in weights)


def _experts(kind: str, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> tuple[Call, Call]:
    """Return a MoE layer's two products, the first with its activation."""
    first, slots = f"{tokens},{2 * inner},{hidden},{experts},{top_k}", tokens * top_k
    second = f"{slots},{hidden},{inner},{experts},1"
    return Call(f"grouped_swiglu_{kind}", first), Call(f"grouped_{kind}_linear", second)


def _layer(kind: str, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> tuple[Call, ...]:
    """Return a MoE layer behind its router."""
    return (
        Call("mxfp8_quantize", f"{tokens},{hidden}", "mall"),
        Call("moe_align_block_size", f"{tokens},{experts},{top_k}", "mall"),
        *_experts(kind, tokens, hidden, inner, experts, top_k),
        Call("moe_combine", f"{tokens},{hidden},{top_k}", "mall"),
    )


def _fp8_blocks(tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> tuple[Call, Call]:
    """Return the same in fp8 with scales per 128 x 128."""
    slots = tokens * top_k
    return (
        Call("grouped_swiglu_fp8", f"{tokens},{2 * inner},{hidden},{experts},{top_k}"),
        Call("grouped_fp8_blocks", f"{slots},{hidden},{inner},{experts},1"),
    )


def _sparse(keys: int) -> tuple[Call, ...]:
    return (
        Call("sparse_block_scores", f"1,{keys},4,128"), Call("sparse_topk_blocks", f"1,{keys},4", "mall"),
        Call("decode_attention_fp8", "1,2048,4,16,128"),
    )  # fmt: skip


_CONTEST = "AMD's contest, MI355X"

CELLS = (
    *_ptpc(2304, 6144, 4.63, 9.77, 10.1, 10.5),
    *_ptpc(6144, 2048, 4.58, 5.33, 5.43, 6.07),
    *_ptpc(6144, 6144, 8.94, 10.7, 10.4, 12.7),
    *(Cell((Call("mxfp8_linear", f"{m},2304,6144"),)) for m in (1, 16, 64)),
    *(
        Cell(
            _experts("mxfp8", tokens, 6144, 512, 257, 9), us, AMD, goal, "kernel", reading,
            _mx_bytes((first, 1024, 6144), (second, 6144, 512)),
        )
        # Reading the weights of as many experts as have slots in the first product, and in the second.
        for tokens, us, goal, reading, first, second in (
            (1, 27.0, 0.65, 18.87, 9, 9), (16, 181.5, 0.95, 170.49, 112, 110), (64, 351.0, 0.95, 346.51, 231, 230),
        )
    ),
    *(
        Cell((Call("quantize_mxfp4_linear", f"{m},{n},{k}"),), us, _CONTEST, 0.5)
        for m, n, k, us in (
            (4, 2880, 512, 8.2), (16, 2112, 7168, 20.9), (32, 4096, 512, 9.5), (64, 7168, 2048, 12.7),
            (256, 3072, 1536, 12.2),
        )
    ),
    Cell(_layer("mxfp4", 16, 7168, 256, 257, 9), 152.7, _CONTEST, 0.5),
    Cell(_layer("mxfp4", 16, 7168, 512, 33, 9), 106.2, _CONTEST, 0.5),
    Cell(_experts("mxfp4", 1, 2880, 2880, 128, 4)),  # gpt-oss-120b on one GPU
    *(Cell(_fp8_blocks(tokens, 4096, 384, 128, 8)) for tokens in (1, 16)),  # Qwen3-235B-A22B at TP 4
    Cell(_sparse(32768)),
    Cell((Call("decode_attention_fp8", "1,32768,4,16,128"),)),  # the same attention in full
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A decode step of a model on one GPU of ``tp``, modelled; a GPU measures one with ``hipforge bench-model``.

    ``notes``: what of the model the step does not have as it is, as ``hipforge time-model`` says it.
    """

    model: str
    tp: int
    batch: int
    context: int
    us: float
    notes: tuple[str, ...] = ()


# A configuration's name in examples/configs, and the GPUs that share the model.
MODELS = (
    ("minimax_m3", 8), ("qwen3_235b_a22b", 8), ("llama_3_1_405b", 8), ("gpt_oss_120b", 2), ("gpt_oss_120b", 8),
    ("glm_5", 8), ("deepseek_v4_1_flash", 8),
)  # fmt: skip
BATCH, CONTEXT = 1, 8192


@dataclass(frozen=True)
class Part:
    """A call with its times, what ran, and the tuned row that chose it, as the table's columns have it.

    Attributes:
        us: interval of replayed calls.
        kernel_us: duration of the kernel as a profiler shows it, of the model alone.
        kernel: name of the kernel.
        configuration: of it.
        table: name of the tuned table, or None.
        row: of the table, or None.
    """

    us: float
    kernel_us: float | None
    kernel: str
    configuration: dict[str, int]
    table: str | None
    row: dict[str, Any] | None


@click.command("bench")
@click.option("--report", type=Output(), help="Write the times as JSON.")
@click.option("--page", type=Output(), help="Write them as a page in Markdown.")
@click.option("--from", "source", type=click.Path(path_type=Path), help="Take the times from this report; run nothing.")
@click.option("--merge", type=click.Path(path_type=Path, file_okay=False),
              help="Put measured times into the tuned tables of this folder.")  # fmt: skip
@click.option("--configs", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Also model decode steps of models whose configurations are here: examples/configs.")  # fmt: skip
@click.option("--arch", type=click.Choice(archs.EMULATED), help="Emulate it; default as HIPFORGE_EMULATE says.")
def command(
    report: Path | None,
    page: Path | None,
    source: Path | None,
    merge: Path | None,
    configs: Path | None,
    arch: str | None,
) -> None:
    """Measure the shapes that have published times on this GPU, or model them on the emulator (minutes).

    The page docs/predictions.md is made of docs/predictions.json, a report of the emulator with --configs
    examples/configs. A report of a GPU holds the tuned rows that chose its kernels, with the measured microseconds:
    --from REPORT --merge FOLDER puts them into that folder's tables as measured.
    """
    if source is not None and (arch is not None or configs is not None):
        raise click.UsageError("--from takes the times of a report and models nothing; leave out --arch and --configs")
    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    if merge is not None:
        _require_tables(merge, source)
    found = _read(source) if source is not None else _run(configs)
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n")
    if page is not None:
        page.write_text(text(found))
    if merge is not None:
        merged(found, merge)
    if report is None and page is None and merge is None:
        click.echo(text(found))


def _require_tables(folder: Path, source: Path | None) -> None:
    """Refuse to measure for tables that would not take the times."""
    from hipforge.tuning.table_writer import require_writable

    device = devices.current()
    if source is None and not device.is_gpu:
        raise ConfigError(
            f"only measured times go into tables, and the device is {device.kind}; give --from a report of a GPU"
        )
    for family in ops.families():
        require_writable(folder / ops.schema_of(family).file_name)


def _run(configs: Path | None) -> dict[str, Any]:
    device = devices.current()
    if device.kind == "reference":
        raise ConfigError("bench works on a GPU and on the emulator; HIPFORGE_DEVICE=reference runs no kernels")
    if configs is not None and device.is_gpu:
        raise ConfigError("--configs is for the emulator; on a GPU hipforge bench-model measures a decode step")
    console = output.console(stderr=True)
    rows = []
    for cell in CELLS:
        with console.status(f"{_title(cell.calls)} ..."):
            try:
                parts = [_part(call, device.is_gpu) for call in cell.calls]
            except ConfigError as error:
                if not device.is_gpu:
                    raise
                click.echo(f"left out: {error}", err=True)  # an op without a kernel for this GPU
                continue
        rows.append({"cell": asdict(cell), "parts": [asdict(part) for part in parts]})
    if not rows:
        raise ConfigError(f"no call has a kernel for {device.arch_of()}")
    if device.is_gpu:
        from hipforge.tuning.timing import measured_source

        source = measured_source()
    else:
        from hipforge.emulator.timing import machine
        from hipforge.emulator.timing.context import gpu_of

        source = f"model:{machine(gpu_of(device.arch_of())).version}"
    steps = [] if configs is None else [asdict(_step(configs / f"{name}.json", name, tp)) for name, tp in MODELS]
    return {
        "hipforge": __version__, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "arch": device.arch_of(), "source": source, "rows": rows, "steps": steps,
    }  # fmt: skip


def _part(called: Call, on_gpu: bool) -> Part:
    from hipforge.cli.profile_subjects import call_of
    from hipforge.ops.core.dispatch import explain

    call = call_of(called.op, called.shape)
    args, named = call.args, call.keywords
    kernel_us = None
    if on_gpu:
        from hipforge.cli import time

        args, named = time.on_gpu(args), time.on_gpu(named)
    told = explain(call.func, *args, **named)
    if on_gpu:
        us = time.measured(called.op, called.shape, rotating=called.start == "cold").us
    else:
        from hipforge import emulator

        with emulator.timed(start=called.start) as timed:
            call()
        us, kernel_us = timed.result.replay_us, round(timed.result.kernel_us, 3)
    row = None if told.row is None else dict(told.row)
    return Part(round(us, 3), kernel_us, told.kernel or "", dict(told.configuration), _table_of(told), row)


def _table_of(told: Explanation) -> str | None:
    """Return the name of the table whose row decided; the file may be one of the user's own, of any name."""
    from hipforge.ops.core.tuned import load_table

    def has(table: str) -> bool:
        return any((row.file, row.line) == told.file for row in load_table(table).rows)

    return None if told.file is None else next(filter(has, ops.families()), None)


def _step(config: Path, name: str, tp: int) -> Step:
    from hipforge.cli import decode_model, decode_step, time_model

    shape = decode_step.read(config)
    shape = decode_step.largest_part(decode_step.without_attention(shape, bool(shape.projections)), tp)
    model = decode_model.Model(shape, decode_model.Untouched())
    us = time_model.model_step(model, BATCH, CONTEXT, {}).us
    return Step(name, tp, BATCH, CONTEXT, round(us, 1), shape.notes)


def _read(path: Path) -> dict[str, Any]:
    """Return a report; raises ConfigError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            for call, part in zip(row["cell"]["calls"], row["parts"], strict=True):
                float(part["us"]), call["op"], call["shape"], part["kernel_us"], part["table"], part["row"]
        str(found["source"]), str(found["date"]), str(found["arch"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no report of hipforge bench: {error!r}") from None
    return dict(found)


def merged(report: Mapping[str, Any], folder: Path) -> None:
    """Put a report's measured times into the tuned tables of a folder, in the rows that chose the kernels.

    Raises:
        ConfigError: the times are modelled, or a row does not fit its table.
    """
    from hipforge.tuning.table_writer import merge_rows

    if not str(report["source"]).startswith("measured:"):
        raise ConfigError(f"only measured times go into tables; these are of {report['source']}")
    rows: dict[str, list[dict[str, Any]]] = {}
    for each in (part for row in report["rows"] for part in row["parts"]):
        # The row of a grouped GEMM decides its launch with SwiGLU too, whose time is not the row's.
        if each["table"] in ops.families() and each["row"] and each["row"].get("kernel") == each["kernel"]:
            rows.setdefault(each["table"], []).append({**each["row"], "us": each["us"], "source": report["source"]})
    for table, new in rows.items():
        schema = ops.schema_of(table)
        merge_rows(folder / schema.file_name, schema, new)
        click.echo(f"{folder / schema.file_name}: {len(new)} rows measured", err=True)


def text(report: Mapping[str, Any]) -> str:
    """Return a report as a page."""
    modelled = str(report["source"]).startswith("model:")
    how = "modelled" if modelled else "measured"
    lines = [
        "# Predictions" if modelled else "# Measured times",
        "",
        f"Microseconds, **{how}** ({report['source']}) for {report['arch']} on {report['date']} by hipforge "
        f"{report['hipforge']}. Calls of a line are timed one by one and added. Weights and caches start in HBM. "
        "Published times are of other kernels on that publisher's GPU.",
    ]
    if modelled:
        lines += [
            "Work-groups that share sums meet in an order that depends on threads: with `HIPFORGE_EMULATOR_THREADS=1` "
            "two runs differ by 3 % at most, on a busy machine without it by more.",
            f"[The model's error](time-model.md): {BAND}. `replayed` is the interval of calls in a graph, `kernel` "
            "the duration that a profiler shows; the ratio is of the one that was published. Routing is uniform, a "
            "draw that reaches as many experts as draws do on average: 64 tokens reach 231 of 257, with a standard "
            "deviation of 4, and weights are nearly all that a layer reads. `hipforge bench --report out.json` "
            "measures the same calls on a GPU (replayed), and `--from out.json --merge FOLDER` puts the times into "
            "tuned tables. `reading`: the modelled duration of kernels that read a line's weights once and compute "
            "nothing, the fastest of eight for each call.",
        ]
    else:
        lines.append(
            "Measured is the interval of calls in a graph; where a `kernel`'s duration was published, as a profiler "
            "shows it, the ratio is not of like and like."
        )
    lines += [
        "",
        "| calls | replayed | kernel | published | of | ratio | goal | reading | kernels |",
        "|---|" + "---|" * 8,
    ]
    for row in report["rows"]:
        cell, us, kernel_us, ratio = row["cell"], *_times(row)
        published, reading = cell["published_us"], cell.get("reading_us")
        title = " + ".join(f"`{call['op']}` {call['shape']}" for call in cell["calls"])
        kernels = " + ".join(f"{part['kernel']}({_options(part['configuration'])})" for part in row["parts"])
        lines.append(
            f"| {title} | {us:.2f} | {'' if kernel_us is None else f'{kernel_us:.2f}'} | "
            f"{'' if published is None else f'{published:g}'} | {'' if published is None else cell['figure']} | "
            f"{'' if ratio is None else f'{ratio:.2f}'} | {_goal(cell)} | "
            f"{'' if reading is None else f'{reading:.2f}'} | {kernels} |"
        )
    lines += [*_summary(report["rows"]), *_derivation(report), *_steps(report.get("steps", ())), ""]
    return "\n".join(lines)


def _goal(cell: Mapping[str, Any]) -> str:
    goal, median_goal = cell["goal"], cell.get("median_goal")
    own = "" if goal is None else f"≤ {goal:g}"
    return own if median_goal is None else f"{own}, median ≤ {median_goal:g}"


def _title(calls: Iterable[Call]) -> str:
    return " + ".join(f"{call.op} {call.shape}" for call in calls)


def _times(row: Mapping[str, Any]) -> tuple[float, float | None, float | None]:
    """Return a row's replayed time, its kernels' durations, and the ratio to what was published."""
    cell, parts = row["cell"], row["parts"]
    us = sum(part["us"] for part in parts)
    durations = [part["kernel_us"] for part in parts]
    kernel_us = None if None in durations else sum(durations)
    own = us if kernel_us is None or cell["figure"] == "call" else kernel_us
    return us, kernel_us, None if cell["published_us"] is None else own / cell["published_us"]


def _options(configuration: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in configuration.items())


def _summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [row for row in rows if row["cell"]["goal"] is not None]
    if not rows:
        return []
    missed, beyond = _missed(rows), _beyond(rows)
    lines = ["", f"{len(rows) - len(missed)} of {len(rows)} lines that have a goal reach it."]
    if beyond:
        how = "reading the weights alone takes longer than the goal allows"
        lines.append(
            f"In {len(beyond)} of the {len(missed)} others {how}: {'; '.join(_limit(cell) for cell in beyond)}."
        )
    asked = [(row["cell"].get("median_goal"), _times(row)[2]) for row in rows]
    for goal in sorted({goal for goal, _ in asked if goal is not None}):
        ratios = [ratio for of, ratio in asked if of == goal and ratio is not None]
        middle, alone = statistics.median(ratios), sum(ratio <= goal for ratio in ratios)
        lines.append(
            f"The median of the {len(ratios)} ratios that have a goal for it is {middle:.3f} and "
            f"{'reaches' if middle <= goal else 'misses'} {goal:g}; {alone} of them reach that alone."
        )
    return lines


def _missed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    asked = ((_times(row)[2], row["cell"]) for row in rows if row["cell"]["goal"] is not None)
    return [cell for ratio, cell in asked if ratio is None or ratio > cell["goal"]]


def _beyond(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines that miss a goal which is below the time of reading their weights."""
    return [cell for cell in _missed(rows) if (cell.get("reading_us") or 0.0) > _allowed(cell)]


def _allowed(cell: Mapping[str, Any]) -> float:
    return math.inf if cell["goal"] is None else cell["goal"] * (cell["published_us"] or math.inf)


def _derivation(report: Mapping[str, Any]) -> list[str]:
    """Return a table of what reading the weights takes where the goal allows less, from the model's parameters."""
    cells = [cell for cell in _beyond(report["rows"]) if cell.get("read_bytes")]
    if not cells or not str(report["source"]).startswith("model:"):
        return []
    from hipforge.emulator.timing import machine
    from hipforge.emulator.timing.context import gpu_of

    of = machine(gpu_of(report["arch"]))
    rate, start = of["hbm_gbps"], of["start_ns"] / 1e3
    lines = [
        "", "## Goals below the time of reading", "",
        f"The model's HBM delivers {rate:,.0f} GB/s, and a launch starts in {start:.2f} µs "
        f"(`emulator/timing/machines.py`, {of.version}). Where their sum is below `allowed`, goal times published, "
        "they alone would leave the goal possible. `reading` is longer: the first bytes arrive one latency after the "
        "start, and the channels of a die are not equally busy. It is of the fastest of eight kernels and no bound: "
        "one that reads in another order may be faster. The rates are those of the bytes once the launches have "
        "started.",
        "",
        f"| calls | bytes | / {rate:,.0f} GB/s | starts | sum | reading | reading reaches, GB/s | allowed "
        "| the goal needs, GB/s |",
        "|---|" + "---|" * 8,
    ]  # fmt: skip
    for cell in cells:
        read, starts, allowed = cell["read_bytes"], start * len(cell["calls"]), _allowed(cell)
        least = read / rate / 1e3
        cells_of = [f"{us:.2f} | {read / (us - starts) / 1e3:,.0f}" for us in (cell["reading_us"], allowed)]
        title = " + ".join(f"`{call['op']}` {call['shape']}" for call in cell["calls"])
        lines.append(
            f"| {title} | {read:,} | {least:.2f} | {starts:.2f} | {least + starts:.2f} | {' | '.join(cells_of)} |"
        )
    return lines


def _limit(cell: Mapping[str, Any]) -> str:
    """Return a line's first call, and its time of reading over the published one beside its goal."""
    call = cell["calls"][0]
    return f"`{call['op']}` {call['shape']} {cell['reading_us'] / cell['published_us']:.2f} for {cell['goal']:g}"


def _steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    if not steps:
        return []
    return [
        "", "## Decode steps", "",
        "One GPU of those that share the model, without communication, embedding and sampling, all weights in MX-FP8 "
        "but gpt-oss's experts, MXFP4 (`hipforge time-model`). `hipforge bench` leaves them out on a GPU, where "
        "`hipforge bench-model` measures a step. A step without attention is not the time of the model: its attention, "
        "over latents that an index chooses, has no op here, and nothing is counted for it.",
        "", "| model | GPUs | batch | keys | µs | |", "|---|---|---|---|---|---|",
        *(f"| {step['model']} | {step['tp']} | {step['batch']} | {step['context']} | {step['us']:.0f} | "
          f"{'; '.join(step.get('notes', ()))} |" for step in steps),
    ]  # fmt: skip
