"""What the tuners need to know of a GEMM family, and one cell of it as a problem: run, check, cost.

Operands are always (xq, x_scale, wq, w_scale) of X[M, K] @ W[N, K]^T. Counters are found by the names that the modules'
entries give their tensors: out, workspace, and the weight's, which the family says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from hipforge.errors import ConfigError
from hipforge.jit import loader
from hipforge.ops.tuned import TableSchema, Value
from hipforge.tuning import model, timing
from hipforge.tuning.cases import Cell
from hipforge.tuning.search import Candidate

if TYPE_CHECKING:
    from hipforge.emulator.counting import Counters, KernelCount

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Baselines = tuple[float, float] | None


def no_baselines(cell: Cell, copies: Sequence[Operands]) -> Baselines:
    """Return None: the family has nothing to be compared with."""
    return None


@dataclass(frozen=True)
class Pipeline:
    """What the model has to know of a kernel's code; the attributes are those of :class:`hipforge.tuning.model.Work`.

    Attributes:
        in_flight_bytes: weight bytes that one wave requests ahead, on average over the waves of a work-group.
        restarts: how often a wave fills its pipeline.
        matrix_waves: waves of a work-group that have matrix instructions; None for all of them.
        busiest: what the busiest work-group does, over what the average one does.
    """

    in_flight_bytes: int
    restarts: int = 1
    matrix_waves: int | None = None
    busiest: float = 1.0


@dataclass(frozen=True)
class GemmFamily:
    """One op family as its tuner sees it.

    Attributes:
        schema: of its table.
        arch: the architecture of its kernels.
        max_error: largest relative Frobenius error of a right result.
        default_cells: what is tuned where nothing is asked for.
        candidates: every configuration that the kernels accept for a cell, simplest first, so that ties go to it.
        quantize: a float matrix → (elements, scales).
        reference: operands → float32 product of the same bits.
        call: launches a candidate on operands.
        columns: a candidate's values of the configuration columns, ``use_hip`` left out.
        instance: module and variant that a candidate runs for M rows.
        pipeline: how a candidate streams the weight of a cell.
        baselines: microseconds of (stock, best) alternatives over copies of the operands, on a GPU.
        machine: whose rates the model takes.
        weight: the weight's name in the modules' entries.
        bound: seconds that the model never goes below for a candidate, known without running it; where there is one,
            candidates are tried in its order, and a modelled search ends where it passes the best time.
        most_trials: how many candidates are tried at most; None for all.
    """

    schema: TableSchema
    arch: str
    max_error: float
    default_cells: tuple[Cell, ...]
    candidates: Callable[[Cell], list[Candidate]]
    quantize: Quantizer
    reference: Callable[[Operands], torch.Tensor]
    call: Callable[[Candidate, Operands], torch.Tensor]
    columns: Callable[[Candidate], Mapping[str, Value]]
    instance: Callable[[Candidate, int], tuple[str, dict[str, int]]]
    pipeline: Callable[[Candidate, Cell], Pipeline]
    baselines: Callable[[Cell, Sequence[Operands]], Baselines] = no_baselines
    machine: model.Machine = model.MI355X
    weight: str = "Wq"
    bound: Callable[[Candidate, Cell], float] | None = None
    most_trials: int | None = None


def _normal(rows: int, columns: int, factor: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * factor).bfloat16()


@functools.lru_cache(maxsize=1)  # neighbouring cells share their weight
def _weight(n: int, k: int, device: torch.device, quantize: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = quantize(_normal(n, k, 0.1, seed=1))
    return q.to(device), scale.to(device)


def random_operands(cell: Cell, device: torch.device, quantize: Quantizer) -> Operands:
    """Return (xq, x_scale, wq, w_scale) of normally distributed data, the same for a cell on every run."""
    xq, x_scale = quantize(_normal(cell.m, cell.k, 0.5, seed=0))
    return (xq.to(device), x_scale.to(device), *_weight(cell.n, cell.k, device, quantize))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``expected``."""
    difference = got.to(torch.float64) - expected.to(torch.float64)
    return float(difference.norm() / expected.to(torch.float64).norm())


