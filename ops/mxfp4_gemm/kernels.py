"""The stub of the MXFP4 GEMM's module, and its call in an explicit configuration."""

from __future__ import annotations

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.alignment import realigned
from hipforge.ops.core.checks import require_choice
from hipforge.ops.mxfp4_gemm.family import K_SPLITS, PARAMETERS, SUB_TILES, Problem


@compile_ops(
    "module_mxfp4_gemm",
    variant=lambda out, xq, xs, wq, ws, shuffled, m_sub, n_sub, k_splits: {"HF_M_SUB": m_sub, "HF_N_SUB": n_sub},
)
def mxfp4_gemm_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    shuffled: bool,
    m_sub: int,
    n_sub: int,
    k_splits: int,
) -> None:
    """Write Xq @ Wq^T into ``out`` [M, N] bf16."""


def launch(
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    shuffled: bool,
    **parameters: int,
) -> torch.Tensor:
    """Run the kernel into ``out``, in a configuration; payloads that start off a 16-byte boundary are copied."""
    x_scale, w_scale = x_scale.contiguous(), w_scale.contiguous()
    numbers = [parameters[name] for name in PARAMETERS]
    try:
        mxfp4_gemm_out(out, xq.contiguous(), x_scale, wq.contiguous(), w_scale, shuffled, *numbers)
    except GuardError:
        copies = realigned(xq, wq)
        if copies is None:
            raise
        mxfp4_gemm_out(out, copies[0], x_scale, copies[1], w_scale, shuffled, *numbers)
    return out


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
    """Run the kernel with the configuration given; shapes and dtypes as in :mod:`hipforge.ops.mxfp4_gemm`.

    Args:
        xq: activations [M, K/2].
        x_scale: e8m0 bytes [M, K/32].
        wq: weights [N, K/2].
        w_scale: e8m0 bytes [N, K/32], or shuffled.
        shuffled: the weight and its scales are in the shuffled order.
        m_sub: tiles of 16 rows per wave: 1, 2 or 4.
        n_sub: tiles of 16 columns per wave: 1, 2 or 4.
        k_splits: waves of a work-group, each with a part of K: 1, 2, 4 or 8, at most ceil(K / 128) and
            64 / (m_sub n_sub). Their sums are added in order.

    Returns:
        bfloat16 [M, N].

    Raises:
        GuardError: an argument that the kernel does not take (ArchError: a device it is not for).
    """
    require_choice("m_sub", m_sub, SUB_TILES)
    require_choice("n_sub", n_sub, SUB_TILES)
    require_choice("k_splits", k_splits, K_SPLITS)
    m, n, _ = Problem.of(xq, x_scale, wq, w_scale, shuffled=shuffled).key
    out = torch.empty((m, n), dtype=torch.bfloat16, device=xq.device)
    return launch(out, xq, x_scale, wq, w_scale, shuffled, m_sub=m_sub, n_sub=n_sub, k_splits=k_splits)
