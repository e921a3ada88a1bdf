"""Trials of what multiplies with experts' weights: the grouped matrix products and the MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stress.case import Arguments, Op, Rng, integers
from stress.floats import BF16_FORMAT, F32, FORMATS, FP8_MAX, Array, Span, e8m0, fp4_values, values
from stress.gemms import (
    BF16,
    SCALES,
    TINY,
    block_of,
    fp8_scales,
    fp8_values,
    mx_values,
    own_payload,
    payload,
    product,
    result_complaint,
)
from stress.quantised import dynamic_complaint, mx_codes, mx_complaint, own_fp8


def make_grouped(rng: Rng, columns: tuple[int, ...] = (8, 16, 40)) -> Arguments:
    experts, n, k = rng.pick((1, 3, 8)), rng.pick(columns), 32 * rng.pick((1, 2, 4, 8, 45))
    tokens, top_k, block_m = rng.pick((1, 2, 5)), rng.pick((1, 2, 4)), rng.pick((4, 8, 16))
    slots, a_div = tokens * top_k, rng.pick((1, top_k))
    owner = rng.numbers.integers(0, experts + 1, slots)  # the last one is on no rank
    ids: list[int] = []
    tiles: list[int] = []
    for expert in range(experts):
        mine = [int(slot) for slot in np.flatnonzero(owner == expert)]
        mine += [slots] * (-len(mine) % block_m)
        ids += mine
        tiles += [-1 if rng.chance(0.1) else expert] * (len(mine) // block_m)
    used = len(ids)
    spare = rng.integer(0, 2)
    ids += [slots] * (block_m * spare)
    tiles += [rng.pick((0, -1, 99))] * spare
    if not ids:
        ids, tiles = [slots] * block_m, [0]
    a_rows = -(-slots // a_div) + rng.integer(0, 1)
    return {
        "a_q": payload(rng, a_rows, k), "a_scale": rng.scales(a_rows, k // 32), "w": payload(rng, experts, n, k),
        "w_scale": rng.scales(experts, n, k // 32), "sorted_token_ids": torch.tensor(ids, dtype=torch.int32),
        "expert_ids": torch.tensor(tiles, dtype=torch.int32),
        "num_tokens_post_padded": torch.tensor([used], dtype=torch.int32), "num_valid_tokens": slots,
        "block_m": block_m, "a_div": a_div, "mul_weight_by": rng.maybe(0.4, lambda: rng.finite(slots)),
        "bias": rng.maybe(0.3, lambda: rng.finite(experts, n)), "uncovered": rng.pick(("zero", "zero", "undefined")),
        "out": rng.maybe(0.3, lambda: torch.full((slots, n), 7.0, dtype=BF16)),
    }  # fmt: skip


def make_grouped_gemm(rng: Rng) -> Arguments:
    given = make_grouped(rng)
    slots, a_div = given["num_valid_tokens"], given["a_div"]
    ids = torch.zeros(slots // a_div, a_div, dtype=torch.int32)
    return {
        **given, "top_k": a_div, "topk_ids": rng.maybe(0.5, lambda: ids),
        "out_dtype": rng.pick((BF16, BF16, BF16, torch.float16)),
    }  # fmt: skip


def make_grouped_fp8(rng: Rng, columns: tuple[int, ...] = (8, 16, 40)) -> Arguments:
    """Operands with scales of each kind."""
    given = make_grouped(rng, columns)
    (rows, k), (experts, n, _) = given["a_q"].shape, given["w"].shape
    payloads = [own_payload(rng, *given[name].shape) for name in ("a_q", "w")]
    a_scale, w_scale = fp8_scales(rng, rng.pick(SCALES), rows, n, k, experts)
    return {**given, "a_q": payloads[0], "w": payloads[1], "a_scale": a_scale, "w_scale": w_scale}


def has_fp8_scales(w: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether experts' weights have scales of the fp8 GEMM, not one per 32 elements of each row."""
    return scale.dtype == torch.float32 or tuple(scale.shape[:2]) != tuple(w.shape[:2])


