"""Trials of the router's choice, the sorting of slots and the sum over experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hipforge.ops.moe_align import SortedSlots
from stress.case import Arguments, Op, Rng, first, integers, is_given
from stress.floats import F32, FORMATS, Span, plain, same, values

REALS = (torch.float32, torch.float16, torch.bfloat16)


def make_gating(rng: Rng) -> Arguments:
    size, groups = rng.pick((4, 8, 16)), rng.pick((None, None, 2, 4))
    experts = size * groups if groups else rng.pick((1, 5, 8, 64, 200))
    kept = rng.integer(1, groups) if groups else None
    most = min(16, size * kept if kept else experts)
    logits = rng.normal(rng.pick((0, 1, 3, 9)), experts, dtype=rng.pick(REALS))
    k, shared = rng.integer(1, most), rng.pick((0, 0, 1, 2))
    shape = len(logits), k + shared
    return {
        "logits": logits, "k": k, "scoring": rng.pick(("softmax", "sigmoid")),
        "bias": rng.maybe(0.4, lambda: rng.finite(experts)), "renormalize": rng.chance(0.7), "groups": groups,
        "topk_groups": kept, "scale": rng.pick((1.0, 2.5)), "shared_experts": shared,
        "out": rng.maybe(0.3, lambda: torch.full(shape, 7.0)),
        "ids_out": rng.maybe(0.3, lambda: torch.full(shape, 7, dtype=torch.int32)),
    }  # fmt: skip


def judge_gating(before: Arguments, result: Any, after: Arguments) -> str | None:
    weights, ids = values(result[0]), integers(result[1])
    logits, k = values(before["logits"]), int(before["k"])
    experts, shared = logits.shape[1], int(before.get("shared_experts", 0))
    groups = 1 if before.get("groups") is None else int(before["groups"])
    kept = 1 if before.get("topk_groups") is None else int(before["topk_groups"])
    bias = None if before.get("bias") is None else values(before["bias"])
    if ids.shape != (len(logits), k + shared):
        return f"ids have shape {ids.shape}"
    complaints = [
        same("shared ids", ids[:, k:], np.broadcast_to(np.arange(experts, experts + shared), (len(ids), shared))),
        same("shared weights", weights[:, k:], np.ones((len(ids), shared))),
    ]
    for row, (one, chosen) in enumerate(zip(logits, ids[:, :k], strict=True)):
        if ((chosen < 0) | (chosen >= experts)).any() or len(set(chosen.tolist())) < k:
            return f"row {row}: ids {chosen.tolist()} are not {k} experts"
        if not np.isfinite(one).all():
            continue
        with np.errstate(all="ignore"):
            if before.get("scoring", "softmax") == "softmax":
                powers = np.exp(one - one.max())
                scores = powers / powers.sum()
            else:
                scores = 1 / (1 + np.exp(-one))
        choice = one if bias is None else scores + bias
        room = 0.0 if bias is None else 1e-5 * (1 + np.abs(choice).max())
        allowed = np.arange(experts)
        if groups > 1:
            parts = np.sort(choice.reshape(groups, -1), axis=1)[:, ::-1]
            value = parts[:, 0] if bias is None or parts.shape[1] == 1 else parts[:, :2].sum(axis=1)
            order = sorted(range(groups), key=lambda g: (-value[g], g))
            mine = {int(i) // (experts // groups) for i in chosen}
            if any(value[g] < value[order[kept - 1]] - 2 * room for g in mine):
                return f"row {row}: an expert of a dropped group among {chosen.tolist()}"
            keep = set(order[:kept])
            if room == 0.0:
                allowed = np.array([e for e in range(experts) if e // (experts // groups) in keep])
            else:
                if np.diff(np.sort(value)).min() < 4 * room:
                    continue
                allowed = np.array([e for e in range(experts) if e // (experts // groups) in keep])
        ranked = sorted(allowed.tolist(), key=lambda e: (-choice[e], e))
        if room == 0.0:
            complaints.append(same(f"row {row} of ids", chosen, np.array(ranked[:k])))
        else:
            gap = np.abs(choice[chosen] - choice[np.array(ranked[:k])])
            complaints.append(None if (gap <= room).all() else f"row {row}: {chosen.tolist()} instead of {ranked[:k]}")
        wanted = scores[chosen]
        if before.get("renormalize", True):
            wanted = wanted / (wanted.sum() + 1e-20)
        wanted = wanted * float(before.get("scale", 1.0))
        complaints.append(
            Span.of(wanted, np.abs(wanted) * 1e-4 + 1e-30).complaint(f"row {row} of weights", weights[row, :k])
        )
    return first(
        is_given(result[0], after.get("out"), "out"), is_given(result[1], after.get("ids_out"), "ids_out"), *complaints
    )


def make_align(rng: Rng) -> Arguments:
    experts = rng.pick((1, 2, 7, 64))
    ids = rng.numbers.integers(-1, experts + 1, (rng.pick((0, 1, 4, 30)), rng.pick((1, 2, 5))))
    chosen = torch.from_numpy(ids.astype(rng.pick((np.int32, np.int64))))
    where = torch.from_numpy(rng.numbers.integers(-1, experts, experts).astype(rng.pick((np.int32, np.int64))))
    block_m = rng.pick((1, 4, 16))
    return {
        "topk_ids": chosen, "block_m": block_m, "num_experts": experts,
        "expert_map": rng.maybe(0.4, lambda: where),
        "out": rng.maybe(0.4, lambda: _slots(chosen.numel(), block_m, experts)),
    }  # fmt: skip


def _slots(chosen: int, block_m: int, experts: int) -> SortedSlots:
    """Memory for the worst case of so many slots."""
    tiles = -(-(chosen + experts * (block_m - 1)) // block_m)
    return SortedSlots(*(torch.full((size,), 7, dtype=torch.int32) for size in (tiles * block_m, tiles, 1)))


def one_part_spoilt(rng: Rng, given: Arguments) -> Arguments:
    """One of the three tensors to write into is freed, another's, of another size or of another dtype."""
    parts = list(given["out"] or _slots(given["topk_ids"].numel(), given["block_m"], given["num_experts"]))
    at = rng.integer(0, 2)
    part = parts[at]
    kind = rng.pick(("freed", "shared", "another's", "short", "dtype", "none"))
    if kind == "freed":
        part.untyped_storage().resize_(rng.pick((0, part.numel() * 2)))
    elif kind == "shared" and given["topk_ids"].dtype == torch.int32 and given["topk_ids"].numel():
        parts[at] = pool = torch.zeros(part.numel() + given["topk_ids"].numel(), dtype=torch.int32)
        shape = given["topk_ids"].shape
        given["topk_ids"] = pool[-given["topk_ids"].numel() :].view(shape).copy_(given["topk_ids"])
        parts[at] = pool[: part.numel() + rng.pick((0, 1))][-part.numel() :]
    elif kind == "another's":
        parts[at] = parts[at - 1][: part.numel()]
    else:
        parts[at] = {"short": part[1:], "dtype": part.to(torch.int64)}.get(kind)
    return {**given, "out": SortedSlots(*parts)}


