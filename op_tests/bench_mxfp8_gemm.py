"""Small-M MX-FP8 GEMM side by side with Triton's dot_scaled.

On a GPU every row is *measured*: microseconds per call by graph replay over weights that rotate past the last-level
cache. Without one every row is *counted* on the emulator: instructions by class, bytes and matrix instructions of the
very machine code, ours and Triton's, with no time given. Either way each result is checked first; a wrong one ends the
run with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import torch
from helpers.rows_csv import write_csv
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hipforge import devices, plots
from hipforge.cli.output import console
from hipforge.jit import loader
from hipforge.ops.core.dispatch import explain
from hipforge.ops.mxfp8_gemm.family import FAMILY
from hipforge.ops.mxfp8_gemm.kernels import gemv_rows
from hipforge.ops.mxfp8_gemm.tuner import KERNELS, MAX_ERROR, operands
from hipforge.ops.reference import mxfp8_mm
from hipforge.ops.smallm_gemm_mxfp8 import mxfp8_gemv
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.tuning import timing
from hipforge.tuning.cases import MINIMAX_M3, Cell, cells, parse_shape
from hipforge.tuning.model import MI355X
from hipforge.tuning.tuner import relative_error

DEFAULT_M = (1, 4, 16, 64)
FAMILIES = ("hipforge", "triton stock", "triton small-M")
Operands = tuple[torch.Tensor, ...]


(ARCH,) = FAMILY.archs


@dataclass(frozen=True)
class Row:
    """One implementation on one cell; what does not apply to its ``source`` is None.

    Instructions are wave-instructions. ``weight_loads`` is weight payload bytes loaded over the weight's size;
    ``floor_us`` the time that each byte of the operands once takes at the MI355X's bandwidth.
    """

    m: int
    n: int
    k: int
    implementation: str
    configuration: str
    relf: float
    floor_us: float
    source: str
    us: float | None = None
    instructions: int | None = None
    valu: int | None = None
    mfma: int | None = None
    salu: int | None = None
    memory: int | None = None
    lds: int | None = None
    other: int | None = None
    bytes_loaded: int | None = None
    weight_loads: float | None = None
    waves: int | None = None
    vgprs: int | None = None
    occupancy: int | None = None


@dataclass(frozen=True)
class Contender:
    """Something to bench.

    ``call(operands)`` returns [M, N] bf16; ``resources()`` gives VGPRs and waves per SIMD.
    """

    implementation: str
    configuration: str
    call: Callable[[Operands], torch.Tensor]
    resources: Callable[[], tuple[int, int]]


def floor_us(cell: Cell) -> float:
    """Return microseconds to move each operand byte once."""
    payload = (cell.m + cell.n) * cell.k
    return (payload + payload // 32 + 2 * cell.m * cell.n) / MI355X.bandwidth * 1e6


def default_mfma(cell: Cell) -> dict[str, int]:
    """Return the untuned MFMA configuration, for cells that dispatch leaves to the fallback."""
    steps = -(-cell.k // 128)
    return {"n_sub": 1, "k_splits": next(splits for splits in (4, 2, 1) if steps % splits == 0)}


def hip_contender(cell: Cell, data: Operands) -> Contender:
    """Return the kernel that dispatch chooses for a cell, or where it chooses none the untuned MFMA."""
    decision = explain(mxfp8_gemv, *data)
    if decision.path == "kernel" and decision.kernel is not None:
        kernel, configuration, note = decision.kernel, dict(decision.configuration), ""
    else:
        kernel, configuration, note = "smallm_mxfp8_mfma", default_mfma(cell), " (untuned)"
    kind = "gemv" if "gemv" in kernel else "mfma"

    def call(arguments: Operands) -> torch.Tensor:
        return KERNELS[kernel](*arguments, torch.bfloat16, **configuration)

    def resources() -> tuple[int, int]:
        name = "module_mxfp8_gemm_gemv" + ("" if kind == "gemv" else "_mfma")
        variant = {"HF_ROWS": gemv_rows(cell.m)} if kind == "gemv" else {"HF_N_SUB": configuration["n_sub"]}
        kernels = loader.load(name, variant, ARCH).manifest.kernels.values()
        found = [entry for entry in kernels if f"smallm_mxfp8_{kind}<" in entry["name"]]
        if kind == "gemv":  # smallm_mxfp8_gemv<rows, columns>: the widest sub-tile that a wave's columns fill
            width = {int(entry["name"].rstrip(">").split(", ")[1]): entry for entry in found}
            found = [width[max(columns for columns in width if columns <= configuration["block_n"] // 4)]]
        return int(found[0]["vgpr"]), int(found[0]["occupancy"])

    text = " ".join(f"{name}={value}" for name, value in configuration.items())
    return Contender(f"hipforge {kind}{note}", text, call, resources)


def triton_contender(cell: Cell, config: dot_scaled.TileConfig, name: str, on_gpu: bool) -> Contender:
    """Return a Triton configuration, on the GPU or compiled for gfx950 and emulated."""
    text = f"{config.block_m}x{config.block_n}x{config.block_k} warps={config.num_warps}"

    def output(data: Operands) -> torch.Tensor:
        return torch.empty(cell.m, cell.n, dtype=torch.bfloat16, device=data[0].device)

    if on_gpu:

        def launch(data: Operands) -> torch.Tensor:
            out = output(data)
            dot_scaled.mxfp8_dot_scaled(out, *data, config)
            return out

        return Contender(f"triton {name}", text, launch, lambda: (0, 0))
    from hipforge.emulator import triton as emulated
    from hipforge.ops.triton.mxfp8_kernels import mxfp8_dot_scaled_kernel

    kernel = emulated.jit(mxfp8_dot_scaled_kernel, arch=ARCH)
    meta = {**config.constants(cell.n, cell.k), "num_warps": config.num_warps, "num_stages": config.num_stages}

    def arguments(data: Operands, out: torch.Tensor) -> tuple[Any, ...]:
        return (*(tensor.view(torch.uint8) for tensor in data), out, cell.m, cell.n, cell.k)

    def call(data: Operands) -> torch.Tensor:
        out = output(data)
        kernel[config.grid(cell.m, cell.n)](*arguments(data, out), **meta)
        return out

    def resources() -> tuple[int, int]:
        data = operands(cell, torch.device("cpu"))
        compiled = kernel.compile(*arguments(data, output(data)), **meta).kernel
        return compiled.vgpr, compiled.occupancy

    return Contender(f"triton {name}", text, call, resources)


def count(cell: Cell, contender: Contender, data: Operands) -> dict[str, Any]:
    """Run once on the emulator and return the counted fields of a row."""
    from hipforge import emulator

    with emulator.counters() as seen:
        contender.call(data)
    classes = seen.by_class
    named = {
        "valu": classes.get("valu", 0) + classes.get("valu_trans", 0),
        "mfma": classes.get("mfma", 0),
        "salu": classes.get("salu", 0) + classes.get("smem", 0),
        "memory": classes.get("vmem_load", 0) + classes.get("vmem_store", 0) + classes.get("atomic", 0),
        "lds": classes.get("lds", 0),
    }
    weights = next(traffic for name, traffic in seen.tensors.items() if name in ("Wq", "w_ptr"))
    vgprs, occupancy = contender.resources()
    return {
        **named,
        "source": "counted:emulator",
        "instructions": seen.wave_instructions,
        "other": seen.wave_instructions - sum(named.values()),
        "bytes_loaded": seen.bytes_loaded,
        "weight_loads": weights.loaded / (cell.n * cell.k),
        "waves": seen.waves,
        "vgprs": vgprs,
        "occupancy": occupancy,
    }


def measure(contender: Contender, data: Operands) -> dict[str, Any]:
    """Time on the GPU and return the measured fields of a row."""
    device = data[0].device
    free, _ = torch.cuda.mem_get_info(device)
    number = timing.rotation(sum(tensor.nbytes for tensor in data), free)
    copies = [data, *(tuple(tensor.clone() for tensor in data) for _ in range(number - 1))]
    us = timing.microseconds_per_call(lambda i: contender.call(copies[i]), len(copies))
    return {"source": timing.measured_source(device.index or 0), "us": us}


def bench(cell: Cell, on_gpu: bool) -> list[Row]:
    """Return a row per contender; raises click's error if a result is wrong."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    data = operands(cell, device)
    reference = mxfp8_mm(*data, out_dtype=torch.float32)
    contenders = [
        hip_contender(cell, data),
        triton_contender(cell, dot_scaled.STOCK, "stock", on_gpu),
        triton_contender(cell, dot_scaled.SMALL_M, "small-M", on_gpu),
    ]
    if on_gpu:
        contenders += [triton_contender(cell, config, "tuned", on_gpu) for config in dot_scaled.TUNED[1:]]
    rows = []
    for contender in contenders:
        error = relative_error(contender.call(data), reference)
        if not error <= MAX_ERROR:
            raise click.ClickException(f"{cell}: {contender.implementation} has relF {error:.2e} > {MAX_ERROR:.0e}")
        values = measure(contender, data) if on_gpu else count(cell, contender, data)
        who = {"implementation": contender.implementation, "configuration": contender.configuration}
        rows.append(Row(m=cell.m, n=cell.n, k=cell.k, relf=error, floor_us=floor_us(cell), **who, **values))
    return rows


