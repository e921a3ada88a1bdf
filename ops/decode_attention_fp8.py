"""Decode attention over an fp8 K/V cache, split-K, for gfx950 (e4m3fn) and gfx942 (e4m3fnuz); torch elsewhere.

A few query tokens per sequence attend over its cached keys. The queries that share a KV head are folded into rows of
one tile of 16; a wave (two at D = 256) owns a tile, a KV head, a sequence and a range of its keys, in blocks of 64, 32
or 16. The waves of a work-group merge their ranges, and a second kernel merges the splits by their log-sum-exp, always
in the same order.

Arithmetic: K is multiplied as it lies in memory by q as a sum of fp8 terms, which is exact but for elements of q below
2^-13 of their row's largest (those lose at most 2^-21 of it). V is exact in bfloat16. Scales and shifts are applied in
float32 outside the products. What is rounded is a weight 2^(score - maximum), times the scale of its row of V where
rows have one, to bfloat16 (a relative error of 2^-8 at most), and the output.

Token t of Mq sees keys up to seqlen - Mq + t (``causal``), so Mq = 1 sees the whole sequence. A row that sees no key
gives zeros and a log-sum-exp of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import dispatch
from hipforge.ops.core.dispatch import Decision, Refused, planned_by
from hipforge.ops.decode_attention_fp8_checks import Scale, check_operands, prepare_packed, scale_tensor
from hipforge.ops.decode_attention_fp8_kernels import ARCH_DTYPES, run_decode_attention
from hipforge.ops.decode_attention_fp8_plan import accepts_configuration, plan, split_k_heuristic
from hipforge.ops.decode_attention_int4 import attend_int4, plan_int4, prepare_int4
from hipforge.ops.reference.attention import dequantize_kv_fp8, paged_attention

__all__ = [
    "ARCH_DTYPES",
    "accepts_configuration",
    "decode_attention_fp8",
    "decode_attention_splitk",
    "run_decode_attention",
    "split_k_heuristic",
]


def _fp8_of(device: torch.device) -> torch.dtype:
    """The device's own format, in which bytes without a dtype are read; e4m3fn where no kernel runs."""
    target = dispatch.target_of(device)
    return torch.float8_e4m3fn if isinstance(target, Refused) else ARCH_DTYPES.get(target[0], torch.float8_e4m3fn)


def _plan_plain(
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
    force_kernel_config: Mapping[str, int] | None = None,
) -> Decision:
    """Return :func:`decode_attention_fp8`'s decision: the HIP kernel, else torch."""
    max_keys = check_operands(q, k_cache, v_cache, block_tables, seqlens)
    return plan(q, k_cache, max_keys, block_tables is not None, split_k, force_kernel_config)


@planned_by(_plan_plain)
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
    force_kernel_config: Mapping[str, int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q K^T) V over an fp8 cache with one scale per tensor or KV head.

    Args:
        q: bfloat16 or float16 [B, Mq, Hq, D], Mq 1 to 16; D 64, 128 or 256 for the kernel.
        k_cache: float8 of the device (e4m3fn on gfx950, e4m3fnuz on gfx942; or uint8 with its bits)
            [pages, page_size, Hkv, D], page_size a multiple of 16 for the kernel; the last dimension contiguous, the
            other strides multiples of 16. Without block tables [B, Mkv, Hkv, D], any Mkv.
        v_cache: like ``k_cache``.
        block_tables: int32 [B, max_pages], the page of each page_size keys of a sequence, or None. Only the entries
            of a sequence's own keys are read.
        seqlens: int32 [B], keys of each sequence; 0 gives zeros. Keys past what the tables hold do not exist.
        k_scale: what an element of K stands for, times its fp8 value: a number, or float32 [1] or [Hkv].
        v_scale: the same of V.
        scale: factor of q.k; 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp.
        causal: token t of Mq sees keys up to seqlen - Mq + t; otherwise each sees all.
        split_k: parts that the keys of a sequence are cut into, 1 to 512; None decides by shape.
        force_kernel_config: any of ``block_n`` (16, 32, 64), ``waves`` (1, 2, 4; from 2 at D 256), ``split_k`` and
            ``block_m`` (16), which override ``split_k``, the tuned table and the heuristic.

    Returns:
        out like q; with ``return_lse`` (out, float32 [B, Hq, Mq]), natural logarithm, -inf where nothing is seen.

    Raises:
        GuardError: operands that do not fit each other or the kernel.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    max_keys = check_operands(q, k_cache, v_cache, block_tables, seqlens)
    taken = plan(q, k_cache, max_keys, block_tables is not None, split_k, force_kernel_config).accepted
    scales = [
        scale_tensor(name, given, k_cache.shape[2], q.device)
        for name, given in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if taken is not None and taken.path == "kernel":
        out, lse = run_decode_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            seqlens,
            scales[0],
            scales[1],
            scale=factor,
            configuration=taken.configuration,
            causal=causal,
        )
    else:
        fp8 = _fp8_of(q.device)
        caches = [cache.view(fp8) if cache.dtype == torch.uint8 else cache for cache in (k_cache, v_cache)]
        k, v = (
            cache.to(torch.float64) * one.to(torch.float64).view(-1, 1)
            for cache, one in zip(caches, scales, strict=True)
        )
        out, lse = paged_attention(q, k, v, block_tables, seqlens, factor, causal)
    return (out, lse) if return_lse else out