class GemmProblem(Protocol):
    """One cell: run a candidate, say what a call costs, and what there is to beat."""

    source: str

    def run(self, candidate: Candidate) -> float:
        """Run once and return the relative Frobenius error of the output."""

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the seconds of a call and a note on them."""

    def baselines(self) -> Baselines:
        """Return microseconds of the stock and the best alternative, or None."""


class ModelledProblem:
    """Costs a candidate by the model over the counts of its run on the emulator."""

    def __init__(self, family: GemmFamily, cell: Cell) -> None:
        self.family = family
        self.source = family.machine.source
        self.cell = cell
        self.operands = random_operands(cell, torch.device("cpu"), family.quantize)
        self.expected = family.reference(self.operands)
        self._counts: Counters | None = None

    def run(self, candidate: Candidate) -> float:
        """Run and count one call; the counts are kept for :meth:`cost`."""
        from hipforge import emulator

        with emulator.counters() as collector:
            got = self.family.call(candidate, self.operands)
        self._counts = collector.result
        return relative_error(got, self.expected)

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the model's seconds for the call that :meth:`run` made, and the bound of each launch."""
        if self._counts is None:
            raise ConfigError("cost() needs the counts of a run() before it")
        module, variant = self.family.instance(candidate, self.cell.m)
        manifest = loader.load(module, variant, self.family.arch).manifest
        occupancy = {symbol: int(kernel["occupancy"]) for symbol, kernel in manifest.kernels.items()}
        found = works(self._counts, self.family.pipeline(candidate, self.cell), occupancy, self.family.weight)
        estimates = [model.estimate(work, self.family.machine) for work in found]
        note = " + ".join(f"{item.seconds * 1e6:.2f} ({item.bound})" for item in estimates)
        return model.total(estimates), note

    def baselines(self) -> Baselines:
        """Return None: nothing is measured without a GPU."""
        return None


class MeasuredProblem:
    """Times a candidate on the GPU, over rotating copies of its operands."""

    def __init__(self, family: GemmFamily, cell: Cell, device: torch.device) -> None:
        self.family = family
        self.cell = cell
        self.source = timing.measured_source(device.index or 0)
        first = random_operands(cell, device, family.quantize)
        self.expected = family.reference(first)
        free, _ = torch.cuda.mem_get_info(device)
        count = timing.rotation(sum(tensor.nbytes for tensor in first), free)
        self.copies: list[Operands] = [first]
        self.copies += [(xq.clone(), xs.clone(), wq.clone(), ws.clone()) for xq, xs, wq, ws in [first] * (count - 1)]

    def run(self, candidate: Candidate) -> float:
        """Run once and return the relative Frobenius error of the output."""
        return relative_error(self.family.call(candidate, self.copies[0]), self.expected)

    def cost(self, candidate: Candidate) -> tuple[float, str]:
        """Return the measured seconds of a call."""
        us = timing.microseconds_per_call(lambda i: self.family.call(candidate, self.copies[i]), len(self.copies))
        return us * 1e-6, f"{us:.2f} us"

    def baselines(self) -> Baselines:
        """Return microseconds of the family's alternatives."""
        return self.family.baselines(self.cell, self.copies)


def works(counts: Counters, pipeline: Pipeline, occupancy: Mapping[str, int], weight: str) -> list[model.Work]:
    """Return the launches of a counted call as the model takes them: the product, then the sum over splits, if any.

    Args:
        counts: of exactly one call.
        pipeline: of the product.
        occupancy: waves per SIMD by kernel symbol.
        weight: the weight's name in the module's entry.
    """
    product, *rest = counts.kernels
    workspace = counts.tensors.get("workspace")
    partial_bytes = workspace.unique_loaded if workspace else 0
    out_bytes = counts.tensors["out"].unique_stored
    workgroups, waves = _geometry(product)
    found = [
        model.Work(
            workgroups=workgroups,
            waves_per_workgroup=waves,
            # The sum over splits is a few instructions of thousands; they are counted here as well as there.
            vector_instructions=counts.by_class.get("valu", 0) + counts.by_class.get("valu_trans", 0),
            instructions=product.wave_instructions,
            matrix_cycles=counts.mfma_cycles,
            loaded_bytes=counts.bytes_loaded - partial_bytes,
            unique_bytes=counts.unique_bytes - (partial_bytes + out_bytes if rest else 0),
            streamed_bytes=counts.tensors[weight].loaded,
            occupancy=occupancy[product.name],
            in_flight_bytes=pipeline.in_flight_bytes,
            restarts=pipeline.restarts,
            matrix_waves=pipeline.matrix_waves,
            busiest=pipeline.busiest,
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
                # Every lane requests its part of all splits before it adds.
                in_flight_bytes=-(-partial_bytes // (workgroups * waves)),
            )
        )
    return found


def _geometry(kernel: KernelCount) -> tuple[int, int]:
    return math.prod(kernel.grid), -(-math.prod(kernel.block) // 64)
