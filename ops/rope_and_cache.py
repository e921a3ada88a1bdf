"""RoPE, an RMS norm per head on request, and the write of k and v into a paged cache, in one launch.

The cache holds what :mod:`hipforge.ops.decode_attention_fp8` reads: fp8 with a scale per tensor or KV head,
fp8 with a float16 scale and shift per row, int4 with a scale and shift per group of a row, or the 16-bit elements.
"""

from __future__ import annotations

import inspect
from operator import index
from typing import Any, Literal, NamedTuple

import torch

from hipforge import archs
from hipforge.errors import GuardError
from hipforge.ops import reference
from hipforge.ops.core import checks, dispatch, programmatic
from hipforge.ops.core.dispatch import Accepted, Decision, plan_kernel
from hipforge.ops.core.formats import HALVES
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.core.operator import operator
from hipforge.ops.core.stub import stub
from hipforge.ops.core.traced import Written, is_symbolic, traced_call
from hipforge.ops.reference.attention import INT4_GROUPS
from hipforge.ops.triton.launch import unavailable

PUBLIC = ("rope_and_cache",)

Scale = torch.Tensor | float
Style = Literal["neox", "interleaved"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8)
STYLES = ("neox", "interleaved")
_WRITTEN = ("q_out", "k_cache", "v_cache", "k_scale_shift", "v_scale_shift", "index_q_out", "index_cache")


def _variant(
    q_out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale_shift: torch.Tensor | None, *rest: object
) -> dict[str, int | str]:
    if k_cache.dtype == torch.int32:
        storage = "int4"
    elif k_cache.dtype in HALVES:
        storage = "half"
    else:
        storage = "fp8" if k_scale_shift is None else "rows"
    return {"HF_INPUT": HALVES[q_out.dtype], "HF_CACHE": storage}


rope_and_cache_out = stub(
    "rope_and_cache_out",
    "module_rope_and_cache",
    "q_out, k_cache, v_cache: Tensor; k_scale_shift, v_scale_shift, index_q_out, index_cache: Tensor?; "
    "q, k, v: Tensor; index_q, index_k: Tensor?; cos_sin, positions, slot_mapping: Tensor; "
    "q_weight, k_weight, index_q_weight, index_k_weight, k_scale, v_scale: Tensor?; "
    "k_scale_value, v_scale_value: float; interleaved: bool; weight_offset, epsilon: float; num_groups: int; "
    "programmatic, known: bool",
    "Write the first seven as :func:`rope_and_cache` says; ``q_out`` may be ``q``, ``index_q_out`` ``index_q``.",
    variant=_variant,
    mutates=_WRITTEN,
)


# While torch traces: a float that changes from call to call is no constant of the graph.
_traced_out = traced_call(
    "rope_and_cache_numbers", inspect.signature(rope_and_cache_out, eval_str=True), rope_and_cache_out, lambda: None,
    Written((), _WRITTEN, (), None), frozenset(),
)  # fmt: skip


