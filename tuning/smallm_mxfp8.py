"""The tuner of the small-M MX-FP8 GEMM: which kernel and parameters for each (M, N, K).

On a GPU candidates are timed and compared with Triton; on the emulator they are ranked by the model of
:mod:`hipforge.tuning.model` over their exact counts. Either way each candidate runs once on real data first and is
rejected if its result is wrong or its build exceeds the module's resource limits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click
import torch

from hipforge import devices
from hipforge.errors import ConfigError
from hipforge.jit import loader
from hipforge.ops import smallm_mxfp8_kernels as ops
from hipforge.ops.reference import mxfp8_mm, quantize_mxfp8
from hipforge.ops.smallm_mxfp8_plan import ARCH
from hipforge.ops.tables import (
    GEMV_BLOCK_N,
    GEMV_MAX_M,
    MFMA_K_SPLITS,
    MFMA_MAX_M,
    MFMA_N_SUB,
    SMALLM_MXFP8,
    mfma_k_steps,
)
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.ops.tuned import Key, Value
from hipforge.tuning import model, timing
from hipforge.tuning.cases import DECODE_M, MINIMAX_M3, Cell, cells, parse_shape, read_untuned
from hipforge.tuning.search import Candidate, Trial, search
from hipforge.tuning.table_writer import Row, merge_rows, read_existing

if TYPE_CHECKING:
    from hipforge.emulator.counting import Counters, KernelCount

# float32 accumulation and one rounding to bf16 give 1.7e-3 (uniform rounding within half a unit of 8 bits); a single
# wrong scale byte in one block of a K of 6144 gives more than 1e-2.
MAX_ERROR = 3e-3

KERNELS = {"gemv": ops.smallm_mxfp8_gemv, "mfma": ops.smallm_mxfp8_mfma}


def candidates(cell: Cell) -> list[Candidate]:
    """Return every configuration that the kernels accept for a cell, simplest first, so that ties go to it."""
    found = []
    if cell.m <= GEMV_MAX_M:
        found += [Candidate("gemv", MappingProxyType({"block_n": block_n})) for block_n in GEMV_BLOCK_N]
    if cell.m <= MFMA_MAX_M:
        found += [
            Candidate("mfma", MappingProxyType({"n_sub": n_sub, "k_splits": k_splits}))
            for k_splits in MFMA_K_SPLITS
            if k_splits <= mfma_k_steps(cell.k)
            for n_sub in MFMA_N_SUB
        ]
    return found


@functools.lru_cache(maxsize=1)  # neighbouring cells share their weight
def _weight(n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    w = (torch.randn(n, k, generator=generator) * 0.1).bfloat16()
    q, scale = quantize_mxfp8(w)
    return q.to(device), scale.to(device)


def operands(cell: Cell, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return (xq, x_scale, wq, w_scale) of normally distributed data, the same for a cell on every run."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(cell.m, cell.k, generator=generator) * 0.5).bfloat16()
    xq, x_scale = quantize_mxfp8(x)
    return (xq.to(device), x_scale.to(device), *_weight(cell.n, cell.k, device))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``."""
    difference = got.to(torch.float64) - expected.to(torch.float64)
    return float(difference.norm() / expected.to(torch.float64).norm())


class _Problem:
    """One cell on one device; subclasses say what a call costs."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell = cell
        self.operands = operands(cell, device)
        self.reference = mxfp8_mm(*self.operands, out_dtype=torch.float32)

    def call(self, candidate: Candidate, arguments: tuple[torch.Tensor, ...] | None = None) -> torch.Tensor:
        """Launch the candidate on ``arguments``, by default the cell's own operands."""
        kernel = KERNELS[candidate.kernel]
        return kernel(*(arguments or self.operands), torch.bfloat16, **candidate.configuration)

    def run(self, candidate: Candidate) -> float:
        """Run once and return the relative Frobenius error of the output."""
        return relative_error(self.call(candidate), self.reference)


# ---- the model's view of the kernels ---------------------------------------------------------------------------------

