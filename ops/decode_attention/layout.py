"""What decode attention accepts on every path, kernel or torch: its calls in one form, the packed layouts as views.

An fp8 row of K or V is D/4 words of four values, its float16 scale and shift in a word of another tensor. An int4 row
is a word per group of neighbouring elements, float16 scale in the low half and float16 shift in the high half, and D/8
words of eight nibbles; x = code * scale + shift. The kernel computes x in float32 and rounds it to q's dtype for K and
to bfloat16 for V; weights are rounded to bfloat16, the output to q's dtype.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hipforge import devices
from hipforge.errors import GuardError
from hipforge.ops.core.alignment import packed
from hipforge.ops.core.arguments import is_traced, require_readable
from hipforge.ops.core.checks import (
    Described,
    require_choice,
    require_dtype,
    require_in_float32,
    require_int,
    require_operand,
    require_rank,
    require_shape,
    require_tensor,
)
from hipforge.ops.core.formats import BLOCK
from hipforge.ops.reference.attention import INT4_GROUPS

MAX_MQ = 16
LEAST_SOFTCAP = 2.0**-120  # whose reciprocal float32 holds
OUT_FORMATS = (None, "mxfp8")

Scale = torch.Tensor | float

# The kernels take the 16-bit ones; torch computes the others.
_QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CACHE_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8)
HALF_DTYPES = (torch.float16, torch.bfloat16)  # of caches that are not quantised; q has the same


class Call(NamedTuple):
    """The common form of both functions: q [B, Mq, Hq, D], caches [pages, page_size, Hkv, D bytes or words].

    With cu_seqlens_q q is [tokens, Hq, D].

    Elements have a scale per tensor or head, or words of a scale and a shift per row, or int4 groups (``num_groups``).
    ``scale`` is 1/sqrt(D) if None. ``forced`` is force_kernel_config as JSON, which a torch operator can take.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_tables: torch.Tensor | None
    seqlens: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_scale_shift: torch.Tensor | None = None
    v_scale_shift: torch.Tensor | None = None
    num_groups: int | None = None
    scale: float | None = None
    causal: bool = True
    split_k: int | None = None
    forced: str | None = None
    sinks: torch.Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    out_scale: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int | None = None


def check_call(call: Call) -> None:
    """Refuse operands and options that no path takes; only shapes, dtypes and numbers are looked at."""
    batch = _check_queries(call)
    if call.num_groups is None:  # packed_call has checked an int4 cache
        _check_caches(call, batch)
    require_operand("sinks", call.sinks, (torch.float32,), call.q.shape[-2:-1], "one per query head")
    if call.window is not None:
        require_int("window", call.window, 1)
        if not call.causal:
            raise GuardError("a window needs causal=True: it counts back from each token's own key; got causal=False")
    if call.softcap is not None and not LEAST_SOFTCAP <= call.softcap < math.inf:
        raise GuardError(
            f"softcap must be positive and finite, or None; got {call.softcap!r} (the least is {LEAST_SOFTCAP:.2g})"
        )


def _check_queries(call: Call) -> int:
    """Refuse queries that no path takes, and return B; q is [B, Mq, Hq, D], with cu_seqlens_q [tokens, Hq, D]."""
    q, seqlens, max_seqlen_q = call.q, call.seqlens, call.max_seqlen_q
    if call.cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise GuardError(f"max_seqlen_q is for cu_seqlens_q, which is None; got max_seqlen_q={max_seqlen_q!r}")
        require_rank("q", q, 4, "[B, Mq, Hq, D]")
        batch, mq, name = q.shape[0], q.shape[1], "Mq"
    else:
        require_rank("q", q, 3, "[tokens, Hq, D] with cu_seqlens_q")
        if call.block_tables is not None and call.block_tables.dim() == 3:
            raise GuardError(
                "cu_seqlens_q must not be given with block_tables of 3 dimensions, a list of keys for each KV head; "
                "pass q as [B, Mq, Hq, D], in one call for each Mq"
            )
        require_rank("seqlens", seqlens, 1, "[B]")
        batch, why = seqlens.shape[0], "the first token of each sequence, and the end"
        require_operand("cu_seqlens_q", call.cu_seqlens_q, (torch.int32,), (batch + 1,), why)
        if max_seqlen_q is None:
            raise GuardError("max_seqlen_q must be given with cu_seqlens_q: the most tokens of a sequence; got None")
        mq, name = require_int("max_seqlen_q", max_seqlen_q), "max_seqlen_q"
    if not 1 <= mq <= MAX_MQ:
        raise GuardError(f"{name} must be 1 to {MAX_MQ} query tokens per sequence; got {mq}")
    require_dtype("q", q, _QUERY_DTYPES)
    return batch