def expert_block(w: torch.Tensor, scale: torch.Tensor) -> int:
    """The rows of an expert's weight, and the elements of each, that share a scale where more than one do."""
    return block_of(w.shape[2], w.shape[1], scale[0])


def expert_values(w: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """Weights of experts in MX-FP8, in MXFP4, or in fp8 with scales of one of its kinds."""
    if has_fp8_scales(w, scale):
        size = expert_block(w, scale)
        return np.stack([fp8_values(one, part, size, size) for one, part in zip(w, scale, strict=True)])
    if w.shape[-1] == 16 * scale.shape[-1]:
        return fp4_values(w) * np.repeat(e8m0(scale), 32, axis=-1)
    return mx_values(w, scale)


def make_grouped_mxfp4(rng: Rng) -> Arguments:
    """Operands with W in e2m1."""
    given = make_grouped(rng)
    experts, n, k = given["w"].shape
    return {**given, "w": rng.codes(experts, n, k // 2, nan=())}


def make_grouped_swiglu(rng: Rng) -> Arguments:
    """Operands whose columns are gate and up, with SwiGLU's parameters."""
    given = make_grouped_fp8(rng, (64, 256, 320, 40))
    for name in ("mul_weight_by", "uncovered", "out"):
        del given[name]
    d = given["w"].shape[1] // 2
    form = rng.pick((None, None, "rows", "blocks", *(["mx"] if d % 32 == 0 else [])))
    if form is None and has_fp8_scales(given["w"], given["w_scale"]):
        form = "blocks" if d % 32 and expert_block(given["w"], given["w_scale"]) == 32 else None
    return {
        **given, "out_format": form, "alpha": rng.pick((1.702, 1.0)), "beta": rng.pick((1.0, 0.0, -0.25)),
        "limit": rng.pick((7.0, None, 0.5)), "interleaved": rng.chance(0.3),
    }  # fmt: skip


def judge_grouped_swiglu(before: Arguments, result: Any, after: Arguments) -> str | None:
    both, judged = grouped_spans({**before, "uncovered": "undefined"})
    both = both.rounded(BF16)
    d = both.low.shape[1] // 2

    def halves(x: Array) -> tuple[Array, Array]:
        return (x[:, ::2], x[:, 1::2]) if before.get("interleaved") else (x[:, :d], x[:, d:])

    gate, up = (Span(*parts) for parts in zip(halves(both.low), halves(both.high), strict=True))
    known = np.logical_and(*halves(judged))
    judged = known & ~(np.isinf(gate.low) | np.isinf(gate.high) | np.isinf(up.low) | np.isinf(up.high))
    if before.get("limit") is not None:
        limit = float(before["limit"])
        gate, up = gate.map(lambda x: np.minimum(x, limit)), up.map(lambda x: np.clip(x, -limit, limit))
    alpha, beta = float(before.get("alpha", 1.0)), float(before.get("beta", 0.0))
    with np.errstate(all="ignore"):
        g, u = (gate.low + gate.high) / 2, (up.low + up.high) / 2 + beta
        silu = g / (1 + np.exp(-alpha * g))
        # g sigmoid(alpha g) has a slope of at most 1.1, whatever alpha is.
        wide_g, wide_u = (gate.high - gate.low) / 2, (up.high - up.low) / 2
        error = 1.1 * wide_g * (np.abs(u) + wide_u) + np.abs(silu) * wide_u
        # As of swiglu_fp8 by itself: exp of an argument off by its own rounding; a few roundings more.
        error += np.abs(silu * u) * (np.abs(alpha * g) * 4 * F32 + 24 * F32) + np.abs(g) * np.abs(beta) * F32
        y = Span.of(silu * u, error + 1e-37)
    q, scale = result
    if before.get("out_format") == "mx" or (scale.dtype == torch.uint8 and scale.shape[1] != -(-d // 128)):
        return mx_complaint(y, judged, q, scale)
    form = {"out_format": "rows" if scale.dim() == 1 else "blocks", "e8m0": scale.dtype == torch.uint8}
    # What is nothing but the error of a product of zeros may be zero, whose scale is 1.
    size = d if scale.dim() == 1 else 128
    largest = np.pad(np.maximum(np.abs(y.low), np.abs(y.high)), ((0, 0), (0, -d % size))).reshape(len(q), -1, size)
    judged = judged & np.repeat(~(largest.max(axis=-1) < 1e-30), size, axis=-1)[:, :d]
    return dynamic_complaint(y, judged, form, q, scale)


def judge_grouped(before: Arguments, result: Any, after: Arguments) -> str | None:
    if result is None:
        return None
    span, judged = grouped_spans(before)
    return result_complaint(result, after, span.rounded(BF16), judged)


def grouped_spans(before: Arguments) -> tuple[Span, Array]:
    """Each slot's row times its expert's weight, before it is rounded, and which elements are to be looked at."""
    slots, block_m, a_div = (int(before[name]) for name in ("num_valid_tokens", "block_m", "a_div"))
    w = expert_values(before["w"], before["w_scale"])
    if has_fp8_scales(before["w"], before["w_scale"]):
        a = fp8_values(before["a_q"], before["a_scale"], 1, expert_block(before["w"], before["w_scale"]))
    else:
        a = mx_values(before["a_q"], before["a_scale"])
    ids, tiles = integers(before["sorted_token_ids"]), integers(before["expert_ids"])
    end = int(integers(before["num_tokens_post_padded"]).reshape(-1)[0])
    owners: list[set[int]] = [set() for _ in range(slots)]
    for tile in range(len(ids) // block_m):
        if tile * block_m < end and 0 <= tiles[tile] < len(w):
            for slot in ids[tile * block_m : (tile + 1) * block_m]:
                if 0 <= slot < slots:
                    owners[slot].add(int(tiles[tile]))
    low, high = np.zeros((slots, w.shape[1])), np.zeros((slots, w.shape[1]))
    judged = np.ones((slots, w.shape[1]), dtype=bool)
    weights = None if before.get("mul_weight_by") is None else values(before["mul_weight_by"]).reshape(-1)
    bias = None if before.get("bias") is None else values(before["bias"])
    if before.get("uncovered", "zero") == "undefined":
        judged[[not found for found in owners]] = False
    for slot, found in enumerate(owners):
        if len(found) > 1:  # two tiles write the row: either may come last
            judged[slot] = False
        for expert in found:
            span, sound = product(a[slot // a_div][None], w[expert])
            if bias is not None:
                span = span.plus(bias[expert]).widened(2 * F32)
            if weights is not None:
                span = span.times(weights[slot]).widened(F32, TINY)
            low[slot], high[slot], judged[slot] = span.low[0], span.high[0], judged[slot] & sound[0]
    return Span(low, high), judged


def make_moe(rng: Rng) -> Arguments:
    experts, width, inner = rng.pick((2, 4)), 32 * rng.integer(1, 2), 32 * rng.integer(1, 2)
    tokens, top_k = rng.pick((0, 1, 3)), rng.pick((1, 2))
    w1, w2 = payload(rng, experts, 2 * inner, width), payload(rng, experts, width, inner)
    ids = rng.numbers.integers(-1, experts + 1, (tokens, top_k))
    plain = rng.chance(0.5)
    biases = rng.chance(0.3)
    given = {
        "hidden": rng.finite(tokens, width, dtype=rng.pick((BF16, torch.float16, torch.float32))), "w1": w1,
        "w1_scale": torch.full((experts, 2 * inner, width // 32), 116, dtype=torch.uint8), "w2": w2,
        "w2_scale": torch.full((experts, width, inner // 32), 116, dtype=torch.uint8),
        "topk_weights": rng.finite(tokens, top_k).abs(), "topk_ids": torch.from_numpy(ids),
        "block_m": rng.pick((4, 16)), "alpha": 1.0 if plain else 1.702, "beta": 0.0 if plain else 1.0,
        "limit": None if plain else 7.0, "interleaved": rng.chance(0.3),
    }  # fmt: skip
    if rng.chance(0.4):
        given["expert_map"] = torch.from_numpy(rng.numbers.integers(-1, experts, rng.integer(1, 6)))
    if biases:
        given |= {"w1_bias": rng.finite(experts, 2 * inner), "w2_bias": rng.finite(experts, width)}
    if rng.chance(0.25):
        given |= {"hidden": payload(rng, tokens, width), "hidden_scale": rng.scales(tokens, width // 32)}
    if rng.chance(0.2):
        given["out"] = torch.full((tokens, width), 7.0, dtype=rng.pick((BF16, torch.float16, torch.float32)))
    return given


def other_ranks_place(rng: Rng, given: Arguments) -> Arguments:
    """An expert that is asked for has a place that the weights do not have."""
    experts = len(given["w1"])
    where = torch.arange(experts)
    where[rng.integer(0, experts - 1)] = rng.pick((experts, experts + 1, 2**31 - 1))
    ids = torch.from_numpy(rng.numbers.integers(0, experts, tuple(given["topk_ids"].shape)))
    return {**given, "expert_map": where, "topk_ids": ids}


def make_moe_mxfp4(rng: Rng) -> Arguments:
    given = make_moe(rng)
    for name in ("w1", "w2"):
        experts, rows, columns = given[name].shape
        given[name] = rng.codes(experts, rows, columns // 2)
        given[f"{name}_scale"] = torch.full((experts, rows, columns // 32), 122, dtype=torch.uint8)
    return given


def make_moe_fp8(rng: Rng) -> Arguments:
    """The same in fp8 with scales of each kind."""
    given, kind = make_moe(rng), rng.pick(SCALES)
    for name in ("w1", "w2"):
        experts, n, k = given[name].shape
        given[name] = own_payload(rng, experts, n, k)
        _, scale = fp8_scales(rng, kind, 1, n, k, experts)
        is_float = scale.dtype == torch.float32
        given[f"{name}_scale"] = torch.full(scale.shape, 2.0**-11 if is_float else 116, dtype=scale.dtype)
    if given.get("hidden_scale") is not None:
        tokens, width = given["hidden"].shape
        given["hidden"] = own_payload(rng, tokens, width)
        given["hidden_scale"], _ = fp8_scales(rng, kind, tokens, 1, width)
    return given


def by_size(x: Array, size: int, e8m0_scales: bool) -> Array:
    """x as fp8 with a scale per ``size`` elements of each row, read back."""
    most = FP8_MAX[own_fp8()]
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -1, size)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / most
    with np.errstate(all="ignore"):
        scale = np.where(scale == 0, 1.0, np.exp2(np.ceil(np.log2(scale))) if e8m0_scales else scale)
    back = FORMATS[own_fp8()].round(np.clip(blocks / scale, -most, most)) * scale
    return back.reshape(len(x), -1)[:, : x.shape[1]]


def quantiser(w: torch.Tensor, scale: torch.Tensor) -> Callable[[Array], Array]:
    """How a layer quantises what it multiplies with experts' weights."""
    if not has_fp8_scales(w, scale):
        return by_blocks
    rows, is_float = w.shape[1], scale.dtype == torch.float32
    if is_float and scale[0].numel() in (1, rows) and (scale.dim() < 3 or scale.shape[2] == 1):
        return lambda x: by_size(x, x.shape[1], False)
    return by_blocks if expert_block(w, scale) == 32 else lambda x: by_size(x, 128, not is_float)


def by_blocks(x: Array) -> Array:
    """x as MX-FP8 with a scale that clips nothing, read back."""
    codes, scale = mx_codes(x.astype(np.float32), own_fp8(), "round_up")
    return codes * np.repeat(scale, 32, axis=-1)


def judge_moe(before: Arguments, result: Any, after: Arguments) -> str | None:
    hidden, ids = values(before["hidden"]), integers(before["topk_ids"])
    w1, w2 = (expert_values(before[name], before[f"{name}_scale"]) for name in ("w1", "w2"))
    quantised, inner_quantised = (quantiser(before[name], before[f"{name}_scale"]) for name in ("w1", "w2"))
    quantised_before = before.get("hidden_scale") is not None
    dtype = BF16 if quantised_before else before["hidden"].dtype
    if after.get("out") is not None:
        dtype = after["out"].dtype
    if result.dtype != dtype:
        return f"the result has dtype {result.dtype}"
    weights, where = values(before["topk_weights"]), before.get("expert_map")
    alpha, beta = float(before.get("alpha", 1.0)), float(before.get("beta", 0.0))
    limit = None if before.get("limit") is None else float(before["limit"])
    if not hidden.size or not ids.size:
        right = result.shape == before["hidden"].shape and not values(result).any()
        return None if right else "an empty layer is not zero"
    exact, room = np.zeros(hidden.shape), np.zeros(hidden.shape)
    local = None if where is None else integers(where)
    if not quantised_before:
        x = quantised(hidden)
    elif has_fp8_scales(before["w1"], before["w1_scale"]):
        x = fp8_values(before["hidden"], before["hidden_scale"], 1, expert_block(before["w1"], before["w1_scale"]))
    else:
        x = mx_values(before["hidden"], before["hidden_scale"])
    with np.errstate(all="ignore"):
        for token in range(len(ids)):
            for choice, expert in enumerate(ids[token]):
                if not 0 <= expert < (len(w1) if local is None else len(local)):
                    continue
                place = int(expert if local is None else local[expert])
                if not 0 <= place < len(w1):
                    continue
                both = w1[place] @ x[token]
                if before.get("w1_bias") is not None:
                    both = both + values(before["w1_bias"])[place]
                both = BF16_FORMAT.round(both)
                gate, up = (both[::2], both[1::2]) if before.get("interleaved") else np.split(both, 2)
                if limit is not None:
                    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                y = inner_quantised((gate / (1 + np.exp(-alpha * gate)) * (up + beta))[None])[0]
                down = w2[place] @ y
                if before.get("w2_bias") is not None:
                    down = down + values(before["w2_bias"])[place]
                exact[token] += down * weights[token, choice]
                # An element that lies near a tie may be quantised to the neighbour, an eighth away.
                room[token] += np.abs(w2[place]) @ np.abs(y) * abs(weights[token, choice]) / 8
    judged = np.isfinite(exact) & np.isfinite(room) & (np.abs(exact) < 60000)
    return result_complaint(result, after, Span.of(exact, room + np.abs(exact) * 2.0**-6 + 1e-6), judged, dtype)


OPS = (
    Op("grouped_gemm_mxfp8", make_grouped_gemm, judge_grouped, writes=("out",), fixed=("top_k", "topk_ids")),
    Op("grouped_mxfp8_linear", make_grouped, judge_grouped, writes=("out",)),
    Op("grouped_gemm_fp8", make_grouped_fp8, judge_grouped, writes=("out",)),
    Op("grouped_fp8_linear", make_grouped_fp8, judge_grouped, writes=("out",)),
    Op("grouped_swiglu_fp8", make_grouped_swiglu, judge_grouped_swiglu),
    Op("grouped_gemm_mxfp4", make_grouped_mxfp4, judge_grouped, writes=("out",)),
    Op("grouped_mxfp4_linear", make_grouped_mxfp4, judge_grouped, writes=("out",)),
    Op("fused_moe_mxfp8", make_moe, judge_moe, writes=("out",), mistake=other_ranks_place),
    Op("fused_moe_fp8", make_moe_fp8, judge_moe, writes=("out",), mistake=other_ranks_place),
    Op("fused_moe_mxfp4", make_moe_mxfp4, judge_moe, writes=("out",), mistake=other_ranks_place),
)
