"""Trials of layers: Float8Linear, and layers with MX-FP8 weights that were cast as models are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hipforge import nn
from hipforge.nn.moe import Activation, Routing
from stress.case import Arguments, Op, Rng
from stress.experts import by_blocks
from stress.floats import Span, same, values
from stress.gemms import BF16, mx_values, payload, product, with_bias

# What may be done to a model: of a plain buffer each makes one of a dtype that no kernel takes, or rounds it.
CASTS: tuple[tuple[str | torch.dtype, ...], ...] = (
    ("half",), ("float",), ("bfloat16", "float"), (torch.float16,), (torch.int32, "bfloat16"),
)  # fmt: skip


def make_float8_linear(rng: Rng) -> Arguments:
    k, n = rng.pick((16, 32, 48, 20)), rng.pick((16, 32, 9))
    x = rng.finite(*rng.pick(((16, k), (4, k), (2, 8, k), (k,), (0, k))), dtype=rng.pick((torch.float32, BF16)))
    return {"input": x, "weight": rng.finite(n, k), "bias": rng.maybe(0.5, lambda: rng.finite(n))}


def float8_linear(input: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """One call of a Float8Linear made from a plain layer."""
    from hipforge import Float8Linear

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
        return Float8Linear.from_float(layer)(input)


def judge_float8_linear(before: Arguments, result: Any, after: Arguments) -> str | None:
    x, weight = values(before["input"]), values(before["weight"])
    flat = x.reshape(-1, x.shape[-1])
    with np.errstate(all="ignore"):
        exact = flat @ weight.T
        # Each operand is off by a quantum: 2^-4 of an element, or 2^-10 of the tensor's largest.
        room = (np.abs(flat) * 2.0**-4 + np.abs(flat).max(initial=0.0) * 2.0**-9) @ np.abs(weight).T
        room += np.abs(flat) @ (np.abs(weight) * 2.0**-4 + np.abs(weight).max(initial=0.0) * 2.0**-9).T
    if before["bias"] is not None:
        exact = exact + values(before["bias"])
    got = values(result).reshape(exact.shape)
    # What is not finite spoils all of an FP8 tensor, by its scale, and its own row where the product takes no FP8.
    judged = np.isfinite(exact) & np.isfinite(room)
    return Span.of(exact, room * 1.1 + np.abs(exact) * 2.0**-7 + 1e-6).complaint("result", got, judged)


def cast(layer: torch.nn.Module, casts: tuple[str | torch.dtype, ...]) -> torch.nn.Module:
    """The layer after some of torch's casts, in their order: methods, and dtypes for ``type``."""
    for each in casts:
        layer = getattr(layer, each)() if isinstance(each, str) else layer.type(each)
    return layer


def weight(rng: Rng, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements in e4m3fn and scales that e4m3fnuz can take too."""
    scales = rng.numbers.integers(116, 126, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)
    return payload(rng, *shape), torch.from_numpy(scales)


def make_linear(rng: Rng) -> Arguments:
    m, n, k = rng.pick((1, 4, 17)), rng.pick((1, 24, 64)), 32 * rng.pick((1, 3, 8))
    elements, scale = weight(rng, n, k)
    return {
        "x": rng.finite(m, k, dtype=BF16), "weight": elements, "weight_scale": scale,
        "bias": rng.maybe(0.6, lambda: rng.finite(n)), "casts": rng.pick(CASTS),
    }  # fmt: skip


def linear(
    x: Any, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, casts: tuple[Any, ...]
) -> Any:
    """A call of a linear layer that was cast."""
    layer = nn.MXFP8Linear.from_quantized(weight, weight_scale, bias)
    with torch.no_grad():
        return cast(layer, casts)(x)


def judge_linear(before: Arguments, result: Any, after: Arguments) -> str | None:
    if result.dtype != before["x"].dtype:
        return f"the result has dtype {result.dtype}"
    x = values(before["x"])
    if result.shape != (*x.shape[:-1], len(before["weight"])):
        return f"the result has shape {tuple(result.shape)}"
    rows = by_blocks(x.reshape(-1, x.shape[-1]))
    span, judged = product(rows, mx_values(before["weight"], before["weight_scale"]))
    bias = None if before["bias"] is None else before["bias"].to(BF16)
    return with_bias(span, bias).rounded(result.dtype).complaint("result", values(result).reshape(judged.shape), judged)


def make_experts(rng: Rng) -> Arguments:
    experts, width, inner, tokens = rng.pick((2, 4)), 32 * rng.integer(1, 2), 32 * rng.integer(1, 2), rng.pick((1, 3))
    biases = {
        name: rng.finite(*shape)
        for name, shape in {
            "router_bias": (experts,), "correction_bias": (experts,), "w1_bias": (experts, 2 * inner),
            "w2_bias": (experts, width),
        }.items()
        if rng.chance(0.5)
    }  # fmt: skip
    return {
        "x": rng.finite(tokens, width, dtype=BF16), "w1": weight(rng, experts, 2 * inner, width),
        "w2": weight(rng, experts, width, inner), "router": rng.finite(experts, width),
        "top_k": rng.integer(1, 2), "biases": biases, "casts": rng.pick(CASTS),
    }  # fmt: skip


def experts(
    x: Any, w1: Any, w2: Any, router: torch.Tensor, top_k: int, biases: dict[str, torch.Tensor], casts: tuple[Any, ...]
) -> Any:
    """A call of a mixture of experts that was cast."""
    layer = nn.MXFP8MoE(w1, w2, router, Routing(top_k), Activation(), **biases)
    with torch.no_grad():
        return cast(layer, casts)(x)


def judge_experts(before: Arguments, result: Any, after: Arguments) -> str | None:
    """A cast changes nothing; other trials judge what the layer is made of."""
    wanted = experts(**{**before, "casts": ()})
    return same("result of a layer that was cast", values(result), values(wanted))


OPS = (
    Op("Float8Linear", make_float8_linear, judge_float8_linear, call=float8_linear, fixed=("weight", "bias")),
    Op("MXFP8Linear", make_linear, judge_linear, call=linear, fixed=("weight", "weight_scale", "bias", "casts")),
    Op("MXFP8MoE", make_experts, judge_experts, call=experts, fixed=("w1", "w2", "router", "top_k", "biases", "casts")),
)
