"""The tuner of the MoE grouped GEMM over MX-FP8: columns per work-group for each weight shape and number of slots.

On a GPU candidates are timed and compared with Triton; on the emulator they are ranked by the model of
:mod:`hipforge.tuning.model` over their exact counts. Either way each candidate runs once on real data first and is
rejected if its result is wrong or its build exceeds the module's resource limits.

A row speaks for every number of slots up to its M, from the next smaller one on; how far rows reach, and with how many
experts, is given here with the cells and not searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import click
import torch

from hipforge import devices
from hipforge.errors import ConfigError
from hipforge.jit import loader
from hipforge.ops.grouped_gemm_mxfp8_kernels import smallm_mxfp8_moe_grouped_gemm
from hipforge.ops.grouped_gemm_mxfp8_plan import ARCH
from hipforge.ops.moe import DEFAULT_BLOCK_M, SortedSlots, moe_align_block_size
from hipforge.ops.reference import quantize_mxfp8
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8
from hipforge.ops.tables import MOE_BLOCK_N, SMALLM_MXFP8_MOE
from hipforge.ops.triton import mxfp8_grouped as triton_grouped
from hipforge.tuning import model, timing
from hipforge.tuning.gemm import relative_error
from hipforge.tuning.search import Candidate, Trial, search
from hipforge.tuning.smallm_mxfp8 import MAX_ERROR
from hipforge.tuning.table_writer import Row, merge_rows, read_existing

# What the model has to know of the kernel's pipelines (moe_kernel.h).
WAVES = 4
VECTOR_SLOTS = 2  # of a tile, up to which a wave streams its own columns
VECTOR_IN_FLIGHT = 2 * 1024  # bytes of a column's row: two steps
MATRIX_IN_FLIGHT = 4 * 128  # the same of a matrix tile: four steps


@dataclass(frozen=True, order=True)
class MoeCell:
    """One problem: M slots over E experts of weight [N, K].

    Attributes:
        n: columns.
        k: depth.
        a_div: slots per activation row.
        has_weight: whether rows are weighted.
        m: slots.
        min_experts: least number of experts that the row asks for.
        experts: E of the problem that is run.
        top_k: choices per token, all of different experts.
    """

    n: int
    k: int
    a_div: int
    has_weight: bool
    m: int
    min_experts: int = 0
    experts: int = 128
    top_k: int = 4

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k} a_div={self.a_div} has_weight={int(self.has_weight)}"


# Gate and up at tensor-parallel degrees 4 and 8, down at both; how many slots they are taken for is from measurements
# of kernels with the same interface on an MI355X.
DEFAULT_CELLS: tuple[MoeCell, ...] = (
    *(MoeCell(n, 6144, 4, False, m, least) for n in (1536, 768) for m, least in ((16, 0), (64, 128))),
    *(MoeCell(6144, k, 1, weighted, 8) for k in (768, 384) for weighted in (True, False)),
)


@dataclass(frozen=True)
class MoeOperands:
    """A cell's tensors; ``index`` may be replaced by another routing."""

    a: torch.Tensor
    a_scale: torch.Tensor
    w: torch.Tensor
    w_scale: torch.Tensor
    weights: torch.Tensor | None
    index: SortedSlots
    topk_ids: torch.Tensor

    @property
    def busy(self) -> list[int]:
        """Return the experts that have slots."""
        return [int(expert) for expert in self.topk_ids.unique()]


