"""MXFP4 GEMM: the torch reference eager and compiled, our gfx950 kernel, and why the reference exists.

A CI job that checks MXFP4 numbers needs no compiler: the first table is the wall time of a fresh process up to its
first result, by the reference and by the kernel with an empty cache. The second is per task shape: the reference in
milliseconds of this machine (CPU, or GPU where torch sees one), the kernel as helpers/bench.py says.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import click
import torch
from helpers import bench, errors
from rich.table import Table

from hipforge import devices
from hipforge.cli.output import console
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


# Both round the same products to bf16 once; sums in another order differ in the last bit of a few.
MAX_ERROR = 1e-3


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of ``call``, after one call that is not counted."""
    wait = torch.cuda.synchronize if bench.on_gpu() else lambda: None
    call()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
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


def problem(m: int, n: int, k: int, repeats: int) -> bench.Problem:
    """Return one shape, its reference timed."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=generator).bfloat16().to(bench.device()) for rows in (m, n))
    compiled = torch.compile(mxfp4_mm, fullgraph=True, dynamic=False)
    times = {f"{name}_ms": milliseconds(lambda call=call: call(a, b), repeats)
             for name, call in (("eager", mxfp4_mm), ("compiled", compiled))}  # fmt: skip
    operands, want = (*quantize_mxfp4(a), *quantize_mxfp4(b)), mxfp4_mm(a, b)
    calls = {"hipforge": lambda _: mxfp4_gemm(*operands)}
    return bench.Problem({"m": m, "n": n, "k": k}, calls, lambda got: errors.relative(got, want), known=times)


@bench.command("MXFP4 GEMM", MAX_ERROR)
@click.option("--repeats", default=5, help="Timed calls per path.")
@click.option("--skip-start-up", is_flag=True, help="Leave out the fresh processes, which build into an empty cache.")
def main(repeats: int, skip_start_up: bool) -> Iterator[bench.Problem]:
    """Time the MXFP4 reference and the kernel."""
    if not skip_start_up:
        console().print(start_up())
    return (problem(*shape, repeats) for shape in SHAPES)


if __name__ == "__main__":
    main()
