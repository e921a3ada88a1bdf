"""MXFP4 GEMM: the torch reference eager and compiled, our gfx950 kernel, and why the reference exists.

A CI job that checks MXFP4 numbers needs no compiler: the first table is the wall time of a fresh process up to its
first result, by the reference and by the kernel with an empty cache. The second is per task shape. Times are of this
machine (CPU, or GPU where torch sees one); on the emulator the kernel's column is instructions executed, not a time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click
import torch
from helpers.rows_csv import write_csv
from rich.console import Console
from rich.table import Table

from hipforge import devices, plots
from hipforge.ops.mxfp4_gemm import mxfp4_gemm
from hipforge.ops.reference import mxfp4_mm, quantize_mxfp4

# (m, n, k): the benchmark list of the task.
SHAPES = ((4, 2880, 512), (16, 2112, 7168), (32, 4096, 512), (32, 2880, 512), (64, 7168, 2048), (256, 3072, 1536))

_REFERENCE = """
import torch
from hipforge.ops.reference import mxfp4_mm
mxfp4_mm(torch.randn(8, 512).bfloat16(), torch.randn(64, 512).bfloat16())
"""
_KERNEL = """
import torch
from hipforge.ops.mxfp4_gemm import mxfp4_gemm
from hipforge.ops.reference import quantize_mxfp4
device = "cuda" if torch.version.hip else "cpu"
a, b = (torch.randn(n, 512, device=device).bfloat16() for n in (8, 64))
assert mxfp4_gemm(*quantize_mxfp4(a), *quantize_mxfp4(b)) is not None
"""


@dataclass(frozen=True)
class Row:
    """One shape; times in milliseconds, medians.

    ``kernel_instructions`` only where the emulator ran the kernel; ``relf`` None where no kernel ran.
    """

    m: int
    n: int
    k: int
    eager_ms: float
    compiled_ms: float
    kernel_ms: float | None
    kernel_instructions: int | None
    relf: float | None


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of ``call``, after one call that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        call()
        synchronise()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def fresh_process_seconds(code: str, cache: str | None) -> float:
    """Return the wall time of a Python process that runs ``code``; ``cache`` is its HIPFORGE_CACHE_DIR."""
    environment = {**os.environ, "HIPFORGE_EMULATOR_QUIET": "1", **({"HIPFORGE_CACHE_DIR": cache} if cache else {})}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - start


def start_up() -> Table:
    """Measure import + reference against import + build, each in its own process."""
    table = Table(title="a fresh process up to its first MXFP4 result")
    table.add_column("path")
    table.add_column("seconds", justify="right")
    table.add_row("import + torch reference", f"{fresh_process_seconds(_REFERENCE, None):.2f}")
    with tempfile.TemporaryDirectory() as cache:
        cold = fresh_process_seconds(_KERNEL, cache)
        warm = fresh_process_seconds(_KERNEL, cache)
    what = "kernel" if devices.current().kind == "hip" else "kernel and emulator"
    table.add_row(f"import + build ({what}, empty cache)", f"{cold:.2f}")
    table.add_row("import + cached kernel", f"{warm:.2f}")
    return table


def measure(m: int, n: int, k: int, repeats: int) -> Row:
    """Run one shape by every path and check the kernel against the reference."""
    kind = devices.current().kind
    device = "cuda" if kind == "hip" else "cpu"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).bfloat16().to(device) for rows in (m, n))
    compiled = torch.compile(mxfp4_mm, fullgraph=True, dynamic=False)
    eager_ms = milliseconds(lambda: mxfp4_mm(a, b), repeats)
    compiled_ms = milliseconds(lambda: compiled(a, b), repeats)
    operands = (*quantize_mxfp4(a), *quantize_mxfp4(b))
    instructions = None
    kernel_ms = None
    if kind == "emulator":
        from hipforge import emulator

        with emulator.counters() as counts:
            got = mxfp4_gemm(*operands)
        instructions = counts.wave_instructions
    else:
        got = mxfp4_gemm(*operands)
        kernel_ms = milliseconds(lambda: mxfp4_gemm(*operands), repeats) if got is not None else None
    expected = mxfp4_mm(a, b).double()
    relf = None if got is None else float((got.double() - expected).norm() / expected.norm())
    return Row(m, n, k, eager_ms, compiled_ms, kernel_ms, instructions, relf)


def show(rows: Sequence[Row]) -> Table:
    """Return the per-shape table."""
    table = Table(title=f"MXFP4 GEMM per shape on {devices.current().kind} (median)")
    for field in fields(Row):
        table.add_column(field.name, justify="right")
    for row in rows:
        table.add_row(
            *("-" if v is None else f"{v:.3g}" if isinstance(v, float) else f"{v:,}" for v in asdict(row).values())
        )
    return table


@click.command()
@click.option("--repeats", default=5, show_default=True, help="Timed calls per path.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Also write the per-shape table here.")
@click.option("--skip-start-up", is_flag=True, help="Leave out the fresh processes, which build into an empty cache.")
@plots.OPTION
def main(repeats: int, csv_path: Path | None, skip_start_up: bool, picture: Path | None) -> None:
    """Time the MXFP4 reference and kernel; exit 1 if they disagree."""
    console = Console()
    if not skip_start_up:
        console.print(start_up())
    rows = [measure(*shape, repeats) for shape in SHAPES]
    console.print(show(rows))
    if csv_path:
        write_csv(csv_path, rows)
    if picture:
        values = [
            plots.Bar(f"{row.m} × {row.n} × {row.k}", name, value)
            for row in rows
            for name, value in (("torch", row.eager_ms), ("compiled", row.compiled_ms), ("kernel", row.kernel_ms))
            if value
        ]
        plots.bars(values, f"MXFP4 GEMM on {devices.current().kind}", "ms (measured)", picture)
    # Both round the same products to bf16 once; sums in another order differ in the last bit of a few.
    if any(row.relf is not None and not row.relf <= 1e-3 for row in rows):
        sys.exit("the kernel and the reference disagree: see column relf")


if __name__ == "__main__":
    main()