def _refuse_words(*given: torch.Tensor | None) -> None:
    if any(words is not None for words in given):
        raise GuardError("k_scale_shift and v_scale_shift must be None with num_groups: int4 rows hold their scales")


def _words_of(k: torch.Tensor | None, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if k is None or v is None:
        raise GuardError(
            "k_scale_shift and v_scale_shift must be given for an fp8 cache; got None (an int4 one needs num_groups)"
        )
    return k, v


def _plan_packed(
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
    force_kernel_config: Mapping[str, int] | None = None,
    *,
    causal: bool = True,
    num_groups: int | None = None,
) -> Decision:
    """Return :func:`decode_attention_splitk`'s decision: the HIP kernel, else torch."""
    if num_groups is not None:
        _refuse_words(k_scale_shift, v_scale_shift)
        folded, k_data, _ = prepare_int4(q, k, v, seqlens, block_tables, page_size, num_groups)
        return plan_int4(folded, k_data, block_tables, split_k, force_kernel_config)
    k_scale_shift, v_scale_shift = _words_of(k_scale_shift, v_scale_shift)
    folded, k_data, v_data, _, _ = prepare_packed(
        q, k, v, k_scale_shift, v_scale_shift, seqlens, block_tables, page_size
    )
    max_keys = check_operands(folded, k_data, v_data, block_tables, seqlens)
    return plan(folded, k_data, max_keys, block_tables is not None, split_k, force_kernel_config)


@planned_by(_plan_packed)
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
    force_kernel_config: Mapping[str, int] | None = None,
    *,
    causal: bool = True,
    num_groups: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and its log-sum-exp over a packed fp8 or int4 cache with scales and shifts in the rows' words.

    Args:
        q: bfloat16 or float16 [1, B*Mq, G, Hq, D]: G KV heads with Hq queries each.
        k: int32 [1, B*Mkv, G, Hq, D/4], expanded along Hq (stride 0): four fp8 values of the device per word, element
            d in bits 8 (d % 4) of word d / 4. Paged: [1, pages*page_size, G, Hq, D/4]. With ``num_groups`` int4:
            num_groups + D/8 words per row, first a word like those of ``k_scale_shift`` for each group of
            D / num_groups neighbouring elements, then eight elements per word, element d in bits 4 (d % 8).
        v: like ``k``.
        k_scale_shift: int32 [1, rows, G, Hq], expanded likewise: float16 scale in the low half, float16 shift in the
            high half; an element is fp8 * scale + shift. None with ``num_groups``.
        v_scale_shift: the same of V.
        seqlens: int32 [B]; rows past a sequence's length are ignored.
        block_tables: int32 [B, max_pages], with ``page_size``.
        page_size: rows of a page, a multiple of 16 for the kernel.
        scale: factor of q.k; 1/sqrt(D) by default.
        split_k: as for :func:`decode_attention_fp8`.
        force_kernel_config: as for :func:`decode_attention_fp8`; with ``num_groups`` ``waves`` and ``split_k``.
        causal: as for :func:`decode_attention_fp8`.
        num_groups: 1, 2, 4 or 8: k and v are int4 with so many scales per row. None: they are fp8.

    Returns:
        (out like q, log-sum-exp float32 [B, G, Hq, Mq]).

    Raises:
        GuardError: operands that do not fit each other or the kernel.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    if num_groups is not None:
        _refuse_words(k_scale_shift, v_scale_shift)
        folded, k_data, v_data = prepare_int4(q, k, v, seqlens, block_tables, page_size, num_groups)
        decision = plan_int4(folded, k_data, block_tables, split_k, force_kernel_config)
        out, lse = attend_int4(folded, k_data, v_data, block_tables, seqlens, num_groups, scale, causal, decision)
        return out.view(q.shape), lse.view(folded.shape[0], q.shape[2], q.shape[3], folded.shape[1])
    k_scale_shift, v_scale_shift = _words_of(k_scale_shift, v_scale_shift)
    folded, k_data, v_data, k_rows, v_rows = prepare_packed(
        q, k, v, k_scale_shift, v_scale_shift, seqlens, block_tables, page_size
    )
    max_keys = check_operands(folded, k_data, v_data, block_tables, seqlens)
    taken = plan(folded, k_data, max_keys, block_tables is not None, split_k, force_kernel_config).accepted
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if taken is not None and taken.path == "kernel":
        out, lse = run_decode_attention(
            folded,
            k_data,
            v_data,
            block_tables,
            seqlens,
            k_scale_shift=k_rows,
            v_scale_shift=v_rows,
            scale=factor,
            configuration=taken.configuration,
            causal=causal,
        )
    else:
        keys, values = (
            dequantize_kv_fp8(data.contiguous().view(torch.int32), rows, _fp8_of(q.device))
            for data, rows in ((k_data, k_rows), (v_data, v_rows))
        )
        out, lse = paged_attention(folded, keys, values, block_tables, seqlens, factor, causal)
    batch, mq = folded.shape[:2]
    return out.view(q.shape), lse.view(batch, q.shape[2], q.shape[3], mq)
