"""The tuner of a grouped GEMM family: cells of routed slots, operands and counts.

On a GPU candidates are timed and compared with the family's alternatives; on the emulator they are ranked by the model
of :mod:`hipforge.tuning.model` over their exact counts. Either way each candidate runs once on real data first and is
rejected if its result is wrong or its build exceeds the module's resource limits.

A row applies to numbers of slots above the next smaller row's M, up to its own M.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hipforge.errors import ConfigError
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.moe import DEFAULT_BLOCK_M, SortedSlots, moe_align_block_size
from hipforge.ops.mxfp8_grouped_gemm.reference import Operands
from hipforge.tuning import model
from hipforge.tuning.gemm import Quantizer, normal, works
from hipforge.tuning.tuner import Counted, Tuner, relative_error


@dataclass(frozen=True, order=True)
class MoeCell:
    """One problem: M slots over E experts of weight [N, K].

    Attributes:
        n: columns.
        k: depth.
        a_div: slots per activation row.
        has_weight: whether rows are weighted.
        m: slots.
        min_experts: least number of experts that the row asks for, in a table with that column.
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
        """Return M, as the families' problems name it."""
        return self.m

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k} a_div={self.a_div} has_weight={int(self.has_weight)}"


C = TypeVar("C", bound=MoeCell)
ROUTINGS = 3  # that a candidate is modelled with


@dataclass(frozen=True)
class Format:
    """What a family's operands are made of.

    Attributes:
        activations: quantises them.
        weights: quantises one expert's.
        product: elements and scales of both -> their product in float32.
        rows: of a weight, that share scales.
    """

    activations: Quantizer
    weights: Quantizer
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int = 1


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


def _turned(part: torch.Tensor, rows: int) -> torch.Tensor:
    return part.view(torch.uint8).roll(rows, 0).view(part.dtype) if part.element_size() == 1 else part.roll(rows, 0)


def _turns(cell: MoeCell, made: Format, expert: int) -> int:
    """Return by how many rows of scales an expert's weight is rotated: none where the last one is of fewer rows."""
    return 0 if cell.n % made.rows else expert


