"""MXFP4 GEMM for gfx950: Y = X @ W^T with e2m1 operands on both sides, through scaled MFMA.

Shapes and dtypes everywhere in this module: ``xq`` [M, K/2] and ``wq`` [N, K/2] hold two e2m1 codes per byte, the even
element in the low nibble (uint8 or float4_e2m1fn_x2); ``x_scale`` [M, K/32] and ``w_scale`` [N, K/32] hold e8m0 bytes
(uint8 or float8_e8m0fnu); the output [M, N] is bfloat16; K is a multiple of 32. Products are accumulated in float32 and
rounded once, to nearest even. A scale byte of 255 makes the outputs that it takes part in NaN.

With ``shuffled=True`` the weight is in the order of :func:`hipforge.ops.reference.shuffle_weight` and its scales in
that of :func:`hipforge.ops.reference.shuffle_scale` (activations stay plain); then N % 16 == 0 and K % 64 == 0.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops import dispatch
from hipforge.ops.alignment import realigned
from hipforge.ops.dispatch import Accepted, Decision, Refused, planned_by
from hipforge.ops.reference import mxfp4_mm_packed, unshuffle_scale, unshuffle_weight
from hipforge.ops.reference.checks import (
    Described,
    TensorSpec,
    require_choice,
    require_device,
    require_dtype,
    require_rank,
    require_shape,
    require_tensor,
    require_torch_dtype,
)
from hipforge.ops.reference.formats import BLOCK, E8M0_DTYPE
from hipforge.ops.tables import MFMA_K_SPLITS, MFMA_N_SUB, MXFP4_GEMM, mfma_k_steps
from hipforge.ops.tuned import load_table

ARCH = "gfx950"
MAX_BYTES = 2**31 - 1
SUB_TILES = MFMA_N_SUB  # of rows as of columns

_PAYLOADS = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", None))
_SCALES = (torch.uint8, E8M0_DTYPE)


@compile_ops(
    "module_mxfp4_gemm",
    variant=lambda out, xq, xs, wq, ws, workspace, shuffled, m_sub, n_sub, k_splits: {
        "HF_M_SUB": m_sub,
        "HF_N_SUB": n_sub,
    },
    mutates=("out", "workspace"),
)
def mxfp4_gemm_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    workspace: torch.Tensor | None,
    shuffled: bool,
    m_sub: int,
    n_sub: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T into ``out`` [M, N] bf16; ``workspace`` float32 [k_splits, M, N] holds the partial sums."""


