"""Which kernel runs a small-M MX-FP8 GEMM, and with which parameters: the envelope, the tuned table, the defaults.

The order of the steps is documented in :mod:`hipforge.ops.smallm_gemm_mxfp8`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from hipforge.ops.core import dispatch
from hipforge.ops.core.checks import (
    TensorSpec,
    require_dtype,
    require_last_multiple,
    require_rank,
    require_shape,
    require_tensor,
    require_torch_dtype,
)
from hipforge.ops.core.dispatch import Accepted, Decision, Refused
from hipforge.ops.core.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.core.tuned import TunedRow, load_table
from hipforge.ops.tables import DEFAULT_BLOCK_N, GEMV_MAX_M, MFMA_MAX_M, SMALLM_MXFP8, mfma_k_steps

ARCH = "gfx950"
MAX_ELEMENTS = 2**31 - 1

_FP8_PAYLOADS = (torch.float8_e4m3fn, torch.uint8)
_SCALES = (torch.uint8, E8M0_DTYPE)


def _check_operands(xq: TensorSpec, x_scale: TensorSpec, wq: TensorSpec, w_scale: TensorSpec) -> None:
    require_rank("xq", xq, 2, "[M, K]")
    require_rank("wq", wq, 2, "[N, K]")
    require_dtype("xq", xq, _FP8_PAYLOADS)
    require_dtype("wq", wq, _FP8_PAYLOADS)
    require_dtype("x_scale", x_scale, _SCALES)
    require_dtype("w_scale", w_scale, _SCALES)
    (m, k), n = xq.shape, wq.shape[0]
    require_shape("wq", wq, (n, k), "its K is that of xq")
    require_last_multiple("xq", xq, BLOCK)
    require_shape("x_scale", x_scale, (m, k // BLOCK), f"one byte per {BLOCK} elements of xq")
    require_shape("w_scale", w_scale, (n, k // BLOCK), f"one byte per {BLOCK} elements of wq")


def _gemv(block_n: int, reason: str, row: TunedRow | None = None) -> Accepted:
    return Accepted("kernel", "smallm_mxfp8_gemv", MappingProxyType({"block_n": block_n}), reason, row)


def _mfma(n_sub: int, k_splits: int, reason: str, row: TunedRow | None = None) -> Accepted:
    return Accepted(
        "kernel", "smallm_mxfp8_mfma", MappingProxyType({"n_sub": n_sub, "k_splits": k_splits}), reason, row
    )


def _by_row(row: TunedRow, reason: str) -> Accepted | Refused:
    if row.integer("use_hip") == 0:
        return Refused("kernel", f"{reason} routes this shape to the fallback (use_hip=0)", row)
    if row.values["kernel"] == "gemv":
        block_n = row.values["block_n"]
        return _gemv(DEFAULT_BLOCK_N if block_n is None else row.integer("block_n"), reason, row)
    return _mfma(row.integer("n_sub"), row.integer("k_splits"), reason, row)


def _by_table(m: int, n: int, k: int, arch: str, cu_count: int) -> Accepted | Refused | None:
    table = load_table(SMALLM_MXFP8)
    row = table.find(arch, cu_count, m, n, k)
    if row is not None:
        return _by_row(row, "the tuned row of this shape")
    if GEMV_MAX_M < m < MFMA_MAX_M and m != 32:
        for larger in (32, MFMA_MAX_M):
            row = table.find(arch, cu_count, larger, n, k) if larger > m else None
            if row is not None:
                return _by_row(row, f"the tuned row of the next larger M ({larger})")
    return None


def _by_default(m: int, n: int, k: int) -> Accepted | Refused:
    if m in (8, 16):
        steps = mfma_k_steps(k)
        k_splits = next((splits for splits in (4, 2) if steps % splits == 0), 1)
        return _mfma(1, k_splits, f"no tuned row; the default for M={m} is MFMA")
    if m <= GEMV_MAX_M:
        return _gemv(DEFAULT_BLOCK_N, f"no tuned row; the default for M={m} is GEMV")
    return Refused("kernel", f"M={m} needs a tuned row for (K, N)=({k}, {n}), and there is none")


def _decide_hip(m: int, n: int, k: int, device: torch.device, out_dtype: torch.dtype) -> Accepted | Refused:
    if out_dtype != torch.bfloat16:
        return Refused("kernel", f"the output dtype must be torch.bfloat16; got {out_dtype}")
    target = dispatch.target_of(device)
    if isinstance(target, Refused):
        return target
    arch, cu_count = target
    if arch != ARCH:
        return Refused("kernel", f"the kernels are for {ARCH}; the device is {arch}")
    if not 1 <= m <= MFMA_MAX_M or n == 0 or k == 0:
        return Refused("kernel", f"M must be 1 to {MFMA_MAX_M}, N and K at least 1; got M={m}, N={n}, K={k}")
    largest = max(m, n) * k
    if largest > MAX_ELEMENTS:
        return Refused("kernel", f"M*K and N*K must be at most 2^31 - 1 (raw-buffer offsets are int32); got {largest}")
    return _by_table(m, n, k, arch, cu_count) or _by_default(m, n, k)


@dispatch.remembered
def _decision(*key: Any) -> Decision:
    """Return the decision for the shapes and dtypes of the four operands, the device and the output's dtype."""
    shapes, dtypes, device, out_dtype = key[:4], key[4:8], key[8], key[9]
    xq, x_scale, wq, w_scale = (TensorSpec(tuple(s), d) for s, d in zip(shapes, dtypes, strict=True))
    _check_operands(xq, x_scale, wq, w_scale)
    require_torch_dtype("out_dtype", out_dtype)
    outcome = _decide_hip(xq.shape[0], wq.shape[0], xq.shape[1], device, out_dtype)
    return Decision(outcome) if isinstance(outcome, Accepted) else Decision(None, (outcome,))


def plan_gemv(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Decision:
    """Return the decision for a call; raises GuardError for operands that are malformed."""
    try:
        if torch.compiler.is_dynamo_compiling():  # the decision is a constant of the graph, so the shapes must be
            shapes = [dispatch.constant_shape(tensor) for tensor in (xq, x_scale, wq, w_scale)]
            return _decision(*shapes, xq.dtype, x_scale.dtype, wq.dtype, w_scale.dtype, xq.device, out_dtype)
        return _decision(
            xq.shape, x_scale.shape, wq.shape, w_scale.shape,
            xq.dtype, x_scale.dtype, wq.dtype, w_scale.dtype, xq.device, out_dtype,
        )  # fmt: skip
    except AttributeError:  # looked into afterwards, so that a good call does not pay for it
        require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
        raise
