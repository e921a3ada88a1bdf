"""The parameters of a model of a given shape, random or untouched, and a process's part of them (tensor parallel)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

import hipforge
from hipforge.cli.decode_ranks import ALONE, Ranks
from hipforge.cli.decode_step import BLOCK, Shape, divided
from hipforge.ops import summed_linear
from hipforge.ops.core.fp8 import fp8_dtypes

Pair = tuple[torch.Tensor, torch.Tensor]  # e4m3 elements or pairs of e2m1, e8m0 bytes


class Linear(NamedTuple):
    """A projection: e4m3 [..., N, K] or e2m1 [..., N, K / 2], e8m0 [..., N, K / 32], bias [..., N] or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        """Of an element of the weight."""
        return 8 * self.weight.shape[-1] // (BLOCK * self.scale.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return sum(part.nbytes for part in self if part is not None)


class Source(Protocol):
    """What fills the tensors of a model."""

    place: torch.device
    kept: bool  # whether every layer has tensors of its own

    def weight(self, *size: int, bits: int = 8) -> Pair:
        """Return weights [..., N, K] in MX-FP8, or MXFP4 with 4 bits."""

    def values(self, *size: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0.0, spread: float = 0.1) -> Any:
        """Return other parameters."""


class Untouched:
    """Weights that are not written: pages of the CPU that read as zeros and take no memory; layers share them."""

    place = torch.device("cpu")
    kept = False

    def weight(self, *size: int, bits: int = 8) -> Pair:
        """Return memory for the weights."""
        elements = torch.empty((*size[:-1], size[-1] * bits // 8), dtype=torch.uint8)
        if bits == 8:
            elements = elements.view(fp8_dtypes(self.place)[0])
        return elements, torch.empty((*size[:-1], size[-1] // BLOCK), dtype=torch.uint8)

    def values(self, *size: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0.0, spread: float = 0.1) -> Any:
        """Return the mean."""
        return torch.full(size, mean, dtype=dtype)


class Random:
    """Random weights of a size that keeps the activations' size, made where the kernels run."""

    kept = True

    def __init__(self, place: torch.device, seed: int = 0) -> None:
        self.place, self.generator = place, torch.Generator(place).manual_seed(seed)

    def weight(self, *size: int, bits: int = 8) -> Pair:
        """Return normal weights with a deviation of 1 / sqrt(K), quantised."""
        rows, k = torch.Size(size[:-1]).numel(), size[-1]
        quantise = hipforge.mxfp8_quantize if bits == 8 else hipforge.mxfp4_quantize
        dtype = fp8_dtypes(self.place)[0] if bits == 8 else torch.uint8
        elements = torch.empty((rows, k * bits // 8), dtype=dtype, device=self.place)
        scales = torch.empty((rows, k // BLOCK), dtype=torch.uint8, device=self.place)
        for at in range(0, rows, step := max(1, (1 << 28) // k)):
            part = slice(at, at + step)
            drawn = self.values(elements[part].shape[0], k, spread=k**-0.5)
            quantise(drawn, out=elements[part], scale_out=scales[part])
        return elements.view(*size[:-1], -1), scales.view(*size[:-1], k // BLOCK)

    def values(self, *size: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0.0, spread: float = 0.1) -> Any:
        """Return normal values."""
        drawn = torch.randn(size, dtype=dtype, device=self.place, generator=self.generator)
        return drawn.mul_(spread).add_(mean)


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer: ``router`` and 3-dimensional ``gate_up`` and ``down`` where it has experts.

    A layer of sparse attention has ``index_norms``, of index queries and keys, whose rows are the last of ``qkv``. One
    whose attention is left out has ``around``, the shape's projections, and the norm of the queries' latent; its
    ``qkv`` makes the latents and its ``out`` reads what attention leaves.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Linear
    out: Linear
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    sinks: torch.Tensor | None
    router: torch.Tensor | None
    router_bias: torch.Tensor | None
    correction_bias: torch.Tensor | None
    gate_up: Linear
    down: Linear
    index_norms: Pair | None = None
    around: tuple[Linear, ...] = ()
    latent_norm: torch.Tensor | None = None


class Model:
    """The parameters of a model.

    Attributes:
        layers: those with experts last, as many as the shape has.
        embedding: bfloat16 [V, H], or [1, H] of a source that keeps nothing.
        last_norm: [H].
        head: V rows.
        ranks: the processes that share the model, and which one this is.
        kv_heads: KV heads of the whole model, and which of them are here.
    """

    def __init__(self, shape: Shape, source: Source) -> None:
        self.shape, self.source, self.place, self.ranks = shape, source, source.place, ALONE
        self.kv_heads = shape.heads[1], slice(None)
        (dense, routed), blocks = shape.layers, 0 if shape.sparse is None else shape.sparse.layers
        kinds = [(index >= dense, index >= dense + routed - blocks) for index in range(dense + routed)]
        shared = {} if source.kept else {kind: self._layer(*kind) for kind in dict.fromkeys(kinds)}
        self.layers = [shared[kind] if shared else self._layer(*kind) for kind in kinds]
        self.embedding = source.values(shape.vocabulary if source.kept else 1, shape.hidden, spread=1.0)
        self.last_norm = source.values(shape.hidden, mean=1.0 - shape.offset)
        self.head = Linear(*source.weight(shape.vocabulary, shape.hidden))

    def _layer(self, routed: bool, sparse: bool) -> Layer:
        shape, source = self.shape, self.source
        heads, kv_heads = shape.heads
        mean, biases = 1.0 - shape.offset, shape.biases
        float32 = torch.float32

        def linear(*size: int, dtype: torch.dtype = torch.bfloat16, bits: int = 8) -> Linear:
            weight = source.weight(*size, bits=bits)
            return Linear(*weight, source.values(*size[:-1], dtype=dtype) if biases else None)

        def head_norm() -> torch.Tensor | None:
            return source.values(shape.head_dim, mean=mean) if shape.head_norms else None

        index_norms = None
        if sparse:
            index_norms = source.values(shape.head_dim, mean=mean), source.values(shape.head_dim, mean=mean)
        around = tuple([linear(each.n, each.k) for each in shape.projections])
        reading = {each.reads: by for each, by in reversed([*zip(shape.projections, around, strict=True)])}
        total, sigmoid = shape.experts + shape.shared, shape.scoring == "sigmoid"
        inner = (total, shape.expert_inner) if routed else (shape.inner,)
        router = torch.float32 if sigmoid else torch.bfloat16
        of_bias, bits = (float32, shape.expert_bits) if routed else (torch.bfloat16, 8)
        return Layer(
            input_norm=source.values(shape.hidden, mean=mean),
            post_norm=source.values(shape.hidden, mean=mean),
            qkv=reading["hidden"]
            if around
            else linear((heads + 2 * kv_heads + sparse * (kv_heads + 1)) * shape.head_dim, shape.hidden),
            out=reading["heads"] if around else linear(shape.hidden, heads * shape.head_dim),
            head_norms=(head_norm(), head_norm()),
            sinks=source.values(heads, mean=1.0, dtype=float32) if biases else None,
            router=source.values(shape.experts, shape.hidden, dtype=router) if routed else None,
            router_bias=source.values(shape.experts, dtype=float32) if routed and biases else None,
            correction_bias=source.values(shape.experts, dtype=float32) if routed and sigmoid else None,
            gate_up=linear(*inner[:-1], 2 * inner[-1], shape.hidden, dtype=of_bias, bits=bits),
            down=linear(*inner[:-1], shape.hidden, inner[-1], dtype=of_bias, bits=bits),
            index_norms=index_norms,
            around=around,
            latent_norm=source.values(reading["latent"].weight.shape[1], mean=mean) if around else None,
        )


def add_up_in_products(model: Model, batch: int) -> bool:
    """Return whether a model's products can add up what its processes have."""
    shape = model.shape
    if model.ranks.sums != "products" or shape.biases or shape.layers[1] or shape.projections:
        return False
    rows = {each.weight.shape[0] for layer in model.layers for each in (layer.qkv, layer.gate_up)}
    columns = {each.weight.shape[1] for layer in model.layers for each in (layer.out, layer.down)}
    receiving = *rows, model.head.weight.shape[0]
    return summed_linear.refusal(batch, shape.hidden, sending=(*columns,), receiving=receiving) is None


def part(model: Model, ranks: Ranks) -> Model:
    """Return a process's part of a model: rows of qkv, gate and up and of the head, columns of o and down.

    Raises:
        ConfigError: something cannot be divided into parts of whole scale blocks.
    """
    own = copy.copy(model)
    own.shape, own.ranks = divided(model.shape, ranks.count), ranks
    own.kv_heads = model.shape.heads[1], ranks.kv_heads(model.shape.heads[1])
    own.layers = [_layer(layer, model, ranks) for layer in model.layers]
    own.head = _rows(model.head, ranks)
    return own


def _layer(layer: Layer, model: Model, ranks: Ranks) -> Layer:
    shape = model.shape
    (heads, kv_heads), dim = shape.heads, shape.head_dim
    kv = ranks.kv_heads(kv_heads)
    q, k, v = _split(layer.qkv, [heads * dim, kv_heads * dim, kv_heads * dim])
    own_kv = [_slice(side, slice(kv.start * dim, kv.stop * dim)) for side in (k, v)]
    if shape.biases:  # rows of gate and up take turns
        gate_up = _rows(layer.gate_up, ranks)
    else:
        rows = layer.gate_up.weight.shape[-2] // 2
        gate_up = _joined([_rows(half, ranks) for half in _split(layer.gate_up, [rows, rows])])
    sinks = None if layer.sinks is None else layer.sinks.chunk(ranks.count)[ranks.rank]
    qkv, out, down = _joined([_rows(q, ranks), *own_kv]), _columns(layer.out, ranks), _columns(layer.down, ranks)
    return replace(layer, qkv=qkv, out=out, gate_up=gate_up, down=down, sinks=sinks)


def _slice(of: Linear, rows: slice) -> Linear:
    return of._replace(
        weight=of.weight[..., rows, :],
        scale=of.scale[..., rows, :],
        bias=None if of.bias is None else of.bias[..., rows],
    )


def _split(of: Linear, sizes: list[int]) -> list[Linear]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_slice(of, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _rows(of: Linear, ranks: Ranks) -> Linear:
    rows = of.weight.shape[-2] // ranks.count
    return _joined([_slice(of, slice(ranks.rank * rows, (ranks.rank + 1) * rows))])


def _joined(parts: list[Linear]) -> Linear:
    def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
        return torch.cat([x.view(torch.uint8) if x.element_size() == 1 else x for x in tensors], dim).view(
            tensors[0].dtype
        )

    biases = [each.bias for each in parts if each.bias is not None]
    weight, scale = cat([each.weight for each in parts], -2), cat([each.scale for each in parts], -2)
    return parts[0]._replace(weight=weight, scale=scale, bias=cat(biases, -1) if biases else None)


def _columns(of: Linear, ranks: Ranks) -> Linear:
    """Columns of a product whose parts are added up; the bias is the first process's."""
    weight, scale = (side.chunk(ranks.count, -1)[ranks.rank].contiguous() for side in (of.weight, of.scale))
    bias = of.bias if of.bias is None or ranks.rank == 0 else torch.zeros_like(of.bias)
    return of._replace(weight=weight, scale=scale, bias=bias)
