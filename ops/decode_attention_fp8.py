"""Decode attention over an fp8 K/V cache, split-K, for gfx950 (e4m3fn); torch elsewhere.

A few query tokens per sequence attend over its cached keys. The queries that share a KV head are folded into rows of
one tile of 16; a wave owns a tile, a KV head, a sequence and a part of its keys (a split), in blocks of 64; a second
kernel merges the splits by their log-sum-exp, always in the same order.

Arithmetic: every fp8 value is exact in bfloat16 and in float16, so K and V enter the products without rounding, and
their scales and shifts are applied in float32 outside. What is rounded is a weight 2^(score - maximum), times the
scale of its row of V where rows have one, to bfloat16 (a relative error of 2^-8 at most), and the output. Rounding q
and the weights to fp8 instead would save the conversions and cost relative errors of up to 2^-4 in each.

Token t of Mq sees keys up to seqlen - Mq + t (``causal``), so Mq = 1 sees the whole sequence. A row that sees no key
gives zeros and a log-sum-exp of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from hipforge.errors import GuardError
from hipforge.ops import dispatch
from hipforge.ops.decode_attention_fp8_kernels import HEAD_DIMS, INPUTS, decode_attention_fp8_out
from hipforge.ops.dispatch import Accepted, Decision, Refused, planned_by
from hipforge.ops.reference.attention import decode_attention, dequantize_kv_fp8, gather_pages
from hipforge.ops.reference.checks import require_dtype, require_rank, require_shape

ARCH_DTYPES = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
KERNEL_ARCH = "gfx950"
BLOCK_M, BLOCK_N, WAVES = 16, 64, 1
MAX_MQ = 16
MAX_SPLITS = 512
MAX_TILE = 64  # of BLOCK_M and BLOCK_N; larger tiles keep too much in registers
MAX_WAVES = 4

Scale = torch.Tensor | float


def split_k_heuristic(batch: int, kv_heads: int, max_keys: int, page_size: int | None = None) -> int:
    """Return the number of splits for a shape without a tuned row, 1 to 512.

    Args:
        batch: sequences.
        kv_heads: KV heads; the queries of each are folded into rows, so that the head count of the formula is 1.
        max_keys: keys that a sequence may have.
        page_size: keys of a page for a kernel whose splits must not cross pages. Those of this module do.
    """
    rows = max(batch, 1)
    split = max(max_keys + rows - 1, 1024) // rows
    while split > 1 and max_keys / (split - 1) < BLOCK_N:
        split -= 1
    enough = max(1024 // max(batch * kv_heads, 1), 1)
    while split > enough:
        split //= 2
    split = max(split, 1)
    if math.ceil(max_keys / split) % BLOCK_N:
        split += 1
    split = min(max(split, 1), MAX_SPLITS)
    if page_size is not None and math.ceil(max_keys / split) > page_size:
        split = math.ceil(max_keys / page_size)
    return split


def accepts_configuration(block_m: int, block_n: int, waves: int) -> bool:
    """Return whether a tuner may try a configuration: tiles up to 64 x 64 and at most four waves."""
    return 1 <= block_m <= MAX_TILE and 1 <= block_n <= MAX_TILE and 1 <= waves <= MAX_WAVES


def _fp8_of(device: torch.device) -> torch.dtype:
    """The device's own format, in which bytes without a dtype are read; e4m3fn where no kernel runs."""
    target = dispatch.target_of(device)
    return torch.float8_e4m3fn if isinstance(target, Refused) else ARCH_DTYPES.get(target[0], torch.float8_e4m3fn)


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    max_keys: int,
    split_k: int | None,
    force_kernel_config: Mapping[str, int] | None,
) -> Decision:
    """Return the decision for ``q`` [B, Mq, Hq, D] and ``k`` [pages, page_size, Hkv, D]."""
    torch_path = Accepted("torch", "decode_attention", MappingProxyType({}), "the HIP kernel refused")
    target = dispatch.target_of(q.device)
    if isinstance(target, Refused):
        return Decision(torch_path, (target,))
    arch = target[0]
    reason = None
    if arch != KERNEL_ARCH:
        reason = f"the kernel is for {KERNEL_ARCH}; the device is {arch}"
    elif q.dtype not in INPUTS:
        reason = f"q must be float16 or bfloat16; got {q.dtype}"
    elif q.shape[-1] not in HEAD_DIMS:
        reason = f"D must be one of {', '.join(map(str, HEAD_DIMS))}; got {q.shape[-1]}"
    elif k.dtype not in (torch.uint8, ARCH_DTYPES[arch]):
        reason = f"{arch} reads {ARCH_DTYPES[arch]}; the cache is {k.dtype}"
    if reason is not None:
        if force_kernel_config is not None:
            raise GuardError(f"force_kernel_config is given, but the kernel does not apply: {reason}")
        return Decision(torch_path, (Refused("hip", reason),))
    unused = Refused("torch", "the HIP kernel takes this shape")
    configuration = {"block_m": BLOCK_M, "block_n": BLOCK_N, "waves": WAVES}
    why = "split_k as given"
    if split_k is None:
        split_k = split_k_heuristic(q.shape[0], k.shape[2], max_keys)
        why = "no tuned row; the split-K heuristic"
    configuration["split_k"] = split_k
    if force_kernel_config is not None:
        _check_forced(force_kernel_config, configuration)
        configuration.update(force_kernel_config)
        why = "force_kernel_config, which overrides everything"
    return Decision(Accepted("hip", "decode_attention_fp8", MappingProxyType(configuration), why), (unused,))


