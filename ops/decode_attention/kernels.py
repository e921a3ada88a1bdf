"""The stubs of the decode attention modules, and their calls: workspaces allocated, an explicit configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.checks import require_device, require_dtype, require_rank
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.decode_attention.family import (
    CONFIGURATION,
    HEAD_DIMS,
    INPUTS,
    INT4_CONFIGURATION,
    check_configuration,
)

FLOAT_BYTES = 4
WORKSPACE_ALIGNMENT = 16


class Options(TypedDict, total=False):
    """What the public functions and the kernels take by name, as :func:`run_decode_attention` says."""

    causal: bool
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    sinks: torch.Tensor | None
    window: int | None
    softcap: float | None
    out_scale: torch.Tensor | None
    scale_out: torch.Tensor | None
    out: torch.Tensor | None
    lse_out: torch.Tensor | None
    workspace: torch.Tensor | None


def _variant(
    out: torch.Tensor, lse: torch.Tensor, partial: object, partial_lse: object, q: torch.Tensor, *rest: object
) -> dict[str, int | str]:
    return {"HF_HEAD_DIM": q.shape[-1], "HF_INPUT": INPUTS[q.dtype]}


def _stub(cache: str, variant: Callable[..., Mapping[str, int | str]]) -> Callable[..., None]:
    """Return the stub of a cache format's module; formats differ in their scales and in the last three."""

    def entry(
        out: torch.Tensor,
        lse: torch.Tensor,
        partial: torch.Tensor | None,
        partial_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_tables: torch.Tensor | None,
        seqlens: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_scale_shift: torch.Tensor | None,
        v_scale_shift: torch.Tensor | None,
        cu_seqlens_q: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out_scale: torch.Tensor | None,
        scale_out: torch.Tensor | None,
        groups: int,
        scale: float,
        max_seqlen_q: int,
        causal: bool,
        window: int,
        softcap: float,
        block_n: int,
        waves: int,
        splits: int,
    ) -> None:
        """Write the attention into ``out`` [B, Mq, Hq, D] and its log-sum-exp into ``lse`` float32 [B, Hq, Mq].

        With ``cu_seqlens_q`` int32 [B + 1] they are [tokens, Hq, D] and [Hq, tokens]; ``max_seqlen_q`` is 0 otherwise.
        A ``window`` or ``softcap`` of 0 is none. ``out`` is of q's dtype, float32, fp8 by ``out_scale`` float32 [1], or
        MX-FP8 with ``scale_out`` uint8 [tokens, Hq * D / 32]. An int4 cache has ``groups`` scales in each row.
        """

    entry.__name__ = f"decode_attention_{cache}_out"
    mutates = ("out", "lse", "partial", "partial_lse", "scale_out")
    return compile_ops(f"module_decode_attention_{cache}", variant=variant, mutates=mutates)(entry)


decode_attention_fp8_out = _stub("fp8", lambda *args: {**_variant(*args), "HF_BLOCK_N": args[-3]})
decode_attention_int4_out = _stub("int4", _variant)
decode_attention_half_out = _stub("half", _variant)


def empty_output(q: torch.Tensor, quantised: bool) -> torch.Tensor:
    """Return memory for the attention of q [..., Hq, D]: of q's dtype, or fp8 of its device."""
    return torch.empty(q.shape, dtype=fp8_dtypes(q.device)[0] if quantised else q.dtype, device=q.device)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """Return memory for the log-sum-exp of q, float32 of :func:`lse_shape`."""
    return torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the log-sum-exp of q: [B, Hq, Mq] of q [B, Mq, Hq, D], [Hq, tokens] of [tokens, Hq, D]."""
    *batch, tokens, heads, _ = q.shape
    return (*batch, heads, tokens)


def workspace_bytes(q: torch.Tensor, splits: int) -> int:
    """Return the bytes that the parts of ``splits`` splits take for q [..., Hq, D]: none for one split."""
    return 0 if splits == 1 else FLOAT_BYTES * splits * (q.numel() + q.numel() // q.shape[-1])


def _parts_in(workspace: torch.Tensor, q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and log-sum-exps of the splits as views of ``workspace``."""
    needed = workspace_bytes(q, splits)
    require_dtype("workspace", workspace, (torch.uint8,))
    require_rank("workspace", workspace, 1, "[bytes]")
    require_device("workspace", workspace, q.device)
    if not workspace.is_contiguous() or workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise GuardError(f"workspace must be contiguous and start at a multiple of {WORKSPACE_ALIGNMENT} bytes")
    if workspace.numel() < needed:
        raise GuardError(
            f"workspace must have at least {needed} bytes for split_k={splits}, as attention_workspace_size says; "
            f"got {workspace.numel()}"
        )
    values = FLOAT_BYTES * splits * q.numel()
    partial = workspace[:values].view(torch.float32).view(splits, q[..., 0].numel(), q.shape[-1])
    return partial, workspace[values:needed].view(torch.float32).view(splits, q[..., 0].numel())


