"""hipforge's kernels on an NVIDIA GPU beside their peers: µs of a call by graph replay, one row per implementation.

    PYTHONPATH=src python op_tests/bench_gpu.py [--ops mxfp4,norms] [--peers torch,humming] [-m 1 -m 16] [--csv FILE]

Operands rotate past L2; ``floor_us`` is what a kernel takes that only reads the weight, or attention's cache, measured
in the same run; ``programmatic`` is ours inside :func:`hipforge.programmatic_launch`. Peers are torch (bf16 cuBLAS,
``_scaled_mm``, copies), torch.compile, Triton kernels in each configuration, and Humming where it is installed: weights
of our format, bf16 activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import bench_mxfp8_gemm as dense
import click
import torch
from gpu import small_ops
from helpers import bench, errors

import hipforge
from hipforge import devices
from hipforge.ops.core.dispatch import explain
from hipforge.ops.core.kernel import Kernel
from hipforge.ops.fp8_skinny_gemm.kernels.row_stream import ROW_STREAM as SKINNY
from hipforge.ops.mxfp4_gemm.kernels import CODE_STREAM, ROW_STREAM
from hipforge.ops.mxfp4_gemm.raw import Problem
from hipforge.ops.reference import dequantize_mxfp4, quantize_mxfp4
from hipforge.tuning.cases import Cell, cells, parse_shape

# (K, N) of weights: narrow and wide ones of decode steps, gpt-oss's last.
SHAPES = ((6144, 2304), (1024, 6144), (2048, 7168), (4096, 4096), (4096, 28672), (14336, 4096), (2880, 5120))
DEFAULT_M = (1, 8, 16)
Calls = dict[str, Callable[[int], Any]]


def mxfp4(cell: Cell, bits: int, every: bool) -> bench.Problem:
    """Return one shape with MXFP4 weights and activations of 4 or 16 bits; ``every``: in each configuration."""
    device = bench.device()
    generator = torch.Generator(device).manual_seed(0)
    activations = torch.randn(cell.m, cell.k, device=device, generator=generator).bfloat16()
    weight = torch.randn(cell.n, cell.k, device=device, generator=generator) * 0.05
    x = quantize_mxfp4(activations) if bits == 4 else (activations, None)
    w = quantize_mxfp4(weight)
    size = cell.n * cell.k // 2
    number = bench.copies_of(size)
    copies = [tuple(part.clone() for part in w) for _ in range(number)]
    values = dequantize_mxfp4(*w, torch.float64)
    exact = (dequantize_mxfp4(*x, torch.float64) if bits == 4 else activations.double()) @ values.T
    chosen = explain(hipforge.mxfp4_linear, *x, *w)
    call = lambda i: hipforge.mxfp4_linear(*x, *copies[i])
    calls: Calls = {f"hipforge {chosen.kernel} {bench.named(chosen.configuration)}": call}
    calls["hipforge programmatic"] = dense.programmatic(call)
    wide = [weight.bfloat16().clone() for _ in range(bench.copies_of(4 * size))]
    calls["torch bf16"] = lambda i: activations @ wide[i % len(wide)].T
    if bits == 16:
        calls |= humming_mxfp4(cell, activations, copies)
    if every:
        problem = Problem.of(*x, *w)
        for kernel in (ROW_STREAM, CODE_STREAM):
            for given in kernel.candidates(problem, dense.HOPPER):
                calls[str(kernel.choice(given))] = partial(_configured, kernel, given, cell, x, copies)
    known = {
        "floor_us": dense.measured_floor(size, number, False),
        "floor_programmatic_us": dense.measured_floor(size, number, True),
    }
    foreign = [name for name in calls if not name.startswith(("hipforge", ROW_STREAM.name, CODE_STREAM.name))]
    of = {"op": f"mxfp4 x{bits}", "m": cell.m, "n": cell.n, "k": cell.k}
    return bench.Problem(of, calls, lambda got: errors.relative(got, exact), number, known, foreign=foreign)


def _configured(kernel: Kernel, given: Any, cell: Cell, x: Any, copies: Sequence[Any], i: int) -> torch.Tensor:
    out = torch.empty(cell.m, cell.n, dtype=torch.bfloat16, device=copies[i][0].device)
    kernel.run(given, (cell.m, cell.n, cell.k), out, *x, *copies[i], False)
    return out


def skinny(cell: Cell, every: bool) -> bench.Problem:
    """Return one shape of the skinny fp8 product, beside ``_scaled_mm`` of the same operands."""
    device = bench.device()
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(rows, cell.k, device=device, generator=generator) for rows in (cell.m, cell.n))
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scale, one = torch.tensor([cell.k**-0.5], device=device), torch.ones((), device=device)
    exact = a.double() @ b.t().double() * scale.double()
    number = bench.copies_of(b.nbytes)
    copies = [b.clone() for _ in range(number)]
    chosen = explain(hipforge.skinny_gemm, a, b.t(), scale)
    call = lambda i: hipforge.skinny_gemm(a, copies[i].t(), scale)
    calls: Calls = {f"hipforge {chosen.kernel} {bench.named(chosen.configuration)}": call}
    calls["hipforge programmatic"] = dense.programmatic(call)
    for fast in (True, False):
        calls[f"torch _scaled_mm{' fast' if fast else ''}"] = lambda i, fast=fast: torch._scaled_mm(
            a, copies[i].t(), scale.reshape(()), one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    if every:
        for given in SKINNY.candidates(cell, dense.HOPPER):
            calls[str(SKINNY.choice(given))] = partial(_skinny_configured, given, a, scale, copies)
    known = {
        "floor_us": dense.measured_floor(b.nbytes * 32 // 33, number, False),
        "floor_programmatic_us": dense.measured_floor(b.nbytes * 32 // 33, number, True),
    }
    foreign = [name for name in calls if name.startswith("torch")]
    of = {"op": "skinny fp8", "m": cell.m, "n": cell.n, "k": cell.k}
    return bench.Problem(of, calls, lambda got: errors.relative(got, exact), number, known, foreign=foreign)


def _skinny_configured(given: Any, a: Any, scale: Any, copies: Sequence[torch.Tensor], i: int) -> torch.Tensor:
    out = torch.empty(a.shape[0], copies[i].shape[0], dtype=torch.float16, device=a.device)
    SKINNY.run(given, (), out, a, copies[i].t(), scale, False, True)
    return out


def humming_mxfp4(cell: Cell, x: torch.Tensor, copies: Sequence[tuple[torch.Tensor, ...]]) -> Calls:
    """Return Humming's product of bf16 activations with the same weights, where it is installed."""
    try:
        from humming.layer import HummingLayer
    except ImportError:
        return {}
    layers = []
    for wq, ws in copies:
        layer = HummingLayer(cell.n, cell.k, {"quant_method": "mxfp4"}, torch_dtype=x.dtype).cuda()
        layer.load_from_tensors({"weight": wq.view(torch.uint8), "weight_scale": ws.view(torch.uint8)})
        layer.transform()
        layers.append(layer)
    return {"humming mxfp4 x bf16": lambda i: layers[i](x)}


