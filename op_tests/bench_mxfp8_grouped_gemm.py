"""The MoE grouped GEMM over MX-FP8 beside a grouped Triton kernel on dot_scaled; see helpers/bench.py.

On a GPU each call is routed to other experts, and all our configurations are measured. ``busy`` is the experts that
have slots, ``fullest`` the most slots on one, ``weight_loads`` weight bytes loaded over the busy experts' size,
``floor_us`` the time to move their bytes once at the MI355X's bandwidth.

On an NVIDIA GPU the floor is that of a kernel which only reads as many bytes, measured in the same run, and the peers
are torch's grouped product of bf16 and a loop of products over the experts, whose activations are gathered before it,
Humming's of the same weights where it is installed, and a Triton kernel over the sorted slots, of bf16 and of fp8 with
a scale a tensor, in each configuration.
``gate up`` is the product with SwiGLU and MX quantisation, ``programmatic`` inside
:func:`hipforge.programmatic_launch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
import torch
from bench_mxfp8_gemm import measured_floor, programmatic
from helpers import bench, errors, grouped_triton, humming_moe

import hipforge
from hipforge import devices, shapes
from hipforge.ops.moe import DEFAULT_BLOCK_M
from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8
from hipforge.ops.mxfp8_grouped_gemm.family import FAMILY
from hipforge.ops.mxfp8_grouped_gemm.kernels import stream, wave_split
from hipforge.ops.reference.mxfp8 import dequantize_mxfp8
from hipforge.ops.triton import mxfp8_grouped as triton_grouped
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR
from hipforge.tuning.families.mxfp8_grouped_gemm import DEFAULT_CELLS, TUNER
from hipforge.tuning.grouped import MoeCell, MoeOperands
from hipforge.tuning.model import MI355X

ARCH, HOPPER = "gfx950", "sm_90"
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
        payloads = parts.a.view(torch.uint8), parts.w.view(torch.uint8)  # bits, as the kernel reads them
        leading = payloads[0], parts.a_scale, payloads[1], parts.w_scale, *parts.index
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


def peers(cell: MoeCell, copies: Sequence[MoeOperands]) -> Iterator[tuple[str, Any]]:
    """Yield bf16 products of slots in the order of their experts, each with that order."""
    weights = torch.stack(
        [dequantize_mxfp8(w, scale).bfloat16() for w, scale in zip(copies[0].w, copies[0].w_scale, strict=True)]
    )
    a = dequantize_mxfp8(copies[0].a, copies[0].a_scale).bfloat16()
    orders = [parts.topk_ids.flatten().argsort(stable=True) for parts in copies]
    rows = [a[order // cell.a_div] for order in orders]
    counts = [parts.topk_ids.flatten().bincount(minlength=cell.experts) for parts in copies]
    ends = [count.cumsum(0).int() for count in counts]
    yield "torch grouped_mm bf16", lambda i: (torch._grouped_mm(rows[i], weights.mT, offs=ends[i]), orders[i])
    listed = [count.tolist() for count in counts]

    out = torch.empty(cell.m, cell.n, device=a.device, dtype=a.dtype)

    def loop(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        for e, (one, result) in enumerate(zip(rows[i].split(listed[i]), out.split(listed[i]), strict=True)):
            if len(one):
                torch.mm(one, weights[e].T, out=result)
        return out, orders[i]

    yield "loop of torch bf16", loop
    yield from humming_moe.calls(a, copies, cell.m, cell.a_div)
    yield from grouped_triton.calls(a, weights, copies, cell.m, cell.a_div)


def problem_nvidia(cell: MoeCell) -> bench.Problem:
    """Return one cell on sm_90."""
    first = TUNER.operands(cell, ARCH, bench.device())
    payload = cell.n * cell.k
    copies = TUNER.copies(first, max(2, min(24, bench.copies_of(TUNER.bytes_per_call(first)))))
    busy = sum(len(parts.busy) for parts in copies) / len(copies)
    want = TUNER.expected(cell, copies[0])

    def given(parts: MoeOperands) -> tuple[Any, ...]:
        return parts.a, parts.a_scale, parts.w, parts.w_scale, *parts.index, cell.m, DEFAULT_BLOCK_M, cell.a_div

    def product(i: int) -> torch.Tensor:
        parts = copies[i]
        return hipforge.grouped_mxfp8_linear(*given(parts), parts.weights, out=parts.out, uncovered="undefined")

    taken = hipforge.explain(hipforge.grouped_mxfp8_linear, *given(first), first.weights)
    calls = {
        f"hipforge {taken.kernel} {bench.named(taken.configuration)}": product,
        "programmatic": programmatic(product),
    }
    gate_up = lambda i: grouped_swiglu_mxfp8(*given(copies[i]))
    if not cell.has_weight and cell.a_div > 1:
        calls |= {"gate up": gate_up, "gate up programmatic": programmatic(gate_up)}
    calls |= dict(peers(cell, copies))

    def error(got: Any) -> float:
        if isinstance(got, tuple) and got[0].dtype == torch.bfloat16:  # a peer's, without weights and in its own order
            plain = want if first.weights is None else want / first.weights[:, None]
            return errors.relative(got[0], plain[got[1]])
        if isinstance(got, tuple):
            gate, up = want.chunk(2, 1)
            return errors.relative(dequantize_mxfp8(*got), torch.nn.functional.silu(gate) * up)
        return errors.relative(got, want)

    of = {"m": cell.m, "n": cell.n, "k": cell.k, "a_div": cell.a_div, "busy": busy}
    floor = measured_floor(round(busy * payload), 2, False)
    return bench.Problem(of, calls, error, len(copies), {"floor_us": floor}, foreign=[*calls][2:])


def problem(cell: MoeCell) -> bench.Problem:
    """Return one cell."""
    if bench.on_gpu() and devices.current().arch_of() == HOPPER:
        return problem_nvidia(cell)
    first = TUNER.operands(cell, ARCH, bench.device())
    busy, number = len(first.busy), bench.copies_of(TUNER.bytes_per_call(first))
    copies = TUNER.copies(first, number) if bench.on_gpu() else [first]
    sizes = cell.m, cell.experts, cell.n, cell.k, MI355X.cu_count
    defaults = wave_split.default_choice(*sizes), stream.default_choice(*sizes)
    chosen = FAMILY.choices(cell, "gfx950") if bench.on_gpu() else [choice for choice in defaults if choice is not None]
    want, weight_bytes = TUNER.expected(cell, copies[0]), busy * cell.n * cell.k
    payload = (busy * cell.n + first.a.shape[0]) * cell.k
    calls = {
        f"hipforge {bench.named(choice.configuration)}": lambda i, choice=choice: TUNER.run(choice, cell, copies[i])
        for choice in chosen
    }
    for config in (triton_grouped.STOCK, *(triton_grouped.TUNED if bench.on_gpu() else ())):
        name = f"triton {DEFAULT_BLOCK_M}x{config.block_n}x{config.block_k} warps={config.num_warps}"
        calls[name] = triton_call(cell, config, copies)
    of = {"m": cell.m, "n": cell.n, "k": cell.k, "a_div": cell.a_div, "busy": busy}
    return bench.Problem(
        {**of, "fullest": int(first.topk_ids.flatten().bincount().max())}, calls,
        lambda got: errors.relative(got, want), len(copies),
        {"floor_us": (payload + payload // 32 + 2 * cell.m * cell.n) / MI355X.bandwidth * 1e6},
        lambda seen: {"weight_loads": bench.loaded(seen, "w", "w_ptr") / weight_bytes},
    )  # fmt: skip


@bench.command("grouped MX-FP8 GEMM", MAX_ERROR, (ARCH, HOPPER))
@click.option("--crowded/--spread", default=None, help="Only cells with few busy experts, or only the others.")
@click.option("--max-m", type=click.IntRange(min=1), default=16, help="Most slots of a default cell.")
@click.option("--layer", "layers", multiple=True, metavar="WIDTH,INNER,EXPERTS,TOP_K", help="Both GEMMs of a layer.")
@click.option(
    "-t", "--tokens", multiple=True, type=click.IntRange(min=1), default=(1, 8), help="Of a layer; repeatable."
)
def main(crowded: bool | None, max_m: int, layers: tuple[str, ...], tokens: tuple[int, ...]) -> Iterator[bench.Problem]:
    """Count or time the grouped GEMM."""
    cells = [*(() if crowded else DEFAULT_CELLS), *(() if crowded is False else CROWDED)]
    if not layers:
        return map(problem, (cell for cell in cells if cell.m <= max_m))
    of_layers = [shapes.parse(text, ("WIDTH", "INNER", "EXPERTS", "TOP_K"), (2048, 768, 128, 8)) for text in layers]
    return (
        problem(MoeCell(*gemm, count * top_k, experts=experts, top_k=top_k))
        for width, inner, experts, top_k in of_layers
        for count in tokens
        for gemm in ((2 * inner, width, top_k, False), (width, inner, 1, True))
    )


if __name__ == "__main__":
    main()
