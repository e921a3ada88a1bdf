"""The stubs of the decode attention modules, and their calls: workspaces allocated, an explicit configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict

import torch

from hipforge.errors import GuardError
from hipforge.jit.compile_ops import compile_ops
from hipforge.ops.core.checks import require_device, require_dtype, require_rank
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.decode_attention.family import HEAD_DIMS, INPUTS, check_configuration

if TYPE_CHECKING:
    from typing_extensions import Unpack

FLOAT_BYTES = 4
WORKSPACE_ALIGNMENT = 16


class Options(TypedDict, total=False):
    """What the public functions and every kernel take by name, as :func:`run_decode_attention` says."""

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


_WRITTEN = ("out", "lse", "partial", "partial_lse", "scale_out")


@compile_ops(
    "module_decode_attention_fp8", variant=lambda *args: {**_variant(*args), "HF_BLOCK_N": args[-3]}, mutates=_WRITTEN
)
def decode_attention_fp8_out(
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

    With ``cu_seqlens_q`` int32 [B + 1] they are [tokens, Hq, D] and [Hq, tokens]; ``max_seqlen_q`` is 0 otherwise. A
    ``window`` or ``softcap`` of 0 is none. ``out`` is of q's dtype, float32, fp8 by ``out_scale`` float32 [1], or
    MX-FP8 with ``scale_out`` uint8 [tokens, Hq * D / 32].
    """


@compile_ops("module_decode_attention_int4", variant=_variant, mutates=_WRITTEN)
def decode_attention_int4_out(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    partial_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
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
    waves: int,
    splits: int,
) -> None:
    """Write what :func:`decode_attention_fp8_out` writes, over int4 rows with ``groups`` scales each."""


@compile_ops("module_decode_attention_half", variant=_variant, mutates=_WRITTEN)
def decode_attention_half_out(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor | None,
    partial_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    scale: float,
    max_seqlen_q: int,
    causal: bool,
    window: int,
    softcap: float,
    waves: int,
    splits: int,
) -> None:
    """Write what :func:`decode_attention_fp8_out` writes, over caches of q's dtype."""


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


def _run(
    stub: Callable[..., None],
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    pages: tuple[torch.Tensor | None, torch.Tensor],
    scales: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    configuration: tuple[int, ...],
    *,
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
    """Call a stub, whose ``configuration`` ends with the splits, on what it takes, and return (out, lse)."""
    splits, (block_tables, seqlens) = configuration[-1], pages
    out = empty_output(q, out_scale is not None or scale_out is not None) if out is None else out
    lse = empty_lse(q) if lse_out is None else lse_out
    partial = partial_lse = None
    if splits > 1 and workspace is None:
        rows = q.numel() // q.shape[-1]
        partial = torch.empty((splits, rows, q.shape[-1]), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, rows), dtype=torch.float32, device=q.device)
    elif splits > 1 and workspace is not None:
        partial, partial_lse = _parts_in(workspace, q, splits)
    block_tables = None if block_tables is None else block_tables.contiguous()
    stub(
        out, lse, partial, partial_lse, q.contiguous(), *caches, block_tables, seqlens.contiguous(), *scales,
        cu_seqlens_q, sinks, out_scale, scale_out, *numbers, max_seqlen_q or 0, causal, window or 0, softcap or 0.0,
        *configuration,
    )  # fmt: skip
    return out, lse


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
    scale: float,
    configuration: Mapping[str, int],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel in one explicit configuration: what the planner calls, and a tuner.

    Args:
        q: bfloat16 or float16 [B, Mq, Hq, D]; with ``cu_seqlens_q`` [tokens, Hq, D].
        k: fp8 of the device or uint8 [pages, page_size, Hkv, D]; [B, Mkv, Hkv, D] without block tables.
        v: like ``k``.
        block_tables: int32 [B, max_pages], or None.
        seqlens: int32 [B].
        k_scale: float32 [1] or [Hkv]; None where rows have words of their own.
        v_scale: like ``k_scale``.
        k_scale_shift: int32 [pages, page_size, Hkv], float16 scale in the low half and float16 shift in the high
            half; None where ``k_scale`` is given.
        v_scale_shift: like ``k_scale_shift``.
        scale: factor of q.k.
        configuration: ``block_n``, ``waves`` and ``split_k``, all three.
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
    check_configuration(configuration, q.shape[-1])
    chosen = configuration["block_n"], configuration["waves"], configuration["split_k"]
    scales = k_scale, v_scale, k_scale_shift, v_scale_shift
    return _run(decode_attention_fp8_out, q, (k, v), (block_tables, seqlens), scales, (scale,), chosen, **options)


def run_int4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    num_groups: int,
    *,
    scale: float,
    configuration: Mapping[str, int],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the int4 kernel on q [B, Mq, Hq, D] and k, v int32 [pages, page_size, Hkv, num_groups + D/8].

    The rest as for :func:`run_decode_attention`; ``configuration`` has ``waves`` and ``split_k``.
    """
    chosen = configuration["waves"], configuration["split_k"]
    numbers = num_groups, scale
    return _run(decode_attention_int4_out, q, (k, v), (block_tables, seqlens), (), numbers, chosen, **options)


def run_half(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    scale: float,
    configuration: Mapping[str, int],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel for a cache of q's dtype on q [B, Mq, Hq, D] and k, v [pages, page_size, Hkv, D].

    The rest as for :func:`run_decode_attention`; ``configuration`` has ``waves`` and ``split_k``.
    """
    chosen, scales = (configuration["waves"], configuration["split_k"]), (k_scale, v_scale)
    return _run(decode_attention_half_out, q, (k, v), (block_tables, seqlens), scales, (scale,), chosen, **options)
