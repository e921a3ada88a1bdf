"""The skinny fp8 GEMM beside a split-K Triton kernel on fp8 tl.dot, counted on the emulator; see helpers/bench.py.

Set HIPFORGE_EMULATE=gfx942 for MI300X. ``b_loads`` is bytes loaded of b over its size.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import torch
import triton
import triton.language as tl
from helpers import bench, errors

from hipforge import devices
from hipforge.emulator import triton as emulated
from hipforge.ops import fp8_skinny_gemm as ops
from hipforge.ops.fp8_skinny_gemm.kernels.queue import default_configuration
from hipforge.ops.reference.skinny import skinny_gemm as reference

# (n, k) of a Llama-3.1-405B layer under tensor parallelism 8.
SHAPES = {"qkv": (2304, 16384), "gate/up": (13312, 16384), "down": (16384, 6656)}
ROWS = (1, 8, 16, 32)
MAX_ERROR = 2e-3  # relative, Frobenius: one fp16 rounding is 4.9e-4 at most
TRITON_BLOCK_N, TRITON_BLOCK_K = 32, 128


@triton.jit
def split_k_dot(
    partials, a, b, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Write fp32 partial sums [SPLIT_K, m, n] of a [m, k] times b, stored as [n, k]."""
    split = tl.program_id(1)
    row, column = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(split, tl.cdiv(k, BLOCK_K), SPLIT_K):
        at = block * BLOCK_K + tl.arange(0, BLOCK_K)
        left_mask = (row[:, None] < m) & (at[None, :] < k)
        right_mask = (column[None, :] < n) & (at[:, None] < k)
        left = tl.load(a + row[:, None] * k + at[None, :], mask=left_mask, other=0.0)
        right = tl.load(b + column[None, :] * k + at[:, None], mask=right_mask, other=0.0)
        total = tl.dot(left, right, total)
    place = partials + split * m * n + row[:, None] * n + column[None, :]
    tl.store(place, total, mask=(row[:, None] < m) & (column[None, :] < n))


def run_triton(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, split_k: int) -> torch.Tensor:
    """Return the product, with the partial sums added in torch (uncounted)."""
    m, k = a.shape
    n = b.shape[1]
    partials = torch.empty(split_k, m, n)
    emulated.jit(split_k_dot)[(-(-n // TRITON_BLOCK_N), split_k)](
        partials, a, b.t(), m, n, k,
        BLOCK_M=32 if m > 16 else 16, BLOCK_N=TRITON_BLOCK_N, BLOCK_K=TRITON_BLOCK_K, SPLIT_K=split_k, num_warps=4,
    )  # fmt: skip
    return (partials.sum(0) * scale).half()


@bench.command("skinny fp8 GEMM", MAX_ERROR)
@click.option("--shape", "names", type=click.Choice(tuple(SHAPES)), multiple=True, help="Default: qkv.")
@click.option("--rows", type=int, multiple=True, default=ROWS)
def main(names: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[bench.Problem]:
    """Count both kernels on the shapes asked for."""
    device = devices.current()
    if device.kind != "emulator":
        raise click.UsageError(f"counts need the emulator; the device is {device.kind}: set HIPFORGE_DEVICE=emulator")
    for name in names or ("qkv",):
        n, k = SHAPES[name]
        generator = torch.Generator().manual_seed(0)
        b = torch.randn(n, k, generator=generator).to(ops.FORMATS[device.default_arch]).t()
        scale = torch.tensor([k**-0.5])
        for m in rows:
            a = torch.randn(m, k, generator=generator).to(b.dtype)
            want = reference(a, b, scale, None, torch.float64, torch.float64)
            split_k = default_configuration(m, n, k, device.cu_count()).split_k  # as many work-groups as compute units
            yield bench.Problem(
                {"layer": name, "n": n, "k": k, "m": m},
                {
                    "hipforge": lambda _, a=a, b=b, scale=scale: ops.skinny_gemm(a, b, scale),
                    "triton": lambda _, a=a, b=b, scale=scale, split=split_k: run_triton(a, b, scale, split),
                },
                lambda got, want=want: errors.relative(got, want),
                counted=lambda seen, size=n * k: {"b_loads": seen.tensors["b"].loaded / size},
            )


if __name__ == "__main__":
    main()