def _check_caches(call: Call, batch: int) -> None:
    q, k = call.q, call.k
    require_rank("k_cache", k, 4, "[pages, page_size, Hkv, D], or [B, Mkv, Hkv, D] without block_tables")
    heads, d = q.shape[-2:]
    pages, page_size, kv_heads, _ = k.shape
    require_tensor(v_cache=call.v, seqlens=call.seqlens)  # None would pass what follows
    accepted = (*_CACHE_DTYPES, *(dtype for dtype in HALF_DTYPES if dtype == q.dtype))
    require_operand("k_cache", k, accepted, (pages, page_size, kv_heads, d), "D of q")
    require_operand("v_cache", call.v, (k.dtype,), k.shape, "that of k_cache")
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise GuardError(f"Hq must be a positive multiple of Hkv; got Hq={heads}, Hkv={kv_heads}")
    if call.block_tables is None:
        require_shape("k_cache", k, (batch, page_size, kv_heads, d), "one page per sequence without block_tables")
    own = call.block_tables is not None and call.block_tables.dim() == 3
    why = "one per KV head, as block_tables has" if own else "one length per sequence"
    require_operand("seqlens", call.seqlens, (torch.int32,), (batch, kv_heads) if own else (batch,), why)
    _check_tables(call.block_tables, batch, kv_heads)
    for name, scale in (("k_scale", call.k_scale), ("v_scale", call.v_scale)):
        if scale is not None and math.prod(scale.shape) != 1:
            require_shape(name, scale, (kv_heads,), "one scale, or one per KV head")


def _check_tables(block_tables: torch.Tensor | None, batch: int, kv_heads: int | None = None) -> None:
    """Refuse tables that no path takes; [B, Hkv, max_pages] where each of ``kv_heads`` may have its own keys."""
    if block_tables is None:
        return
    if kv_heads is not None and block_tables.dim() == 3:
        shape: tuple[int, ...] = (batch, kv_heads, block_tables.shape[2])
        why = "one row per sequence and KV head"
    else:
        require_rank("block_tables", block_tables, 2, "[B, max_pages]")
        shape, why = (batch, block_tables.shape[1]), "one row per sequence"
    require_operand("block_tables", block_tables, (torch.int32,), shape, why)


def token_counts(cu_seqlens_q: torch.Tensor, tokens: int, max_seqlen_q: int) -> list[int] | None:
    """Return the query tokens of each sequence, where they are on the CPU; refuse what does not fit q [tokens, ...].

    On a GPU nobody looks, as for :func:`check_pages`.
    """
    if cu_seqlens_q.device.type != "cpu" or devices.current().is_capturing():
        return None
    require_readable(cu_seqlens_q=cu_seqlens_q)
    starts = cu_seqlens_q.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] > tokens or min(counts, default=0) < 0:
        raise GuardError(
            f"cu_seqlens_q must begin with 0, not fall, and end at no more than the {tokens} tokens of q; got {starts}"
        )
    if max(counts, default=0) > max_seqlen_q:
        raise GuardError(
            f"max_seqlen_q must be at least the tokens of every sequence; got {max_seqlen_q}, but sequence "
            f"{counts.index(max(counts))} of cu_seqlens_q has {max(counts)}"
        )
    return counts


def _check_output(
    q: Described, out_scale: Described | None, out_format: str | None, scale_out: Described | None
) -> None:
    """Refuse an output that is quantised in no way, or in two; q is [..., Hq, D], or [1, tokens, G, Hq, D]."""
    require_choice("out_format", out_format, OUT_FORMATS)
    if out_scale is not None:
        require_dtype("out_scale", out_scale, (torch.float32,))
        if math.prod(out_scale.shape) != 1:
            raise GuardError(f"out_scale must have one element, the scale of all of out; got {tuple(out_scale.shape)}")
        if out_format is not None:
            raise GuardError(
                f"out_scale and out_format={out_format!r} must not both be given: out has one scale, or one per "
                f"{BLOCK} elements; leave one out"
            )
    if out_format is None:
        if scale_out is not None:
            raise GuardError("scale_out takes the scales of out_format='mxfp8'; got out_format=None")
    elif (width := math.prod(q.shape[-3 if q.dim() == 5 else -2 :])) % BLOCK:
        raise GuardError(
            f"Hq * D must be a multiple of {BLOCK}, the block that shares a scale, for out_format={out_format!r}; "
            f"got {width}"
        )


