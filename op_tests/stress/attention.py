"""Trials of decode attention over fp8 and int4 caches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stress.case import Arguments, Op, Rng, first, integers, is_given
from stress.floats import FORMATS, Array, Span, raw_bytes, same, values
from stress.quantised import mx_complaint, own_fp8, static_complaint

HALVES = (torch.float16, torch.bfloat16)
MOST_SPLITS = 5
FN = torch.float8_e4m3fn


def _fp8_cache(rng: Rng, *shape: int) -> torch.Tensor:
    return (rng.finite(*shape).clamp(-6, 6)).to(own_fp8())


def _options(rng: Rng, heads: int) -> Arguments:
    """What a token sees and how it is weighed, and whether it is causal."""
    window = rng.maybe(0.25, lambda: rng.pick((1, 5, 16, 40, 10**6)))
    sinks = rng.finite(heads) * 2
    if rng.chance(0.5):
        sinks[rng.integer(0, heads - 1)] = rng.pick((-math.inf, 1e10, -1e10, 1e20, 2e38, 3e38, 3.4e38))
    return {
        "causal": window is not None or rng.chance(0.7), "window": window, "sinks": rng.maybe(0.4, lambda: sinks),
        "softcap": rng.maybe(0.25, lambda: rng.pick((0.5, 5.0, 30.0))),
    }  # fmt: skip


def _outputs(rng: Rng, shape: tuple[int, ...], lse: tuple[int, ...], dtype: torch.dtype) -> Arguments:
    """How the output of ``shape`` is quantised, if it is, and memory for some of the results."""
    row = -3 if len(shape) == 5 else -2  # the first axis of a row
    rows, width = math.prod(shape[:row]), math.prod(shape[row:])
    kind = rng.pick(("", "", "static", "mx"))
    most = 4 * MOST_SPLITS * (math.prod(shape) + math.prod(shape[:-1]))
    made: Arguments = {
        "out": rng.maybe(0.3, lambda: torch.full(shape, 7.0).to(own_fp8() if kind else dtype)),
        "lse_out": rng.maybe(0.3, lambda: torch.full(lse, 7.0)),
        "workspace": rng.maybe(0.2, lambda: torch.zeros(most, dtype=torch.uint8)),
    }
    if kind == "static":
        made["out_scale"] = torch.tensor([rng.pick((0.01, 0.25, 1.0, 3.0, 0.0))])
    if kind == "mx" and width % 32 == 0:
        scales = rng.as_scale_dtype(torch.full((rows, width // 32), 9, dtype=torch.uint8))
        made |= {"out_format": "mxfp8", "scale_out": rng.maybe(0.4, lambda: scales)}
    elif kind == "mx" and made["out"] is not None:
        made["out"] = made["out"].to(dtype)
    return made


def _ragged(rng: Rng, batch: int, mq: int) -> Arguments:
    """The tokens of each sequence, up to ``mq`` of them and not all alike, and a few of none at the end."""
    counts = rng.numbers.integers(0, mq + 1, batch)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return {"cu_seqlens_q": torch.from_numpy(starts), "max_seqlen_q": mq}


def with_unread_pages(rng: Rng, given: Arguments, page_size: int, tokens: int) -> Arguments:
    """The call, often with numbers of no page where no token sees a key of it."""
    tables = given["block_tables"]
    if tables is None or tables.dim() == 3 or rng.chance(0.5):
        return given
    first_key = torch.arange(tables.shape[1]) * page_size
    lengths = given["seqlens"].clamp(max=tables.shape[1] * page_size)[:, None]
    starts = given.get("cu_seqlens_q")
    counts = torch.full_like(lengths, tokens // len(tables)) if starts is None else starts.diff()[:, None]
    seen = lengths if given["window"] is None else counts - 1 + given["window"]
    unread = (first_key >= lengths) | (counts == 0) | (first_key + page_size <= lengths - seen)
    tables[unread] = rng.pick((-1, 2**31 - 1))
    return given


def _tables(rng: Rng, pages: int, *lists: int) -> torch.Tensor:
    """One to three pages of each list."""
    return torch.from_numpy(rng.numbers.integers(0, pages, (*lists, rng.integer(1, 3))).astype(np.int32))


def make_plain(rng: Rng) -> Arguments:
    given = _drawn_plain(rng)
    return with_unread_pages(rng, given, given["k_cache"].shape[1], given["q"].shape[:-2].numel())


def _drawn_plain(rng: Rng) -> Arguments:
    batch, mq, kv_heads, group = (rng.pick(sizes) for sizes in ((1, 2, 3), (1, 1, 2, 4), (1, 2), (1, 3, 8)))
    d = rng.pick((64, 128, 64, 256, 192, 32, 72, 160))
    paged, dtype = rng.chance(0.6), rng.pick((*HALVES, *HALVES, torch.float32, torch.float64))
    page_size, pages = (rng.pick((16, 32, 48, 8, 20, 1)), 4) if paged else (rng.pick((1, 17, 48, 100)), batch)
    half = dtype in HALVES and rng.chance(0.25)
    cache = [_fp8_cache(rng, pages, page_size, kv_heads, d).to(dtype if half else own_fp8()) for _ in range(2)]
    tables = _tables(rng, pages, batch) if paged else None
    most = page_size * (tables.shape[1] if tables is not None else 1) + rng.pick((0, 0, 1, 30))
    lists: tuple[int, ...] = (batch,)
    ragged = _ragged(rng, batch, mq) if rng.chance(0.3) else {}
    if tables is not None and not ragged and rng.chance(0.25):  # each KV head has its own keys
        lists = batch, kv_heads
        chosen = rng.numbers.integers(0, pages, (*lists, tables.shape[1]))
        tables = torch.from_numpy(chosen.astype(np.int32))
        most = page_size * tables.shape[2]
    lengths = torch.from_numpy(rng.numbers.integers(0, most + 1, lists).astype(np.int32))
    scales = [rng.pick((1.0, 0.5, torch.tensor([0.7]), rng.finite(kv_heads).abs())) for _ in range(2)]
    heads = kv_heads * group
    tokens = int(ragged["cu_seqlens_q"][-1]) + rng.integer(0, 2) if ragged else 0
    shape, lse = ((tokens, heads, d), (heads, tokens)) if ragged else ((batch, mq, heads, d), (batch, heads, mq))
    q = rng.finite(*shape, dtype=dtype)
    as_bytes = rng.chance(0.3) and not half
    return {
        "q": rng.strided(q), "k_cache": cache[0].view(torch.uint8) if as_bytes else cache[0],
        "v_cache": cache[1].view(torch.uint8) if as_bytes else cache[1], "block_tables": tables, "seqlens": lengths,
        "k_scale": scales[0], "v_scale": scales[1], "scale": rng.maybe(0.3, lambda: 0.1), "return_lse": rng.chance(0.6),
        "split_k": rng.maybe(0.4, lambda: rng.integer(1, MOST_SPLITS)), **_options(rng, heads), **ragged,
        **_outputs(rng, shape, lse, q.dtype),
    }  # fmt: skip


def make_past_tables(rng: Rng) -> Arguments:
    """A window over sequences that are longer than their pages."""
    given = _drawn_plain(rng)
    while (tables := given["block_tables"]) is None or tables.dim() == 3 or "cu_seqlens_q" in given:
        given = _drawn_plain(rng)
    page_size = given["k_cache"].shape[1]
    held = page_size * tables.shape[1]
    lengths = rng.numbers.integers(held, held + 60, len(tables)).astype(np.int32)
    given |= {"seqlens": torch.from_numpy(lengths), "causal": True, "window": rng.pick((1, 5, 16))}
    return with_unread_pages(rng, given, page_size, given["q"].shape[:-2].numel())


def _rows(cache: Array, tables: Array | None) -> Array:
    """Each sequence's rows [B, keys, heads, D]; a page outside the cache is NaN, as nothing may read it."""
    if tables is None:
        return cache
    if tables.ndim == 3:
        heads = [_rows(cache[:, :, head : head + 1], tables[:, head]) for head in range(tables.shape[1])]
        return np.concatenate(heads, axis=2)
    known = (tables >= 0) & (tables < len(cache))
    rows = np.where(known[:, :, None, None, None], cache[np.where(known, tables, 0)], np.nan)
    return rows.reshape(len(tables), -1, *cache.shape[2:])


