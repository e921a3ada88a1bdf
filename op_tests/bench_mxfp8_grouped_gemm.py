"""The MoE grouped GEMM over MX-FP8 beside a grouped Triton kernel on dot_scaled; see helpers/bench.py.

On a GPU each call is routed to other experts, and all our configurations are measured. ``busy`` is the experts that
have slots, ``fullest`` the most slots on one, ``weight_loads`` weight bytes loaded over the busy experts' size,
``floor_us`` the time to move their bytes once at the MI355X's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
import torch
from helpers import bench

from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.ops.mxfp8_grouped_gemm.family import FAMILY
from hipforge.ops.mxfp8_grouped_gemm.kernels import stream, wave_split
from hipforge.ops.triton import mxfp8_grouped as triton_grouped
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.families.mxfp8_grouped_gemm import (
    DEFAULT_CELLS,
    TUNER,
    MoeCell,
    MoeOperands,
    expected,
    operands,
    run,
)
from hipforge.tuning.model import MI355X

ARCH = "gfx950"
# One slot per expert is what few tokens give; all slots on few experts show the matrix path.
CROWDED = tuple(MoeCell(1536, 6144, 4, False, m, experts=4, top_k=4) for m in (16, 64, 128))


def triton_call(cell: MoeCell, config: triton_grouped.GroupedConfig, copies: Sequence[MoeOperands]) -> Any:
    """Return a call of the Triton kernel, on the GPU or compiled for gfx950 and emulated."""
    from hipforge.ops.triton.mxfp8_grouped_kernels import mxfp8_grouped_kernel

    binder = bench.triton_binder()
    kernel = binder(mxfp8_grouped_kernel, arch=ARCH) if binder else None
    constants = config.constants(DEFAULT_BLOCK_M, cell.a_div, cell.has_weight)
    meta = {**constants, "num_warps": config.num_warps, "num_stages": config.num_stages}

    def call(i: int) -> torch.Tensor:
        parts = copies[i]
        leading = parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index
        out = torch.zeros_like(parts.out)
        if kernel is None:
            triton_grouped.mxfp8_grouped(out, *leading, DEFAULT_BLOCK_M, cell.a_div, parts.weights, config)
        else:
            weights = out if parts.weights is None else parts.weights
            grid = config.grid(parts.index.expert_ids.numel(), cell.n)  # vLLM's launch covers the whole buffer as well
            # The first out stands where biases would.
            kernel[grid](*leading, weights, out, out, cell.m, cell.experts, cell.n, cell.k, **meta)
        return out

    return call


def problem(cell: MoeCell) -> bench.Problem:
    """Return one cell."""
    first = operands(cell, bench.device())
    busy, number = len(first.busy), bench.copies_of(TUNER.bytes_per_call(first))
    copies = TUNER.copies(first, number) if bench.on_gpu() else [first]
    sizes = cell.m, cell.experts, cell.n, cell.k, MI355X.cu_count
    defaults = wave_split.default_choice(*sizes), stream.default_choice(*sizes)
    chosen = FAMILY.choices(cell, "gfx950") if bench.on_gpu() else [choice for choice in defaults if choice is not None]
    want, weight_bytes = expected(cell, copies[0]), busy * cell.n * cell.k
    payload = (busy * cell.n + first.a.shape[0]) * cell.k
    calls = {
        f"hipforge {bench.named(choice.configuration)}": lambda i, choice=choice: run(choice, cell, copies[i])
        for choice in chosen
    }
    for config in (triton_grouped.STOCK, *(triton_grouped.TUNED if bench.on_gpu() else ())):
        name = f"triton {DEFAULT_BLOCK_M}x{config.block_n}x{config.block_k} warps={config.num_warps}"
        calls[name] = triton_call(cell, config, copies)
    of = {"m": cell.m, "n": cell.n, "k": cell.k, "a_div": cell.a_div, "busy": busy}
    return bench.Problem(
        {**of, "fullest": int(first.topk_ids.flatten().bincount().max())}, calls,
        lambda got: bench.relative(got, want), len(copies),
        {"floor_us": (payload + payload // 32 + 2 * cell.m * cell.n) / MI355X.bandwidth * 1e6},
        lambda seen: {"weight_loads": bench.loaded(seen, "w", "w_ptr") / weight_bytes},
    )  # fmt: skip


@bench.command("grouped MX-FP8 GEMM", MAX_ERROR, (ARCH,))
@click.option("--crowded/--spread", default=None, help="Only cells with few busy experts, or only the others.")
@click.option("--max-m", type=click.IntRange(min=1), default=16, help="Most slots of a cell.")
def main(crowded: bool | None, max_m: int) -> Iterator[bench.Problem]:
    """Count or time the grouped GEMM."""
    cells = [*(() if crowded else DEFAULT_CELLS), *(() if crowded is False else CROWDED)]
    return (problem(cell) for cell in cells if cell.m <= max_m)


if __name__ == "__main__":
    main()
