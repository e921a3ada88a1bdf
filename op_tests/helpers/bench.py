"""The driver of the benches: runs each implementation of a problem, checks it, counts or measures it, shows the rows.

On a GPU a row is *measured*: microseconds per call by graph replay over operands that rotate past the last-level cache.
Without one it is *counted* on the emulator, from the very machine code, with no time given: instructions are those of
waves, ``loaded`` and ``stored`` bytes of all lanes, ``unique`` those that cross the memory bus at least once.
Registers, scratch bytes of a lane and waves per SIMD are those of the first kernel. A wrong result ends the run with
status 1.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hipforge import devices, plots
from hipforge.cli.options import PICTURE_OPTION, Output
from hipforge.cli.output import console
from hipforge.emulator.counting import Counters
from hipforge.tuning import timing

Row = Mapping[str, Any]
TO_CSV = click.option("--csv", "csv_path", type=Output(), help="Also write the rows here.")
READ = click.option(
    "--read", "earlier", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw the rows of an earlier --csv, of this machine or another, instead of running anything.",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One problem and who computes it.

    Attributes:
        of: what names it, by column.
        calls: by implementation, ours first: ``call(i)`` computes on copy ``i`` of the operands.
        error: of what a call returns.
        copies: of the operands.
        known: columns that need no run, such as a floor.
        counted: columns of the problem's own, from what was counted.
        foreign: implementations whose errors are shown and not judged.
    """

    of: Row
    calls: Mapping[str, Callable[[int], Any]]
    error: Callable[[Any], float]
    copies: int = 1
    known: Row = field(default_factory=dict)
    counted: Callable[[Counters], Row] = lambda counts: {}
    foreign: Sequence[str] = ()


def on_gpu() -> bool:
    """Whether rows are measured."""
    return devices.current().is_gpu


def device() -> torch.device:
    """Return where operands are made."""
    return torch.device("cuda" if on_gpu() else "cpu")


def copies_of(bytes_per_call: int) -> int:
    """Return how many copies of the operands to rotate over; one on the emulator."""
    return timing.copies_for(bytes_per_call) if on_gpu() else 1


def triton_binder() -> Any:
    """Return what binds a Triton kernel on the emulator; None on a GPU."""
    if on_gpu():
        return None
    from hipforge.emulator import triton as emulated

    return emulated.jit


def named(configuration: Mapping[str, Any]) -> str:
    """Return a configuration as rows show it."""
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def loaded(seen: Counters, *names: str) -> int:
    """Return the bytes loaded of the tensor that a kernel calls by one of these names."""
    return next(seen.tensors[name].loaded for name in names if name in seen.tensors)


def count(call: Callable[[int], Any], own: Callable[[Counters], Row]) -> tuple[Any, dict[str, Any]]:
    """Run a call on the emulator; return its result and the counted columns."""
    from hipforge import emulator

    with emulator.counters() as collector:
        result = call(0)
    seen, first = collector.result, collector.result.kernels[0]
    of = {name: seen.by_class.get(name, 0) for name in ("mfma", "lds")}
    for name, parts in (("valu", "valu valu_trans"), ("salu", "salu smem"), ("memory", "vmem_load vmem_store atomic")):
        of[name] = sum(seen.by_class.get(part, 0) for part in parts.split())
    return result, {
        "instructions": seen.wave_instructions, **of, "other": seen.wave_instructions - sum(of.values()),
        "mfma_cycles": seen.mfma_cycles, "lds_bytes": seen.lds_bytes, "lds_conflicts": seen.lds_bank_conflicts,
        "loaded": seen.bytes_loaded, "stored": seen.bytes_stored, "unique": seen.unique_bytes, "waves": seen.waves,
        "vgprs": first.vgprs, "scratch": first.scratch_bytes, "occupancy": first.occupancy, **own(seen),
    }  # fmt: skip


def rows_of(problem: Problem) -> list[dict[str, Any]]:
    """Return a row per implementation."""
    rows = []
    for name, call in problem.calls.items():
        result, values = (call(0), {}) if on_gpu() else count(call, problem.counted)
        source = timing.measured_source() if on_gpu() else "counted:emulator"
        head = {**problem.of, "implementation": name, "source": source, "error": problem.error(result)}
        if on_gpu():  # after the error is known: copies may share what they write
            values = {"us": timing.microseconds_per_call(call, problem.copies)}
        rows.append({**head, **problem.known, **values})
    return rows


