"""Decode attention over an fp8 K/V cache, split-K, for gfx950 and sm_90 (e4m3fn), gfx942 (e4m3fnuz); torch elsewhere.

A few query tokens per sequence attend over its cached keys. The queries that share a KV head are folded into rows of
one tile of 16; a wave (two at D = 256) owns a tile, a KV head, a sequence and a range of its keys, in blocks of 64, 32
or 16. The waves of a work-group merge their ranges, and a second kernel merges the splits by their log-sum-exp, always
in the same order.

On gfx950 and gfx942 another kernel (``decode_attention_gathered``) takes caches with pages of other than whole tiles of
16 keys, and D of other than 64, 128, 192 and 256: each key's row is found by itself, and 1 to 4 waves
share a key range, 128 columns each. Its arithmetic is the same.

Arithmetic: K is multiplied as it lies in memory by q as a sum of fp8 terms, which is exact but for elements of q below
2^-13 of their row's largest (those lose at most 2^-21 of it). V is exact in bfloat16. Scales and shifts are applied in
float32 outside the products. What is rounded is a weight 2^(score - maximum), times the scale of its row of V where
rows have one, to bfloat16 (a relative error of 2^-8 at most), and the output. A cache of q's own 16-bit dtype is
multiplied as it is, by weights rounded to that dtype. On sm_90 all fp8 and int4 products are of float16, to which q is
brought by a power of two for each row and weights are rounded (2^-11); an int4 element must be within float16's range.
There a warp owns keys, a cluster of up to 16 blocks adds up the splits, and ``block_n`` is the most keys of a step.

Token t of Mq sees keys up to seqlen - Mq + t (``causal``), so Mq = 1 sees the whole sequence. Sequences may have
unequally many tokens (``cu_seqlens_q``): the grid is for the most, and a work-group without a row ends at once. A row
that sees no key gives zeros and a log-sum-exp of -inf (of its sink where heads have one). A key outside a token's mask
does not change that token's row, even if it holds NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

import torch

from hipforge.errors import GuardError
from hipforge.ops.core.arguments import bound, naming_arguments
from hipforge.ops.core.checks import require_out
from hipforge.ops.core.dispatch import planned_by, planner_of
from hipforge.ops.core.documented import documented_like
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.decode_attention.family import FAMILY, INT4_FAMILY, Forced
from hipforge.ops.decode_attention.kernels import (
    ARCH_DTYPES,
    Options,
    accepts_configuration,
    lse_shape,
    run_decode_attention,
    split_k_heuristic,
    workspace_bytes,
)
from hipforge.ops.decode_attention.layout import Call, Scale, packed_call, plain_call
from hipforge.ops.decode_attention.operation import decode_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

PUBLIC = ("decode_attention_fp8", "decode_attention_splitk")

__all__ = [
    "ARCH_DTYPES",
    "FAMILY",
    "INT4_FAMILY",
    "accepts_configuration",
    "attention_workspace_size",
    "decode_attention_fp8",
    "decode_attention_splitk",
    "run_decode_attention",
    "split_k_heuristic",
]


class _PlainOptions(Options, total=False):
    """What :func:`decode_attention_fp8` takes by name."""

    split_k: int | None
    force_kernel_config: Forced


class _PackedOptions(Options, total=False):
    """What :func:`decode_attention_splitk` takes by name."""

    num_groups: int | None


def _new_scales(q: torch.Tensor) -> torch.Tensor:
    shape = math.prod(q.shape[:-2]), math.prod(q.shape[-2:]) // BLOCK
    return q.new_empty(shape, dtype=torch.uint8)


@overload
def decode_attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    out_format: None = None,
    **options: Unpack[_PlainOptions],
) -> torch.Tensor: ...


@overload
def decode_attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    out_format: None = None,
    **options: Unpack[_PlainOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    out_format: Literal["mxfp8"],
    **options: Unpack[_PlainOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    out_format: Literal["mxfp8"],
    **options: Unpack[_PlainOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    scale: float | None = None,
    *,
    return_lse: bool,
    out_format: Literal["mxfp8"] | None = None,
    **options: Unpack[_PlainOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@planned_by(lambda **given: planner_of("decode_attention")(*plain_call(**given)))
@naming_arguments
def decode_attention_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    causal: bool = True,
    split_k: int | None = None,
    force_kernel_config: Forced = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: torch.Tensor | None = None,
    out_format: Literal["mxfp8"] | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return softmax(scale q K^T) V over an fp8 cache with one scale per tensor or KV head.

    Args:
        q: bfloat16 or float16 [B, Mq, Hq, D], Mq 1 to 16; D a multiple of 8 from 16 to 512 for the kernels (on sm_90
            64, 128, 192 or 256). With ``cu_seqlens_q`` [tokens, Hq, D].
        k_cache: float8 of the device (e4m3fn on gfx950, e4m3fnuz on gfx942; or uint8 with its bits)
            or of q's own 16-bit dtype, [pages, page_size, Hkv, D], any page_size for the kernels (on sm_90 a multiple
            of 16); the last dimension contiguous, the other strides multiples of 16 bytes, or of 8 where page_size is
            no multiple of 16 or D is not 64, 128, 192 or 256. Without block tables [B, Mkv, Hkv, D], any Mkv.
        v_cache: like ``k_cache``.
        block_tables: int32 [B, max_pages], the page of each page_size keys of a sequence, or None; [B, Hkv, max_pages]
            where each KV head has its own keys, such as those that :func:`hipforge.sparse_topk_blocks` chose. Only the
            entries of a sequence's own keys are read; there a page that the cache does not have is refused where the
            tables are on the CPU, and undefined on a GPU.
        seqlens: int32 [B], keys of each sequence; 0 gives zeros. [B, Hkv] with such tables. Keys past what the tables
            hold do not exist.
        k_scale: the factor of K's fp8 values: a number, or float32 [1] or [Hkv].
        v_scale: the same of V.
        scale: factor of q.k; 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp.
        causal: token t of Mq sees keys up to seqlen - Mq + t; otherwise each sees all.
        split_k: parts that the keys of a sequence are cut into, 1 to 512; None decides by shape.
        force_kernel_config: any of ``block_n`` (16, 32, 64), ``waves`` (1, 2, 4; from 2 at D 256), ``split_k`` and
            ``block_m`` (16), which override ``split_k``, the tuned table and the heuristic. A cache of 16-bit elements
            has ``waves`` (1, 2, 4) and ``split_k``, and so have other pages and D than those above: there ``waves`` is
            D / 128, rounded up, or 2 or 4 times as many, up to 4.
        cu_seqlens_q: int32 [B + 1], for sequences of unequally many query tokens: those of sequence b are
            q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]], none included, and its last keys are theirs, as with ``causal``.
            Tokens of q after the last one stay unwritten. Not with block tables of each KV head. Values that do not
            rise from 0 to at most ``tokens``, or by more than ``max_seqlen_q``, are refused where they are on the CPU,
            and undefined on a GPU.
        max_seqlen_q: with ``cu_seqlens_q``, the most query tokens that a sequence has, 1 to 16.
        sinks: float32 [Hq]: for each head a score that no key has, finite or -inf, which adds to the sum of weights
            alone; neither scaled nor capped. The log-sum-exp includes it, up to 2.3e38.
        window: a token sees the last ``window`` keys of those that ``causal`` lets it see, its own among them, at least
            1. Pages before them are not read.
        softcap: c > 0: scores become c tanh(score / c) before they are masked.
        out_scale: float32 [1] on the device: out is fp8, the float32 result times 1 / scale, saturated and rounded to
            nearest even, so that out.float() * scale is the attention; 0 is taken as 1.
        out_format: "mxfp8": out is fp8 with an e8m0 scale per 32 elements of a token's heads, what
            :func:`hipforge.mxfp8_quantize` makes of the float32 result, bit for bit, and where D is no multiple of 32
            in a launch of that op, which gives tokens of no sequence zeros. Not with ``out_scale``.
        out: contiguous, like q (fp8 of the device with a scale), to write the attention into.
        scale_out: contiguous uint8 or float8_e8m0fnu [B * Mq, Hq * D / 32] ([tokens, Hq * D / 32]) to write these
            scales into.
        lse_out: contiguous float32 [B, Hq, Mq] ([Hq, tokens]) to write the log-sum-exp into.
        workspace: uint8 [bytes] for what the splits give before they are merged, at least
            :func:`attention_workspace_size` of this call and at a multiple of 16; allocated if None. Calls on one
            stream may share it. A traced graph manages its own memory and ignores it.

    Returns:
        out like q; with ``return_lse`` (out, float32 [B, Hq, Mq]), natural logarithm, -inf where nothing is seen; with
        ``cu_seqlens_q`` it is [Hq, tokens]. With ``out_format`` the scales come last: (out, scales) or
        (out, log-sum-exp, scales).

    Raises:
        GuardError: operands that do not fit each other or the kernel.
        BuildError, LaunchError: the kernel could not be built or run.

    Example:
        >>> import torch, hipforge
        >>> fp8 = ARCH_DTYPES[hipforge.devices.current().arch_of()]
        >>> q, cache = torch.ones(1, 1, 4, 64).half(), torch.ones(1, 32, 1, 64).to(fp8)
        >>> lengths = torch.tensor([20], dtype=torch.int32)
        >>> hipforge.decode_attention_fp8(q, cache, cache, None, lengths)[0, 0, 0, 0].item()
        1.0
    """
    return_lse = bool(return_lse)  # what has no truth is refused before anything is written
    call = plain_call(
        q, k_cache, v_cache, block_tables, seqlens, k_scale, v_scale, scale=scale, causal=causal, split_k=split_k,
        force_kernel_config=force_kernel_config, sinks=sinks, window=window, softcap=softcap, out_scale=out_scale,
        out_format=out_format, scale_out=scale_out, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    if out_format is not None and scale_out is None:
        scale_out = _new_scales(call.q)
    found = decode_attention(*call, scale_out=scale_out, out=out, lse_out=lse_out, workspace=workspace)
    if scale_out is not None:
        return (*found, scale_out) if return_lse else (found[0], scale_out)
    return found if return_lse else found[0]


@overload
def decode_attention_splitk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    scale: float | None = None,
    split_k: int | None = None,
    force_kernel_config: Forced = None,
    *,
    out_format: None = None,
    **options: Unpack[_PackedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention_splitk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    scale: float | None = None,
    split_k: int | None = None,
    force_kernel_config: Forced = None,
    *,
    out_format: Literal["mxfp8"],
    **options: Unpack[_PackedOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@planned_by(lambda **given: planner_of("decode_attention")(*packed_call(**given)))
@naming_arguments
@documented_like(decode_attention_fp8)
def decode_attention_splitk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    scale: float | None = None,
    split_k: int | None = None,
    force_kernel_config: Forced = None,
    *,
    causal: bool = True,
    num_groups: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_scale: torch.Tensor | None = None,
    out_format: Literal["mxfp8"] | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return attention and its log-sum-exp over a packed fp8 or int4 cache with scales and shifts in the rows' words.

    Args:
        q: bfloat16 or float16 [1, B*Mq, G, Hq, D]: G KV heads with Hq queries each. With ``cu_seqlens_q``
            [1, tokens, G, Hq, D].
        k: int32 [1, B*Mkv, G, Hq, D/4], expanded along Hq (stride 0): four fp8 values of the device per word, element
            d in bits 8 (d % 4) of word d / 4. Paged: [1, pages*page_size, G, Hq, D/4]. With ``num_groups`` int4:
            num_groups + D/8 words per row, first a word like those of ``k_scale_shift`` for each group of
            D / num_groups neighbouring elements, then eight elements per word, element d in bits 4 (d % 8). Not
            quantised: of q's 16-bit dtype, [1, rows, G, Hq, D].
        v: like ``k``.
        k_scale_shift: int32 [1, rows, G, Hq], expanded likewise: float16 scale in the low half, float16 shift in the
            high half; an element is fp8 * scale + shift. None with ``num_groups`` and
            for a cache that is not quantised.
        v_scale_shift: the same of V.
        seqlens: int32 [B]; rows past a sequence's length are ignored.
        block_tables: int32 [B, max_pages], with ``page_size``.
        page_size: rows of a page, any number for the kernels (on sm_90 a multiple of 16).
        force_kernel_config: as for :func:`decode_attention_fp8`; with ``num_groups`` ``waves`` and ``split_k``.
        num_groups: 1, 2, 4 or 8: k and v are int4 with so many scales per row; D is then a multiple of 8 num_groups for
            the kernels. None: they are fp8.
        sinks: as for :func:`decode_attention_fp8`, float32 [G * Hq].
        out: contiguous, like q (fp8 of the device with a scale), to write the attention into.
        scale_out: contiguous uint8 or float8_e8m0fnu [B * Mq, G * Hq * D / 32] to write the scales into.
        lse_out: contiguous float32 [B, G, Hq, Mq] ([G, Hq, tokens]) to write the log-sum-exp into.

    Returns:
        (out like q, log-sum-exp float32 [B, G, Hq, Mq], with ``cu_seqlens_q`` [G, Hq, tokens]); with ``out_format``
        (out, log-sum-exp, scales).

    Example:
        >>> import torch, hipforge
        >>> from hipforge.ops.reference import quantize_kv_int4
        >>> rows = quantize_kv_int4(torch.ones(1, 32, 1, 1, 64), 1).expand(-1, -1, -1, 4, -1)
        >>> q, lengths = torch.ones(1, 1, 1, 4, 64).half(), torch.tensor([20], dtype=torch.int32)
        >>> out, _ = hipforge.decode_attention_splitk(q, rows, rows, None, None, lengths, num_groups=1)
        >>> out[0, 0, 0, 0, 0].item()
        1.0
    """
    call = packed_call(
        q, k, v, k_scale_shift, v_scale_shift, seqlens, block_tables, page_size, scale=scale, split_k=split_k,
        force_kernel_config=force_kernel_config, causal=causal, num_groups=num_groups, sinks=sinks, window=window,
        softcap=softcap, out_scale=out_scale, out_format=out_format, scale_out=scale_out, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )  # fmt: skip
    folded = call.q
    *batch, heads, tokens = lse_shape(folded)
    groups = (*batch, q.shape[2], q.shape[3], tokens)
    folded_out = folded_lse = None
    if out is not None:
        quantised = out_scale is not None or out_format is not None
        require_out(out, q.shape, fp8_dtypes(q.device)[0] if quantised else q.dtype, q.device)
        folded_out = out.view(folded.shape)
    if lse_out is not None:
        require_out(lse_out, groups, torch.float32, q.device, "lse_out")
        folded_lse = lse_out.view(*batch, heads, tokens)
    if out_format is not None and scale_out is None:
        scale_out = _new_scales(folded)
    found, lse = decode_attention(*call, scale_out=scale_out, out=folded_out, lse_out=folded_lse, workspace=workspace)
    results = found.view(q.shape) if out is None else out, lse.view(groups) if lse_out is None else lse_out
    return results if scale_out is None else (*results, scale_out)


def attention_workspace_size(attention: Callable[..., object], *args: object, **kwargs: object) -> int:
    """Return the bytes of ``workspace`` that a call needs: 0 where one split, or torch, computes it.

    Args:
        attention: :func:`decode_attention_fp8` or :func:`decode_attention_splitk`.
        args: the call's arguments.
        kwargs: the call's keyword arguments.

    Raises:
        GuardError: what the call itself would raise, or another function.

    Example:
        >>> import torch
        >>> from hipforge.ops.decode_attention import attention_workspace_size, decode_attention_fp8
        >>> q, cache = torch.zeros(1, 1, 8, 64).bfloat16(), torch.zeros(1, 512, 1, 64).bfloat16()
        >>> lengths = torch.tensor([512], dtype=torch.int32)
        >>> attention_workspace_size(decode_attention_fp8, q, cache, cache, None, lengths, split_k=4)
        8320
    """
    calls: dict[Callable[..., object], Callable[..., Call]] = {
        decode_attention_fp8: plain_call,
        decode_attention_splitk: packed_call,
    }
    if attention not in calls:
        raise GuardError(f"attention must be decode_attention_fp8 or decode_attention_splitk; got {attention!r}")
    call = calls[attention](**bound(attention.__name__, inspect.signature(attention), args, kwargs))
    taken = planner_of("decode_attention")(*call).accepted
    if taken is None or taken.path != "kernel":
        return 0
    return workspace_bytes(call.q, taken.configuration["split_k"])
