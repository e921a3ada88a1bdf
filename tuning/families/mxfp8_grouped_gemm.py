"""The tuner of the MoE grouped GEMM over MX-FP8: kernel and parameters for each weight shape and number of slots.

On a GPU candidates are timed and compared with Triton; on the emulator they are ranked by the model of
:mod:`hipforge.tuning.model` over their exact counts. Either way each candidate runs once on real data first and is
rejected if its result is wrong or its build exceeds the module's resource limits.

A row applies to numbers of slots above the next smaller row's M, up to its own M. This range and the number of experts
are given here with the cells, not searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import click
import torch

from hipforge.errors import ConfigError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.moe import DEFAULT_BLOCK_M, SortedSlots, moe_align_block_size
from hipforge.ops.mxfp8_grouped_gemm.family import FAMILY
from hipforge.ops.mxfp8_grouped_gemm.kernels import launch
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands
from hipforge.ops.reference import quantize_mxfp8
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8
from hipforge.ops.triton import mxfp8_grouped as triton_grouped
from hipforge.tuning import model, timing
from hipforge.tuning.driver import command_for
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.gemm import Pipeline, normal, works
from hipforge.tuning.tuner import Baselines, Counted, Tuner, relative_error


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

    @property
    def key(self) -> tuple[int, ...]:
        """Return M, N, K, a_div and has_weight."""
        return self.m, self.n, self.k, self.a_div, int(self.has_weight)

    @property
    def slots(self) -> int:
        """Return M, as the family's problem names it."""
        return self.m

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k} a_div={self.a_div} has_weight={int(self.has_weight)}"


