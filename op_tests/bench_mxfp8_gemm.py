"""MX-FP8 GEMM beside Triton's dot_scaled; helpers/bench.py says what is counted or measured.

``weight_loads`` is weight payload bytes loaded over the weight's size. ``floor_us`` is the time of moving each byte of
the operands once: at the MI355X's bandwidth, or on an NVIDIA GPU that of a kernel which only reads W, measured in the
same run. There the peers are torch's bf16 product and, where it is installed, Humming with MX-FP8 weights and bf16
activations; ``programmatic`` is ours inside :func:`hipforge.programmatic_launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import torch
from helpers import bench, errors

import hipforge
from hipforge import devices
from hipforge.cli import read_floor
from hipforge.ops.core.dispatch import explain
from hipforge.ops.core.kernel import Configuration, Kernel
from hipforge.ops.mxfp8_gemm.kernels import KERNELS
from hipforge.ops.reference import mxfp8_mm
from hipforge.ops.triton import mxfp8_dot_scaled as dot_scaled
from hipforge.tuning.cases import MINIMAX_M3, Cell, cells, parse_shape
from hipforge.tuning.families.mxfp8_gemm import MAX_ERROR, TUNER
from hipforge.tuning.model import MI355X
from hipforge.weights import share_scales

DEFAULT_M = (1, 4, 16, 64)
ARCH = "gfx950"
HOPPER = "sm_90"
HUMMING = "humming mxfp8 x bf16"


def floor_us(cell: Cell) -> float:
    """Return microseconds to move each operand byte once."""
    payload = (cell.m + cell.n) * cell.k
    return (payload + payload // 32 + 2 * cell.m * cell.n) / MI355X.bandwidth * 1e6


def measured_floor(payload: int, copies: int, programmatic: bool) -> float:
    """Return microseconds of reading W, of so many bytes, and its scales once, with the blocks that are fastest."""
    size = (payload + payload // 32) // 16 * 16
    sources = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    return read_floor.microseconds(sources, programmatic)


def programmatic(call: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return the call inside a programmatic launch."""

    def inside(i: int) -> Any:
        with hipforge.programmatic_launch():
            return call(i)

    return inside


def peers(cell: Cell, copies: list[tuple[torch.Tensor, ...]]) -> Iterator[tuple[str, Any]]:
    """Yield what computes the same product from the values that the operands stand for."""
    from hipforge.ops.reference.mxfp8 import dequantize_mxfp8

    x = dequantize_mxfp8(*copies[0][:2]).bfloat16()
    number = max(1, len(copies) // 2)  # twice the bytes
    weights = [dequantize_mxfp8(*copies[i][2:]).bfloat16() for i in range(number)]
    yield "torch bf16", lambda i: x @ weights[i % number].T
    try:
        from humming.layer import HummingLayer
    except ImportError:
        return
    layers = []
    for _, _, wq, ws in copies:
        layer = HummingLayer(cell.n, cell.k, {"quant_method": "modelopt", "quant_algo": "mxfp8"}, torch_dtype=x.dtype)
        layer = layer.cuda()
        layer.load_from_tensors({"weight": wq.view(torch.float8_e4m3fn), "weight_scale": ws.view(torch.uint8)})
        layer.transform()
        layers.append(layer)
    yield HUMMING, lambda i: layers[i](x)


def every_kernel(cell: Cell, copies: list[tuple[torch.Tensor, ...]], arch: str) -> Iterator[tuple[str, Any]]:
    """Yield each kernel of an architecture in every configuration that a tuner would try."""
    for kernel in KERNELS:
        for given in kernel.candidates(cell, arch) if arch in kernel.archs else ():
            chosen = kernel.choice(given)
            yield str(chosen), partial(_run, kernel, chosen.configuration, cell, copies)


def _run(kernel: Kernel, given: Configuration, cell: Cell, copies: list[tuple[torch.Tensor, ...]], i: int) -> Any:
    out = torch.empty(cell.m, cell.n, dtype=torch.bfloat16, device=copies[i][0].device)
    kernel.run(given, (cell.m, cell.n, cell.k), out, *copies[i], None)
    return out


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


def problem(cell: Cell, every: bool, shared: bool = False) -> bench.Problem:
    """Return one cell; ``every``: also each kernel of a GPU's in each configuration; ``shared``: W's scales are."""
    data = TUNER.operands(cell, ARCH, bench.device())
    if shared:
        data = (*data[:2], *share_scales(*data[2:]))
    number = bench.copies_of(sum(tensor.nbytes for tensor in data))
    copies = [data, *(tuple(tensor.clone() for tensor in data) for _ in range(number - 1))]
    chosen = explain(hipforge.mxfp8_gemm, *data)
    if chosen.path != "kernel":
        raise click.ClickException(f"no kernel takes {cell}: {chosen.reason}")
    want = mxfp8_mm(*data, out_dtype=torch.float32)
    known = {"floor_us": floor_us(cell)}
    ours = f"hipforge {chosen.kernel} {bench.named(chosen.configuration)}"
    if bench.on_gpu() and devices.current().arch_of() == HOPPER:
        call = lambda i: hipforge.mxfp8_gemm(*copies[i])
        calls = {ours: call, "hipforge programmatic": programmatic(call), **dict(peers(cell, copies))}
        if every:
            calls |= dict(every_kernel(cell, copies, HOPPER))
        size = cell.n * cell.k
        known = {
            "floor_us": measured_floor(size, number, False), "floor_programmatic_us": measured_floor(size, number, True)
        }  # fmt: skip
        return bench.Problem(
            {"m": cell.m, "n": cell.n, "k": cell.k}, calls, lambda got: errors.relative(got, want), number, known,
            foreign=(HUMMING,),
        )  # fmt: skip
    configs = [("stock", dot_scaled.STOCK), ("small-M", dot_scaled.SMALL_M)]
    if bench.on_gpu():
        configs += [("tuned", config) for config in dot_scaled.TUNED[1:]]
    calls = {ours: lambda i: hipforge.mxfp8_gemm(*copies[i])}
    for name, config in configs:
        tile = f"{config.block_m}x{config.block_n}x{config.block_k} warps={config.num_warps}"
        calls[f"triton {name} {tile}"] = triton_call(cell, config, copies)
    return bench.Problem(
        {"m": cell.m, "n": cell.n, "k": cell.k}, calls, lambda got: errors.relative(got, want), number,
        known,
        lambda seen: {"weight_loads": bench.loaded(seen, "Wq", "w_ptr") / (cell.n * cell.k)},
    )  # fmt: skip


@bench.command("MX-FP8 GEMM", MAX_ERROR, (ARCH, HOPPER))
@click.option("--shapes", multiple=True, metavar="N,K", help="Weight shape; may be repeated. Default: MiniMax-M3's 15.")
@click.option("-m", "--batch", "batches", multiple=True, type=click.IntRange(1, 16384), help="M; may be repeated.")
@click.option("--kernels", "every", is_flag=True, help="On an NVIDIA GPU also every kernel in every configuration.")
@click.option("--shared", is_flag=True, help="Share scales of W before, as hipforge.weights.share_scales does.")
def main(shapes: tuple[str, ...], batches: tuple[int, ...], every: bool, shared: bool) -> Iterator[bench.Problem]:
    """Bench the MX-FP8 GEMM against Triton: measured on a GPU, counted on the emulator."""
    chosen = cells([parse_shape(text) for text in shapes] or MINIMAX_M3, batches or DEFAULT_M)
    return (problem(cell, every, shared) for cell in chosen)


if __name__ == "__main__":
    main()