GEMV_WAVES = 4
GEMV_STEP_BYTES = 1024  # of one weight row, per wave and step
GEMV_STEPS_AHEAD = 2
GEMV_MOST_COLUMNS = {1: 4, 2: 4, 4: 4, 8: 4, 16: 2}  # that a wave accumulates at once, by accumulated rows
MFMA_STEP_BYTES = 2048  # of 16 weight rows, per wave and step
MFMA_STEPS_AHEAD = {1: 4, 2: 4, 4: 2}  # by n_sub


def _instance(candidate: Candidate, m: int) -> tuple[str, dict[str, int]]:
    """Return the module and variant that a candidate runs."""
    if candidate.kernel == "gemv":
        return "module_smallm_mxfp8_dense", {"HF_ROWS": ops.gemv_rows(m)}
    return "module_smallm_mxfp8_dense_mfma", {"HF_N_SUB": candidate.configuration["n_sub"]}


def _pipeline(candidate: Candidate, m: int) -> tuple[int, int]:
    """Return (weight bytes that a wave requests ahead, how often it fills its pipeline)."""
    if candidate.kernel == "mfma":
        n_sub = candidate.configuration["n_sub"]
        return MFMA_STEPS_AHEAD[n_sub] * MFMA_STEP_BYTES * n_sub, 1
    columns = candidate.configuration["block_n"] // GEMV_WAVES
    at_once = min(columns, GEMV_MOST_COLUMNS[ops.gemv_rows(m)])
    return GEMV_STEPS_AHEAD * GEMV_STEP_BYTES * at_once, columns // at_once


def works(candidate: Candidate, m: int, counts: Counters, occupancy: Mapping[str, int]) -> list[model.Work]:
    """Return the launches of a counted call as the model takes them: the product, then the sum over splits, if any.

    Args:
        candidate: what ran.
        m: its M.
        counts: of exactly one call.
        occupancy: waves per SIMD by kernel symbol.
    """
    product, *rest = counts.kernels
    workspace = counts.tensors.get("workspace")
    partial_bytes = workspace.unique_loaded if workspace else 0
    reduce_instructions = sum(kernel.wave_instructions for kernel in rest)
    out_bytes = counts.tensors["out"].unique_stored
    in_flight, restarts = _pipeline(candidate, m)
    workgroups, waves = _geometry(product)
    found = [
        model.Work(
            workgroups=workgroups,
            waves_per_workgroup=waves,
            vector_instructions=counts.by_class.get("valu", 0) + counts.by_class.get("valu_trans", 0),
            instructions=counts.wave_instructions - reduce_instructions,
            matrix_cycles=counts.mfma_cycles,
            loaded_bytes=counts.bytes_loaded - partial_bytes,
            unique_bytes=counts.unique_bytes - (partial_bytes + out_bytes if rest else 0),
            streamed_bytes=counts.tensors["Wq"].loaded,
            occupancy=occupancy[product.name],
            in_flight_bytes=in_flight,
            restarts=restarts,
        )
    ]
    for kernel in rest:
        workgroups, waves = _geometry(kernel)
        found.append(
            model.Work(
                workgroups=workgroups,
                waves_per_workgroup=waves,
                vector_instructions=kernel.wave_instructions,
                instructions=kernel.wave_instructions,
                matrix_cycles=0,
                loaded_bytes=partial_bytes,
                unique_bytes=partial_bytes + out_bytes,
                streamed_bytes=partial_bytes,
                occupancy=occupancy[kernel.name],
                # Every lane loads 16 bytes of each split before it adds.
                in_flight_bytes=-(-partial_bytes // (workgroups * waves)),
            )
        )
    return found


def _geometry(kernel: KernelCount) -> tuple[int, int]:
    return math.prod(kernel.grid), -(-math.prod(kernel.block) // 64)


class ModelledProblem(_Problem):
    """Costs a candidate by the model over the counts of its run on the emulator."""

    source = model.SOURCE

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell, torch.device("cpu"))
        self._counts: Counters | None = None

    def run(self, candidate: Candidate) -> float:
        """Run and count one call; the counts are kept for :meth:`cost`."""
        from hipforge import emulator

        with emulator.counters() as collector:
            error = super().run(candidate)
        self._counts = collector.result
        return error

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the model's seconds for the call that :meth:`run` made, and the bound of each launch."""
        if self._counts is None:
            raise ConfigError("cost() needs the counts of a run() before it")
        module, variant = _instance(candidate, self.cell.m)
        manifest = loader.load(module, variant, ARCH).manifest
        occupancy = {symbol: int(kernel["occupancy"]) for symbol, kernel in manifest.kernels.items()}
        estimates = [model.estimate(work) for work in works(candidate, self.cell.m, self._counts, occupancy)]
        note = " + ".join(f"{item.seconds * 1e6:.2f} ({item.bound})" for item in estimates)
        return model.total(estimates), note

    def baselines(self) -> tuple[float, float] | None:
        """Return None: nothing is measured without a GPU."""
        return None


class MeasuredProblem(_Problem):
    """Times a candidate on the GPU, over rotating copies of its operands."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        super().__init__(cell, device)
        self.source = timing.measured_source(device.index or 0)
        free, _ = torch.cuda.mem_get_info(device)
        count = timing.rotation(sum(tensor.nbytes for tensor in self.operands), free)
        self.copies = [self.operands, *(tuple(t.clone() for t in self.operands) for _ in range(count - 1))]

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the measured seconds of a call."""
        us = timing.microseconds_per_call(lambda i: self.call(candidate, self.copies[i]), len(self.copies))
        return us * 1e-6, f"{us:.2f} us"

    def baselines(self) -> tuple[float, float] | None:
        """Return microseconds of Triton in its stock configuration and in its best one; None without triton."""
        if dot_scaled.unavailable(self.operands[0].device) is not None:
            return None
        shape = (self.cell.m, self.cell.n)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.operands[0].device)

        def time(config: dot_scaled.TileConfig) -> float:
            return timing.microseconds_per_call(
                lambda i: dot_scaled.mxfp8_dot_scaled(out, *self.copies[i], config), len(self.copies)
            )

        stock = time(dot_scaled.STOCK)
        return stock, min(stock, *(time(config) for config in dot_scaled.TUNED))