def _check_forced(forced: Mapping[str, int], default: Mapping[str, int]) -> None:
    for name, value in forced.items():
        if name not in default:
            raise GuardError(f"force_kernel_config has {', '.join(default)}; got {name!r}")
        if name != "split_k" and value != default[name]:
            raise GuardError(f"force_kernel_config: {name} must be {default[name]}, what the kernel has; got {value}")


_CACHE_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8)


def _check_plain(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
) -> int:
    """Refuse operands that no path takes; return the keys that a sequence may have."""
    require_rank("q", q, 4, "[B, Mq, Hq, D]")
    require_rank("k_cache", k_cache, 4, "[pages, page_size, Hkv, D], or [B, Mkv, Hkv, D] without block_tables")
    batch, mq, heads, d = q.shape
    if not 1 <= mq <= MAX_MQ:
        raise GuardError(f"Mq must be 1 to {MAX_MQ} query tokens per sequence; got {mq}")
    pages, page_size, kv_heads, _ = k_cache.shape
    require_shape("k_cache", k_cache, (pages, page_size, kv_heads, d), "D of q")
    require_shape("v_cache", v_cache, k_cache.shape, "that of k_cache")
    require_dtype("k_cache", k_cache, _CACHE_DTYPES)
    require_dtype("v_cache", v_cache, (k_cache.dtype,))
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise GuardError(f"Hq must be a positive multiple of Hkv; got Hq={heads}, Hkv={kv_heads}")
    require_shape("seqlens", seqlens, (batch,), "one length per sequence")
    require_dtype("seqlens", seqlens, (torch.int32,))
    if block_tables is None:
        require_shape("k_cache", k_cache, (batch, page_size, kv_heads, d), "one page per sequence without block_tables")
        return page_size
    require_rank("block_tables", block_tables, 2, "[B, max_pages]")
    require_shape("block_tables", block_tables, (batch, block_tables.shape[1]), "one row per sequence")
    require_dtype("block_tables", block_tables, (torch.int32,))
    return page_size * block_tables.shape[1]