class _Operands(NamedTuple):
    """What a plan looks at."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    style: Style
    rotary_dim: int | None
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    k_scale: Scale | None
    v_scale: Scale | None
    k_scale_shift: torch.Tensor | None
    v_scale_shift: torch.Tensor | None
    num_groups: int | None
    q_out: torch.Tensor | None
    index_q: torch.Tensor | None
    index_k: torch.Tensor | None
    index_cache: torch.Tensor | None
    index_q_weight: torch.Tensor | None
    index_k_weight: torch.Tensor | None
    index_q_out: torch.Tensor | None


def _plan(**given: Any) -> Decision:
    parts = _Operands(**{name: given[name] for name in _Operands._fields})
    _check_heads(parts)
    _check_rotation(parts)
    _check_weights(parts)
    storage = _storage_of(parts)
    _check_caches(parts)
    _check_index(parts)
    triton_refusal = "the Triton kernel writes no int4 rows" if storage == "int4" else None
    if parts.index_q is not None:
        triton_refusal = "the Triton kernel writes no index keys"
    device = parts.q.device
    refusal = _refusal(device, index(parts.q.shape[2]))  # a constant of a traced graph
    return plan_kernel("rope_and_cache", device, refusal, unavailable(device) or triton_refusal)


def _refusal(device: torch.device, dim: int) -> str | None:
    """Return why the kernel does not take heads of ``dim``: one is held by a wave, 8 elements a lane."""
    target = dispatch.target_of(device)
    if isinstance(target, dispatch.Refused) or not 8 * archs.get(target[0]).wave < dim <= 512:
        return None
    return f"D must be at most {8 * archs.get(target[0]).wave} on {target[0]}; got {dim}"


_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


@operator(_plan, outs=("q_out",), mutates=(
    "q", "k_cache", "v_cache", "k_scale_shift", "v_scale_shift", "index_q", "index_cache", "index_q_out",
))  # fmt: skip
def rope_and_cache(
    taken: Accepted,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    style: Style = "neox",
    rotary_dim: int | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    epsilon: float = 1e-6,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    k_scale_shift: torch.Tensor | None = None,
    v_scale_shift: torch.Tensor | None = None,
    num_groups: int | None = None,
    q_out: torch.Tensor | None = None,
    index_q: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    index_q_weight: torch.Tensor | None = None,
    index_k_weight: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate q and k, and store k and v in a paged cache as decode attention reads it.

    With H the inputs' own 16-bit type, per head ``n = x * rsqrt(mean(x^2) + epsilon)`` in fp32, where there is a
    weight w: ``y = H(H(n) * w)`` for a ``weight_offset`` of 0, else ``y = H(n * (weight_offset + w))``. The first
    rotary_dim elements of y are rotated in fp32 and rounded once: ``H(a cos - b sin)`` and ``H(b cos + a sin)``. k is
    quantised from that value, v as it is, saturating and to nearest even: ``H`` itself; fp8 of ``x * (1 / scale)``; fp8
    of ``(x - shift) / scale`` with the words of :func:`hipforge.ops.reference.quantize_kv_fp8`; or the rows of
    :func:`hipforge.ops.reference.quantize_kv_int4`. A scale of 0 is taken as 1.

    A token whose slot is negative or past the cache is not stored; its q is rotated all the same. A position outside
    cos_sin makes what is rotated NaN. Two tokens with one slot: either may be stored, or parts of both.

    Example:
        >>> import torch, hipforge                                          # doctest: +SKIP
        >>> q, k, v = qkv.split((32 * 128, 8 * 128, 8 * 128), dim=-1)       # doctest: +SKIP
        >>> heads = [x.unflatten(-1, (-1, 128)) for x in (q, k, v)]         # doctest: +SKIP
        >>> hipforge.rope_and_cache(*heads, cos_sin, positions, k_cache, v_cache, slots, k_scale=1.0, v_scale=1.0)
        ... # doctest: +SKIP

    Args:
        taken: the path that was decided; callers do not pass it.
        q: float16 or bfloat16 [T, Hq, D], D a multiple of 8, at most 512; the last dimension contiguous, so that it
            may be a slice of one fused projection.
        k: like q, [T, Hkv, D].
        v: like k.
        cos_sin: contiguous [max_pos, rotary_dim], float32 or q's dtype: cosines in the first half of a row, sines in
            the second.
        positions: int32 or int64 [T].
        k_cache: [pages, page_size, Hkv, D] of fp8 (the device's e4m3, or uint8 with its bits) or of q's dtype, rows
            and pages at multiples of 16 bytes; with ``num_groups`` int32 [pages, page_size, Hkv, num_groups + D/8].
        v_cache: like ``k_cache``.
        slot_mapping: int64 [T]: page * page_size + slot.
        style: ``neox`` pairs elements (i, i + rotary_dim / 2), ``interleaved`` (2i, 2i + 1).
        rotary_dim: even, at most D; the columns of cos_sin, which is the default.
        q_weight: [D] of q's dtype: normalise each head of q. None: no norm.
        k_weight: the same of k.
        weight_offset: added to either weight: 1 for models that store w - 1 (Gemma, MiniMax-M3).
        epsilon: added to the mean; finite, at least 0.
        k_scale: of an fp8 cache: what an element of K stands for, over its fp8 value: a number, or float32 [1] or
            [Hkv].
        v_scale: the same of V.
        k_scale_shift: of an fp8 cache with words instead: int32 [pages, page_size, Hkv], written with the rows:
            float16 scale in the low half, float16 shift in the high half.
        v_scale_shift: the same of V.
        num_groups: 1, 2, 4 or 8: the caches are int4 with so many scales per row. D is then a power of two.
        q_out: like q, last dimension contiguous; None writes q in place.
        index_q: [T, groups, D] of q's dtype, the last dimension contiguous, the index queries of sparse attention:
            normalised and rotated like q.
        index_k: [T, 1, D], the index key of each token, the last dimension contiguous: normalised and rotated like k.
        index_cache: [pages, page_size, D] with the pages of k_cache, of fp8 (stored as it is, saturated) or of q's
            dtype: takes the index keys. Given with ``index_q`` and ``index_k``, or none of them.
        index_q_weight: [D]: the norm of ``index_q``; None: no norm.
        index_k_weight: the same of ``index_k``.
        index_q_out: like ``index_q``; None writes ``index_q`` in place.

    Returns:
        The rotated q [T, Hq, D]: ``q_out``, or q itself.

    Raises:
        GuardError: operands that do not fit each other, more or less than one kind of scale, or memory that is
            written and read by two of them (ArchError: a device that is neither gfx942 nor gfx950).
        BuildError, LaunchError: the kernel could not be built or run.
    """
    result = q if q_out is None else q_out
    index_result = index_q if index_q_out is None else index_q_out
    if taken.path == "kernel":
        (k_tensor, k_value), (v_tensor, v_value) = _scale_parts(k_scale), _scale_parts(v_scale)
        write = rope_and_cache_out
        if torch.compiler.is_dynamo_compiling():
            numbers = k_value, v_value, weight_offset, epsilon
            write = _traced_out if any([is_symbolic(each) for each in numbers]) else write  # noqa: C419
        write(
            result, k_cache, v_cache, k_scale_shift, v_scale_shift, index_result, index_cache, q, k, v, index_q,
            index_k, cos_sin, positions, slot_mapping, q_weight, k_weight, index_q_weight, index_k_weight, k_tensor,
            v_tensor, k_value, v_value, style == "interleaved", weight_offset, epsilon, num_groups or 0,
            programmatic.active(), programmatic.promised_new_keys() > 0,
        )  # fmt: skip
        return result
    scales = [
        None if scale is None else _one_or_more(scale, q.device) for scale in (k_scale, v_scale)
    ]
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None and scale.numel() != 1:
            checks.require_shape(name, scale, k.shape[1:2], "one scale, or one per KV head")
    tensors = q, k, v, cos_sin, positions, k_cache, v_cache, slot_mapping
    options: dict[str, Any] = {
        "interleaved": style == "interleaved", "q_weight": q_weight, "k_weight": k_weight,
        "weight_offset": float(weight_offset), "epsilon": float(epsilon), "k_scale": scales[0], "v_scale": scales[1],
        "k_scale_shift": k_scale_shift, "v_scale_shift": v_scale_shift,
        "fp8_dtype": fp8_dtypes(q.device)[0] if k_cache.dtype not in _FP8[:2] else k_cache.dtype,
    }  # fmt: skip
    if taken.path == "triton":
        from hipforge.ops.triton import rope_and_cache as fallback

        fallback.rope_and_cache(result, *tensors, **options)
        return result
    result.copy_(reference.rope_and_cache(*tensors, **options, num_groups=num_groups))
    if index_q is not None and index_k is not None and index_cache is not None and index_result is not None:
        turned = reference.rope_and_index(
            index_q, index_k, cos_sin, positions, index_cache, slot_mapping, interleaved=style == "interleaved",
            q_weight=index_q_weight, k_weight=index_k_weight, weight_offset=float(weight_offset),
            epsilon=float(epsilon), fp8_dtype=fp8_dtypes(q.device)[0],
        )  # fmt: skip
        index_result.copy_(turned)
    return result