HEADINGS = {
    "implementation": "kernel",
    "configuration": "parameters",
    "relf": "relF",
    "floor_us": "floor us",
    "instructions": "instr",
    "memory": "mem",
    "bytes_loaded": "bytes",
    "weight_loads": "W x",
    "occupancy": "occ",
}


def text_of(value: float | int | str | None) -> str:
    """Return a value as the table shows it: three digits and a unit."""
    if value is None or isinstance(value, str):
        return value or ""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (unit == "M" and value >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table of the columns that hold something, with each cell's ratio to ours."""
    measured = rows[0].us is not None
    shown = [field.name for field in fields(Row) if any(getattr(row, field.name) is not None for row in rows)]
    for name in ("source",) if measured else ("source", "floor_us", "other"):  # all are in the CSV
        shown.remove(name)
    table = Table(
        title=f"{rows[0].source}: {'microseconds' if measured else 'wave-instructions; no time is implied'}",
        padding=(0, 1, 0, 0),
        box=SIMPLE_HEAD,
    )
    for name in [*shown, "/ ours"]:
        left = name in ("implementation", "configuration")
        table.add_column(HEADINGS.get(name, name), justify="left" if left else "right", no_wrap=True)
    metric = "us" if measured else "instructions"
    ours: float = 1.0
    for number, row in enumerate(rows):
        value = getattr(row, metric)
        ours = value if row.implementation.startswith("hipforge") else ours
        last_of_cell = number + 1 == len(rows) or rows[number + 1].implementation.startswith("hipforge")
        table.add_row(
            *(text_of(getattr(row, name)) for name in shown), f"{value / ours:.2f}x", end_section=last_of_cell
        )
    return table


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw one panel per M: the metric of every implementation over the weight shapes."""
    measured = rows[0].us is not None
    values: list[plots.Bar] = []
    for row in sorted(rows, key=lambda row: (row.m, row.n * row.k)):
        value = row.us if measured else row.instructions
        if value:
            family = next(name for name in FAMILIES if row.implementation.startswith(name))
            values.append(plots.Bar(f"{row.n} × {row.k}", family, value, f"M = {row.m}"))
    if measured:
        values += [plots.Bar(f"{row.n} × {row.k}", "memory floor", row.floor_us, f"M = {row.m}") for row in rows]
    unit = "µs (measured)" if measured else "wave-instructions (counted)"
    plots.bars(values, "MX-FP8 GEMM for small M", unit, path)


@click.command()
@click.option("--shapes", multiple=True, metavar="N,K", help="Weight shape; may be repeated. Default: MiniMax-M3's 15.")
@click.option("-m", "--batch", "batches", multiple=True, type=click.IntRange(1, 64), help="M; may be repeated.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Write all rows here.")
@plots.OPTION
def command(shapes: tuple[str, ...], batches: tuple[int, ...], csv_path: Path | None, picture: Path | None) -> None:
    """Bench the small-M MX-FP8 GEMM against Triton: measured on a GPU, counted on the emulator."""
    device = devices.current()
    if device.kind == "reference" or device.arch_of() != ARCH:
        raise click.ClickException(f"the kernels are for {ARCH}; the device is {device.kind} (HIPFORGE_DEVICE)")
    wanted = cells([parse_shape(text) for text in shapes] or MINIMAX_M3, batches or DEFAULT_M)
    rows: list[Row] = []
    for number, cell in enumerate(wanted, 1):
        click.echo(f"[{number}/{len(wanted)}] {cell}", err=True)
        rows += bench(cell, device.kind == "hip")
    console().print(table_of(rows))
    writers: list[tuple[Path | None, Callable[[Path, Sequence[Row]], None]]] = [
        (csv_path, write_csv),
        (picture, plot),
    ]
    for path, write in writers:
        if path is not None:
            write(path, rows)
            click.echo(f"written: {path}")


if __name__ == "__main__":
    sys.exit(command())
