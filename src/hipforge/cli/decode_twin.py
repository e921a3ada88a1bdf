"""A decode step in torch alone: what a chain of ops is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import silu

from hipforge.cli import decode_model, decode_ops
from hipforge.cli.decode_model import Layer, Linear, Model
from hipforge.cli.decode_ops import ALPHA, EPSILON, PAGE_SIZE, Chain
from hipforge.cli.decode_step import Shape
from hipforge.ops.core.fp8 import fp8_dtypes
from hipforge.ops.reference import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp8


@dataclass(frozen=True)
class Arithmetic:
    """How a step computes products, what a launch rounds to 16 bits, what the cache stores, attention and experts."""

    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    rounded: Callable[[torch.Tensor], torch.Tensor]
    stored: Callable[[torch.Tensor], torch.Tensor]
    attend: Callable[..., torch.Tensor]
    experts: Callable[..., torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, offset: float, math: Arithmetic) -> torch.Tensor:
    """Return the norm over the last dimension, rounded as the ops do."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    if offset:
        return math.rounded((normed * (offset + weight.to(wide.dtype))).to(x.dtype))
    return math.rounded(math.rounded(normed.to(x.dtype)) * weight.to(x.dtype))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, heads, D] with its first elements rotated by cos and sin [rotary_dim / 2]."""
    half = cos.shape[0]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)


def swiglu(gate_up: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return SwiGLU of [..., 2 I]."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if shape.biases else gate_up.chunk(2, -1)
    if shape.limit is None:
        return silu(gate) * up
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def layer_step(
    x: torch.Tensor,
    layer: Layer,
    shape: Shape,
    math: Arithmetic,
    cache: tuple[torch.Tensor, torch.Tensor],
    position: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    window: int | None,
) -> torch.Tensor:
    """Return the stream [B, H] after a layer; keys and values [B, Hkv, L, D] get one more at ``position`` [1]."""
    (heads, kv_heads), dim, batch = shape.heads, shape.head_dim, x.shape[0]
    normed = rms_norm(x, layer.input_norm, shape.offset, math)
    q, k, v = math.linear(normed, layer.qkv).view(batch, -1, dim).split((heads, kv_heads, kv_heads), 1)
    of_q, of_k = layer.head_norms
    if of_q is not None and of_k is not None:
        q, k = rms_norm(q, of_q, shape.offset, math), rms_norm(k, of_k, shape.offset, math)
    q, k = (math.rounded(rotated(y, *cos_sin)) for y in (q, k))
    for kept, new in zip(cache, (k, v), strict=True):
        kept.index_copy_(2, position, math.stored(new)[:, :, None].to(kept.dtype))
    heads_out = math.attend(q, *cache, layer.sinks, window)
    x = math.rounded(x + math.linear(heads_out.reshape(batch, -1), layer.out))
    normed = rms_norm(x, layer.post_norm, shape.offset, math)
    if layer.router is not None:
        return math.rounded(x + math.experts(normed, layer, shape))
    return math.rounded(x + math.linear(swiglu(math.linear(normed, layer.gate_up), shape), layer.down))


def route(logits: torch.Tensor, layer: Layer, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids [B, top_k + shared] of the experts of each token, by the router's products."""
    if layer.router_bias is not None:
        logits = logits + layer.router_bias
    scores = logits.sigmoid() if shape.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if layer.correction_bias is None else scores + layer.correction_bias
    ids = ranked.topk(shape.top_k, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    if shape.shared:
        ids = torch.cat((ids, torch.full_like(ids[:, :1], shape.experts)), 1)
        weights = torch.cat((weights, torch.ones_like(weights[:, :1])), 1)
    return weights, ids


# ---- the definition: float64, rounded where a launch rounds ----------------------------------------------------------


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


def _mxfp8(x: torch.Tensor) -> torch.Tensor:
    return dequantize_mxfp8(*quantize_mxfp8(x.float().contiguous(), fp8_dtypes(x.device)[0]), torch.float64)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(fp8_dtypes(x.device)[0]).double()


def _exact_weight(by: Linear) -> torch.Tensor:
    return (dequantize_mxfp8 if by.bits == 8 else dequantize_mxfp4)(by.weight, by.scale, torch.float64)


def _exact_product(x: torch.Tensor, by: Linear) -> torch.Tensor:
    y = _mxfp8(x) @ _exact_weight(by).T
    return _bf16(y if by.bias is None else y + by.bias.double())


def _exact_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, window: int | None
) -> torch.Tensor:
    groups = q.shape[1] // keys.shape[1]
    keys, values = (y.repeat_interleave(groups, 1) for y in (keys, values))
    scores = torch.einsum("bhd,bhld->bhl", q, keys) * q.shape[-1] ** -0.5
    if window is not None:
        scores[..., : max(0, scores.shape[-1] - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None].expand(len(q), -1, 1)), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.einsum("bhl,bhld->bhd", weights, values)


