"""A decode step in torch alone, as its user writes it for speed: what ``bench-model`` times a step beside.

Layers are compiled by ``torch.compile`` and a step is one graph. Each kind of weights has several ways, which are all
measured: which is best depends on the card, on the model and on how many sequences there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from hipforge.cli.decode_model import Layer
from hipforge.cli.decode_step import Shape
from hipforge.cli.decode_twin import EXACT, Arithmetic, layer_step, rms_norm, route, swiglu

FP8 = torch.float8_e4m3fn
FP8_SCALE = 64.0  # of weights, which are normal with a deviation of 1 / sqrt(K)
KINDS = ("bf16", "fp8")
MOST_ERROR = {"bf16": 0.02, "fp8": 0.1}
"""Of what a layer adds to the residual stream beside float64, relatively.

Four products in a row and SwiGLU round to bfloat16, 2^-9 each; products of fp8 also their activations to e4m3, 0.03 in
the mean, of which SwiGLU's product of two adds both.
"""
MOST_GATHERED = 16  # sequences; more choose most experts, and each gathers its own
TUNED = {"coordinate_descent_tuning": True, "assert_indirect_indexing": False}
"""Of torch.compile: products of one token become reductions, with which a gather is fused, as in gpt-fast."""


class Weights(NamedTuple):
    """Weights: bfloat16 or e4m3 [..., N, K]; scale of e4m3, float32 [], of experts [E, N]; bias bfloat16 [..., N]."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def of(self, ids: Any) -> Weights:
        """Return those of chosen experts."""
        scale, bias = (None if part is None else part[ids] for part in (self.scale, self.bias))
        return Weights(self.weight[ids], scale, bias)

    def product(self, found: torch.Tensor) -> torch.Tensor:
        """Return a product with ``weight``, scaled and with the bias."""
        scaled = found if self.scale is None else found * self.scale.to(found.dtype)
        return scaled if self.bias is None else scaled + self.bias.to(found.dtype)


@dataclass(frozen=True)
class Way:
    """A way to write the model: its name in a table, its arithmetic, torch.compile's options, how many sequences."""

    name: str
    math: Arithmetic
    options: dict[str, Any]
    sequences: range


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, window: int | None
) -> torch.Tensor:
    if window is not None:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    if sinks is None:
        return scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
    out, logsumexp = _flash(q[:, :, None], keys, values)
    return out[:, :, 0] * torch.sigmoid(logsumexp[:, :, :1] - sinks[:, None]).to(q.dtype)


