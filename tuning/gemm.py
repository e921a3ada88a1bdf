"""The tuner of a GEMM family: operands and counts.

Operands are always (xq, x_scale, wq, w_scale) of X[M, K] @ W[N, K]^T. Counters are found by the names that the modules'
entries give their tensors: out, workspace, and the weight's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hipforge.jit import loader
from hipforge.ops.core.dispatch import Choice
from hipforge.ops.core.family import Family
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.kernel import Pipeline
from hipforge.tuning import model
from hipforge.tuning.cases import Cell
from hipforge.tuning.tuner import Counted, Tuner, relative_error

if TYPE_CHECKING:
    from hipforge.emulator.counting import Counters, KernelCount

C = TypeVar("C", bound=Cell)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Quantizer = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""(a float matrix, the e4m3 format of an architecture) -> (elements, scales)."""


def gemm_tuner(
    family: Family[Any],
    *,
    max_error: float,
    default_cells: Sequence[C],
    quantizers: Callable[[C], tuple[Quantizer, Quantizer]],
    reference: Callable[[Operands], torch.Tensor],
    run: Callable[[Choice, Operands], torch.Tensor],
    pipeline: Callable[[Choice, C, str], Pipeline] | None = None,
    weight: str = "Wq",
    **more: Any,
) -> Tuner[C, Operands]:
    """Return the tuner of a GEMM family.

    Args:
        family: its table and candidates.
        max_error: largest relative Frobenius error of a right result.
        default_cells: what is tuned where nothing is asked for.
        quantizers: cell -> what makes the operands of X, and those of W.
        reference: operands -> float32 product of the same bits.
        run: launches a candidate on operands.
        pipeline: how a candidate streams the weight of a cell on an architecture, where the kernels do not say it.
        weight: the weight's name in the modules' entries.
        **more: further attributes of :class:`~hipforge.tuning.tuner.Tuner`.
    """

    def operands(cell: C, arch: str, device: torch.device) -> Operands:
        return random_operands(cell, arch, device, *quantizers(cell))

    def count(cell: C, arch: str) -> Counted:
        parts = operands(cell, arch, torch.device("cpu"))
        expected = reference(parts)

        def counted(choice: Choice) -> tuple[list[model.Work], float]:
            from hipforge import emulator

            with emulator.counters() as collector:
                got = run(choice, parts)
            launches = works(collector.result, streams(choice, cell, arch), weight)
            return launches, relative_error(got, expected)

        return counted

    def by_kernel(choice: Choice, cell: C, arch: str) -> Pipeline:
        described = family.kernel(choice.kernel).pipeline
        assert described is not None, f"{choice.kernel} says no pipeline"
        return described(choice.configuration, cell, arch)

    streams = pipeline or by_kernel
    if family.kernels:
        more.setdefault("loop", lambda name: family.kernel(name).loop or name)
    return Tuner(
        family=family,
        max_error=max_error,
        default_cells=tuple(default_cells),
        cell=type(default_cells[0]),
        operands=operands,
        expected=lambda cell, parts: reference(parts),
        run=lambda choice, cell, parts: run(choice, parts),
        count=count,
        copies=lambda parts, number: [parts, *(_clone(parts) for _ in range(number - 1))],
        bytes_per_call=lambda parts: sum(tensor.nbytes for tensor in parts),
        **more,
    )


def _clone(parts: Operands) -> Operands:
    xq, x_scale, wq, w_scale = parts
    return xq.clone(), x_scale.clone(), wq.clone(), w_scale.clone()


def both(quantize: Quantizer) -> Callable[[Cell], tuple[Quantizer, Quantizer]]:
    """Return the quantisers of a family that makes the operands of X and of W in one way."""
    return lambda cell: (quantize, quantize)


def normal(rows: int, columns: int, factor: float, seed: int) -> torch.Tensor:
    """Return bfloat16 [rows, columns] of normally distributed numbers times a factor, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * factor).bfloat16()


@functools.lru_cache(maxsize=1)  # neighbouring cells share their weight
def _weight(n: int, k: int, arch: str, device: torch.device, quantize: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = quantize(normal(n, k, 0.1, seed=1), fp8_dtypes(arch)[0])
    return q.to(device), scale.to(device)


def random_operands(cell: Cell, arch: str, device: torch.device, of_x: Quantizer, of_w: Quantizer) -> Operands:
    """Return (xq, x_scale, wq, w_scale) of normally distributed data, the same for a cell on every run."""
    xq, x_scale = of_x(normal(cell.m, cell.k, 0.5, seed=0), fp8_dtypes(arch)[0])
    return (xq.to(device), x_scale.to(device), *_weight(cell.n, cell.k, arch, device, of_w))


def works(counts: Counters, pipeline: Pipeline, weight: str) -> list[model.Work]:
    """Return a counted call's launches, for the model: the product, then the sum over splits, if any.

    Args:
        counts: of exactly one call.
        pipeline: of the product.
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
            occupancy=_occupancy(product.name),
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
                loaded_bytes=partial_bytes,
                unique_bytes=partial_bytes + out_bytes,
                streamed_bytes=partial_bytes,
                occupancy=_occupancy(kernel.name),
                # Every lane requests its part of all splits before it adds.
                in_flight_bytes=-(-partial_bytes // (workgroups * waves)),
            )
        )
    return found


def _occupancy(symbol: str) -> int:
    """Return the waves per SIMD of a kernel that was launched; a symbol names its module's variant too."""
    manifests = (module.manifest.kernels for module in loader.loaded())
    return next(int(kernels[symbol]["occupancy"]) for kernels in manifests if symbol in kernels)


def _geometry(kernel: KernelCount) -> tuple[int, int]:
    return math.prod(kernel.grid), -(-math.prod(kernel.block) // 64)
