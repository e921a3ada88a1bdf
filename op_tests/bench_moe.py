"""The MoE grouped GEMM over MX-FP8 side by side with a grouped Triton kernel on dot_scaled.

On a GPU every row is *measured*: microseconds per call by graph replay, each call routed to other experts. Without one
every row is *counted* on the emulator: instructions by class, bytes and matrix instructions of the very machine code,
ours and Triton's, with no time given. Either way each result is checked first; a wrong one ends the run with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import click
import torch
from helpers.rows_csv import write_csv
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hipforge import devices, plots
from hipforge.cli.output import console
from hipforge.jit import loader
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.ops.mxfp8_gemm.tuner import MAX_ERROR
from hipforge.ops.mxfp8_grouped import stream, wave_split
from hipforge.ops.mxfp8_grouped.family import FAMILY, candidates
from hipforge.ops.mxfp8_grouped.tuner import (
    DEFAULT_CELLS,
    TUNER,
    MoeCell,
    MoeOperands,
    expected,
    operands,
    run,
)
from hipforge.ops.triton import mxfp8_grouped as triton_grouped
from hipforge.tuning.model import MI355X
from hipforge.tuning.search import Candidate
from hipforge.tuning.tuner import Measured, relative_error

(ARCH,) = FAMILY.archs
# One slot per expert is what few tokens give; all slots on few experts show the matrix path.
CROWDED = (
    MoeCell(1536, 6144, 4, False, 16, experts=4, top_k=4),
    MoeCell(1536, 6144, 4, False, 64, experts=4, top_k=4),
    MoeCell(1536, 6144, 4, False, 128, experts=4, top_k=4),
)


@dataclass(frozen=True)
class Row:
    """One implementation on one cell; what does not apply to its ``source`` is None.

    Instructions are wave-instructions, and ``per_kib`` is those per KiB of busy weight. ``weight_loads`` is weight
    payload bytes loaded over the busy experts' size; ``floor_us`` the time to move their bytes once at the MI355X's
    bandwidth; ``busy`` the experts that have slots and ``fullest`` the most slots on one of them.
    """

    m: int
    n: int
    k: int
    a_div: int
    busy: int
    fullest: int
    implementation: str
    relf: float
    floor_us: float
    source: str
    us: float | None = None
    instructions: int | None = None
    per_kib: float | None = None
    valu: int | None = None
    mfma: int | None = None
    vmem: int | None = None
    lds: int | None = None
    bytes_loaded: int | None = None
    weight_loads: float | None = None
    waves: int | None = None
    vgprs: int | None = None
    occupancy: int | None = None


@dataclass(frozen=True)
class Contender:
    """Something to count: ``call()`` returns [M, N] bf16, ``resources()`` VGPRs and waves per SIMD."""

    implementation: str
    call: Callable[[], torch.Tensor]
    resources: Callable[[], tuple[int, int]]


def instance(choice: Choice, k: int) -> tuple[str, dict[str, int]]:
    """Return the module and variant that a choice runs at a K."""
    if choice.kernel == wave_split.KERNEL:
        return "module_mxfp8_grouped_split", {"HF_ROWS": choice.configuration["rows"]}
    return "module_mxfp8_grouped_stream", {"HF_STEPS": k // stream.K_STEP}


def hip_contender(cell: MoeCell, parts: MoeOperands, choice: Choice) -> Contender:
    """Return a HIP kernel in one configuration."""

    def resources() -> tuple[int, int]:
        kernels = [
            kernel
            for kernel in loader.load(*instance(choice, cell.k), ARCH).manifest.kernels.values()
            if kernel["name"].startswith("hf::moe::")
        ]
        return max(int(kernel["vgpr"]) for kernel in kernels), min(int(kernel["occupancy"]) for kernel in kernels)

    return Contender(f"hipforge {_text(choice)}", lambda: run(choice, cell, parts), resources)


def triton_contender(cell: MoeCell, parts: MoeOperands, config: triton_grouped.GroupedConfig) -> Contender:
    """Return the Triton kernel, compiled for gfx950 and emulated."""
    from hipforge.emulator import triton as emulated
    from hipforge.ops.triton.mxfp8_grouped_kernels import mxfp8_grouped_kernel

    kernel = emulated.jit(mxfp8_grouped_kernel, arch=ARCH)
    constants = config.constants(DEFAULT_BLOCK_M, cell.a_div, cell.has_weight)
    meta = {**constants, "num_warps": config.num_warps, "num_stages": config.num_stages}
    out = torch.zeros((cell.m, cell.n), dtype=torch.bfloat16)
    weights = out if parts.weights is None else parts.weights
    arguments = (
        parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, weights, out, out, cell.m, cell.experts, cell.n,
        cell.k,
    )  # fmt: skip  # the first out stands where biases would
    # vLLM's launch covers the whole buffer as well.
    grid = config.grid(parts.index.expert_ids.numel(), cell.n)

    def call() -> torch.Tensor:
        kernel[grid](*arguments, **meta)
        return out

    def resources() -> tuple[int, int]:
        compiled = kernel.compile(*arguments, **meta).kernel
        return compiled.vgpr, compiled.occupancy

    name = f"triton {DEFAULT_BLOCK_M}x{config.block_n}x{config.block_k} warps={config.num_warps}"
    return Contender(name, call, resources)


def base_row(cell: MoeCell, parts: MoeOperands, implementation: str, relf: float, source: str) -> Row:
    """Return a row with what both kinds of runs know."""
    busy = len(parts.busy)
    payload = (busy * cell.n + parts.a.shape[0]) * cell.k
    floor = (payload + payload // 32 + 2 * cell.m * cell.n) / MI355X.bandwidth * 1e6
    fullest = int(parts.topk_ids.flatten().bincount().max())
    return Row(cell.m, cell.n, cell.k, cell.a_div, busy, fullest, implementation, relf, floor, source)


def counted(cell: MoeCell, parts: MoeOperands, want: torch.Tensor, contender: Contender) -> Row:
    """Run once on the emulator and return the row of counts."""
    from hipforge import emulator

    with emulator.counters() as collector:
        got = contender.call()
    counts = collector.result
    classes = counts.by_class
    row = base_row(cell, parts, contender.implementation, relative_error(got, want), "counted")
    weight_bytes = row.busy * cell.n * cell.k
    weight = next(counts.tensors[name] for name in ("w", "w_ptr") if name in counts.tensors)
    vgprs, occupancy = contender.resources()
    return replace(
        row,
        instructions=counts.wave_instructions,
        per_kib=counts.wave_instructions / (weight_bytes / 1024),
        valu=classes.get("valu", 0) + classes.get("valu_trans", 0),
        mfma=counts.mfma_count,
        vmem=classes.get("vmem_load", 0) + classes.get("vmem_store", 0),
        lds=classes.get("lds", 0),
        bytes_loaded=counts.bytes_loaded,
        weight_loads=weight.loaded / weight_bytes,
        waves=counts.waves,
        vgprs=vgprs,
        occupancy=occupancy,
    )


def bench_counted(cell: MoeCell) -> list[Row]:
    """Return a cell's rows, counted on the emulator."""
    parts = operands(cell, torch.device("cpu"))
    want = expected(cell, parts)
    sizes = cell.m, cell.experts, cell.n, cell.k, MI355X.cu_count
    defaults = wave_split.default_choice(*sizes), stream.default_choice(*sizes)
    contenders = [hip_contender(cell, parts, choice) for choice in defaults if choice is not None]
    contenders.append(triton_contender(cell, parts, triton_grouped.STOCK))
    return [counted(cell, parts, want, contender) for contender in contenders]


