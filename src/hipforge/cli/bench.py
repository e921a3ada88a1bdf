"""``hipforge bench``: the shapes that have published times, measured on a GPU or modelled on the emulator."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from hipforge import __version__, archs, devices, ops
from hipforge.cli import output
from hipforge.errors import ConfigError

AMD = "AMD, MI355X"
# Of the model of time beside 1,207 published times: docs/time-model.md.
BAND = "half of the model's times are within 4.5 % of published ones, nine of ten within 12.4 %"


@dataclass(frozen=True)
class Cell:
    """A call, and what another kernel takes for it.

    Attributes:
        op: name of a subject of ``hipforge time``.
        shape: as its ``SHAPE``.
        published_us: microseconds that were published, or None.
        publisher: who published them, and of which GPU.
        goal: the share of them that is to be reached, or None.
    """

    op: str
    shape: str
    published_us: float | None = None
    publisher: str = ""
    goal: float | None = None


def _ptpc(n: int, k: int, *published: float) -> list[Cell]:
    return [
        Cell("fp8_gemm", f"{m},{n},{k}", us, AMD, 0.85 if m <= 16 else 1.0)
        for m, us in zip((1, 16, 64), published, strict=True)
    ]


CELLS = (
    *_ptpc(2304, 6144, 9.77, 10.1, 10.5),
    *_ptpc(6144, 2048, 5.33, 5.43, 6.07),
    *_ptpc(6144, 6144, 10.7, 10.4, 12.7),
    *(Cell("mxfp8_linear", f"{m},2304,6144") for m in (1, 16, 64)),
)


@dataclass(frozen=True)
class Row:
    """A cell with its time, what ran, and the tuned row that chose it, as the table's columns have it."""

    cell: Cell
    us: float
    kernel: str
    configuration: dict[str, int]
    table: str | None
    row: dict[str, Any] | None


@click.command("bench")
@click.option("--report", type=click.Path(path_type=Path), help="Write the times as JSON.")
@click.option("--page", type=click.Path(path_type=Path), help="Write them as a page in Markdown.")
@click.option("--from", "source", type=click.Path(path_type=Path), help="Take the times from this report; run nothing.")
@click.option("--merge", type=click.Path(path_type=Path, file_okay=False),
              help="Put measured times into the tuned tables of this folder.")  # fmt: skip
@click.option("--tables", is_flag=True, help="Take the times that tuned rows of these shapes have from the model.")
@click.option("--arch", type=click.Choice(archs.EMULATED), help="Emulate it; default as HIPFORGE_EMULATE says.")
def command(
    report: Path | None, page: Path | None, source: Path | None, merge: Path | None, tables: bool, arch: str | None
) -> None:
    """Measure the shapes that have published times on this GPU, or model them on the emulator (minutes).

    A report of a GPU holds the tuned rows that chose its kernels, with the measured microseconds: --from REPORT --merge
    FOLDER puts them into that folder's tables as measured.
    """
    if arch is not None:
        os.environ["HIPFORGE_EMULATE"] = arch
    found = _read(source) if source is not None else _run(tables)
    if report is not None:
        report.write_text(json.dumps(found, indent=1) + "\n")
    if page is not None:
        page.write_text(text(found))
    if merge is not None:
        merged(found, merge)
    if report is None and page is None and merge is None:
        click.echo(text(found))