def _starts(before: Arguments, batch: int, mq: int) -> Array:
    """The first token of each sequence among all of them, and the end."""
    starts = before.get("cu_seqlens_q")
    return np.arange(batch + 1) * mq if starts is None else integers(starts)


def attend(
    q: Array, starts: Array, k: Array, v: Array, size_v: Array, lengths: Array, factor: float, rough_k: float,
    before: Arguments,
) -> tuple[Span, Span, Array]:  # fmt: skip
    """(attention, log-sum-exp [tokens, heads], where both are judged) with the options of the call ``before``.

    ``q``: [tokens, heads, D], of which sequence b has ``starts[b]`` to ``starts[b + 1]``; ``size_v``: what errors of V
    are relative to, its parts where it is a sum; ``rough_k``: the relative error of K.
    """
    causal, window, cap = bool(before.get("causal", True)), before.get("window"), before.get("softcap")
    sinks = None if before.get("sinks") is None else values(before["sinks"])
    tokens, heads, _ = q.shape
    group = heads // k.shape[2]
    out, room, written = np.zeros(q.shape), np.zeros(q.shape), np.zeros(q.shape, bool)
    lse, lse_room = np.full((tokens, heads), -np.inf), np.zeros((tokens, heads))
    each = lengths if lengths.ndim == 2 else np.repeat(lengths[:, None], k.shape[2], axis=1)
    for b in range(len(each)):
        count = int(starts[b + 1] - starts[b])
        for index in range(count):
            token = int(starts[b]) + index
            written[token] = True
            for head in range(heads):
                length = int(np.clip(each[b, head // group], 0, k.shape[1]))
                end = max(length - count + index + 1, 0) if causal else length
                begin = 0 if window is None else max(end - int(window), 0)
                sink = -np.inf if sinks is None else float(sinks[head])
                if not end:
                    lse[token, head] = sink
                    continue
                keys, rows, sizes = (part[b, begin:end, head // group] for part in (k, v, size_v))
                with np.errstate(all="ignore"):
                    scores = keys @ q[token, head] * factor
                    off = np.abs(keys) @ np.abs(q[token, head]) * abs(factor) * (rough_k + 2.0**-18)
                    if cap is not None:  # tanh flattens errors; its own is a few roundings of the cap
                        scores = float(cap) * np.tanh(scores / float(cap))
                        off = off + abs(float(cap)) * 2.0**-18
                    top = max(scores.max(), sink)
                    powers = np.exp(scores - top)
                    total = powers.sum() + np.exp(sink - top)
                    lse[token, head] = top + np.log(total)
                    lse_room[token, head] = off.max() + 2.0**-16 * (1 + abs(top))
                    weights = powers / total
                    out[token, head] = weights @ rows
                    # A weight is rounded to bfloat16, V to bfloat16 at most, scores are off, sums are float32.
                    room[token, head] = (weights * (2 * off.max() + 2.0**-6.5)) @ sizes
    judged = np.isfinite(out) & (room < 1e4) & written
    found = Span.of(lse, lse_room + 1e-6)
    # As documented: the kernels' exponents of 2 hold a log-sum-exp up to 2.3e38.
    return Span.of(out, room + 1e-6), Span(np.where(found.low > 2.3e38, 2.3e38, found.low), found.high), judged


def _attention_complaint(
    before: Arguments, after: Arguments, out: Any, lse: Any, scales: Any, found: tuple[Span, Span, Array]
) -> str | None:
    for name, got in (("out", out), ("lse_out", lse), ("scale_out", scales)):
        if got is not None and (complaint := is_given(got, after.get(name), name)):
            return complaint
    wanted, wanted_lse, judged = found
    shape = wanted.low.shape
    if before.get("out_format") is not None or before.get("out_scale") is not None:
        if out.dtype != own_fp8():
            return f"the quantised result has dtype {out.dtype}"
        if scales is None:
            complaint = static_complaint(wanted, judged, out.reshape(shape), before["out_scale"], None)
        else:
            flat = shape[0], shape[1] * shape[2]
            span = Span(wanted.low.reshape(flat), wanted.high.reshape(flat))
            complaint = mx_complaint(span, judged.reshape(flat), out.reshape(flat), scales)
    else:
        dtype = before["q"].dtype
        if out.dtype != dtype:
            return f"the result has dtype {out.dtype}"
        got = values(out).reshape(shape)
        complaint = (wanted.rounded(dtype) if dtype in FORMATS else wanted).complaint("result", got, judged)
    if lse is None or complaint:
        return complaint
    rows = judged.all(axis=-1)
    got = values(lse)
    if before.get("cu_seqlens_q") is None:
        got = got.reshape(len(integers(before["seqlens"])), shape[1], -1).transpose(0, 2, 1)
    else:
        got = got.reshape(shape[1], shape[0]).T
    got = got.reshape(shape[:2])
    empty = np.isneginf(wanted_lse.low) & rows
    return first(
        wanted_lse.complaint("lse", got, rows & ~empty),
        same("lse of nothing", np.isneginf(got[empty]), np.ones(empty.sum(), bool)),
    )  # fmt: skip


def per_head(scale: Any, heads: int) -> Array:
    found = values(scale).reshape(-1) if isinstance(scale, torch.Tensor) else np.array([np.float64(np.float32(scale))])
    return np.broadcast_to(found, (heads,))[:, None]


def judge_plain(before: Arguments, result: Any, after: Arguments) -> str | None:
    q, fp8 = before["q"], own_fp8()
    if before["k_cache"].dtype not in (fp8, torch.uint8, FN, torch.float8_e4m3fnuz, *HALVES):
        raise ValueError("this is no cache")
    tables = None if before.get("block_tables") is None else integers(before["block_tables"])
    heads = before["k_cache"].shape[2]
    scales = [per_head(before.get(f"{name}_scale", 1.0), heads) for name in "kv"]
    caches = [values(before[f"{name}_cache"], fp8) * scale for name, scale in zip("kv", scales, strict=True)]
    factor = 1 / math.sqrt(q.shape[-1]) if before.get("scale") is None else float(before["scale"])
    k, v = (_rows(cache, tables) for cache in caches)
    lengths = integers(before["seqlens"])
    starts = _starts(before, len(lengths), q.shape[1])
    folded = values(q).reshape(-1, *q.shape[-2:])
    found = attend(folded, starts, k, v, np.abs(v), lengths, factor, 0.0, before)
    out, *rest = result if isinstance(result, tuple) else (result,)
    lse = rest.pop(0) if before.get("return_lse") else None
    return _attention_complaint(before, after, out, lse, rest.pop() if rest else None, found)


def _packed_rows(
    rng: Rng, rows: int, groups: int, d: int, num_groups: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(words [1, rows, groups, 1, n], scale and shift words) of a random cache."""
    halves = (rng.finite(rows, groups, num_groups or 1, 2) * 0.1).abs().half()
    words = halves.view(torch.int32).squeeze(-1)
    if num_groups is None:
        data = _fp8_cache(rng, rows, groups, d).view(torch.uint8).view(torch.int32)
        return data[None, :, :, None], words[None, :, :, None, 0]
    codes = rng.codes(rows, groups, d // 2).view(torch.int32)
    return torch.cat((words, codes), dim=-1)[None, :, :, None], None


def make_packed(rng: Rng) -> Arguments:
    batch, mq, groups, heads = (rng.pick(sizes) for sizes in ((1, 2), (1, 2), (1, 2), (1, 4)))
    d = rng.pick((64, 128, 192, 256))
    num_groups, paged = rng.pick((None, None, 1, 2, 4)), rng.chance(0.5)
    page_size, pages = (16 * rng.integer(1, 2), 4) if paged else (rng.pick((1, 20, 64)), batch)
    tables = _tables(rng, pages, batch) if paged else None
    most = page_size * (tables.shape[1] if tables is not None else 1) + rng.pick((0, 0, 1, 30))
    (k, k_words), (v, v_words) = (_packed_rows(rng, pages * page_size, groups, d, num_groups) for _ in range(2))
    wide = [None if x is None else x.expand(*x.shape[:3], heads, *x.shape[4:]) for x in (k, v, k_words, v_words)]
    ragged = _ragged(rng, batch, mq) if rng.chance(0.3) else {}
    tokens = int(ragged["cu_seqlens_q"][-1]) + rng.integer(0, 2) if ragged else batch * mq
    shape = (1, tokens, groups, heads, d)
    q = rng.finite(*shape, dtype=rng.pick(HALVES))
    given = {
        "q": q, "k": wide[0], "v": wide[1],
        "k_scale_shift": wide[2], "v_scale_shift": wide[3],
        "seqlens": torch.from_numpy(rng.numbers.integers(0, most + 1, batch).astype(np.int32)), "block_tables": tables,
        "page_size": page_size if paged else None, "scale": rng.maybe(0.3, lambda: 0.1),
        "split_k": rng.maybe(0.3, lambda: rng.integer(1, 4)),
        "num_groups": num_groups, **_options(rng, groups * heads), **ragged,
        **_outputs(rng, shape, (groups, heads, tokens) if ragged else (batch, groups, heads, mq), q.dtype),
    }  # fmt: skip
    return with_unread_pages(rng, given, page_size, tokens)


def _unpacked(words: torch.Tensor, scale_shift: torch.Tensor | None, num_groups: int | None) -> tuple[Array, Array]:
    """The rows [rows, G, D] of a packed cache, and the size of the two parts that each element is the sum of."""
    own = words[0, :, :, 0].contiguous()
    num_groups = None if num_groups is None else int(num_groups)
    if num_groups is None:
        assert scale_shift is not None
        halves = scale_shift[0, :, :, 0].contiguous().unsqueeze(-1).view(torch.float16).numpy().astype(np.float64)
        scaled = values(own.view(torch.uint8), own_fp8()) * halves[..., :1]
        return scaled + halves[..., 1:], np.abs(scaled) + np.abs(halves[..., 1:])
    halves = own[..., :num_groups].contiguous().unsqueeze(-1).view(torch.float16).numpy().astype(np.float64)
    codes = raw_bytes(own[..., num_groups:].contiguous())
    elements = np.stack((codes & 15, codes >> 4), axis=-1).reshape(
        *codes.shape[:2], num_groups, 2 * codes.shape[-1] // num_groups
    )
    shape = (*codes.shape[:2], 2 * codes.shape[-1])
    sizes = (elements * np.abs(halves[..., :1]) + np.abs(halves[..., 1:])).reshape(shape)
    return (elements * halves[..., :1] + halves[..., 1:]).reshape(shape), sizes


def judge_packed(before: Arguments, result: Any, after: Arguments) -> str | None:
    q, lengths, num_groups = before["q"], integers(before["seqlens"]), before.get("num_groups")
    if before["k"].dtype != torch.int32 or before["v"].dtype != torch.int32:
        raise ValueError("these are no packed caches")
    batch, (_, _, groups, heads, d) = len(lengths), q.shape
    tables = None if before.get("block_tables") is None else integers(before["block_tables"])
    page = before["k"].shape[1] // batch if before.get("page_size") is None else int(before["page_size"])
    caches = []
    for name in "kv":
        for part in _unpacked(before[name], before.get(f"{name}_scale_shift"), num_groups):
            caches.append(_rows(part.reshape(-1, page, *part.shape[1:]), tables))
    factor = 1 / math.sqrt(d) if before.get("scale") is None else float(before["scale"])
    folded = values(q).reshape(-1, groups * heads, d)
    # K of int4 is rounded to q's dtype.
    rough = 0.0 if num_groups is None else 2.0**-8
    k, _, v, sizes = caches
    starts = _starts(before, batch, q.shape[1] // max(batch, 1))
    found = attend(folded, starts, k, v, sizes, lengths, factor, rough, before)
    out, lse, *rest = result
    return _attention_complaint(before, after, out, lse, rest[0] if rest else None, found)


def _over(rng: Rng, given: Arguments) -> Arguments:
    """Parts of the keys are merged in a workspace in whose first bytes an operand or a result is."""
    names = [name for name, value in given.items() if isinstance(value, torch.Tensor) and name != "workspace"]
    name = rng.pick([each for each in ("k", "v", "k_cache", "v_cache", "q", "q", "out", "lse_out") if each in names])
    value = given[name].contiguous()
    size, start = value.numel() * value.element_size(), 16 * rng.pick((0, 0, 1, 3))
    pool = torch.zeros(start + size + (1 << 18), dtype=torch.uint8)
    shared = pool[start : start + size].view(value.dtype).view(value.shape).copy_(value)
    return {**given, name: shared, "workspace": pool, "split_k": rng.integer(2, MOST_SPLITS)}


def configured(rng: Rng, given: Arguments) -> Arguments:
    """A configuration that overrides everything, which the kernel may not have or which may not apply."""
    if rng.chance(0.4):
        return _over(rng, given)
    names = rng.pick((("waves",), ("block_n",), ("split_k",), ("waves", "split_k"), ("block_n", "block_m"), ()))
    return {**given, "force_kernel_config": {name: _number(rng, name) for name in names}}


def _number(rng: Rng, name: str) -> Any:
    kept = {"waves": (1, 2, 4), "block_n": (16, 32, 64), "split_k": (1, 2, MOST_SPLITS), "block_m": (16,)}[name]
    return rng.pick((*kept, *kept, np.int64(kept[0]), torch.tensor(kept[0]), 0, -1, 3, 2**31, 2**70, True))


WRITES = ("out", "lse_out", "scale_out", "workspace")
OPS = (
    Op("decode_attention_fp8", make_past_tables, judge_plain, writes=WRITES, mistake=configured),
    Op("decode_attention_fp8", make_plain, judge_plain, writes=WRITES, mistake=configured),
    Op("decode_attention_splitk", make_packed, judge_packed, writes=WRITES, mistake=configured),
)
