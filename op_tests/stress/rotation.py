"""Trials of the rotation that fills a cache of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stress.attention import HALVES, per_head
from stress.case import Arguments, Op, Rng, first, integers, is_given
from stress.floats import F32, FP8_MAX, Array, Span, raw_bytes, same, values
from stress.quantised import judged_rows, own_fp8

WRITES = (
    "q", "q_out", "k_cache", "v_cache", "k_scale_shift", "v_scale_shift", "index_q", "index_q_out", "index_cache",
)  # fmt: skip


def make_rope(rng: Rng) -> Arguments:
    tokens, heads, kv_heads, d = rng.pick((0, 1, 4)), rng.pick((1, 4)), rng.pick((1, 2)), rng.pick((64, 128, 48))
    dtype, storage = rng.pick(HALVES), rng.pick(("half", "fp8", "rows", "int4"))
    d = 64 if storage == "int4" and d == 48 else d
    pages, page_size, width = 3, rng.pick((1, 8, 16)), rng.pick((d, d // 2, 2))
    num_groups = rng.pick((1, 2, 4)) if storage == "int4" else None
    angle = rng.finite(17, width // 2) * 3
    table = torch.cat((angle.cos(), angle.sin()), dim=1).to(rng.pick((torch.float32, dtype)))
    slots = rng.numbers.permutation(pages * page_size)[:tokens]
    slots = np.where(rng.numbers.random(len(slots)) < 0.1, rng.pick((-1, 10**6)), slots)
    tokens = len(slots)
    fused = rng.finite(tokens, heads + 2 * kv_heads, d, dtype=dtype)
    if dtype == torch.bfloat16 and rng.chance(0.6):  # means beyond float16, which holds a row's shift
        fused[:, heads:] += rng.pick((1e5, -1e5, 1e30))
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    cache_dtype = {"half": dtype, "fp8": own_fp8(), "rows": own_fp8(), "int4": torch.int32}[storage]
    columns = d if num_groups is None else num_groups + d // 8
    given: Arguments = {
        "q": q, "k": k, "v": v, "cos_sin": table, "style": rng.pick(("neox", "interleaved")),
        "positions": torch.from_numpy(rng.numbers.integers(0, 17, tokens).astype(rng.pick((np.int32, np.int64)))),
        "k_cache": torch.zeros(pages, page_size, kv_heads, columns, dtype=cache_dtype),
        "v_cache": torch.zeros(pages, page_size, kv_heads, columns, dtype=cache_dtype),
        "slot_mapping": torch.from_numpy(slots.astype(np.int64)), "num_groups": num_groups,
    }  # fmt: skip
    if storage == "fp8":
        given |= {f"{n}_scale": rng.pick((0.5, 0.03, torch.tensor([0.25]), rng.finite(kv_heads).abs())) for n in "kv"}
    if storage == "rows":
        given |= {f"{name}_scale_shift": torch.zeros(pages, page_size, kv_heads, dtype=torch.int32) for name in "kv"}
    if rng.chance(0.5):
        given |= {f"{name}_weight": rng.finite(d, dtype=dtype) for name in "qk"}
        given["weight_offset"] = rng.pick((0.0, 1.0))
    given["epsilon"] = rng.pick((1e-6, 1e-5, 0.1, 0.0))
    given["rotary_dim"] = rng.maybe(0.3, lambda: width)
    if rng.chance(0.5):
        given["q_out"] = torch.zeros(tokens, heads, d, dtype=dtype)
    if rng.chance(0.4):
        groups, own = rng.pick((1, 2, 4)), rng.pick((dtype, own_fp8()))
        given |= {
            "index_q": rng.finite(tokens, groups + 1, d, dtype=dtype)[:, :groups],
            "index_k": rng.finite(tokens, 1, d, dtype=dtype),
            "index_cache": torch.zeros(pages, page_size, d, dtype=own),
            "index_q_out": rng.maybe(0.4, lambda: torch.zeros(tokens, groups, d, dtype=dtype)),
            **{
                f"index_{name}_weight": rng.finite(d, dtype=dtype) if rng.chance(0.5) else None for name in "qk"
            },
        }  # fmt: skip
    return given


def _turned(before: Arguments, name: str) -> tuple[Span, Array]:
    """q or k normalised and rotated, and where it is judged."""
    x, dtype = values(before[name]), before[name].dtype
    weight, offset = before.get(f"{name}_weight"), float(before.get("weight_offset", 0.0))
    y = Span.of(x)
    if weight is not None:
        with np.errstate(all="ignore"):
            inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + float(before.get("epsilon", 1e-6)))
        y = Span.of(x * inverse).widened((x.shape[-1] + 12) * F32)
        if offset == 0.0:
            y = y.rounded(dtype).times(values(weight)).widened(F32).rounded(dtype)
        else:
            y = y.times(values(weight) + offset).widened(4 * F32).rounded(dtype)
    table, positions = values(before["cos_sin"]), integers(before["positions"])
    width = table.shape[1]
    known = (positions >= 0) & (positions < len(table))
    some = table if len(table) else np.full((1, width), np.nan)
    rows = np.where(known[:, None], some[np.where(known, positions, 0)], np.nan)[:, None]
    cos, sin = rows[..., : width // 2], rows[..., width // 2 :]
    if before.get("style", "neox") == "interleaved":
        one, two = np.arange(0, width, 2), np.arange(1, width, 2)
    else:
        one, two = np.arange(width // 2), np.arange(width // 2, width)
    low, high = y.low.copy(), y.high.copy()
    for into, a, b, sign in ((one, one, two, -1.0), (two, two, one, 1.0)):
        left, right = (
            Span(y.low[..., a], y.high[..., a]).times(cos),
            Span(y.low[..., b], y.high[..., b]).times(sign * sin),
        )
        with np.errstate(invalid="ignore"):
            size = np.maximum(np.abs(left.low), np.abs(left.high)) + np.maximum(np.abs(right.low), np.abs(right.high))
            error = np.where(np.isinf(size), 0.0, 3 * F32 * size)  # an infinite end stays what it is
            summed = Span(left.low + right.low - error, left.high + right.high + error).rounded(dtype)
        low[..., into], high[..., into] = summed.low, summed.high
    judged = np.isfinite(x).all(axis=-1, keepdims=True) & np.ones(x.shape, dtype=bool)
    return Span(low, high), judged if weight is None else judged & judged_rows(x)  # squares that float32 holds


def _index_complaint(before: Arguments, after: Arguments) -> str | None:
    """What is wrong with the index queries and with the cache of index keys, one head with no scale."""
    if before.get("index_q") is None:
        return None
    q, judged_q = _turned(before, "index_q")
    k, judged_k = _turned(before, "index_k")
    into = after["index_q"] if after.get("index_q_out") is None else after["index_q_out"]
    cache = {"index_k_cache": before["index_cache"][:, :, None], "slot_mapping": before["slot_mapping"]}
    stored = {"index_k_cache": after["index_cache"][:, :, None]}
    return first(
        q.complaint("index_q", values(into), judged_q),
        _stored(k, judged_k, {**cache, "index_k": before["index_k"], "index_k_scale": 1.0}, stored, "index_k"),
    )


def _stored(span: Span, judged: Array, before: Arguments, after: Arguments, name: str) -> str | None:
    cache, slots = after[f"{name}_cache"], integers(before["slot_mapping"])
    pages, page_size = cache.shape[:2]
    kept = (slots >= 0) & (slots < pages * page_size)
    # Of several tokens with one slot any may be stored.
    alone = np.array([np.count_nonzero(slots == slot) == 1 for slot in slots], dtype=bool) & kept
    place = slots[alone] // page_size, slots[alone] % page_size
    span, judged = Span(span.low[alone], span.high[alone]), judged[alone]
    given = before[f"{name}_cache"]
    untouched = np.ones((pages, page_size), dtype=bool)
    untouched[slots[kept] // page_size, slots[kept] % page_size] = False
    left = same(f"{name}_cache of no token", raw(cache)[untouched], raw(given)[untouched])
    rows = cache[place]
    if cache.dtype == before[name].dtype:
        found = span.complaint(f"{name}_cache", values(rows), judged)
    elif cache.dtype == torch.int32:
        found = _int4_complaint(span, judged, rows, int(before["num_groups"]), name)
    elif before.get(f"{name}_scale_shift") is not None:
        found = _rows_complaint(span, judged, rows, after[f"{name}_scale_shift"][place], name)
    else:
        scale = np.float32(per_head(before[f"{name}_scale"], cache.shape[2])).astype(np.float64)
        fp8 = own_fp8()
        with np.errstate(all="ignore"):
            codes = span.times(np.where(scale == 0, 1.0, 1 / scale)).widened(4 * F32, 1e-40)
            codes = codes.map(lambda x: np.clip(x, -FP8_MAX[fp8], FP8_MAX[fp8])).rounded(fp8)
        found = codes.complaint(f"{name}_cache", values(rows, fp8), judged)
    return first(left, found)


def raw(x: torch.Tensor) -> Array:
    """The bits of a cache, one row per slot."""
    return x.contiguous().view(torch.uint8).numpy().reshape(*x.shape[:2], -1)


def _saturated(shift: Span) -> Span:
    """A shift as float16, whose range it does not leave."""
    return shift.map(lambda x: np.clip(x, -65504.0, 65504.0)).rounded(torch.float16)


def _rows_complaint(span: Span, judged: Array, rows: torch.Tensor, words: torch.Tensor, name: str) -> str | None:
    halves = words.contiguous().unsqueeze(-1).view(torch.float16).numpy().astype(np.float64)
    scale, shift = halves[..., :1], halves[..., 1:]
    fp8 = own_fp8()
    exact = (span.low == span.high).all(axis=-1, keepdims=True) & judged.all(axis=-1, keepdims=True)
    x = span.low
    mean = x.mean(axis=-1, keepdims=True)
    room = np.abs(x).sum(axis=-1, keepdims=True) * 4 * F32
    shifts = _saturated(Span.of(mean, room))
    widest = np.abs(x - shift).max(axis=-1, keepdims=True, initial=0.0) / FP8_MAX[fp8]
    scales = Span.of(widest).widened(8 * F32).rounded(torch.float16)
    usable = exact & (scales.low > 0) & np.isfinite(scales.high)
    codes = Span.of((x - shift) / np.where(scale > 0, scale, 1.0)).widened(8 * F32, 1e-9).rounded(fp8)
    return first(
        shifts.complaint(f"{name} shift", shift, exact), scales.complaint(f"{name} scale", scale, usable),
        codes.complaint(f"{name}_cache", values(rows, fp8), np.broadcast_to(usable, x.shape)),
    )  # fmt: skip


def _int4_complaint(span: Span, judged: Array, rows: torch.Tensor, groups: int, name: str) -> str | None:
    halves = rows[..., :groups].contiguous().unsqueeze(-1).view(torch.float16).numpy().astype(np.float64)
    scale, shift = halves[..., :1], halves[..., 1:]
    packed = raw_bytes(rows[..., groups:].contiguous())
    codes = (
        np.stack((packed & 15, packed >> 4), axis=-1)
        .reshape(*packed.shape[:-1], groups, 2 * packed.shape[-1] // groups)
        .astype(np.float64)
    )
    x = span.low.reshape(codes.shape)
    exact = ((span.low == span.high) & judged).reshape(codes.shape).all(axis=-1, keepdims=True)
    least, most = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scales = Span.of((most - least) / 15).widened(4 * F32).rounded(torch.float16)
    usable = exact & (scales.low > 0) & np.isfinite(scales.high)
    steps = (x - shift) / np.where(scale > 0, scale, 1.0) + 0.5
    wanted = Span.of(steps).widened(0.0, 1e-5).map(lambda s: np.clip(np.floor(s), 0, 15))
    return first(
        _saturated(Span.of(least)).complaint(f"{name} shift", shift, exact),
        scales.complaint(f"{name} scale", scale, usable),
        wanted.complaint(f"{name}_cache", codes, np.broadcast_to(usable, x.shape)),
    )  # fmt: skip


def judge_rope(before: Arguments, result: Any, after: Arguments) -> str | None:
    q, judged_q = _turned(before, "q")
    k, judged_k = _turned(before, "k")
    into = after["q"] if after.get("q_out") is None else after["q_out"]
    v = Span.of(values(before["v"]))
    return first(
        is_given(result, into, "q_out"), q.complaint("q", values(result), judged_q),
        _stored(k, judged_k, before, after, "k"), _stored(v, np.isfinite(v.low), before, after, "v"),
        _index_complaint(before, after),
    )  # fmt: skip


OPS = (Op("rope_and_cache", make_rope, judge_rope, writes=WRITES),)