def text_of(value: Any) -> str:
    """Return a value as tables show it: three digits and a unit."""
    if value is None or isinstance(value, (str, bool)):
        return "-" if value is None else str(value)
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (unit == "M" and abs(value) >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# Only in the CSV, where a table has several problems.
DETAILS = ("source", "valu", "salu", "memory", "lds", "other", "lds_conflicts", "stored", "scratch")


def table_of(rows: Sequence[Row], title: str, without: Sequence[str] = ()) -> Table:
    """Return the rows as a table of the columns that hold something."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value not in (None, ""))
    shown = [name for name in names if name not in without]
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in shown:
        text = any(isinstance(row.get(name), str) for row in rows)
        table.add_column(name.replace("_", "\n"), justify="left" if text else "right")
    for row in rows:
        table.add_row(*(text_of(row.get(name)) for name in shown))
    return table


def columns_of(rows: Sequence[Row], title: str) -> Table:
    """Return the rows of one problem as columns."""
    table = Table("", title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_column(row["implementation"].replace(" ", "\n"), justify="right")
    for name in dict.fromkeys(name for row in rows for name in row if name != "implementation"):
        table.add_row(name, *(text_of(row.get(name)) for row in rows))
    return table


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write rows, which are mappings or dataclasses; their columns may differ."""
    flat = [row if isinstance(row, Mapping) else asdict(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def key_of(row: Row) -> list[tuple[str, Any]]:
    """Return the columns that name a row's problem."""
    return list(row.items())[: list(row).index("implementation")]


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier --csv, without empty cells, numbers as numbers.

    Raises:
        ValueError: it is not such a file.
    """

    def value(text: str) -> Any:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text

    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if not {"implementation", "source"} <= set(reader.fieldnames or ()):
            raise ValueError("no columns implementation and source")
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num} has not as many cells as the first")
            rows.append({name: value(text) for name, text in row.items() if text})
    drawn = [row.get("us", row.get("instructions")) for row in rows]
    named = all(isinstance(row.get(name), str) for row in rows for name in ("implementation", "source"))
    if not rows or not named or not all(isinstance(each, int | float) for each in drawn):
        raise ValueError("no rows, or some without implementation, source, and times or instructions")
    return rows


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw each problem's implementations: times against M, bandwidth of what moves memory, or instructions.

    Raises:
        ConfigError: as :func:`hipforge.plots.bars`.
    """
    measured = rows[0].get("us") is not None
    if measured and len({row.get("m") for row in rows}) > 2 and all("m" in row for row in rows):
        return plots.curves(list(_against_m(rows)), title, "M", "µs (measured)", path)
    if measured and all("mb" in row for row in rows):
        return plots.bars(list(_bandwidths(rows)), title, "TB/s (measured)", path)
    metric, unit = ("us", "µs (measured)") if measured else ("instructions", "wave-instructions (counted)")
    values = []
    for row in rows:
        if row.get(metric):
            label = " ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in key_of(row))
            values.append(plots.Bar(label, _series(row["implementation"]), row[metric]))
    return plots.bars(values, title, unit, path)


def _bandwidths(rows: Sequence[Row]) -> Iterator[plots.Bar]:
    """Yield the bandwidth of each row, beside that of a kernel which only reads, for problems of the same columns."""
    for row in rows:
        key = key_of(row)
        panel = ", ".join(name for name, value in key if not isinstance(value, str))
        label = " ".join(value for _, value in key if isinstance(value, str))
        label += " " + " × ".join(str(value) for _, value in key if not isinstance(value, str))
        if row.get("floor_us"):
            yield plots.Bar(label, "reading alone", row["mb"] / row["floor_us"], panel)
        yield plots.Bar(label, _series(row["implementation"]), row["mb"] / row["us"], panel)


def _series(implementation: str) -> str:
    """Return an implementation without what its configuration adds: words with digits, and our kernels' names."""
    words = implementation.split()
    if words[0] == "hipforge":
        return "hipforge programmatic" if "programmatic" in words else "hipforge"
    return " ".join(word for word in words if "=" not in word)


def _against_m(rows: Sequence[Row]) -> Iterator[plots.Curve]:
    """Yield curves of a shape: each implementation in the best of its configurations, and reading its weight."""
    found: dict[tuple[str, str, bool], dict[float, float]] = {}
    for row in rows:
        shape = " ".join(v if isinstance(v, str) else f"{n.upper()}={v}" for n, v in key_of(row) if n != "m")
        floors = [("reading W", row.get("floor_us"), True)]
        for name, us, bound in [(_series(row["implementation"]), row["us"], False), *floors]:
            if us:
                best = found.setdefault((shape, name, bound), {})
                best[row["m"]] = min(us, best.get(row["m"], us))
    for (shape, name, bound), points in found.items():
        yield plots.Curve(shape, name, list(points.items()), bound)


def _drawn_from(earlier: Path, title: str, picture: Path | None) -> None:
    if picture is None:
        raise click.UsageError("--read draws the rows of a file: say where to, with --plot FILE")
    try:
        rows = read_csv(earlier)
    except (ValueError, csv.Error) as error:
        why = f"{earlier} has no rows of a bench's --csv: {error}"
        raise click.BadParameter(why, param_hint="--read") from None
    draw(rows, f"{title}, {rows[0]['source']}", picture)


def command(title: str, max_error: float, archs: Sequence[str] = ()) -> Callable[[Any], click.Command]:
    """Make a command of a function that yields problems; its own options stay.

    Args:
        title: of the table.
        max_error: the largest error of a right result.
        archs: whose kernels there are; empty for all.
    """

    def decorate(problems: Callable[..., Iterable[Problem]]) -> click.Command:
        @TO_CSV
        @PICTURE_OPTION
        @READ
        @functools.wraps(problems)
        def run(csv_path: Path | None, picture: Path | None, earlier: Path | None, **given: Any) -> None:
            if earlier is not None:
                return _drawn_from(earlier, title, picture)
            current = devices.current()
            if current.kind == "reference" or (archs and current.arch_of() not in archs):
                where = f"the kernels are for {', '.join(archs) or 'a GPU or the emulator'}"
                raise click.ClickException(f"{where}; the device is {current.kind} (HIPFORGE_DEVICE)")
            rows: list[dict[str, Any]] = []
            judged: list[dict[str, Any]] = []
            for problem in problems(**given):
                click.echo(f"{title}: {named(problem.of)}", err=True)
                found = rows_of(problem)
                rows += found
                judged += (row for row in found if row["implementation"] not in problem.foreign)
            heading = f"{title}, {rows[0]['source']}, {current.arch_of()}"
            alone = len({str(problem) for problem in map(key_of, rows)}) == 1
            console().print(columns_of(rows, heading) if alone else table_of(rows, heading, DETAILS))
            if csv_path:
                write_csv(csv_path, rows)
            if picture:
                draw(rows, title, picture)
            if any(not row["error"] <= max_error for row in judged):
                sys.exit(f"a result is wrong: column error must be at most {max_error:g}")
            return None

        return click.command(context_settings={"show_default": True})(run)

    return decorate


@dataclass(frozen=True)
class Figure:
    """One number that has a bound: at most, or at least where ``more_is_better``."""

    section: str
    name: str
    value: float
    unit: str
    note: str = ""
    target: float | None = None
    more_is_better: bool = False

    @property
    def missed(self) -> bool:
        """Whether there is a target and the value is on the wrong side of it."""
        if self.target is None:
            return False
        return self.value < self.target if self.more_is_better else self.value > self.target


def finish(figures: Sequence[Figure], title: str, json_path: Path | None, picture: Path | None) -> None:
    """Print figures, write and draw them, and end with status 1 if a target is missed."""
    rows = []
    for figure in figures:
        target = "" if figure.target is None else f"{'≥' if figure.more_is_better else '≤'} {figure.target:g}"
        mark = "[red]missed[/]" if figure.missed else ""
        rows.append({"": figure.section, "measured": figure.name, "value": figure.value, "unit": figure.unit,
                     "target": target, "missed": mark, "note": figure.note})  # fmt: skip
    console().print(table_of(rows, f"{title} (measured on this machine)"))
    if json_path is not None:
        json_path.write_text(json.dumps([{**asdict(one), "missed": one.missed} for one in figures], indent=1) + "\n")
    if picture is not None:
        values = [
            plots.Bar(f"{one.name}, {one.unit}", series, value)
            for one in figures
            for series, value in (("measured", one.value), ("target", one.target))
            if value
        ]
        plots.bars(values, title, "see each name (measured)", picture)
    if any(one.missed for one in figures):
        sys.exit(1)
