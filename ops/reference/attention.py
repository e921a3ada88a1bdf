"""Decode attention over an FP8 or int4 K/V cache, in float64.

An FP8 cache row of D elements is D/4 int32 words, element d in bits 8·(d % 4) of word d / 4, and one int32 word with
the row's float16 scale in the low half and its float16 shift in the high half; x = fp8 * scale + shift.
An int4 row is a word like that per group of neighbouring elements, then D/8 words of eight nibbles.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hipforge.errors import GuardError
from hipforge.ops.core import checks
from hipforge.ops.core.formats import fp8_format

INT4_GROUPS = (1, 2, 4, 8)


def quantize_kv_fp8(x: torch.Tensor, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise cache rows: shift = row mean, scale = largest magnitude of the centred row / the format's maximum.

    Scale and shift are rounded to float16 first, a shift beyond its range to the end of it, and elements quantised with
    the rounded values, so that dequantisation uses the same numbers.

    Args:
        x: float32, bfloat16 or float16 [..., D], D a multiple of 4.
        fp8_dtype: float8_e4m3fn (gfx950) or float8_e4m3fnuz (gfx942).

    Returns:
        (words int32 [..., D/4], scale_shift int32 [...]).

    Raises:
        GuardError: a dtype or last dimension that is not accepted.
    """
    checks.require_real("x", x)
    checks.require_last_multiple("x", x, 4)
    largest = fp8_format(fp8_dtype).max_value
    rows = x.to(torch.float32)
    shift = _saturated(rows.mean(dim=-1, keepdim=True))
    centred = rows - shift.to(torch.float32)
    scale = (centred.abs().amax(dim=-1, keepdim=True) / largest).to(torch.float16)
    # A row of equal values, and one whose range leaves float16, keep only their mean.
    scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    elements = (centred / scale.to(torch.float32)).clamp(-largest, largest).to(fp8_dtype)
    words = elements.contiguous().view(torch.uint8).view(torch.int32)
    scale_shift = torch.cat((scale, shift), dim=-1).contiguous().view(torch.int32).squeeze(-1)
    return words, scale_shift


def _saturated(shift: torch.Tensor) -> torch.Tensor:
    """A shift as float16; an infinite one would make every element of its row NaN."""
    largest = torch.finfo(torch.float16).max
    return shift.clamp(-largest, largest).to(torch.float16)


