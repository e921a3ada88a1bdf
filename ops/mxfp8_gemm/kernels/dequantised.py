"""The MX-FP8 GEMM of many rows on sm_90 by torch's bf16 product of the operands, which bf16 holds exactly.

On Hopper a product of e4m3 has to be multiplied by its scales every 32 k, in which a kernel loses more than this costs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Timed
from hipforge.ops.core.stub import stub
from hipforge.ops.mxfp8_gemm.raw import OPERANDS, run_raw

_MODULE = "module_mxfp8_gemm_dequantised"

# Rough rates on an H100: of the bf16 product by its operations and by reading W, of the conversion by its bytes;
# and the cost of five launches.
FLOP_PER_US, BYTES_PER_US, START_US = 7.0e8, 2.7e6, 9.0
LEAST_M = 128  # fewer rows are never faster so
MOST_BYTES = 1 << 30  # of the operands in bf16, which exist during a call

mxfp8_dequantise_out = stub(
    "mxfp8_dequantise_out",
    _MODULE,
    "out, inexact, codes, scales: Tensor",
    "Write codes times scales into ``out``, bf16 [rows, K]; ``inexact``, int32 [1], becomes 1 if bf16 holds not all.",
    mutates=("out", "inexact"),
)
_OUT, _, _INPUTS = OPERANDS.partition(", ")
mxfp8_repair_out = stub(
    "mxfp8_repair_out",
    _MODULE,
    f"{_OUT}, inexact, {_INPUTS}",
    "Write Xq @ Wq^T + bias into ``out`` [M, N] again where ``inexact``, int32 [1], is not 0.",
)


@contextlib.contextmanager
def _float32_sums() -> Iterator[None]:
    """Have parts of K added up in float32, whatever torch is set to."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def _launch(
    out: torch.Tensor,
    xq: torch.Tensor,
    xs: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    inexact = torch.zeros(1, dtype=torch.int32, device=out.device)
    x, w = (torch.empty(codes.shape, dtype=torch.bfloat16, device=out.device) for codes in (xq, wq))
    mxfp8_dequantise_out(x, inexact, xq, xs)
    mxfp8_dequantise_out(w, inexact, wq, ws)
    with _float32_sums():
        if bias is None:
            torch.mm(x, w.t(), out=out)
        else:
            torch.addmm(bias, x, w.t(), out=out)
    mxfp8_repair_out(out, inexact, xq, xs, wq, ws, bias)


@documented_like(run_raw)
def mxfp8_dequantised(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run it on contiguous tensors of any size; operands as in :mod:`hipforge.ops.mxfp8_gemm`."""
    return run_raw(DEQUANTISED, Xq, Wq, Xq, Xs, Wq, Ws, bias)


def _default(problem: Any, arch: str, cu_count: int) -> Iterator[Timed]:
    m, n, k = problem.key
    if m >= LEAST_M and 2 * (m + n) * k <= MOST_BYTES:
        product = max(2 * m * n * k / FLOP_PER_US, 2 * n * k / BYTES_PER_US)
        yield START_US + product + 3 * (m + n) * k / BYTES_PER_US, {}


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    return [given for _, given in _default(cell, arch, 0)]


DEQUANTISED = Kernel(
    "mxfp8_dequantised",
    archs=("sm_90",),
    parameters=MappingProxyType({}),
    launch=_launch,
    candidates=_candidates,
    default=_default,
)