def _run(tables: bool) -> dict[str, Any]:
    device = devices.current()
    if tables and device.kind != "emulator":
        raise ConfigError(f"--tables is of the model's times, for the emulator; the device is {device.kind}")
    if device.kind == "reference":
        raise ConfigError("bench works on a GPU and on the emulator; HIPFORGE_DEVICE=reference runs no kernels")
    console = output.console(stderr=True)
    rows = []
    for cell in CELLS:
        with console.status(f"{cell.op} {cell.shape} ..."):
            try:
                rows.append(_row(cell, device.is_gpu, tables))
            except ConfigError as error:
                if not device.is_gpu:
                    raise
                click.echo(f"left out: {error}", err=True)  # an op without a kernel for this GPU
    if not rows:
        raise ConfigError(f"no call has a kernel for {device.arch_of()}")
    if device.is_gpu:
        from hipforge.tuning.timing import measured_source

        source = measured_source()
    else:
        from hipforge.emulator.timing import machine
        from hipforge.emulator.timing.context import gpu_of

        source = f"model:{machine(gpu_of(device.arch_of())).version}"
    return {
        "hipforge": __version__, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "arch": device.arch_of(), "source": source, "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def _row(cell: Cell, on_gpu: bool, tables: bool) -> Row:
    from hipforge.cli.profile_subjects import call_of
    from hipforge.ops.core.dispatch import explain

    call = call_of(cell.op, cell.shape)
    args, named = call.args, call.keywords
    if on_gpu:
        from hipforge.cli import time

        args, named = time.on_gpu(args), time.on_gpu(named)
    told = explain(call.func, *args, **named)
    if tables:
        us = _of_table(cell, told.row)
    elif on_gpu:
        us = time.measured(cell.op, cell.shape, rotating=True).us
    else:
        from hipforge import emulator

        with emulator.timed(start="cold") as timed:
            call()
        us = timed.result.kernel_us
    table = None if told.file is None else told.file[0].name.removesuffix("_tuned.csv")
    row = None if told.row is None else dict(told.row)
    return Row(cell, round(us, 3), told.kernel or "", dict(told.configuration), table, row)


def _of_table(cell: Cell, row: Mapping[str, Any] | None) -> float:
    """Return the model's time in the tuned row of a cell; raises ConfigError where there is no row of that shape."""
    shape = [int(number) for number in cell.shape.split(",")]
    if row is None or [row["M"], row["N"], row["K"]] != shape or row["model_us"] is None:
        raise ConfigError(f"no tuned row of {cell.op} has {cell.shape} and a time of the model; leave --tables out")
    return float(row["model_us"])


def _read(path: Path) -> dict[str, Any]:
    """Return a report; raises ConfigError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found["rows"]:
            float(row["us"]), row["cell"]["op"], row["cell"]["shape"], row["table"], row["row"]
        str(found["source"]), str(found["date"]), str(found["arch"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
    for each in report["rows"]:
        if each["table"] in ops.families() and each["row"]:
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
        f"Microseconds of a call, **{how}** ({report['source']}) for {report['arch']} on {report['date']} by hipforge "
        f"{report['hipforge']}; operands start in HBM. Published times are of other kernels on that publisher's GPU.",
    ]
    if modelled:
        lines += [
            f"[The model's error](time-model.md): {BAND}. `hipforge bench --report out.json` measures the same calls "
            "on a GPU, and `--from out.json --merge FOLDER` puts the times into tuned tables.",
        ]
    lines += ["", f"| op | shape | {how} µs | published µs | ratio | goal | kernel |", "|---|---|---|---|---|---|---|"]
    for row in report["rows"]:
        cell = row["cell"]
        published, goal = cell["published_us"], cell["goal"]
        ratio = "" if published is None else f"{row['us'] / published:.2f}"
        options = ", ".join(f"{name} {value}" for name, value in row["configuration"].items())
        lines.append(
            f"| `{cell['op']}` | {cell['shape']} | {row['us']:.2f} | {_number(published)} | {ratio} | "
            f"{'' if goal is None else f'≤ {goal:g}'} | {row['kernel']}({options}) |"
        )
    return "\n".join([*lines, *_summary(report["rows"]), ""])


def _summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    with_goal = [row for row in rows if row["cell"]["goal"] is not None]
    if not with_goal:
        return []
    reached = sum(row["us"] <= row["cell"]["goal"] * row["cell"]["published_us"] for row in with_goal)
    return ["", f"{reached} of {len(with_goal)} calls that have a goal reach it."]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