def _normal(rows: int, columns: int, factor: float, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul_(factor).bfloat16()


def route(cell: MoeCell, seed: int) -> torch.Tensor:
    """Return topk_ids [T, top_k]: each token's experts are distinct, drawn uniformly."""
    generator = torch.Generator().manual_seed(seed)
    tokens = -(-cell.m // cell.top_k)
    return torch.stack([torch.randperm(cell.experts, generator=generator)[: cell.top_k] for _ in range(tokens)]).int()


def operands(cell: MoeCell, device: torch.device) -> MoeOperands:
    """Return normally distributed data, the same for a cell on every run.

    Experts are one weight with its rows rotated by the expert's number; those without slots stay zero, and on a CPU
    take no memory.
    """
    if cell.m % cell.top_k:
        raise ConfigError(f"M must be a multiple of top_k = {cell.top_k}; got {cell.m}")
    topk_ids = route(cell, seed=2)
    a, a_scale = quantize_mxfp8(_normal(-(-cell.m // cell.a_div), cell.k, 0.5, seed=0))
    base, base_scale = quantize_mxfp8(_normal(cell.n, cell.k, 0.1, seed=1))
    w = torch.zeros((cell.experts, cell.n, cell.k), dtype=torch.uint8, device=device)
    w_scale = torch.zeros((cell.experts, cell.n, cell.k // 32), dtype=torch.uint8, device=device)
    for expert in topk_ids.unique().tolist():
        w[expert] = base.view(torch.uint8).roll(expert, 0).to(device)
        w_scale[expert] = base_scale.roll(expert, 0).to(device)
    weights = torch.rand(cell.m, generator=torch.Generator().manual_seed(3)).to(device) if cell.has_weight else None
    topk_ids = topk_ids.to(device)
    index = moe_align_block_size(topk_ids, DEFAULT_BLOCK_M, cell.experts)
    return MoeOperands(a.view(torch.uint8).to(device), a_scale.to(device), w, w_scale, weights, index, topk_ids)


def expected(cell: MoeCell, parts: MoeOperands) -> torch.Tensor:
    """Return the float32 result of the same bits: one product with the unrotated weight, rotated per slot."""
    first = parts.busy[0]
    base = dequantize_mxfp8(parts.w[first].roll(-first, 0), parts.w_scale[first].roll(-first, 0))
    rows = dequantize_mxfp8(parts.a, parts.a_scale) @ base.T
    owners = parts.topk_ids.flatten().tolist()
    out = torch.stack([rows[slot // cell.a_div].roll(owner) for slot, owner in enumerate(owners)])
    return out if parts.weights is None else out * parts.weights[:, None]


def run(cell: MoeCell, parts: MoeOperands, block_n: int) -> torch.Tensor:
    """Launch the kernel into a new zeroed output [M, N]."""
    out = torch.zeros((cell.m, cell.n), dtype=torch.bfloat16, device=parts.a.device)
    return smallm_mxfp8_moe_grouped_gemm(
        parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, out, cell.experts, cell.n, cell.k, cell.m,
        parts.a.shape[0], cell.a_div, DEFAULT_BLOCK_M, parts.weights, block_n,
    )  # fmt: skip


def candidates() -> list[Candidate]:
    """Return every configuration that the kernel accepts."""
    return [Candidate("moe", MappingProxyType({"block_n": block_n})) for block_n in MOE_BLOCK_N]


class ModelledMoe:
    """Costs a candidate by the model over the counts of its run on the emulator."""

    source = model.MI355X.source

    def __init__(self, cell: MoeCell) -> None:
        self.cell = cell
        self.parts = operands(cell, torch.device("cpu"))
        self.expected = expected(cell, self.parts)
        self._work: model.Work | None = None

    def run(self, candidate: Candidate) -> float:
        """Run and count one call; the counts are kept for :meth:`cost`."""
        from hipforge import emulator

        block_n = candidate.configuration["block_n"]
        with emulator.counters() as collector:
            got = run(self.cell, self.parts, block_n)
        counts = collector.result
        (launch,) = counts.kernels
        manifest = loader.load("module_smallm_mxfp8_moe", {"HF_BLOCK_N": block_n}, ARCH).manifest
        fullest = int(self.parts.topk_ids.flatten().bincount().max())
        in_flight = VECTOR_IN_FLIGHT * block_n // WAVES if fullest <= VECTOR_SLOTS else MATRIX_IN_FLIGHT * block_n
        # Work-groups whose tile is past the last one in use end at once; the others are what the model is about.
        tiles = int(self.parts.index.num_tokens_post_padded) // DEFAULT_BLOCK_M
        self._work = model.Work(
            workgroups=math.prod(launch.grid) // launch.grid[1] * min(tiles, launch.grid[1]),
            waves_per_workgroup=WAVES,
            vector_instructions=counts.by_class.get("valu", 0) + counts.by_class.get("valu_trans", 0),
            instructions=launch.wave_instructions,
            matrix_cycles=counts.mfma_cycles,
            loaded_bytes=counts.bytes_loaded,
            unique_bytes=counts.unique_bytes,
            streamed_bytes=counts.tensors["w"].loaded,
            occupancy=int(manifest.kernels[launch.name]["occupancy"]),
            in_flight_bytes=in_flight,
        )
        return relative_error(got, self.expected)

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the model's seconds for the call that :meth:`run` made, and its bound."""
        if self._work is None:
            raise ConfigError("cost() needs the counts of a run() before it")
        estimate = model.estimate(self._work)
        return estimate.seconds, f"{estimate.seconds * 1e6:.2f} ({estimate.bound})"

    def baselines(self) -> tuple[float, float] | None:
        """Return None: nothing is measured without a GPU."""
        return None


class MeasuredMoe:
    """Times a candidate on the GPU; calls of a replay route to other experts, so that weights come from memory."""

    def __init__(self, cell: MoeCell, device: torch.device) -> None:
        self.cell = cell
        self.source = timing.measured_source(device.index or 0)
        self.parts = operands(cell, device)
        self.expected = expected(cell, self.parts)
        per_call = len(self.parts.busy) * cell.n * cell.k
        free, _ = torch.cuda.mem_get_info(device)
        self.routings = [
            moe_align_block_size(route(cell, seed).to(device), DEFAULT_BLOCK_M, cell.experts)
            for seed in range(2, 2 + timing.rotation(per_call, free))
        ]

    def run(self, candidate: Candidate) -> float:
        """Run once and return the relative Frobenius error of the output."""
        return relative_error(run(self.cell, self.parts, candidate.configuration["block_n"]), self.expected)

    def _time(self, call: Callable[[torch.Tensor, SortedSlots], object]) -> float:
        out = torch.zeros((self.cell.m, self.cell.n), dtype=torch.bfloat16, device=self.parts.a.device)
        return timing.microseconds_per_call(lambda i: call(out, self.routings[i]), len(self.routings))

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the measured seconds of a call."""
        cell, parts, block_n = self.cell, self.parts, candidate.configuration["block_n"]
        us = self._time(
            lambda out, index: smallm_mxfp8_moe_grouped_gemm(
                parts.a, parts.a_scale, parts.w, parts.w_scale, *index, out, cell.experts, cell.n, cell.k, cell.m,
                parts.a.shape[0], cell.a_div, DEFAULT_BLOCK_M, parts.weights, block_n,
            )
        )  # fmt: skip
        return us * 1e-6, f"{us:.2f} us"

    def baselines(self) -> tuple[float, float] | None:
        """Return microseconds of Triton's grouped kernel (stock and best), or None without triton."""
        cell, parts = self.cell, self.parts
        if triton_grouped.unavailable(parts.a.device, DEFAULT_BLOCK_M) is not None:
            return None
        times = [
            self._time(
                lambda out, index, config=config: triton_grouped.mxfp8_grouped(  # type: ignore[misc]
                    out, parts.a, parts.a_scale, parts.w, parts.w_scale, index.sorted_token_ids, index.expert_ids,
                    index.num_tokens_post_padded, DEFAULT_BLOCK_M, cell.a_div, parts.weights, config,
                )
            )
            for config in (triton_grouped.STOCK, *triton_grouped.TUNED)
        ]  # fmt: skip
        return times[0], min(times)


def row_for(
    cell: MoeCell, cu_num: int, trial: Trial, source: str, baselines: tuple[float, float] | None, min_pct: float
) -> Row:
    """Return the table row of a cell's best trial; ``use_hip`` is 0 only where a measured baseline is not beaten."""
    measured = source.startswith("measured:")
    us = trial.seconds * 1e6 if measured and trial.seconds is not None else None
    stock_us, best_us = baselines if measured and baselines else (None, None)
    wins = us is None or best_us is None or best_us > us * (1 + min_pct / 100)
    row: Row = {
        "gfx": ARCH,
        "cu_num": cu_num,
        "M": cell.m,
        "N": cell.n,
        "K": cell.k,
        "a_div": cell.a_div,
        "has_weight": int(cell.has_weight),
        "block_n": trial.candidate.configuration["block_n"],
        "min_experts": cell.min_experts,
        "use_hip": int(wins),
        "us": us,
        "stock_us": stock_us,
        "best_baseline_us": best_us,
        "err": trial.error,
        "source": source,
    }
    return row


def tune(
    wanted: list[MoeCell], output: Path, *, min_pct: float = 3.0, say: Callable[[str], None] = lambda text: None
) -> int:
    """Tune cells one by one, merging each row into ``output``; a model does not replace a measured row.

    Returns:
        How many rows were written.

    Raises:
        ConfigError: the device has no such kernel, ``output`` is malformed, or no candidate of a cell is usable.
    """
    device = devices.current()
    if device.kind == "reference" or device.arch_of() != ARCH:
        seen = device.kind if device.kind == "reference" else device.arch_of()
        raise ConfigError(f"the kernel is for {ARCH}; the device is {seen} (HIPFORGE_DEVICE, HIPFORGE_EMULATE)")
    cu_num = device.cu_count()
    existing = read_existing(SMALLM_MXFP8_MOE, output)
    written = 0
    for number, cell in enumerate(wanted, 1):
        where = f"[{number}/{len(wanted)}] {cell}"
        old = existing.get((ARCH, cu_num, cell.m, cell.n, cell.k, cell.a_div, int(cell.has_weight)))
        if old is not None and str(old["source"]).startswith("measured:") and device.kind != "hip":
            say(f"{where}: {output} has a measured row, which a model does not replace")
            continue
        problem: MeasuredMoe | ModelledMoe = (
            MeasuredMoe(cell, torch.device("cuda", 0)) if device.kind == "hip" else ModelledMoe(cell)
        )
        trials = search(problem, candidates(), MAX_ERROR)
        for trial in trials:
            say(f"    {trial.candidate}: {trial.rejected or trial.note}")
        if trials[0].rejected:
            raise ConfigError(f"{cell}: no candidate is usable: {trials[0].rejected}")
        row = row_for(cell, cu_num, trials[0], problem.source, problem.baselines(), min_pct)
        merge_rows(output, SMALLM_MXFP8_MOE, [row])
        written += 1
        say(f"{where}: {trials[0].candidate}, {trials[0].note}{'' if row['use_hip'] else ', fallback is faster'}")
    return written


@click.command(
    SMALLM_MXFP8_MOE.family,
    help="Choose block_n of the MoE grouped GEMM for each weight shape. On a GPU cells are measured; elsewhere a "
    "model ranks them and rows say so.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Table to merge rows into.")
@click.option("--n", "columns", multiple=True, type=click.IntRange(min=1), help="Only cells with this N; repeatable.")
@click.option("--min-improvement-pct", default=3.0, show_default=True, help="By how much a baseline must be beaten.")
def command(output: Path, columns: tuple[int, ...], min_improvement_pct: float) -> None:
    """Tune the default cells."""
    wanted = [cell for cell in DEFAULT_CELLS if not columns or cell.n in columns]
    count = tune(wanted, output, min_pct=min_improvement_pct, say=click.echo)
    click.echo(f"{count} rows written to {output}")