def _flash(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What scaled_dot_product_attention calls, with the logarithm that it drops: a sink is a key without a value."""
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values)
    return out, logsumexp


def _chosen(x: torch.Tensor, layer: Layer, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    router: Any = layer.router
    return route((x @ router.T).float(), layer, shape)


def _gathered(x: torch.Tensor, layer: Layer, shape: Shape) -> torch.Tensor:
    """Experts whose weights each token gathers inside its products."""
    weights, ids = _chosen(x, layer, shape)
    gate_up, down = _of(layer.gate_up).of(ids), _of(layer.down).of(ids)
    inner = swiglu(gate_up.product(torch.einsum("ti,tkni->tkn", x, gate_up.weight.to(x.dtype))), shape)
    rows = down.product(torch.einsum("tki,tkni->tkn", inner, down.weight.to(x.dtype)))
    return (rows * weights[..., None].to(x.dtype)).sum(1)


def _grouped(x: torch.Tensor, layer: Layer, shape: Shape) -> torch.Tensor:
    """Experts as one product over groups of rows, which are sorted by expert."""
    weights, ids = _chosen(x, layer, shape)
    flat, each = ids.flatten(), ids.shape[1]
    order = flat.argsort()
    ends = (flat[:, None] == torch.arange(shape.experts + shape.shared, device=x.device)).sum(0).cumsum(0).int()
    experts = flat[order]
    rows = swiglu(_of_groups(x[order // each], _of(layer.gate_up), ends, experts), shape)
    rows = _of_groups(rows, _of(layer.down), ends, experts) * weights.flatten()[order, None].to(x.dtype)
    return torch.empty_like(rows).index_copy_(0, order, rows).view(len(x), each, -1).sum(1)


def _of_groups(rows: torch.Tensor, by: Weights, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    if by.scale is None:
        found = torch._grouped_mm(rows, by.weight.transpose(1, 2), offs=ends)
    else:
        own = rows.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
        found = torch._scaled_grouped_mm(
            (rows.float() / own).to(FP8), by.weight.transpose(1, 2), own.view(-1), by.scale, offs=ends,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
    return found if by.bias is None else found + by.bias[experts]


def _of(of: Any) -> Weights:
    return of  # a layer's type is that of MX-FP8


def _wide_product(x: torch.Tensor, by: Weights) -> torch.Tensor:
    return by.product(x @ by.weight.to(x.dtype).T)


def _fp8_product(x: torch.Tensor, by: Weights) -> torch.Tensor:
    own = x.abs().amax().float().clamp(min=1e-12) / 448
    scale: Any = by.scale
    found = torch._scaled_mm((x.float() / own).to(FP8), by.weight.T, own, scale, out_dtype=torch.bfloat16)
    return found if by.bias is None else found + by.bias


def ways(shape: Shape, kind: str) -> tuple[Way, ...]:
    """Return the ways to write a model of a shape with weights of a kind that are worth measuring.

    A product over groups is none of them for one sequence: on an H100 it takes a step of Qwen3-30B-A3B 1.4 times as
    long as gathering.
    """

    def way(name: str, product: Any, options: dict[str, Any], sequences: range, experts: Any = _grouped) -> Way:
        return Way(name, Arithmetic(product, _same, _same, _attend, experts), options, sequences)

    one, any_number, some, few = range(1, 2), range(1, 1 << 30), range(2, 1 << 30), range(2, MOST_GATHERED + 1)
    if shape.experts and kind == "bf16":
        return (
            way("experts gathered in torch.compile's products", _wide_product, TUNED, range(1, few.stop), _gathered),
            way("torch._grouped_mm", _wide_product, TUNED, some),
        )
    if shape.experts:
        return (
            way("widened and gathered in torch.compile's products", _wide_product, TUNED, one, _gathered),
            way("torch._scaled_mm, experts gathered", _fp8_product, TUNED, few, _gathered),
            way("torch._scaled_mm, torch._scaled_grouped_mm", _fp8_product, TUNED, some),
        )
    if kind == "bf16":
        return (
            way("torch.compile's products", _wide_product, TUNED, one),
            way("cuBLAS", _wide_product, {}, any_number),
        )
    return (
        way("widened in torch.compile's products", _wide_product, TUNED, one),
        way("torch._scaled_mm", _fp8_product, {}, any_number),
    )


# ---- what a layer is held to -----------------------------------------------------------------------------------------


def _wide(of: Weights) -> torch.Tensor:
    weight = of.weight.double()
    if of.scale is None:
        return weight
    return weight * (of.scale[..., None] if of.scale.dim() else of.scale).double()


def _exact_product(x: torch.Tensor, by: Weights) -> torch.Tensor:
    return Weights(by.weight, None, by.bias).product(x @ _wide(by).T)


def _exact_experts(x: torch.Tensor, layer: Layer, shape: Shape) -> torch.Tensor:
    router: Any = layer.router
    weights, ids = route(x @ router.double().T, layer, shape)
    total = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        gate_up, down = _of(layer.gate_up).of(expert), _of(layer.down).of(expert)
        factor = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        total += _exact_product(swiglu(_exact_product(x, gate_up), shape), down) * factor
    return total


REFERENCE = replace(
    EXACT, linear=_exact_product, rounded=_same, stored=lambda x: x.bfloat16(), experts=_exact_experts
)
"""Float64 throughout; the cache has bfloat16."""


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    """A step in torch: ``run`` runs it; ``error`` is of what its first and last layer add, beside float64."""

    run: Callable[[], object]
    error: Callable[[], float]


class Peer:
    """A model of a shape in torch, random weights of a kind, a contiguous bfloat16 cache."""

    def __init__(self, shape: Shape, kind: str, place: torch.device) -> None:
        self.shape, self.place, self.generator = shape, place, torch.Generator(place).manual_seed(0)
        (heads, kv_heads), dim, (dense, sparse) = shape.heads, shape.head_dim, shape.layers

        def weight(*size: int) -> Any:
            bias = self.normal(*size[:-1]).mul_(0.1) if shape.biases else None
            if kind == "bf16":
                return Weights(self.normal(*size).mul_(size[-1] ** -0.5), None, bias)
            elements = torch.empty(size, dtype=FP8, device=place)
            for part in elements.view(-1, *size[-2:]):
                part.copy_(self.normal(*part.shape).mul_(FP8_SCALE * size[-1] ** -0.5))
            scale = torch.full(size[:-1] if len(size) == 3 else (), 1 / FP8_SCALE, device=place)
            return Weights(elements, scale, bias)

        def norm(size: int) -> torch.Tensor:
            return torch.full((size,), 1 - shape.offset, dtype=torch.bfloat16, device=place)

        def layer(experts: bool) -> Layer:
            inner = (shape.experts + shape.shared, shape.expert_inner) if experts else (shape.inner,)
            return Layer(
                input_norm=norm(shape.hidden), post_norm=norm(shape.hidden),
                qkv=weight((heads + 2 * kv_heads) * dim, shape.hidden), out=weight(shape.hidden, heads * dim),
                head_norms=(norm(dim), norm(dim)) if shape.head_norms else (None, None),
                sinks=self.normal(heads).float() if shape.biases else None,
                router=self.normal(shape.experts, shape.hidden).mul_(0.1) if experts else None,
                router_bias=self.normal(shape.experts).float() if experts and shape.biases else None,
                correction_bias=torch.zeros(shape.experts, device=place)
                if experts and shape.scoring == "sigmoid" else None,
                gate_up=weight(*inner[:-1], 2 * inner[-1], shape.hidden),
                down=weight(*inner[:-1], shape.hidden, inner[-1]),
            )  # fmt: skip

        self.layers = [layer(index >= dense) for index in range(dense + sparse)]
        self.embedding = self.normal(shape.vocabulary, shape.hidden)
        self.last_norm, self.head = norm(shape.hidden), weight(shape.vocabulary, shape.hidden)._replace(bias=None)

    def normal(self, *size: int) -> torch.Tensor:
        """Return normal values in bfloat16."""
        return torch.randn(size, dtype=torch.bfloat16, device=self.place, generator=self.generator)

    def step(self, way: Way, batch: int, context: int) -> Running:
        """Return a step of ``batch`` sequences at their last of ``context`` keys; other tokens each time."""
        shape, place = self.shape, self.place
        size = batch, shape.heads[1], context, shape.head_dim
        caches = [(self.normal(*size), self.normal(*size)) for _ in self.layers]
        angles = self.normal(shape.rotary_dim // 2).float()
        cos_sin = angles.cos(), angles.sin()
        where = torch.tensor([context - 1], device=place)
        tokens = torch.randint(shape.vocabulary, (batch,), device=place, generator=self.generator)
        parameters = [tuple([getattr(layer, item.name) for item in fields(layer)]) for layer in self.layers]

        windows = [shape.window if index % 2 == 0 else None for index in range(len(self.layers))]

        def one_layer(x: torch.Tensor, parameters: tuple[Any, ...], cache: Any, window: int | None) -> torch.Tensor:
            return layer_step(x, Layer(*parameters), shape, way.math, cache, where, cos_sin, window)

        def logits(x: torch.Tensor) -> torch.Tensor:
            head: Any = self.head
            return way.math.linear(rms_norm(x, self.last_norm, shape.offset, way.math), head)

        compiled = partial(torch.compile, dynamic=False, options=way.options)
        layer, last = compiled(one_layer), compiled(logits)

        def run() -> object:
            x = self.embedding[tokens]
            for own, cache, window in zip(parameters, caches, windows, strict=True):
                x = layer(x, own, cache, window)
            return torch.argmax(last(x), 1, out=tokens)

        def error() -> float:
            # The median: a rounding may change which expert a router chooses.
            found = []
            wide = cos_sin[0].double(), cos_sin[1].double()
            for index in {0, len(self.layers) - 1}:
                for _ in range(5):
                    x = self.normal(batch, shape.hidden)
                    added = layer(x, parameters[index], caches[index], windows[index]).double() - x.double()
                    keys, values = caches[index]
                    cache, own = (keys.double(), values.double()), self.layers[index]
                    want = layer_step(x.double(), own, shape, REFERENCE, cache, where, wide, windows[index])
                    want -= x.double()
                    found += ((added - want).norm(dim=1) / want.norm(dim=1)).tolist()
            return statistics.median(found)

        return Running(run, error)