def dequantize_kv_fp8(
    words: torch.Tensor,
    scale_shift: torch.Tensor,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the cache rows that :func:`quantize_kv_fp8` packed.

    Args:
        words: int32 [..., D/4].
        scale_shift: int32 [...].
        fp8_dtype: what the bytes mean.
        dtype: the result's dtype; the arithmetic is float64.

    Returns:
        ``dtype`` [..., D].

    Raises:
        GuardError: a dtype or shape that is not accepted.
    """
    checks.require_dtype("words", words, (torch.int32,))
    fp8_format(fp8_dtype)
    checks.require_operand("scale_shift", scale_shift, (torch.int32,), words.shape[:-1], "one word per row")
    elements = words.contiguous().view(torch.uint8).view(fp8_dtype).to(torch.float32).to(torch.float64)
    halves = scale_shift.contiguous().unsqueeze(-1).view(torch.float16).to(torch.float64)
    return (elements * halves[..., :1] + halves[..., 1:]).to(dtype)


def quantize_kv_int4(x: torch.Tensor, num_groups: int = 1) -> torch.Tensor:
    """Quantise cache rows to 4 bits: shift = a group's least element, scale = its range / 15.

    Scale and shift are rounded to float16 first, a shift beyond its range to the end of it, and elements quantised with
    the rounded values. A group of equal
    values, and one whose range is too small or too large for a float16 scale, keeps only its shift (code 0).

    Args:
        x: float32, bfloat16 or float16 [..., D], D a multiple of 8 and of ``num_groups``.
        num_groups: groups of neighbouring elements in a row: 1, 2, 4 or 8.

    Returns:
        int32 [..., num_groups + D/8]: a word per group, float16 scale in the low half and float16 shift in the high
        half, then the elements, element d in bits 4 (d % 8) of word d / 8.

    Raises:
        GuardError: a dtype, last dimension or number of groups that is not accepted.
    """
    checks.require_real("x", x)
    checks.require_choice("num_groups", num_groups, INT4_GROUPS)
    num_groups = int(num_groups)
    checks.require_last_multiple("x", x, 8)
    groups = x.to(torch.float32).unflatten(-1, (num_groups, -1))
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    shift = _saturated(least)
    scale = ((largest - least) / 15.0).to(torch.float16)
    scale = torch.where(scale.isfinite(), scale, torch.zeros_like(scale))
    steps = (groups - shift.to(torch.float32)) / torch.where(scale > 0, scale, torch.ones_like(scale)).to(torch.float32)
    codes = torch.where(scale > 0, (steps + 0.5).floor().clamp(0, 15), torch.zeros_like(steps)).to(torch.uint8)
    codes = codes.flatten(-2)
    words = (codes[..., ::2] | codes[..., 1::2] << 4).contiguous().view(torch.int32)
    heads = torch.cat((scale, shift), dim=-1).contiguous().view(torch.int32).squeeze(-1)
    return torch.cat((heads, words), dim=-1)


def dequantize_kv_int4(rows: torch.Tensor, num_groups: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the cache rows that :func:`quantize_kv_int4` packed.

    Args:
        rows: int32 [..., num_groups + D/8].
        num_groups: 1, 2, 4 or 8.
        dtype: the result's dtype; the arithmetic is float64.

    Returns:
        ``dtype`` [..., D].

    Raises:
        GuardError: a dtype, shape or number of groups that is not accepted.
    """
    checks.require_dtype("rows", rows, (torch.int32,))
    checks.require_choice("num_groups", num_groups, INT4_GROUPS)
    num_groups = int(num_groups)
    if rows.shape[-1] <= num_groups:
        raise GuardError(f"rows must be [..., {num_groups} + D/8] words; got a last dimension of {rows.shape[-1]}")
    words = rows[..., num_groups:].contiguous().view(torch.uint8)
    codes = torch.stack((words & 15, words >> 4), dim=-1).flatten(-2)
    halves = rows[..., :num_groups].contiguous().unsqueeze(-1).view(torch.float16).to(torch.float64)
    elements = codes.to(torch.float64).unflatten(-1, (num_groups, -1))
    return (elements * halves[..., :1] + halves[..., 1:]).flatten(-2).to(dtype)


def gather_pages(cache: torch.Tensor, block_tables: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return each sequence's rows of a paged cache as a dense tensor.

    Args:
        cache: [n_pages · page_size, ...].
        block_tables: int32 [B, max_pages], page numbers.
        page_size: rows per page.

    Returns:
        [B, max_pages · page_size, ...]; zeros where the cache has no pages, of which no sequence can have a key.

    Raises:
        GuardError: ``cache`` does not hold whole pages, or ``block_tables`` is not [B, max_pages].
    """
    checks.require_rank("block_tables", block_tables, 2, "[B, max_pages]")
    if page_size < 1 or cache.shape[0] % page_size:
        raise GuardError(f"cache must hold whole pages of {page_size} rows; got {cache.shape[0]} rows")
    pages = cache.unflatten(0, (cache.shape[0] // page_size, page_size))
    if not len(pages):
        return cache.new_zeros(block_tables.shape[0], block_tables.shape[1] * page_size, *cache.shape[1:])
    return pages[block_tables.to(torch.int64)].flatten(1, 2)


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens: torch.Tensor,
    sm_scale: float | None = None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of a few query rows per sequence over its cached keys, in float64.

    Args:
        q: [B, Mq, G, Hq, D]: G key heads with Hq query heads each.
        k: [B, Mkv, G, D].
        v: [B, Mkv, G, D].
        seqlens: int [B]: keys of each sequence; rows past it are ignored. 0 gives zeros.
        sm_scale: factor of q·k; 1/sqrt(D) by default.
        causal: query row i of Mq sees keys up to seqlen - Mq + i only.
        sinks: [G * Hq], a score for each head that no key has: it adds to the sum of weights only. Neither scaled nor
            capped.
        window: with ``causal`` row i sees the last ``window`` of these keys only.
        softcap: c > 0; scores become c tanh(score / c).

    Returns:
        (out float64 [B, Mq, G, Hq, D], log-sum-exp float64 [B, G, Hq, Mq], natural logarithm, -inf where nothing
        is seen).

    Raises:
        GuardError: shapes that do not fit.
    """
    checks.require_rank("q", q, 5, "[B, Mq, G, Hq, D]")
    batch, mq, groups, heads, d = q.shape
    checks.require_rank("k", k, 4, "[B, Mkv, G, D]")
    checks.require_shape("k", k, (batch, k.shape[1], groups, d), "B, G and D of q")
    checks.require_shape("v", v, k.shape, "that of k")
    checks.require_shape("seqlens", seqlens, (batch,), "one length per sequence")
    factor = 1.0 / math.sqrt(d) if sm_scale is None else sm_scale
    keys = torch.arange(k.shape[1], device=q.device)
    length = seqlens.to(torch.int64).view(batch, 1, 1)
    limit = length - mq + 1 + torch.arange(mq, device=q.device).view(1, mq, 1) if causal else length.expand(-1, mq, 1)
    seen = keys < limit
    if window is not None:
        seen = seen & (keys >= limit - window)
    seen = seen[:, None, None]  # [B, 1, 1, Mq, Mkv]
    scores = torch.einsum("bmghd,bkgd->bghmk", q.to(torch.float64), k.to(torch.float64)) * factor
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(torch.float64).view(groups, heads, 1))
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return torch.stack([_weighted(weights[:, :, :, m], v, seen[:, 0, 0, m]) for m in range(mq)], dim=1), lse


def _weighted(weights: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Add up one token's values over the keys that are ``seen`` [B, Mkv]; others may be NaN, and 0 times NaN is NaN."""
    return torch.einsum("bghk,bkgd->bghd", weights, v.to(torch.float64).masked_fill(~seen[:, :, None, None], 0.0))


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    factor: float | None,
    causal: bool,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 over dequantised paged caches, as the decode kernels lay their operands out.

    Args:
        q: [B, Mq, Hq, D].
        k: [pages, page_size, Hkv, D]; [B, Mkv, Hkv, D] without block tables.
        v: like ``k``.
        block_tables: int32 [B, max_pages], or None; entries past a sequence's length may hold anything. With
            [B, Hkv, max_pages] each KV head has its own keys.
        seqlens: int32 [B]; [B, Hkv] where each KV head has its own keys.
        factor: factor of q.k; 1/sqrt(D) if None.
        causal: token t of Mq sees keys up to seqlen - Mq + t.
        sinks: [Hq], as for :func:`decode_attention`.
        window: as for :func:`decode_attention`.
        softcap: as for :func:`decode_attention`.
        dtype: of out; q's if None.
        counts: int [B], of the tokens of q the last ones that count; all if None. What the others give has no meaning.

    Returns:
        (out of q's shape, log-sum-exp float32 [B, Hq, Mq]).

    Raises:
        GuardError: shapes that do not fit.
    """
    if block_tables is not None and block_tables.dim() == 3:
        heads = k.shape[2]
        queries = q.unflatten(2, (heads, -1)).unbind(2)
        parts = [
            paged_attention(
                queries[h], k[:, :, h : h + 1], v[:, :, h : h + 1], block_tables[:, h], seqlens[:, h], factor, causal,
                None if sinks is None else sinks.view(heads, -1)[h], window, softcap, dtype, counts,
            )
            for h in range(heads)
        ]  # fmt: skip
        return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=1)
    if block_tables is not None:
        page_size = k.shape[1]
        tokens = q.shape[1] if counts is None else counts.view(-1, 1).to(torch.int64)
        k, v = (
            gather_pages(cache.flatten(0, 1), _used_pages(block_tables, seqlens, page_size, tokens, window), page_size)
            for cache in (k, v)
        )
    batch, mq, heads, d = q.shape
    kv_heads = k.shape[2]
    lengths = seqlens.clamp(0, k.shape[1])
    folded = q.reshape(batch, mq, kv_heads, heads // kv_heads, d)
    out, lse = decode_attention(folded, k, v, lengths, factor, causal, sinks, window, softcap)
    return out.reshape(q.shape).to(q.dtype if dtype is None else dtype), lse.reshape(batch, heads, mq).to(torch.float32)


def ragged_attention(
    q: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, k: torch.Tensor, v: torch.Tensor,
    block_tables: torch.Tensor | None, seqlens: torch.Tensor, factor: float | None, causal: bool, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """:func:`paged_attention` of sequences that have unequally many query tokens; their last keys are theirs.

    Args:
        q: [tokens, Hq, D], those of sequence b from cu_seqlens_q[b] to before cu_seqlens_q[b + 1].
        cu_seqlens_q: int32 [B + 1].
        max_seqlen_q: the most tokens of a sequence.
        k: as for :func:`paged_attention`, like what follows.
        v: likewise.
        block_tables: likewise.
        seqlens: likewise.
        factor: likewise.
        causal: likewise.
        options: likewise.

    Returns:
        (out of q's shape, log-sum-exp float32 [Hq, tokens]); 0 and -inf for tokens of no sequence.

    Raises:
        GuardError: shapes that do not fit.
    """
    tokens, batch = q.shape[0], seqlens.shape[0]
    starts = cu_seqlens_q.to(torch.int64)
    token = torch.arange(tokens, device=q.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    known = (sequence < batch).view(-1, 1)
    # Each sequence's tokens are the last ones of max_seqlen_q; those of no sequence go into a row of their own.
    ends = torch.cat((starts[1:], starts[-1:] + tokens))
    place = (max_seqlen_q - ends[sequence] + token).clamp(0, max_seqlen_q - 1)
    padded = q.new_zeros((batch + 1, max_seqlen_q, *q.shape[1:]))
    padded[sequence, place] = q
    out, lse = paged_attention(
        padded[:batch], k, v, block_tables, seqlens, factor, causal, counts=starts.diff(), **options
    )
    sequence = sequence.clamp(max=batch - 1)
    return (
        out[sequence, place].masked_fill(~known.unsqueeze(-1), 0.0),
        lse[sequence, :, place].masked_fill(~known, -math.inf).t().contiguous(),
    )


def _used_pages(
    block_tables: torch.Tensor, seqlens: torch.Tensor, page_size: int, mq: int | torch.Tensor, window: int | None
) -> torch.Tensor:
    """The tables with 0 for pages past a sequence's length or before every window, which may hold anything."""
    first_key = torch.arange(block_tables.shape[1], device=block_tables.device) * page_size
    lengths = seqlens.view(-1, 1).to(torch.int64).clamp(max=block_tables.shape[1] * page_size)
    unused = (first_key >= lengths) | torch.as_tensor(mq == 0, device=first_key.device)
    if window is not None:
        unused |= first_key + page_size <= lengths - (mq - 1) - window
    return block_tables.masked_fill(unused, 0)