# Gate and up at tensor-parallel degrees 4 and 8, down at both. Their numbers of slots come from measurements of kernels
# with the same interface on an MI355X.
DEFAULT_CELLS: tuple[MoeCell, ...] = (
    *(MoeCell(n, 6144, 4, False, m, least) for n in (1536, 768) for m, least in ((4, 0), (8, 0), (16, 0), (64, 128))),
    *(
        MoeCell(6144, k, 1, weighted, m, least)
        for k in (768, 384)
        for weighted in (True, False)
        for m, least in ((8, 0), (64, 128))
    ),
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
    out: torch.Tensor

    @property
    def busy(self) -> list[int]:
        """Return the experts that have slots."""
        return [int(expert) for expert in self.topk_ids.unique()]


def route(slots: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    """Return topk_ids [T, top_k]: each token's experts are distinct, drawn uniformly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(-(-slots // top_k))]).int()


def operands(cell: MoeCell, device: torch.device) -> MoeOperands:
    """Return normally distributed data, the same for a cell on every run.

    Experts are one weight with its rows rotated by the expert's number; on a CPU those without slots stay zero and take
    no memory.
    """
    if cell.m % cell.top_k:
        raise ConfigError(f"M must be a multiple of top_k = {cell.top_k}; got {cell.m}")
    topk_ids = route(cell.m, cell.top_k, cell.experts, seed=2)
    a, a_scale = quantize_mxfp8(normal(-(-cell.m // cell.a_div), cell.k, 0.5, seed=0))
    base, base_scale = quantize_mxfp8(normal(cell.n, cell.k, 0.1, seed=1))
    w = torch.zeros((cell.experts, cell.n, cell.k), dtype=torch.uint8, device=device)
    w_scale = torch.zeros((cell.experts, cell.n, cell.k // 32), dtype=torch.uint8, device=device)
    base, base_scale = base.view(torch.uint8).to(device), base_scale.to(device)
    for expert in topk_ids.unique().tolist() if device.type == "cpu" else range(cell.experts):
        w[expert] = base.roll(expert, 0)
        w_scale[expert] = base_scale.roll(expert, 0)
    weights = torch.rand(cell.m, generator=torch.Generator().manual_seed(3)).to(device) if cell.has_weight else None
    topk_ids = topk_ids.to(device)
    index = moe_align_block_size(topk_ids, DEFAULT_BLOCK_M, cell.experts)
    out = torch.zeros((cell.m, cell.n), dtype=torch.bfloat16, device=device)
    return MoeOperands(a.view(torch.uint8).to(device), a_scale.to(device), w, w_scale, weights, index, topk_ids, out)


def expected(cell: MoeCell, parts: MoeOperands) -> torch.Tensor:
    """Return the float32 result of the same bits: one product with the unrotated weight, rotated per slot."""
    first = parts.busy[0]
    base = dequantize_mxfp8(parts.w[first].roll(-first, 0), parts.w_scale[first].roll(-first, 0))
    rows = dequantize_mxfp8(parts.a, parts.a_scale) @ base.T
    owners = parts.topk_ids.flatten().tolist()
    out = torch.stack([rows[slot // cell.a_div].roll(owner) for slot, owner in enumerate(owners)])
    return out if parts.weights is None else out * parts.weights[:, None]


def run(choice: Choice, cell: MoeCell, parts: MoeOperands) -> torch.Tensor:
    """Launch a kernel into the operands' output [M, N], every row of which has a slot."""
    weight = parts.a, parts.a_scale, parts.w, parts.w_scale
    given = Operands(*weight, *parts.index, cell.m, DEFAULT_BLOCK_M, cell.a_div, parts.weights)
    launch(choice.kernel, choice.configuration, parts.out, given)
    return parts.out


def _pipeline(choice: Choice, cell: MoeCell, arch: str) -> Pipeline:
    described = FAMILY.kernel(choice.kernel).pipeline
    assert described is not None
    return described(choice.configuration, cell, arch)


def _count(cell: MoeCell, arch: str) -> Counted:
    parts = operands(cell, torch.device("cpu"))
    right = expected(cell, parts)

    def counted(choice: Choice) -> tuple[list[model.Work], float]:
        from hipforge import emulator

        with emulator.counters() as collector:
            got = run(choice, cell, parts)
        (work,) = works(collector.result, _pipeline(choice, cell, arch), "w")
        # Work-groups past the last tile in use end at once; only the others count for the model.
        (launch,), tiles = collector.result.kernels, int(parts.index.num_tokens_post_padded) // DEFAULT_BLOCK_M
        used = work.workgroups // launch.grid[1] * min(tiles, launch.grid[1])
        return [replace(work, workgroups=used)], relative_error(got, right)

    return counted


def _rerouted(parts: MoeOperands, number: int) -> list[MoeOperands]:
    """Return operands whose calls route to other experts each, so that weights come from memory."""
    slots, top_k = parts.topk_ids.shape
    experts = parts.w.shape[0]
    routings = (route(slots * top_k, top_k, experts, seed).to(parts.a.device) for seed in range(2, 2 + number))
    return [replace(parts, index=moe_align_block_size(ids, DEFAULT_BLOCK_M, experts), topk_ids=ids) for ids in routings]


def _baselines(cell: MoeCell, copies: Sequence[MoeOperands]) -> Baselines:
    """Return microseconds of Triton's grouped kernel (stock and best), or None without triton."""
    if triton_grouped.unavailable(copies[0].a.device, DEFAULT_BLOCK_M) is not None:
        return None

    def time(config: triton_grouped.GroupedConfig) -> float:
        def call(i: int) -> None:
            parts = copies[i]
            triton_grouped.mxfp8_grouped(
                parts.out, parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, DEFAULT_BLOCK_M, cell.a_div,
                parts.weights, config,
            )  # fmt: skip

        return timing.microseconds_per_call(call, len(copies))

    stock = time(triton_grouped.STOCK)
    return stock, min(stock, *(time(config) for config in triton_grouped.TUNED))


TUNER = Tuner(
    family=FAMILY,
    max_error=MAX_ERROR,
    default_cells=DEFAULT_CELLS,
    operands=lambda cell, arch, device: operands(cell, device),
    expected=expected,
    run=run,
    count=_count,
    copies=_rerouted,
    bytes_per_call=lambda parts: len(parts.busy) * parts.w[0].numel(),
    given=lambda cell: {"min_experts": cell.min_experts},
    baselines=_baselines,
)

command = command_for(
    TUNER,
    "Choose kernel and parameters of the MoE grouped GEMM for each weight shape. On a GPU cells are measured; "
    "elsewhere a model ranks them and rows say so.",
    [click.Option(["--n", "columns"], multiple=True, type=click.IntRange(min=1), help="Only this N; repeatable.")],
    lambda columns: [cell for cell in DEFAULT_CELLS if not columns or cell.n in columns],
)