# ---- rows ------------------------------------------------------------------------------------------------------------


def row_for(
    cell: Cell,
    cu_num: int,
    trial: Trial,
    source: str,
    baselines: tuple[float, float] | None,
    min_improvement_pct: float,
) -> Row:
    """Return the table row of a cell's chosen trial.

    ``use_hip`` is 0 only where the best baseline was measured and the kernel does not beat it by
    ``min_improvement_pct`` percent.
    """
    measured = source.startswith("measured:")
    us = trial.seconds * 1e6 if measured and trial.seconds is not None else None
    stock_us, best_us = baselines if measured and baselines else (None, None)
    wins = us is None or best_us is None or best_us > us * (1 + min_improvement_pct / 100)
    row: dict[str, Value] = {
        "gfx": ARCH,
        "cu_num": cu_num,
        "M": cell.m,
        "N": cell.n,
        "K": cell.k,
        "kernel": trial.candidate.kernel,
        "block_n": 0,
        "n_sub": 0,
        "k_splits": 0,
        **trial.candidate.configuration,
        "use_hip": int(wins),
        "us": us,
        "stock_us": stock_us,
        "best_baseline_us": best_us,
        "err": trial.error,
        "source": source,
    }
    return row


def keep_old(old: Row | None, trials: list[Trial], min_improvement_pct: float) -> Trial | None:
    """Return the trial of the configuration that ``old`` names, unless the best one beats it by the given percent."""
    if old is None:
        return None
    best = trials[0]
    for trial in trials:
        values = {"block_n": 0, "n_sub": 0, "k_splits": 0, **trial.candidate.configuration}
        same = old["kernel"] == trial.candidate.kernel and all((old[name] or 0) == v for name, v in values.items())
        if same and trial.seconds is not None and best.seconds is not None:
            return trial if trial.seconds <= best.seconds * (1 + min_improvement_pct / 100) else None
    return None