def _one_or_more(scale: Scale, device: torch.device) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return scale.to(device, torch.float32).reshape(-1)
    return torch.ones(1, dtype=torch.float32, device=device) * scale  # torch makes no guard of the number


def _scale_parts(scale: Scale | None) -> tuple[torch.Tensor | None, float]:
    if isinstance(scale, torch.Tensor):
        return scale, 1.0
    return None, 1.0 if scale is None else scale if isinstance(scale, float) else float(scale)


def _check_heads(parts: _Operands) -> None:
    q, k = parts.q, parts.k
    checks.require_tensor(q=q, k=k, v=parts.v)
    checks.require_rank("q", q, 3, "[T, Hq, D]")
    checks.require_dtype("q", q, tuple(HALVES))
    checks.require_rank("k", k, 3, "[T, Hkv, D]")
    tokens, _, dim = q.shape
    checks.require_operand("k", k, (q.dtype,), (tokens, k.shape[1], dim), "T and D of q", q.device)
    checks.require_operand("v", parts.v, (q.dtype,), k.shape, "that of k", q.device)
    checks.require_operand("q_out", parts.q_out, (q.dtype,), q.shape, "that of q", q.device)


def _check_rotation(parts: _Operands) -> None:
    q, cos_sin, rotary_dim = parts.q, parts.cos_sin, parts.rotary_dim
    checks.require_choice("style", parts.style, STYLES)
    checks.require_rank("cos_sin", cos_sin, 2, "[max_pos, rotary_dim]")
    checks.require_dtype("cos_sin", cos_sin, (torch.float32, q.dtype))
    checks.require_device("cos_sin", cos_sin, q.device)
    width = cos_sin.shape[1]
    if rotary_dim is not None and rotary_dim != width:
        raise GuardError(f"rotary_dim must be the columns of cos_sin, {width}; got {rotary_dim}")
    if width < 2 or width % 2 or width > q.shape[2]:
        raise GuardError(f"rotary_dim (the columns of cos_sin) must be even, 2 to D = {q.shape[2]}; got {width}")
    per_token, why = q.shape[:1], "one per token of q"
    checks.require_operand("positions", parts.positions, (torch.int32, torch.int64), per_token, why, q.device)
    checks.require_operand("slot_mapping", parts.slot_mapping, (torch.int64,), per_token, why, q.device)


