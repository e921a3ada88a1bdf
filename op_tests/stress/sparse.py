"""Trials of sparse attention: scores of key blocks, and which of them are chosen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from stress.attention import own_fp8
from stress.case import Arguments, Op, Rng, first, integers, is_given
from stress.floats import F32, Span, values


def _lists(rng: Rng, batch: int, pages: int, page_size: int) -> dict[str, torch.Tensor]:
    tables = torch.from_numpy(rng.numbers.permutation(batch * pages).astype(np.int32)).view(batch, pages)
    lengths = torch.from_numpy(rng.numbers.integers(0, pages * page_size + 2, batch).astype(np.int32))
    return {"block_tables": tables, "seqlens": lengths}


def make_scores(rng: Rng) -> Arguments:
    batch, pages, page_size = rng.pick((1, 2, 3)), rng.integer(1, 9), rng.pick((16, 32, 48, 128))
    dtype, d = rng.pick((torch.bfloat16, torch.float16)), rng.pick((64, 128, 128, 96))
    keys, block_size = rng.finite(batch * pages, page_size, d), rng.pick((16, 32, 64, 128))
    q = rng.finite(batch, rng.pick((1, 1, 3, 16)), rng.pick((1, 2, 4)), d, dtype=dtype)
    shape = (*q.shape[:3], -(-pages * page_size // block_size))
    return {
        "q": rng.strided(q), "index_cache": keys.to(rng.pick((dtype, own_fp8()))),
        **_lists(rng, batch, pages, page_size), "block_size": block_size,
        "out": rng.maybe(0.3, lambda: torch.full(shape, 7.0)),
    }  # fmt: skip


def _seen(before: Arguments, tokens: int, held: int) -> Any:
    """How many keys each token sees [B, tokens]."""
    lengths = np.minimum(integers(before["seqlens"]), held)
    return np.maximum(lengths[:, None] - tokens + 1 + np.arange(tokens), 0)


def judge_scores(before: Arguments, result: Any, after: Arguments) -> str | None:
    q, tables, size = values(before["q"]), integers(before["block_tables"]), int(before.get("block_size", 128))
    cache = before["index_cache"]
    held = tables.shape[1] * cache.shape[1]
    blocks = -(-held // size)
    listed = cache[torch.from_numpy(tables.clip(0, len(cache) - 1))]  # of 2^46 pages few are listed
    keys = values(listed, own_fp8() if cache.dtype == torch.uint8 else None).reshape(len(q), held, -1)
    shape = (*q.shape[:3], blocks)
    wanted, room = np.full(shape, -np.inf), np.zeros(shape)
    seen = _seen(before, q.shape[1], held)
    for b, t in np.ndindex(q.shape[:2]):
        products = q[b, t] @ keys[b, : seen[b, t]].T
        sums = np.abs(q[b, t]) @ np.abs(keys[b, : seen[b, t]]).T
        for block in range(-(-int(seen[b, t]) // size)):
            part = slice(block * size, (block + 1) * size)
            wanted[b, t, :, block] = products[:, part].max(axis=1)
            room[b, t, :, block] = sums[:, part].max(axis=1) * q.shape[3] * F32
    return first(
        is_given(result, after.get("out"), "out"),
        Span.of(wanted, room).complaint("scores", values(result), wanted > -np.inf),
        None if (np.isinf(values(result)) == np.isinf(wanted)).all() else "-inf in other places",
    )  # fmt: skip


def make_choice(rng: Rng) -> Arguments:
    size, batch, tokens = rng.pick((16, 64, 128)), rng.pick((1, 2)), rng.pick((1, 2, 5))
    page_size = rng.pick([each for each in (16, 32, 64, 128) if each <= size])
    lists = _lists(rng, batch, rng.integer(1, 60), page_size)
    blocks = -(-lists["block_tables"].shape[1] * page_size // size)
    scores = rng.normal(batch, tokens, rng.pick((1, 4)), blocks)
    if rng.chance(0.2):
        scores[..., rng.integer(0, blocks - 1)] = rng.pick((-math.inf, math.inf, math.nan))
    topk, groups = rng.integer(1, 16), scores.shape[2]
    outs = {
        "ids_out": (batch, tokens, groups, topk), "tables_out": (batch * tokens, groups, topk * size // page_size),
        "lengths_out": (batch * tokens, groups),
    }  # fmt: skip
    return {
        "scores": scores.round() if rng.chance(0.5) else scores, **lists, "page_size": page_size, "topk": topk,
        "local_blocks": rng.integer(0, min(topk, 3)), "block_size": size,
        **{
            name: torch.full(shape, 7, dtype=torch.int32) if rng.chance(0.3) else None for name, shape in outs.items()
        },
    }  # fmt: skip


def judge_choice(before: Arguments, result: Any, after: Arguments) -> str | None:
    ids, pages, lengths = (integers(part) for part in result)
    scores, tables = before["scores"].double().numpy(), integers(before["block_tables"])
    size, page_size, topk = int(before.get("block_size", 128)), int(before["page_size"]), int(before.get("topk", 16))
    local, per_block = int(before.get("local_blocks", 1)), size // page_size
    seen = _seen(before, scores.shape[1], tables.shape[1] * page_size)
    for b, t, g in np.ndindex(scores.shape[:3]):
        own = (int(seen[b, t]) - 1) // size if seen[b, t] else -1
        candidates = range(own + 1)

        def rank(block: int, row: Any = scores[b, t, g], own: int = own) -> tuple[float, ...]:
            if block > own - local:
                return (0.0, 0.0, block)
            return (1.0, 0.0, block) if np.isnan(row[block]) else (2.0, -row[block], block)

        usable = [i for i in candidates if rank(i)[0] < 2 or scores[b, t, g, i] > -np.inf]
        chosen = sorted(sorted(usable, key=rank)[:topk])
        where = f"sequence {b}, token {t}, group {g}"
        if ids[b, t, g].tolist() != chosen + [-1] * (topk - len(chosen)):
            return f"{where}: blocks {ids[b, t, g].tolist()} instead of {chosen}"
        entries = [i * per_block + j for i in chosen for j in range(per_block)]
        listed = [int(tables[b, e]) if e * page_size < seen[b, t] else 0 for e in entries]
        row = b * scores.shape[1] + t
        if pages[row, g].tolist() != listed + [0] * (topk * per_block - len(listed)):
            return f"{where}: pages {pages[row, g].tolist()} instead of {listed}"
        keys = sum(min(size, int(seen[b, t]) - i * size) for i in chosen)
        if lengths[row, g] != keys:
            return f"{where}: {lengths[row, g]} keys instead of {keys}"
    names = ("ids_out", "tables_out", "lengths_out")
    return first(*(is_given(part, after.get(name), name) for part, name in zip(result, names, strict=True)))


OPS = (
    Op("sparse_block_scores", make_scores, judge_scores, writes=("out",)),
    Op("sparse_topk_blocks", make_choice, judge_choice, writes=("ids_out", "tables_out", "lengths_out")),
)