def tune(
    wanted: list[Cell],
    output: Path,
    *,
    resume: bool = False,
    compare: bool = False,
    min_improvement_pct: float = 3.0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Tune cells one by one and merge each row into ``output`` as soon as it is known.

    Args:
        wanted: the cells.
        output: the table; rows of other cells stay.
        resume: skip cells that ``output`` already has a row for.
        compare: keep the configuration that ``output`` has unless the new one is faster by ``min_improvement_pct``.
        min_improvement_pct: see :func:`row_for` and ``compare``.
        say: takes progress, one line at a time.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: the device has no such kernels, ``output`` is malformed, or no candidate of a cell is usable.
    """
    device = devices.current()
    if device.kind == "reference" or device.arch_of() != ARCH:
        seen = device.kind if device.kind == "reference" else device.arch_of()
        raise ConfigError(f"the kernels are for {ARCH}; the device is {seen} (HIPFORGE_DEVICE, HIPFORGE_EMULATE)")
    cu_num = device.cu_count()
    existing = read_existing(SMALLM_MXFP8, output)
    written = 0
    for number, cell in enumerate(wanted, 1):
        key: Key = (ARCH, cu_num, cell.m, cell.n, cell.k)
        if resume and key in existing:
            say(f"[{number}/{len(wanted)}] {cell}: already in {output}")
            continue
        on_gpu = device.kind == "hip"
        problem = MeasuredProblem(cell, torch.device("cuda", 0)) if on_gpu else ModelledProblem(cell)
        trials = search(problem, candidates(cell), MAX_ERROR)
        rejected = [trial for trial in trials if trial.rejected]
        for trial in rejected:
            say(f"    rejected {trial.candidate}: {trial.rejected}")
        if len(rejected) == len(trials):
            raise ConfigError(f"{cell}: no candidate is usable; the first was rejected because {rejected[0].rejected}")
        old = existing.get(key) if compare else None
        chosen = keep_old(old, trials, min_improvement_pct) or trials[0]
        row = row_for(cell, cu_num, chosen, problem.source, problem.baselines(), min_improvement_pct)
        merge_rows(output, SMALLM_MXFP8, [row])
        written += 1
        verdict = "" if row["use_hip"] else ", fallback is faster"
        was = f" (was {old['kernel']})" if old else ""
        say(f"[{number}/{len(wanted)}] {cell}: {chosen.candidate}, {chosen.note}{verdict}{was}")
    return written


@click.command("smallm_mxfp8")
@click.option("-i", "--untuned", type=click.Path(path_type=Path), help="CSV with columns M,N,K of the cells to tune.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Table to merge rows into.")
@click.option("--shapes", multiple=True, metavar="K,N", help="Weight shape; may be repeated. Default: MiniMax-M3's 15.")
@click.option("-m", "--batch", "batches", multiple=True, type=click.IntRange(1, MFMA_MAX_M), help="M; may be repeated.")
@click.option("--compare", is_flag=True, help="Keep the output's configuration unless the new one is clearly faster.")
@click.option(
    "--min-improvement-pct", default=3.0, show_default=True, help="What counts as clearly faster, in percent."
)
@click.option("--resume", is_flag=True, help="Skip cells that the output already has.")
def command(
    untuned: Path | None,
    output: Path,
    shapes: tuple[str, ...],
    batches: tuple[int, ...],
    compare: bool,
    min_improvement_pct: float,
    resume: bool,
) -> None:
    """Choose kernel, block_n, n_sub and k_splits of the small-M MX-FP8 GEMM for each cell.

    On a GPU cells are measured; elsewhere a model ranks them and rows say so.
    """
    if untuned is not None:
        if shapes or batches:
            raise ConfigError("give either -i FILE or --shapes and -m, not both")
        wanted = read_untuned(untuned)
    else:
        wanted = cells([parse_shape(text) for text in shapes] or MINIMAX_M3, batches or DECODE_M)
    count = tune(
        wanted,
        output,
        resume=resume,
        compare=compare,
        min_improvement_pct=min_improvement_pct,
        say=click.echo,
    )
    click.echo(f"{count} rows written to {output}")