def judge_align(before: Arguments, result: Any, after: Arguments) -> str | None:
    flat, block_m, experts = (
        integers(before["topk_ids"]).reshape(-1),
        int(before["block_m"]),
        int(before["num_experts"]),
    )
    ids: list[int] = []
    tiles: list[int] = []
    where = None if before.get("expert_map") is None else integers(before["expert_map"])
    for expert in range(experts):
        mine = np.flatnonzero(flat == expert).tolist()
        mine += [len(flat)] * (-len(mine) % block_m)
        ids += mine
        local = expert if where is None else int(where[expert])
        # An id past int32 is cut: it stays outside the op's experts, and those are skipped.
        tiles += [int(np.array(local).astype(np.int32))] * (len(mine) // block_m)
    sorted_ids, expert_ids, padded = (integers(part) for part in result)
    if padded.tolist() != [len(ids)]:
        return f"{padded.tolist()} entries in use instead of {len(ids)}"
    given = (None,) * 3 if after.get("out") is None else after["out"]
    return first(
        *(is_given(part, wanted, "out") for part, wanted in zip(result, given, strict=True)),
        same("sorted_ids", sorted_ids[: len(ids)], np.array(ids, dtype=np.int64)),
        same("expert_ids", expert_ids[: len(tiles)], np.array(tiles, dtype=np.int64)),
    )


def make_combine(rng: Rng) -> Arguments:
    tokens, k, n = rng.pick((0, 1, 5)), rng.pick((1, 2, 4)), rng.pick((1, 8, 33))
    dtype = rng.pick(REALS)
    experts = rng.integer(1, 8)
    ids = torch.from_numpy(rng.numbers.integers(-1, experts + 2, (tokens, k)).astype(rng.pick((np.int32, np.int64))))
    given: Arguments = {
        "rows": rng.normal(tokens * k, n, dtype=dtype),
        "weights": rng.maybe(0.6, lambda: rng.finite(tokens, k)),
    }
    if rng.chance(0.6):
        given["ids"] = ids
        if rng.chance(0.5):
            given["num_experts"] = experts
        if rng.chance(0.5):
            local = rng.numbers.integers(-1, experts + 2, experts)
            given["expert_map"] = torch.from_numpy(local.astype(rng.pick((np.int32, np.int64))))
            given["num_local_experts"] = rng.pick((None, experts, experts // 2))
    if given["weights"] is None and "ids" not in given:
        given["top_k"] = k
    if rng.chance(0.3):
        given["out"] = torch.full((tokens, n), 7.0, dtype=rng.pick(REALS))
    return given


def judge_combine(before: Arguments, result: Any, after: Arguments) -> str | None:
    rows, ids, where = before["rows"], before.get("ids"), before.get("expert_map")
    k = next(
        int(found) for found in (
            None if before.get("weights") is None else before["weights"].shape[1],
            None if ids is None else ids.shape[1], before.get("top_k"),
        ) if found is not None
    )  # fmt: skip
    numbers = plain(rows).float().numpy().reshape(rows.shape[0] // k, k, rows.shape[1])
    used = np.ones(numbers.shape[:2], dtype=bool)
    if ids is not None:
        chosen = integers(ids)
        limit = before.get("num_experts") if where is None else len(where)
        used = (chosen >= 0) & (True if limit is None else chosen < int(limit))
        if where is not None and len(where):
            local = integers(where)
            most = before.get("num_local_experts")
            place = local[np.where(used, chosen, 0)]
            used &= (place >= 0) & (True if most is None else place < int(most))
    total = np.zeros((len(numbers), numbers.shape[2]), dtype=np.float32)
    weights = None if before.get("weights") is None else values(before["weights"]).astype(np.float32)
    with np.errstate(all="ignore"):
        for i in range(k if numbers.size else 0):
            term = numbers[:, i] if weights is None else numbers[:, i] * weights[:, i, None]
            total = np.where(used[:, i, None], total + term, total)
    wanted = Span.of(total.astype(np.float64))
    # One fused multiply-add rounds once where two operations round twice.
    if weights is not None:
        size = np.abs(np.where(used[..., None], numbers * weights[..., None], 0)).astype(np.float64).sum(axis=1)
        wanted = Span.of(total.astype(np.float64), size * k * 2 * F32)
    dtype = result.dtype
    if dtype not in FORMATS or dtype != (after["out"].dtype if after.get("out") is not None else rows.dtype):
        return f"the result has dtype {dtype}"
    judged = np.isnan(total) | np.isfinite(total)
    return first(
        is_given(result, after.get("out"), "out"), wanted.rounded(dtype).complaint("result", values(result), judged)
    )


OPS = (
    Op("topk_gating", make_gating, judge_gating, writes=("out", "ids_out")),
    Op("moe_align_block_size", make_align, judge_align, writes=("out",), mistake=one_part_spoilt),
    Op("moe_combine", make_combine, judge_combine, writes=("out",)),
)