def check_pages(
    block_tables: torch.Tensor,
    seqlens: torch.Tensor,
    k: torch.Tensor,
    counts: list[int] | int | None,
    window: int | None,
) -> None:
    """Refuse a page that a sequence reads and the cache does not have, where tables and lengths are on the CPU.

    ``counts``: query tokens of each sequence, one number for all, or None where :func:`token_counts` did not look; a
    sequence without any reads nothing.

    On a GPU nobody looks, because it would have to be waited for; nor in a capture, whose tables are filled later.
    """
    pages, page_size = k.shape[:2]
    on_cpu = block_tables.device.type == "cpu" == seqlens.device.type
    if counts is None or not on_cpu or devices.current().is_capturing():
        return
    require_readable(block_tables=block_tables, seqlens=seqlens)
    counts = [counts] * seqlens.shape[0] if isinstance(counts, int) else counts
    # Python numbers: a model's layers let torch allocate and make views, and compute nothing.
    own = block_tables.shape[1] if block_tables.dim() == 3 else 1  # lists of keys of a sequence
    lists = zip(block_tables.flatten(0, -2).tolist(), seqlens.flatten().tolist(), strict=True)
    for index, (entries, length) in enumerate(lists):
        batch = index // own
        length = min(length, len(entries) * page_size)  # keys past what the tables hold do not exist
        first = 0 if window is None else max(0, length - (counts[batch] - 1) - window) // page_size
        for entry in range(first, min(len(entries), -(-length // page_size)) if counts[batch] else 0):
            if not 0 <= entries[entry] < pages:
                line = f"{batch}, {index % own}" if block_tables.dim() == 3 else f"{batch}"
                held = f"pages 0 to {pages - 1}" if pages else "no pages"
                raise GuardError(
                    f"block_tables[{line}, {entry}] is page {entries[entry]}, but the cache has {held}; "
                    f"sequence {batch} reads it, having {length} keys in pages of {page_size}"
                )


def scale_tensor(name: str, scale: Scale, device: torch.device) -> torch.Tensor:
    """Return a scale as contiguous float32, on ``device`` if it was a number; then it is not written to."""
    if not isinstance(scale, torch.Tensor):
        if is_traced("decode_attention"):
            return torch.full((1,), float(scale), dtype=torch.float32, device=device)
        require_in_float32(name, scale)
        return _constant(float(1.0 * scale), device)  # of which a text has none
    require_dtype(name, scale, (torch.float32,))
    return packed(scale)


_MAX_CONSTANTS = 256
_constants: dict[tuple[float, torch.device], torch.Tensor] = {}


def _constant(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as float32 [1] on a device, kept so that a call that gives one launches and captures no fill."""
    found = _constants.get((value, device))
    if found is None:
        with torch.inference_mode(False):
            found = torch.full((1,), value, dtype=torch.float32, device=device)
        if devices.current().is_capturing():  # its memory is the graph's, and it is filled when that is replayed
            return found
        if device.type == "cuda":  # other streams may read it next
            torch.cuda.current_stream(device).synchronize()
        if len(_constants) >= _MAX_CONSTANTS:
            _constants.clear()
        _constants[value, device] = found
    return found


def _by_page(name: str, rows: torch.Tensor, per_page: int) -> torch.Tensor:
    """Return rows [1, rows, G, Hq, ...] that the heads of a group share as [pages, per_page, G, ...], a view."""
    if rows.shape[3] > 1 and rows.stride(3):
        raise GuardError(
            f"{name} must be expanded along Hq (stride 0), since the heads of a group share their keys; got stride "
            f"{rows.stride(3)}"
        )
    return rows[0, :, :, 0].unflatten(0, (-1, per_page))


def _passed(q: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a :class:`Call` takes as it is of a function's options, among which outputs may be."""
    _check_output(q, options.get("out_scale"), options.get("out_format"), options.get("scale_out"))
    forced = options.get("force_kernel_config")
    named = {name: value for name, value in options.items() if name in Call._fields}
    if forced is not None:
        numbers = {name: require_int(f"force_kernel_config[{name!r}]", value) for name, value in dict(forced).items()}
        return {**named, "forced": json.dumps(numbers)}
    return {**named, "forced": None}


def plain_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    **options: Any,
) -> Call:
    """Return the call of :func:`hipforge.decode_attention_fp8` with these arguments."""
    given = _passed(q, options)
    k_factor, v_factor = scale_tensor("k_scale", k_scale, q.device), scale_tensor("v_scale", v_scale, q.device)
    return Call(q, k_cache, v_cache, block_tables, seqlens, k_factor, v_factor, **given)


def packed_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor | None,
    v_scale_shift: torch.Tensor | None,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    *,
    num_groups: int | None = None,
    **options: Any,
) -> Call:
    """Return the call of :func:`hipforge.decode_attention_splitk` with these arguments, all of them as views.

    q is [B, Mq, G*Hq, D], [tokens, G*Hq, D] with ``cu_seqlens_q``. k and v are int32 [pages, page_size, G,
    num_groups + D/8]; without ``num_groups`` bytes [pages, page_size, G, D] and their words [pages, page_size, G], or,
    without words, [pages, page_size, G, D] of q's 16-bit dtype.

    Raises:
        GuardError: operands that no path takes.
    """
    given, ragged = _passed(q, options), options.get("cu_seqlens_q") is not None
    half = num_groups is None and isinstance(k, torch.Tensor) and k.dtype in HALF_DTYPES
    if num_groups is not None or half:
        if k_scale_shift is not None or v_scale_shift is not None:
            why = "for a cache that is not quantised" if half else "with num_groups: int4 rows hold their scales"
            raise GuardError(f"k_scale_shift and v_scale_shift must be None {why}")
    elif k_scale_shift is None or v_scale_shift is None:
        raise GuardError(
            "k_scale_shift and v_scale_shift must be given for an fp8 cache; got None (an int4 one needs num_groups)"
        )
    require_rank("q", q, 5, "[1, B*Mq, G, Hq, D]")
    require_dtype("q", q, _QUERY_DTYPES)
    require_rank("seqlens", seqlens, 1, "[B]")
    require_dtype("seqlens", seqlens, (torch.int32,))
    batch = seqlens.shape[0]
    if batch < 1 or q.shape[0] != 1 or (q.shape[1] % batch and not ragged):
        raise GuardError(f"q must be [1, B*Mq, G, Hq, D] with B = {batch} of seqlens; got shape {tuple(q.shape)}")
    _, tokens, groups, heads, d = q.shape
    dtype, multiple, width, layout = q.dtype, 8, d, "D"
    if num_groups is not None:
        require_choice("num_groups", num_groups, INT4_GROUPS)
        num_groups = int(num_groups)  # True is 1, which torch does not take for a size
        dtype, width, layout = torch.int32, num_groups + d // 8, "num_groups + D/8 (words of eight int4 values)"
    elif not half:
        dtype, multiple, width, layout = torch.int32, 4, d // 4, "D/4 (words of four fp8 values)"
    if min(groups, heads, d) < 1 or d % multiple:
        raise GuardError(
            f"q needs at least one head and a D that is a multiple of {multiple}; got shape {tuple(q.shape)}"
        )
    if (block_tables is None) != (page_size is None):
        raise GuardError(f"block_tables and page_size belong together; got page_size={page_size!r}")
    _check_tables(block_tables, batch)
    require_rank("k", k, 5, f"[1, rows, G, Hq, {layout}]")
    rows = k.shape[1]
    per_page = rows // batch if page_size is None else require_int("page_size", page_size)
    if per_page < 1 or rows % per_page or (page_size is None and rows % batch):
        raise GuardError(f"k must hold whole pages of {per_page} rows; got {rows} rows")

    def views(
        name: str, cache: torch.Tensor, scale_shift: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require_operand(name, cache, (dtype,), (1, rows, groups, heads, width), f"G and Hq of q, {layout}")
        if cache.stride(4) != 1:
            raise GuardError(f"{name} must have its last dimension contiguous; got stride {cache.stride(4)}")
        data = _by_page(name, cache, per_page)
        if scale_shift is None:
            return data, None
        words = f"{name}_scale_shift"
        require_operand(words, scale_shift, (torch.int32,), (1, rows, groups, heads), "one word per row")
        return data.view(torch.uint8), _by_page(words, scale_shift, per_page)

    (k, k_words), (v, v_words) = views("k", k, k_scale_shift), views("v", v, v_scale_shift)
    folded = q.reshape(*((tokens,) if ragged else (batch, tokens // batch)), groups * heads, d)
    ones = scale_tensor("k_scale", 1.0, q.device) if half else None
    return Call(folded, k, v, block_tables, seqlens, ones, ones, k_words, v_words, num_groups, **given)