def run_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_scale_shift: torch.Tensor | None = None,
    v_scale_shift: torch.Tensor | None = None,
    *,
    num_groups: int | None = None,
    scale: float,
    configuration: Mapping[str, int],
    causal: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel in one explicit configuration: what the planner calls, and a tuner.

    Args:
        q: bfloat16 or float16 [B, Mq, Hq, D]; with ``cu_seqlens_q`` [tokens, Hq, D].
        k: fp8 of the device or uint8 [pages, page_size, Hkv, D]; [B, Mkv, Hkv, D] without block tables. Of q's dtype:
            a cache that is not quantised. With ``num_groups`` int32 [pages, page_size, Hkv, num_groups + D/8].
        v: like ``k``.
        block_tables: int32 [B, max_pages], or None.
        seqlens: int32 [B].
        k_scale: float32 [1] or [Hkv]; None where rows have words of their own.
        v_scale: like ``k_scale``.
        k_scale_shift: int32 [pages, page_size, Hkv], float16 scale in the low half and float16 shift in the high
            half; None where ``k_scale`` is given.
        v_scale_shift: like ``k_scale_shift``.
        num_groups: scales in each row of an int4 cache; None for the others.
        scale: factor of q.k.
        configuration: ``waves``, ``split_k`` and, of an fp8 cache, ``block_n``.
        causal: token t of Mq sees keys up to seqlen - Mq + t; otherwise each sees all.
        cu_seqlens_q: contiguous int32 [B + 1], the first token of each sequence in q, and the end.
        max_seqlen_q: the most tokens of a sequence, 1 to 16; only with ``cu_seqlens_q``.
        sinks: float32 [Hq], contiguous, or None.
        window: keys that a token sees, its own the last one; None for all.
        softcap: c of c tanh(score / c); None for none.
        out_scale: float32 [1]: out is fp8 of the device, of the float32 result over this scale.
        scale_out: uint8 or float8_e8m0fnu [tokens, Hq * D / 32], written: out is MX-FP8 of the float32 result.
        out: contiguous, of q's shape, to write into: of q's dtype, or float32 for the result before any rounding; fp8
            with a scale.
        lse_out: contiguous float32 [B, Hq, Mq] ([Hq, tokens]) to write into.
        workspace: uint8 [bytes] for what the splits give, at least :func:`workspace_bytes`; allocated if None.

    Returns:
        (out like q, log-sum-exp float32 [B, Hq, Mq] or [Hq, tokens], natural logarithm).

    Raises:
        GuardError: operands or a configuration that the kernel does not take.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    if q.dim() not in (3, 4) or q.dtype not in INPUTS or q.shape[-1] not in HEAD_DIMS:
        raise GuardError(
            f"q must be float16 or bfloat16 [B, Mq, Hq, D], or [tokens, Hq, D], with D in {HEAD_DIMS}; got {q.dtype} "
            f"{tuple(q.shape)}"
        )
    if num_groups is None and k.dtype not in INPUTS:
        stub = decode_attention_fp8_out
        check_configuration(configuration, q.shape[-1], CONFIGURATION)
    else:
        stub = decode_attention_half_out if num_groups is None else decode_attention_int4_out
        check_configuration(configuration, q.shape[-1], INT4_CONFIGURATION)
    splits = configuration["split_k"]
    out = empty_output(q, out_scale is not None or scale_out is not None) if out is None else out
    lse = empty_lse(q) if lse_out is None else lse_out
    partial = partial_lse = None
    if splits > 1 and workspace is None:
        rows = q.numel() // q.shape[-1]
        partial = torch.empty((splits, rows, q.shape[-1]), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, rows), dtype=torch.float32, device=q.device)
    elif splits > 1 and workspace is not None:
        partial, partial_lse = _parts_in(workspace, q, splits)
    block_tables = None if block_tables is None else packed(block_tables)
    stub(
        out, lse, partial, partial_lse, packed(q), k, v, block_tables, packed(seqlens), k_scale, v_scale,
        k_scale_shift, v_scale_shift, cu_seqlens_q, sinks, out_scale, scale_out, num_groups or 0, scale,
        max_seqlen_q or 0, causal, window or 0, softcap or 0.0, configuration.get("block_n", 0),
        configuration["waves"], splits,
    )  # fmt: skip
    return out, lse