def bench_measured(cell: MoeCell) -> list[Row]:
    """Return a cell's rows, measured on the GPU: each configuration, and Triton's stock and best."""
    problem = Measured(TUNER, cell, ARCH, torch.device("cuda", 0))
    parts = problem.copies[0]
    rows = []
    for candidate in candidates(cell):
        relf = problem.run(candidate)
        seconds, _ = problem.cost(candidate)
        name = f"hipforge {_text(candidate)}"
        rows.append(replace(base_row(cell, parts, name, relf, problem.source), us=seconds * 1e6))
    baselines = problem.baselines()
    for name, us in zip(("triton stock", "triton best"), baselines or (), strict=False):
        rows.append(replace(base_row(cell, parts, name, 0.0, problem.source), us=us))
    return rows


def _text(candidate: Candidate) -> str:
    return " ".join(f"{name}={value}" for name, value in candidate.configuration.items())


def show(rows: list[Row]) -> Table:
    """Return the table; columns that no row fills are left out."""
    table = Table(box=SIMPLE_HEAD)
    names = [field.name for field in fields(Row) if any(getattr(row, field.name) is not None for row in rows)]
    for name in names:
        table.add_column(name, justify="left" if name in ("implementation", "source") else "right")
    for row in rows:
        values = (getattr(row, name) for name in names)
        table.add_row(
            *("-" if v is None else f"{v:.3g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
              for v in values)
        )  # fmt: skip
    return table


@click.command()
@click.option("--crowded/--spread", default=None, help="Only cells with few busy experts, or only the others.")
@click.option("--max-m", type=click.IntRange(min=1), default=16, show_default=True, help="Most slots of a cell.")
@click.option("--csv", "csv_path", type=click.Path(path_type=Path), help="Also write the rows here.")
@plots.OPTION
def main(crowded: bool | None, max_m: int, csv_path: Path | None, picture: Path | None) -> None:
    """Count or time the grouped GEMM; exit 1 if a result is wrong."""
    cells = [*(() if crowded else DEFAULT_CELLS), *(() if crowded is False else CROWDED)]
    on_gpu = devices.current().kind == "hip"
    rows: list[Row] = []
    for cell in cells:
        if cell.m <= max_m:
            rows += bench_measured(cell) if on_gpu else bench_counted(cell)
    console().print(show(rows))
    if csv_path:
        write_csv(csv_path, rows)
    if picture:
        values = [
            plots.Bar(f"{row.n} × {row.k}\n{row.busy} busy experts", row.implementation, value, f"{row.m} slots")
            for row in rows
            if (value := row.us if on_gpu else row.instructions)
        ]
        unit = "µs (measured)" if on_gpu else "wave-instructions (counted)"
        plots.bars(values, "grouped MX-FP8 GEMM", unit, picture)
    if any(not row.relf <= MAX_ERROR for row in rows):
        sys.exit("a result is wrong: see column relf")


if __name__ == "__main__":
    main()