def operands(cell: MoeCell, made: Format, arch: str, device: torch.device) -> MoeOperands:
    """Return normally distributed data, the same for a cell on every run.

    Experts are one weight with its rows rotated by the expert's number; on a CPU those without slots stay zero and take
    no memory.
    """
    if cell.m % cell.top_k:
        raise ConfigError(f"M must be a multiple of top_k = {cell.top_k}; got {cell.m}")
    topk_ids = route(cell.m, cell.top_k, cell.experts, seed=2)
    own = fp8_dtypes(arch)[0]
    a, a_scale = made.activations(normal(-(-cell.m // cell.a_div), cell.k, 0.5, seed=0), own)
    base, base_scale = (part.to(device) for part in made.weights(normal(cell.n, cell.k, 0.1, seed=1), own))
    w, w_scale = (
        torch.zeros((cell.experts, *part.shape), dtype=part.dtype, device=device) for part in (base, base_scale)
    )
    for expert in topk_ids.unique().tolist() if device.type == "cpu" else range(cell.experts):
        turns = _turns(cell, made, expert)
        w[expert] = _turned(base, turns * made.rows)
        w_scale[expert] = _turned(base_scale, turns)
    weights = torch.rand(cell.m, generator=torch.Generator().manual_seed(3)).to(device) if cell.has_weight else None
    topk_ids = topk_ids.to(device)
    index = moe_align_block_size(topk_ids, DEFAULT_BLOCK_M, cell.experts)
    out = torch.zeros((cell.m, cell.n), dtype=torch.bfloat16, device=device)
    return MoeOperands(a.to(device), a_scale.to(device), w, w_scale, weights, index, topk_ids, out)


def expected(cell: MoeCell, made: Format, parts: MoeOperands) -> torch.Tensor:
    """Return the float32 result of the same bits: one product with the unrotated weight, rotated per slot."""
    first = parts.busy[0]
    turns = _turns(cell, made, first)
    base = _turned(parts.w[first], -turns * made.rows), _turned(parts.w_scale[first], -turns)
    rows = made.product(parts.a, parts.a_scale, *base)
    owners = parts.topk_ids.flatten().tolist()
    turned = (_turns(cell, made, owner) * made.rows for owner in owners)
    out = torch.stack([rows[slot // cell.a_div].roll(by) for slot, by in enumerate(turned)])
    return out if parts.weights is None else out * parts.weights[:, None]


def rerouted(parts: MoeOperands, number: int) -> list[MoeOperands]:
    """Return operands whose calls route to other experts each, so that weights come from memory."""
    slots, top_k = parts.topk_ids.shape
    experts = parts.w.shape[0]
    routings = (route(slots * top_k, top_k, experts, seed).to(parts.a.device) for seed in range(2, 2 + number))
    return [replace(parts, index=moe_align_block_size(ids, DEFAULT_BLOCK_M, experts), topk_ids=ids) for ids in routings]


def over_routings(
    operands: Callable[[C, str], MoeOperands], run: Callable[[Choice, C, MoeOperands], torch.Tensor]
) -> Callable[[Choice, C, str], tuple[float, str]]:
    """Return a function that models a candidate: the median of microseconds of a replay over ROUTINGS, and its bound.

    Which experts have slots decides on which dies work-groups fall: by one routing alone a configuration may seem 1.24
    times as fast as one that it ties with in others.
    """
    kept = functools.lru_cache(maxsize=1)(operands)  # of a cell, for all of its candidates

    def modelled(choice: Choice, cell: C, arch: str) -> tuple[float, str]:
        from hipforge.emulator.timing import Capture, estimate
        from hipforge.emulator.timing.context import gpu_of

        timings = []
        for parts in rerouted(kept(cell, arch), ROUTINGS):
            capture = Capture()
            with capture.recording():
                run(choice, cell, parts)
            timings.append(estimate(capture, gpu_of(arch), "cold"))
        middle = sorted(timings, key=lambda timing: timing.replay_us)[ROUTINGS // 2]
        return middle.replay_us, middle.bound

    return modelled


def grouped_tuner(
    family: Family[Any],
    *,
    max_error: float,
    default_cells: Sequence[C],
    made_of: Callable[[C], Format],
    entry: Callable[[C], tuple[Any, ...]] = lambda cell: (),
    **more: Any,
) -> Tuner[C, MoeOperands]:
    """Return the tuner of a grouped GEMM family.

    Args:
        family: its table and candidates.
        max_error: largest relative Frobenius error of a right result.
        default_cells: what is tuned where nothing is asked for.
        made_of: what a cell's operands are made of.
        entry: what the kernels' entries take between sizes and configuration.
        **more: further attributes of :class:`~hipforge.tuning.tuner.Tuner`.
    """

    def run(choice: Choice, cell: C, parts: MoeOperands) -> torch.Tensor:
        """Launch a kernel into the operands' output [M, N], every row of which has a slot."""
        weight = parts.a, parts.a_scale, parts.w, parts.w_scale
        given = Operands(*weight, *parts.index, cell.m, DEFAULT_BLOCK_M, cell.a_div, parts.weights)
        routed = given.mul_weight_by, given.bias, *given.sizes, *entry(cell)
        family.kernel(choice.kernel).run(choice.configuration, (), parts.out, *given.tensors, *routed)
        return parts.out

    def count(cell: C, arch: str) -> Counted:
        parts = operands(cell, made_of(cell), arch, torch.device("cpu"))
        right = expected(cell, made_of(cell), parts)

        def counted(choice: Choice) -> tuple[list[model.Work], float]:
            from hipforge import emulator

            described = family.kernel(choice.kernel).pipeline
            assert described is not None, f"{choice.kernel} says no pipeline"
            with emulator.counters() as collector:
                got = run(choice, cell, parts)
            (work,) = works(collector.result, described(choice.configuration, cell, arch), "w")
            # Work-groups past the last tile in use end at once; only the others count for the model.
            (launch,), tiles = collector.result.kernels, int(parts.index.num_tokens_post_padded) // DEFAULT_BLOCK_M
            used = work.workgroups // launch.grid[1] * min(tiles, launch.grid[1])
            return [replace(work, workgroups=used)], relative_error(got, right)

        return counted

    more.setdefault(
        "modelled", over_routings(lambda cell, arch: operands(cell, made_of(cell), arch, torch.device("cpu")), run)
    )
    more.setdefault("loop", lambda name: family.kernel(name).loop or name)
    more.setdefault("cell", type(default_cells[0]))
    return Tuner(
        family=family,
        max_error=max_error,
        default_cells=tuple(default_cells),
        operands=lambda cell, arch, device: operands(cell, made_of(cell), arch, device),
        expected=lambda cell, parts: expected(cell, made_of(cell), parts),
        run=run,
        count=count,
        copies=rerouted,
        bytes_per_call=lambda parts: len(parts.busy) * parts.w[0].numel(),
        **more,
    )