def default_configuration(m: int, n: int, k: int, cu_count: int) -> dict[str, int]:
    """Return (m_sub, n_sub, k_splits) for a shape without a tuned row.

    Rows of X per wave grow with M, so that a weight byte is loaded as seldom as registers allow; K is split until there
    is at least one wave per compute unit.
    """
    m_sub = 1 if m <= 16 else 2 if m <= 32 else 4
    n_sub = 1
    waves = -(-n // (16 * n_sub)) * -(-m // (16 * m_sub))
    k_splits = 1
    while k_splits < 8 and waves * k_splits < cu_count and 2 * k_splits <= mfma_k_steps(k):
        k_splits *= 2
    return {"m_sub": m_sub, "n_sub": n_sub, "k_splits": k_splits}


def _check(
    xq: Described, x_scale: Described, wq: Described, w_scale: Described, shuffled: bool
) -> tuple[int, int, int]:
    require_rank("xq", xq, 2, "[M, K/2]")
    require_rank("wq", wq, 2, "[N, K/2]")
    for name, payload in (("xq", xq), ("wq", wq)):
        require_dtype(name, payload, _PAYLOADS)
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        require_dtype(name, scale, _SCALES)
    m, n, k = xq.shape[0], wq.shape[0], 2 * xq.shape[1]
    require_shape("wq", wq, (n, k // 2), "its K is that of xq")
    if k % BLOCK:
        raise GuardError(f"K must be a multiple of {BLOCK} (one e8m0 scale per {BLOCK} elements); got K={k}")
    require_shape("x_scale", x_scale, (m, k // BLOCK), f"one byte per {BLOCK} elements of xq")
    if shuffled:
        if n % 16 or k % 64:
            raise GuardError(f"shuffled weights need N % 16 == 0 and K % 64 == 0; got N={n}, K={k}")
        padded = (-(-n // 256) * 256, -(-(k // BLOCK) // 8) * 8)
        require_shape("w_scale", w_scale, padded, "shuffled scales are padded to 256 rows and 8 columns")
    else:
        require_shape("w_scale", w_scale, (n, k // BLOCK), f"one byte per {BLOCK} elements of wq")
    return m, n, k


def plan_mxfp4(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    shuffled: bool = False,
) -> Decision:
    """Return the decision for a call; raises GuardError for operands that are malformed."""
    require_tensor(xq=xq, x_scale=x_scale, wq=wq, w_scale=w_scale)
    operands = (xq, x_scale, wq, w_scale)
    shapes = map(dispatch.constant_shape, operands)
    return _decision(*shapes, *(tensor.dtype for tensor in operands), shuffled, xq.device, out_dtype)


@dispatch.remembered
def _decision(*key: Any) -> Decision:
    """Return the decision for the shapes and dtypes of the four operands, their order, the device and the output."""
    xq, x_scale, wq, w_scale = (TensorSpec(shape, dtype) for shape, dtype in zip(key[:4], key[4:8], strict=True))
    shuffled, device, out_dtype = key[8:]
    require_torch_dtype("out_dtype", out_dtype)
    outcome = _decide(*_check(xq, x_scale, wq, w_scale, shuffled), device, out_dtype)
    return Decision(outcome) if isinstance(outcome, Accepted) else Decision(None, (outcome,))


def _decide(m: int, n: int, k: int, device: torch.device, out_dtype: torch.dtype) -> Accepted | Refused:
    if out_dtype != torch.bfloat16:
        return Refused("hip", f"the output dtype must be torch.bfloat16; got {out_dtype}")
    target = dispatch.target_of(device)
    if isinstance(target, Refused):
        return target
    arch, cu_count = target
    if arch != ARCH:
        return Refused("hip", f"the kernel is for {ARCH}; the device is {arch}")
    if min(m, n, k) < 1:
        return Refused("hip", f"M, N and K must be at least 1; got M={m}, N={n}, K={k}")
    if max(m, n) * k // 2 > MAX_BYTES:
        return Refused("hip", f"a payload must be at most 2^31 - 1 bytes; got {max(m, n) * k // 2}")
    row = load_table(MXFP4_GEMM.family).find(arch, cu_count, m, n, k)
    if row is None:
        configuration = default_configuration(m, n, k, cu_count)
        return Accepted("hip", "mxfp4_gemm", MappingProxyType(configuration), "no tuned row; the default rule")
    if row.integer("use_hip") == 0:
        return Refused("hip", "the tuned row of this shape routes it to the fallback (use_hip=0)", row)
    configuration = {name: row.integer(name) for name in ("m_sub", "n_sub", "k_splits")}
    return Accepted("hip", "mxfp4_gemm", MappingProxyType(configuration), "the tuned row of this shape", row)


@planned_by(plan_mxfp4)
def mxfp4_gemm(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    shuffled: bool = False,
) -> torch.Tensor | None:
    """Return X @ W^T from MXFP4 operands, or None where the caller must use its fallback.

    Args:
        xq: activations [M, K/2], any strides.
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32].
        out_dtype: ``torch.bfloat16`` (another dtype gives None).
        shuffled: the weight and its scales are in the shuffled order.

    Returns:
        bfloat16 [M, N]; None on a device other than gfx950, past 2 GB, or where the tuned table says so.

    Raises:
        GuardError: dtypes or shapes that are no MXFP4 operands.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    taken = plan_mxfp4(xq, x_scale, wq, w_scale, out_dtype, shuffled=shuffled).accepted
    if taken is None:
        return None
    return run_mxfp4(xq, x_scale, wq, w_scale, shuffled=shuffled, **taken.configuration)


def run_mxfp4(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    shuffled: bool = False,
    m_sub: int = 1,
    n_sub: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the kernel with the configuration given; shapes and dtypes as in the module's docstring.

    Args:
        xq: activations [M, K/2].
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        shuffled: the weight and its scales are in the shuffled order.
        m_sub: tiles of 16 rows per wave: 1, 2 or 4.
        n_sub: tiles of 16 columns per wave: 1, 2 or 4.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128); partial sums are added in order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    require_choice("m_sub", m_sub, SUB_TILES)
    require_choice("n_sub", n_sub, SUB_TILES)
    require_choice("k_splits", k_splits, MFMA_K_SPLITS)
    m, n, _ = _check(xq, x_scale, wq, w_scale, shuffled)
    out = torch.empty((m, n), dtype=torch.bfloat16, device=xq.device)
    workspace = torch.empty((k_splits, m, n), dtype=torch.float32, device=xq.device) if k_splits > 1 else None
    x_scale, w_scale = x_scale.contiguous(), w_scale.contiguous()
    configuration = (workspace, shuffled, m_sub, n_sub, k_splits)
    try:
        mxfp4_gemm_out(out, xq.contiguous(), x_scale, wq.contiguous(), w_scale, *configuration)
    except GuardError:
        copies = realigned(xq, wq)
        if copies is None:
            raise
        mxfp4_gemm_out(out, copies[0], x_scale, copies[1], w_scale, *configuration)
    return out


def _plan_linear(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    shuffled: bool = False,
) -> Decision:
    """Return :func:`mxfp4_linear`'s decision: the HIP kernel, else torch."""
    hip = plan_mxfp4(xq, x_scale, wq, w_scale, shuffled=shuffled)
    if hip.accepted is not None:
        return Decision(hip.accepted, (Refused("torch", "the HIP kernel takes this shape"),))
    return Decision(Accepted("torch", "mxfp4_mm_packed", MappingProxyType({}), "the HIP kernel refused"), hip.refused)


@planned_by(_plan_linear)
def mxfp4_linear(
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    shuffled: bool = False,
) -> torch.Tensor:
    """Return X @ W^T + bias from MXFP4 operands, always: the kernel where it applies, else torch.

    Args:
        xq: activations [M, K/2].
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        bias: bfloat16 [N], added to the rounded product.
        out: bfloat16 [M, N] to write into.
        shuffled: the weight and its scales are in the shuffled order.

    Returns:
        bfloat16 [M, N]; ``out`` itself where it is given.

    Raises:
        GuardError: dtypes or shapes that are no MXFP4 operands, or a bias or an ``out`` of another shape, dtype or
            device.
    """
    taken = _plan_linear(xq, x_scale, wq, w_scale, bias, out, shuffled=shuffled).accepted
    if out is not None:
        require_dtype("out", out, (torch.bfloat16,))
        require_shape("out", out, (xq.shape[0], wq.shape[0]), "[M, N]")
        require_device("out", out, xq.device)
    if bias is not None:
        require_dtype("bias", bias, (torch.bfloat16,))
        require_shape("bias", bias, (wq.shape[0],), "[N]")
        require_device("bias", bias, xq.device)
    if taken is not None and taken.path == "hip":
        result = run_mxfp4(xq, x_scale, wq, w_scale, shuffled=shuffled, **taken.configuration)
    else:
        xq, wq = xq.view(torch.uint8), wq.view(torch.uint8)
        if shuffled:
            w_scale = unshuffle_scale(w_scale, wq.shape[0], 2 * wq.shape[1] // BLOCK)
            wq = unshuffle_weight(wq)
        result = mxfp4_mm_packed(xq, x_scale, wq, w_scale)
    if bias is not None:
        result = result.add_(bias)
    return result if out is None else out.copy_(result)