def _exact_experts(x: torch.Tensor, layer: Layer, shape: Shape) -> torch.Tensor:
    router: Any = layer.router
    weights, ids = route(x @ router.to(x.dtype).T, layer, shape)
    total, quantised = torch.zeros_like(x), _mxfp8(x)
    for expert in ids.unique().tolist():
        first, last = (
            Linear(by.weight[expert], by.scale[expert], None if by.bias is None else by.bias[expert])
            for by in (layer.gate_up, layer.down)
        )
        factor = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        inner = _mxfp8(swiglu(_exact_product(quantised, first), shape))
        down = inner @ _exact_weight(last).T
        if last.bias is not None:
            down = down + last.bias.double()
        total += _bf16(down * factor)
    return _bf16(total)


EXACT = Arithmetic(_exact_product, _bf16, _fp8, _exact_attention, _exact_experts)


def exact_logits(model: Model, chain: Chain, tokens: torch.Tensor, position: int) -> torch.Tensor:
    """Return float64 [B, V]: a step at ``position`` over the keys and values that ``chain`` holds, by definition."""
    shape, batch = model.shape, len(tokens)
    tables = chain.tables[:, : position // PAGE_SIZE + 1].long()
    half = shape.rotary_dim // 2
    frequency = shape.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (position * frequency).to(model.place)
    cos_sin = angles.cos().float().double(), angles.sin().float().double()
    x = model.embedding[tokens].double()
    where = torch.tensor([position], device=model.place)
    for index, layer in enumerate(model.layers):
        cache = [
            pages[index].view(torch.uint8)[tables].view(pages.dtype).double().view(batch, -1, *pages.shape[-2:])
            .transpose(1, 2)[:, :, : position + 1].contiguous()
            for pages in (chain.cache.k, chain.cache.v)
        ]  # fmt: skip
        window = shape.window if index % 2 == 0 else None
        x = layer_step(x, layer, shape, EXACT, (cache[0], cache[1]), where, cos_sin, window)
    return _exact_product(rms_norm(x, model.last_norm, shape.offset, EXACT), model.head)


# ---- the check -------------------------------------------------------------------------------------------------------


def small(shape: Shape) -> Shape:
    """Return a model of the same widths with at most two layers of a kind and a short vocabulary."""
    dense, sparse = shape.layers
    return replace(shape, layers=(min(dense, 2), min(sparse, 2)), vocabulary=min(shape.vocabulary, 2048))


@torch.no_grad()
def check(shape: Shape, place: torch.device, batch: int = 4, context: int = 100, steps: int = 3) -> float:
    """Return the relative error of the logits of the median token of some steps beside their definition.

    The tokens are drawn, whatever the model would choose. Each step is compared over the keys and values that the chain
    itself has stored by then. The median, because a rounding may also change which expert a router chooses.
    """
    model = Model(shape, decode_model.Random(place))
    chain = decode_ops.chain(model, batch, context, ahead=steps)
    fill(chain)
    generator, errors = torch.Generator().manual_seed(1), []
    for number in range(steps):
        tokens = torch.randint(0, shape.vocabulary, (batch,), generator=generator).to(place)
        chain.tokens.copy_(tokens)
        for op in chain.ops:
            op.call()
        want = exact_logits(model, chain, tokens, context - 1 + number)
        errors.append((chain.logits.double() - want).norm(dim=1) / want.norm(dim=1))
    return float(torch.cat(errors).median())


@torch.no_grad()
def fill(chain: Chain, kv_heads: int | None = None, own: slice = slice(None)) -> None:
    """Put random keys and values into every page; of ``kv_heads`` those that are this process's ``own``."""
    for pages in (chain.cache.k, chain.cache.v):
        for layer in pages:
            generator = torch.Generator(layer.device).manual_seed(0)
            for at in range(0, len(layer), 1024):
                part = layer[at : at + 1024]
                size = (*part.shape[:2], kv_heads or part.shape[2], part.shape[3])
                drawn = torch.randn(size, dtype=torch.bfloat16, device=layer.device, generator=generator)[:, :, own]
                part.view(torch.uint8).copy_(drawn.float().to(layer.dtype).view(torch.uint8))