def dense_problems(chosen: Sequence[Cell], every: bool) -> dict[str, Iterator[bench.Problem]]:
    """Return the products by op."""
    return {
        "mxfp8": (dense.problem(cell, every) for cell in chosen),
        "mxfp4": (mxfp4(cell, bits, every) for cell in chosen for bits in (4, 16)),
        "skinny": (skinny(cell, every) for cell in chosen if cell.m <= 32),
    }


OPS = ("mxfp8", "mxfp4", "skinny", *small_ops.OPS)
PEERS = ("torch", "humming", "compile", "triton")


def _names(context: Any, option: Any, text: str) -> tuple[str, ...]:
    accepted = OPS if option.name == "ops" else PEERS
    names = tuple(filter(None, text.split(",")))
    if unknown := [name for name in names if name not in accepted]:
        raise click.BadParameter(f"{', '.join(unknown)} is not one of {', '.join(accepted)}")
    return names


@bench.command("kernels of sm_90", dense.MAX_ERROR, (dense.HOPPER,))
@click.option("--ops", default=",".join(OPS), callback=_names, help="Which ops, separated by commas.")
@click.option("--peers", default=",".join(PEERS), callback=_names, help="Beside whom, where they are installed.")
@click.option("--shapes", multiple=True, metavar="N,K", help="Weight shape of the products; may be repeated.")
@click.option("-m", "--batch", "batches", multiple=True, type=click.IntRange(1, 16384), help="M; may be repeated.")
@click.option("--kernels", "every", is_flag=True, help="Products also in every configuration of every kernel.")
def main(
    ops: tuple[str, ...], peers: tuple[str, ...], shapes: tuple[str, ...], batches: tuple[int, ...], every: bool
) -> Iterator[bench.Problem]:
    """Measure kernels of sm_90 and their peers on this machine's GPU."""
    if not devices.current().is_gpu:
        raise click.UsageError("times need a GPU of NVIDIA's; set HIPFORGE_DEVICE=cuda on a machine that has one")
    chosen = cells([parse_shape(text) for text in shapes] or SHAPES, batches or DEFAULT_M)
    of_op = {**dense_problems(chosen, every), **small_ops.problems(batches)}
    for name in ops:
        for problem in of_op[name]:
            left_out = set(PEERS) - set(peers)
            calls = {call: run for call, run in problem.calls.items() if call.split()[0] not in left_out}
            yield dataclasses.replace(problem, calls=calls)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