def _scale_tensor(name: str, scale: Scale, kv_heads: int, device: torch.device) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor):
        return torch.tensor([float(scale)], dtype=torch.float32, device=device)
    require_dtype(name, scale, (torch.float32,))
    if scale.numel() != 1:
        require_shape(name, scale, (kv_heads,), "one scale, or one per KV head")
    return scale.contiguous()


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
    max_keys = _check_plain(q, k_cache, v_cache, block_tables, seqlens)
    return _plan(q, k_cache, max_keys, split_k, force_kernel_config)


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
            [pages, page_size, Hkv, D], page_size a multiple of 16; the last dimension contiguous, the other strides
            multiples of 16. Without block tables [B, Mkv, Hkv, D], any Mkv.
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
        force_kernel_config: ``split_k`` and the tile (``block_m`` 16, ``block_n`` 64, ``waves`` 1), which override
            ``split_k`` and every table.

    Returns:
        out like q; with ``return_lse`` (out, float32 [B, Hq, Mq]), natural logarithm, -inf where nothing is seen.

    Raises:
        GuardError: operands that do not fit each other or the kernel.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    max_keys = _check_plain(q, k_cache, v_cache, block_tables, seqlens)
    taken = _plan(q, k_cache, max_keys, split_k, force_kernel_config).accepted
    scales = [
        _scale_tensor(name, given, k_cache.shape[2], q.device)
        for name, given in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if taken is not None and taken.path == "hip":
        out, lse = _run(
            q,
            k_cache,
            v_cache,
            block_tables,
            seqlens,
            scales[0],
            scales[1],
            None,
            None,
            factor,
            taken.configuration["split_k"],
            causal,
        )
    else:
        fp8 = _fp8_of(q.device)
        caches = [cache.view(fp8) if cache.dtype == torch.uint8 else cache for cache in (k_cache, v_cache)]
        k, v = (
            cache.to(torch.float64) * one.to(torch.float64).view(-1, 1)
            for cache, one in zip(caches, scales, strict=True)
        )
        out, lse = _reference(q, k, v, block_tables, seqlens, factor, causal)
    return (out, lse) if return_lse else out


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_rows: torch.Tensor | None,
    v_rows: torch.Tensor | None,
    factor: float,
    splits: int,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, mq, heads, d = q.shape
    out = torch.empty((batch, mq, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, mq), dtype=torch.float32, device=q.device)
    partial = partial_lse = None
    if 1 < splits <= MAX_SPLITS:  # another number is for the module's own guard
        partial = torch.empty((splits, batch, heads * mq, d), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((splits, batch, heads * mq), dtype=torch.float32, device=q.device)
    tables = None if block_tables is None else block_tables.contiguous()
    decode_attention_fp8_out(
        out,
        lse,
        partial,
        partial_lse,
        q.contiguous(),
        k,
        v,
        tables,
        seqlens.contiguous(),
        k_scale,
        v_scale,
        k_rows,
        v_rows,
        factor,
        splits,
        causal,
    )
    return out, lse


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor | None,
    seqlens: torch.Tensor,
    factor: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 over dequantised caches [pages, page_size, Hkv, D]."""
    if block_tables is not None:
        page_size = k.shape[1]
        k, v = (
            gather_pages(cache.flatten(0, 1), _used_pages(block_tables, seqlens, page_size), page_size)
            for cache in (k, v)
        )
    batch, mq, heads, d = q.shape
    kv_heads = k.shape[2]
    lengths = seqlens.clamp(0, k.shape[1])
    folded = q.view(batch, mq, kv_heads, heads // kv_heads, d)
    out, lse = decode_attention(folded, k, v, lengths, factor, causal)
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, heads, mq).to(torch.float32)


def _used_pages(block_tables: torch.Tensor, seqlens: torch.Tensor, page_size: int) -> torch.Tensor:
    """The tables with 0 for pages past a sequence's length, which may hold anything."""
    first_key = torch.arange(block_tables.shape[1], device=block_tables.device) * page_size
    return block_tables.masked_fill(first_key >= seqlens.view(-1, 1), 0)


def _unpacked(
    q: torch.Tensor,
    cache: torch.Tensor,
    scale_shift: torch.Tensor,
    name: str,
    batch: int,
    page_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed cache as bytes [pages, page_size, G, D] and its words [pages, page_size, G], both views."""
    groups, heads, d = q.shape[2:]
    require_rank(name, cache, 5, "[1, rows, G, Hq, D/4]")
    require_dtype(name, cache, (torch.int32,))
    rows = cache.shape[1]
    require_shape(name, cache, (1, rows, groups, heads, d // 4), "G, Hq and D of q, four fp8 values per word")
    require_shape(f"{name}_scale_shift", scale_shift, (1, rows, groups, heads), "one word per row")
    require_dtype(f"{name}_scale_shift", scale_shift, (torch.int32,))
    if heads > 1 and (cache.stride(3) or scale_shift.stride(3)):
        raise GuardError(
            f"{name} and its scale_shift must be expanded along Hq (stride 0), since the heads of a group share their "
            f"keys; got strides {cache.stride(3)} and {scale_shift.stride(3)}"
        )
    if cache.stride(4) != 1:
        raise GuardError(f"{name} must have its last dimension contiguous; got stride {cache.stride(4)}")
    per_page = rows // max(batch, 1) if page_size is None else page_size
    if per_page < 1 or rows % per_page:
        raise GuardError(f"{name} must hold whole pages of {per_page} rows; got {rows} rows")
    data = cache[0, :, :, 0].unflatten(0, (-1, per_page)).view(torch.uint8)
    return data, scale_shift[0, :, :, 0].unflatten(0, (-1, per_page))


def _prepare_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor,
    v_scale_shift: torch.Tensor,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None,
    page_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    require_rank("q", q, 5, "[1, B*Mq, G, Hq, D]")
    batch = seqlens.shape[0] if seqlens.dim() == 1 else 0
    if batch < 1 or q.shape[0] != 1 or q.shape[1] % batch:
        raise GuardError(f"q must be [1, B*Mq, G, Hq, D] with B = {batch} of seqlens; got shape {tuple(q.shape)}")
    if (block_tables is None) != (page_size is None):
        raise GuardError(f"block_tables and page_size belong together; got page_size={page_size!r}")
    if page_size is not None and page_size % BLOCK_N:
        raise GuardError(f"page_size must be a multiple of BLOCK_N = {BLOCK_N}; got {page_size}")
    if q.shape[-1] % 4:
        raise GuardError(f"D must be a multiple of 4 (four fp8 values per word); got {q.shape[-1]}")
    k_data, k_rows = _unpacked(q, k, k_scale_shift, "k", batch, page_size)
    v_data, v_rows = _unpacked(q, v, v_scale_shift, "v", batch, page_size)
    folded = q.reshape(batch, q.shape[1] // batch, q.shape[2] * q.shape[3], q.shape[4])
    return folded, k_data, v_data, k_rows, v_rows


def _plan_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor,
    v_scale_shift: torch.Tensor,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    scale: float | None = None,
    split_k: int | None = None,
    force_kernel_config: Mapping[str, int] | None = None,
    *,
    causal: bool = True,
) -> Decision:
    """Return :func:`decode_attention_splitk`'s decision: the HIP kernel, else torch."""
    folded, k_data, v_data, _, _ = _prepare_packed(
        q, k, v, k_scale_shift, v_scale_shift, seqlens, block_tables, page_size
    )
    max_keys = _check_plain(folded, k_data, v_data, block_tables, seqlens)
    return _plan(folded, k_data, max_keys, split_k, force_kernel_config)


@planned_by(_plan_packed)
def decode_attention_splitk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale_shift: torch.Tensor,
    v_scale_shift: torch.Tensor,
    seqlens: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    scale: float | None = None,
    split_k: int | None = None,
    force_kernel_config: Mapping[str, int] | None = None,
    *,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and its log-sum-exp over a packed fp8 cache with a scale and a shift per row.

    Args:
        q: bfloat16 or float16 [1, B*Mq, G, Hq, D]: G KV heads with Hq queries each.
        k: int32 [1, B*Mkv, G, Hq, D/4], expanded along Hq (stride 0): four fp8 values of the device per word, element
            d in bits 8 (d % 4) of word d / 4. Paged: [1, pages*page_size, G, Hq, D/4].
        v: like ``k``.
        k_scale_shift: int32 [1, rows, G, Hq], expanded likewise: float16 scale in the low half, float16 shift in the
            high half; an element is fp8 * scale + shift.
        v_scale_shift: the same of V.
        seqlens: int32 [B]; rows past a sequence's length are ignored.
        block_tables: int32 [B, max_pages], with ``page_size``.
        page_size: rows of a page, a multiple of 64.
        scale: factor of q.k; 1/sqrt(D) by default.
        split_k: as for :func:`decode_attention_fp8`.
        force_kernel_config: as for :func:`decode_attention_fp8`.
        causal: as for :func:`decode_attention_fp8`.

    Returns:
        (out like q, log-sum-exp float32 [B, G, Hq, Mq]).

    Raises:
        GuardError: operands that do not fit each other or the kernel.
        BuildError, LaunchError: the kernel could not be built or run.
    """
    folded, k_data, v_data, k_rows, v_rows = _prepare_packed(
        q, k, v, k_scale_shift, v_scale_shift, seqlens, block_tables, page_size
    )
    max_keys = _check_plain(folded, k_data, v_data, block_tables, seqlens)
    taken = _plan(folded, k_data, max_keys, split_k, force_kernel_config).accepted
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if taken is not None and taken.path == "hip":
        splits = taken.configuration["split_k"]
        out, lse = _run(
            folded, k_data, v_data, block_tables, seqlens, None, None, k_rows, v_rows, factor, splits, causal
        )
    else:
        keys, values = (
            dequantize_kv_fp8(data.contiguous().view(torch.int32), rows, _fp8_of(q.device))
            for data, rows in ((k_data, k_rows), (v_data, v_rows))
        )
        out, lse = _reference(folded, keys, values, block_tables, seqlens, factor, causal)
    batch, mq = folded.shape[:2]
    return out.view(q.shape), lse.view(batch, q.shape[2], q.shape[3], mq)
