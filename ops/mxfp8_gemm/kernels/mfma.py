"""The MX-FP8 GEMM whose waves each take tiles of columns through scaled MFMA: its stub, its raw op and its value."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_int
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.kernel import Configuration, Kernel, Pipeline
from hipforge.ops.mxfp8_gemm.raw import MAX_ELEMENTS, STEP_BYTES, k_steps, new_result, run_raw

MAX_M = 64
N_SUB = (1, 2, 4)
K_SPLITS = (1, 2, 4, 8)
STEPS_AHEAD = {1: 4, 2: 4, 4: 2}  # by n_sub


@compile_ops(
    "module_mxfp8_gemm_mfma",
    # The module's guard refuses any other n_sub.
    variant=lambda *given: {"HF_N_SUB": given[6] if given[6] in N_SUB else 1},
    mutates=("out", "workspace"),
)
def smallm_mxfp8_mfma_out(
    out: torch.Tensor,
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    workspace: torch.Tensor | None,
    n_sub: int,
    k_splits: int,
    bias: torch.Tensor | None = None,
) -> None:
    """Write Xq @ Wq^T + ``bias`` into ``out`` [M, N] bf16; ``workspace`` float32 [k_splits, M, N] takes partials."""


def split_k_workspace(m: int, n: int, k_splits: int, device: torch.device) -> torch.Tensor | None:
    """Return the float32 [k_splits, m, n] that partial sums need; None where K is not split."""
    return torch.empty((k_splits, m, n), dtype=torch.float32, device=device) if k_splits > 1 else None


@documented_like(run_raw)
def smallm_mxfp8_mfma(
    Xq: torch.Tensor,
    Xs: torch.Tensor,
    Wq: torch.Tensor,
    Ws: torch.Tensor,
    out_dtype: torch.dtype,
    n_sub: int = 1,
    k_splits: int = 1,
) -> torch.Tensor:
    """Run the scaled-MFMA kernel on contiguous tensors; shapes and dtypes as in the module's docstring, M to 64.

    With ``k_splits`` > 1 float32 partial sums are added in a fixed order, so that results do not vary from run to
    run.

    Args:
        out_dtype: ``torch.bfloat16``.
        n_sub: 16-column tiles per wave: 1, 2 or 4.
        k_splits: parts that K is cut into: 1, 2, 4 or 8, at most ceil(K / 128).
    """
    out = new_result(Xq, Wq, out_dtype)
    parts = min(require_int("k_splits", k_splits), K_SPLITS[-1])
    workspace = split_k_workspace(out.shape[0], out.shape[1], parts, out.device)
    smallm_mxfp8_mfma_out(out, Xq, Xs, Wq, Ws, workspace, n_sub, k_splits)
    return out


def _launch(
    out: torch.Tensor,
    xq: torch.Tensor,
    x_scale: torch.Tensor,
    wq: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    workspace: torch.Tensor | None,
    n_sub: int,
    k_splits: int,
) -> None:
    added = () if bias is None else (bias,)
    smallm_mxfp8_mfma_out(out, xq, x_scale, wq, w_scale, workspace, n_sub, k_splits, *added)


def _candidates(cell: Any, arch: str) -> list[Configuration]:
    given = [{"n_sub": n_sub, "k_splits": k_splits} for k_splits in K_SPLITS for n_sub in N_SUB]
    return [one for one in given if _refusal(one, cell.key, arch) is None]


def _refusal(given: Configuration, key: Sequence[int], arch: str) -> str | None:
    m, n, k = key
    if m > MAX_M or n * k > MAX_ELEMENTS:
        return f"M of at most {MAX_M} and N*K of at most 2^31 - 1"
    return None if given["k_splits"] <= k_steps(k) else f"no more k_splits than the {k_steps(k)} K steps of 128"


def _pipeline(given: Configuration, cell: Any, arch: str) -> Pipeline:
    return Pipeline(STEPS_AHEAD[given["n_sub"]] * STEP_BYTES * given["n_sub"])


MFMA = Kernel(
    "smallm_mxfp8_mfma",
    archs=("gfx950",),
    parameters=MappingProxyType({"n_sub": N_SUB, "k_splits": K_SPLITS}),
    launch=_launch,
    candidates=_candidates,
    pipeline=_pipeline,
    refusal=_refusal,
    workspace=lambda given, key, device: split_k_workspace(key[0], key[1], given["k_splits"], device),
)
