"""MX-FP8 GEMM for few rows beside Triton's dot_scaled; helpers/bench.py says what is counted or measured.

``weight_loads`` is weight payload bytes loaded over the weight's size, ``floor_us`` the time that each byte of the
operands once takes at the MI355X's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import torch
from helpers import bench

import hipforge
from hipforge.ops.core.dispatch import explain
from hipforge.ops.mxfp8_gemm.tuner import MAX_ERROR, operands
from hipforge.ops.reference import mxfp8_mm
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.tuning.cases import MINIMAX_M3, Cell, cells, parse_shape
from hipforge.tuning.model import MI355X

DEFAULT_M = (1, 4, 16, 64)
ARCH = "gfx950"


def floor_us(cell: Cell) -> float:
    """Return microseconds to move each operand byte once."""
    payload = (cell.m + cell.n) * cell.k
    return (payload + payload // 32 + 2 * cell.m * cell.n) / MI355X.bandwidth * 1e6


def triton_call(cell: Cell, config: dot_scaled.TileConfig, copies: list[tuple[torch.Tensor, ...]]) -> Any:
    """Return a call of a Triton configuration, on the GPU or compiled for gfx950 and emulated."""
    from hipforge.ops.triton.mxfp8_kernels import mxfp8_dot_scaled_kernel

    binder = bench.triton_binder()
    kernel = binder(mxfp8_dot_scaled_kernel, arch=ARCH) if binder else None
    meta = {**config.constants(cell.n, cell.k), "num_warps": config.num_warps, "num_stages": config.num_stages}

    def call(i: int) -> torch.Tensor:
        out = torch.empty(cell.m, cell.n, dtype=torch.bfloat16, device=copies[i][0].device)
        if kernel is None:
            dot_scaled.mxfp8_dot_scaled(out, *copies[i], config)
        else:
            data = (tensor.view(torch.uint8) for tensor in copies[i])
            kernel[config.grid(cell.m, cell.n)](*data, out, cell.m, cell.n, cell.k, **meta)
        return out

    return call


def problem(cell: Cell) -> bench.Problem:
    """Return one cell."""
    data = operands(cell, bench.device())
    number = bench.copies_of(sum(tensor.nbytes for tensor in data))
    copies = [data, *(tuple(tensor.clone() for tensor in data) for _ in range(number - 1))]
    chosen = explain(hipforge.mxfp8_gemm, *data)
    if chosen.path != "kernel":
        raise click.ClickException(f"no kernel takes {cell}: {chosen.reason}")
    want = mxfp8_mm(*data, out_dtype=torch.float32)
    configs = [("stock", dot_scaled.STOCK), ("small-M", dot_scaled.SMALL_M)]
    if bench.on_gpu():
        configs += [("tuned", config) for config in dot_scaled.TUNED[1:]]
    calls = {f"hipforge {chosen.kernel} {bench.named(chosen.configuration)}": lambda i: hipforge.mxfp8_gemm(*copies[i])}
    for name, config in configs:
        tile = f"{config.block_m}x{config.block_n}x{config.block_k} warps={config.num_warps}"
        calls[f"triton {name} {tile}"] = triton_call(cell, config, copies)
    return bench.Problem(
        {"m": cell.m, "n": cell.n, "k": cell.k}, calls, lambda got: bench.relative(got, want), number,
        {"floor_us": floor_us(cell)},
        lambda seen: {"weight_loads": bench.loaded(seen, "Wq", "w_ptr") / (cell.n * cell.k)},
    )  # fmt: skip


@bench.command("MX-FP8 GEMM for few rows", MAX_ERROR, (ARCH,))
@click.option("--shapes", multiple=True, metavar="N,K", help="Weight shape; may be repeated. Default: MiniMax-M3's 15.")
@click.option("-m", "--batch", "batches", multiple=True, type=click.IntRange(1, 64), help="M; may be repeated.")
def main(shapes: tuple[str, ...], batches: tuple[int, ...]) -> Iterator[bench.Problem]:
    """Bench the MX-FP8 GEMM against Triton: measured on a GPU, counted on the emulator."""
    return map(problem, cells([parse_shape(text) for text in shapes] or MINIMAX_M3, batches or DEFAULT_M))


if __name__ == "__main__":
    main()