def _check_index(parts: _Operands) -> None:
    given = parts.index_q, parts.index_k, parts.index_cache
    others = parts.index_q_weight, parts.index_k_weight, parts.index_q_out
    index_q, index_k, index_cache = given
    if index_q is None or index_k is None or index_cache is None:
        if any(each is not None for each in (*given, *others)):
            raise GuardError("index_q, index_k and index_cache must all be given, or none of the index")
        return
    q, device, (tokens, _, dim) = parts.q, parts.q.device, parts.q.shape
    checks.require_rank("index_q", index_q, 3, "[T, groups, D]")
    groups = index_q.shape[1]
    checks.require_operand("index_q", index_q, (q.dtype,), (tokens, groups, dim), "T and D of q", device)
    checks.require_operand("index_k", index_k, (q.dtype,), (tokens, 1, dim), "one index key per token", device)
    pages, why = parts.k_cache.shape[:2], "pages and page_size of k_cache, D of q"
    checks.require_operand("index_cache", index_cache, (*_FP8, q.dtype), (*pages, dim), why, device)
    checks.require_operand("index_q_out", parts.index_q_out, (q.dtype,), index_q.shape, "that of index_q", device)
    for name in ("index_q_weight", "index_k_weight"):
        why = "one weight per element of a head"
        checks.require_operand(name, getattr(parts, name), (q.dtype,), (dim,), why, device)


def _check_weights(parts: _Operands) -> None:
    q, dim = parts.q, parts.q.shape[2]
    for name, weight in (("q_weight", parts.q_weight), ("k_weight", parts.k_weight)):
        if weight is None:
            continue
        checks.require_tensor(**{name: weight})
        if weight.numel() != dim and weight.numel() % dim == 0:
            raise GuardError(
                f"{name} must have one weight per element of a head, [{dim}]; got {weight.numel()}, a norm over the "
                "whole projection (as in MiniMax-M2), which is not computed here: normalise before the call"
            )
        checks.require_operand(name, weight, (q.dtype,), (dim,), "one weight per element of a head", q.device)


def _storage_of(parts: _Operands) -> Literal["half", "fp8", "rows", "int4"]:
    """Return the caches' format; exactly its scales must be given."""
    checks.require_tensor(k_cache=parts.k_cache)
    dtype, names = parts.k_cache.dtype, ("k_scale", "v_scale", "k_scale_shift", "v_scale_shift", "num_groups")
    seen = ", ".join(name for name in names if getattr(parts, name) is not None) or "none"
    if dtype == torch.int32:
        if seen != "num_groups":
            raise GuardError(f"an int4 cache (int32 words) takes num_groups and no other scale; got {seen}")
        checks.require_choice("num_groups", parts.num_groups, INT4_GROUPS)
        return "int4"
    if dtype == parts.q.dtype:
        if seen != "none":
            raise GuardError(f"a cache of q's dtype takes no scale; got {seen}")
        return "half"
    checks.require_dtype("k_cache", parts.k_cache, (*_FP8, torch.int32, parts.q.dtype))
    if seen == "k_scale, v_scale":
        return "fp8"
    if seen == "k_scale_shift, v_scale_shift":
        return "rows"
    raise GuardError(
        "an fp8 cache takes exactly one kind of scale: k_scale and v_scale, or k_scale_shift and v_scale_shift; "
        f"got {seen}"
    )


def _check_caches(parts: _Operands) -> None:
    k_cache, groups, device = parts.k_cache, parts.num_groups, parts.q.device
    checks.require_rank("k_cache", k_cache, 4, "[pages, page_size, Hkv, D]")
    _, heads, dim = parts.k.shape
    rows, why = (*k_cache.shape[:2], heads), "one word per row of the cache"
    width = dim if groups is None else groups + dim // 8
    checks.require_shape("k_cache", k_cache, (*rows, width), "Hkv and D of k")
    checks.require_device("k_cache", k_cache, device)
    checks.require_operand("v_cache", parts.v_cache, (k_cache.dtype,), k_cache.shape, "that of k_cache", device)
    checks.require_operand("k_scale_shift", parts.k_scale_shift, (torch.int32,), rows, why, device)
    checks.require_operand("v_scale_shift", parts.v_scale_shift, (torch.int32,), rows, why, device)
