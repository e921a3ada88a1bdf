"""The launches of a decode step of a model, from its configuration: what one GPU of a tensor-parallel group runs.

Layers are those of examples/generate.py. Weights, cache and activations have the model's shapes and arbitrary values;
experts are drawn at random. Not included: the two all-reduces of a layer, the embedding's gather and sampling.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hipforge.errors import ConfigError
from hipforge.jit.cache.files import read as read_file

if TYPE_CHECKING:
    import torch

PAGE_SIZE = 64
BLOCK = 32


@dataclass(frozen=True)
class Shape:
    """What of a configuration decides the launches, on one of ``tp`` GPUs.

    Attributes:
        name: ``model_type`` of the configuration.
        hidden: H.
        layers: dense layers, layers with experts.
        heads: query heads, KV heads.
        head_dim: D.
        rotary_dim: elements of a head that rotate.
        head_norms: whether q and k have norms.
        offset: added to the weights of norms.
        inner: I of a dense layer.
        experts: routed experts; 0 without any.
        top_k: of them per token.
        shared: experts that serve every token.
        expert_inner: I of an expert.
        scoring: of the router.
        limit: of SwiGLU with alpha 1.702 and beta 1, or None for plain SwiGLU.
        vocabulary: rows of the head.
    """

    name: str
    hidden: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    head_dim: int
    rotary_dim: int
    head_norms: bool
    offset: float
    inner: int
    experts: int
    top_k: int
    shared: int
    expert_inner: int
    scoring: str
    limit: float | None
    vocabulary: int


@dataclass(frozen=True)
class Piece:
    """One op of a step.

    Attributes:
        name: what it does.
        calls: how often a step makes it.
        start: where its operands are: ``cold`` for weights and cache, ``mall`` for what the launch before has written.
        run: makes its operands and returns the call.
        of_context: whether its time depends on the length of the context.
    """

    name: str
    calls: int
    start: str
    run: Callable[[], Callable[[], object]]
    of_context: bool = False


def read(path: Path) -> Shape:
    """Return the shape of a ``config.json`` as the transformers library writes it, for one GPU.

    Raises:
        ConfigError: it is not JSON, lacks a field, or is of a model that is not known here.
    """
    try:
        config = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    config = config.get("text_config") or config if isinstance(config, dict) else config
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; got {type(config).__name__}")
    name = str(config.get("model_type"))
    try:
        shape = _shape(name, config)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the field {error} of a {name} model") from None
    except (TypeError, OverflowError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} has a value that a {name} model cannot have: {error}") from None
    sizes = [size for item in fields(shape) for size in _numbers(getattr(shape, item.name))]
    wrong = [size for size in sizes if not 0 <= size <= _MOST]
    if wrong:
        raise ConfigError(f"{path}: sizes of a model are 0 to {_MOST}; got {wrong[0]:g}")
    return shape


_MOST = 1 << 30


def _numbers(value: object) -> list[float]:
    return [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, int | float)]


def _shape(name: str, config: dict[str, Any]) -> Shape:
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    plain = Shape(
        name, int(config["hidden_size"]), (layers, 0), (heads, int(config.get("num_key_value_heads") or heads)), dim,
        dim, False, 0.0, 0, 0, 0, 0, 0, "softmax", None, int(config["vocab_size"]),
    )  # fmt: skip
    if name in ("llama", "qwen3"):
        return replace(plain, inner=int(config["intermediate_size"]), head_norms=name == "qwen3")
    if name.startswith("minimax_m3"):
        kinds = config.get("mlp_layer_types") or ["sparse"] * layers
        dense = sum(kind == "dense" for kind in kinds)
        shared = int(config["shared_intermediate_size"]), int(config["intermediate_size"])
        if shared[0] != shared[1]:
            raise ConfigError(f"a shared expert must be as wide as a routed one, {shared[1]}; got {shared[0]}")
        return replace(
            plain, layers=(dense, layers - dense), rotary_dim=int(config.get("rotary_dim", dim)), head_norms=True,
            offset=1.0, inner=int(config["dense_intermediate_size"]), experts=int(config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]), shared=1, expert_inner=shared[1], scoring="sigmoid",
            limit=float(config["swiglu_limit"]),
        )  # fmt: skip
    raise ConfigError(f"model_type must be llama, qwen3 or minimax_m3_vl_text; got {name!r}")


def divided(shape: Shape, tp: int) -> Shape:
    """Return the shape on one of ``tp`` GPUs; KV heads that are fewer than GPUs are on several.

    Raises:
        ConfigError: something cannot be divided into parts of whole scale blocks.
    """
    for what, size, unit in (
        ("query heads", shape.heads[0], 1), ("the dense layers' I", shape.inner, BLOCK),
        ("the experts' I", shape.expert_inner, BLOCK), ("the vocabulary", shape.vocabulary, 1),
    ):  # fmt: skip
        if tp < 1 or size % (tp * unit):
            raise ConfigError(f"--tp {tp} does not divide {what}, {size}, into whole parts of {unit}")
    kv = shape.heads[1]
    if max(kv, tp) % min(kv, tp):
        raise ConfigError(f"--tp {tp} and the {kv} KV heads must divide each other")
    return replace(
        shape, heads=(shape.heads[0] // tp, max(1, kv // tp)), inner=shape.inner // tp,
        expert_inner=shape.expert_inner // tp, vocabulary=shape.vocabulary // tp,
    )  # fmt: skip


def pieces(shape: Shape, batch: int, context: int) -> list[Piece]:
    """Return the ops of a step for ``batch`` sequences with ``context`` keys each, the new token included."""
    import torch

    import hipforge
    from hipforge.nn import PagedKVCache
    from hipforge.ops.core.fp8 import fp8_dtypes
    from hipforge.ops.moe_gate_up import grouped_swiglu_mxfp8

    bf16 = torch.bfloat16
    every = sum(shape.layers)
    heads, kv_heads = shape.heads
    width = (heads + 2 * kv_heads) * shape.head_dim
    limits: dict[str, Any] = {} if shape.limit is None else {"alpha": 1.702, "beta": 1.0, "limit": shape.limit}
    payload = fp8_dtypes("cpu")[0]

    def mxfp8(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Untouched pages read as zeros and take no memory.
        return torch.empty(size, dtype=torch.uint8).view(payload), torch.empty(
            (*size[:-1], size[-1] // BLOCK), dtype=torch.uint8
        )

    def rows(columns: int) -> torch.Tensor:
        return torch.zeros(batch, columns, dtype=bf16)

    def linear(n: int, k: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            operands = (*mxfp8(batch, k), *mxfp8(n, k))
            return lambda: hipforge.mxfp8_linear(*operands)

        return make

    def norm(copied: bool) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            x, residual, weight = rows(shape.hidden), rows(shape.hidden), torch.ones(shape.hidden, dtype=bf16)
            copy = rows(shape.hidden) if copied else None
            return lambda: hipforge.residual_rms_mxfp8(
                x, residual, weight, 1e-6, weight_offset=shape.offset, also_out=copy
            )

        return make

    def cached() -> tuple[Any, Any]:
        pages = batch * -(-context // PAGE_SIZE)
        cache = PagedKVCache(1, pages, PAGE_SIZE, kv_heads, shape.head_dim)
        if context > 1:
            cache.extend(range(batch), context - 1)
        return cache, cache.extend(range(batch), 1)

    def rope() -> Callable[[], object]:
        cache, step = cached()
        heads_of = rows(width).view(batch, -1, shape.head_dim)
        q, k, v = heads_of.split((heads, kv_heads, kv_heads), 1)
        weight = torch.ones(shape.head_dim, dtype=bf16) if shape.head_norms else None
        table = torch.zeros(context, shape.rotary_dim)
        out = torch.empty(batch, heads, shape.head_dim, dtype=bf16)
        return lambda: cache.rope_and_store(
            0, q, k, v, table, step, q_weight=weight, k_weight=weight, weight_offset=shape.offset, q_out=out
        )

    def attention() -> Callable[[], object]:
        cache, step = cached()
        q = rows(heads * shape.head_dim).view(batch, heads, shape.head_dim)
        return lambda: cache.attend(0, q, step, out_format="mxfp8")

    def swiglu(count: int, inner: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            x = torch.zeros(count, 2 * inner, dtype=bf16)
            return lambda: hipforge.swiglu_mxfp8(x, **limits)

        return make

    def router() -> Callable[[], object]:
        x, w = rows(shape.hidden), torch.zeros(shape.experts, shape.hidden)
        return lambda: hipforge.router_gemm(x, w)

    def logits() -> torch.Tensor:
        return torch.randn(batch, shape.experts, generator=torch.Generator().manual_seed(0))

    def choose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = torch.zeros(shape.experts)
        return hipforge.topk_gating(x, shape.top_k, scoring=shape.scoring, bias=bias, shared_experts=shape.shared)

    def gating() -> Callable[[], object]:
        x = logits()
        return lambda: choose(x)

    total, slots_of = shape.experts + shape.shared, shape.top_k + shape.shared

    def align() -> Callable[[], object]:
        ids = choose(logits())[1]
        return lambda: hipforge.moe_align_block_size(ids, BLOCK_M, total)

    def grouped(n: int, k: int, per_slot: bool) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            weights, ids = choose(logits())
            index = hipforge.moe_align_block_size(ids, BLOCK_M, total)
            slots = batch * slots_of
            a, w = mxfp8(slots if per_slot else batch, k), mxfp8(total, n, k)
            if not per_slot:
                return lambda: grouped_swiglu_mxfp8(*a, *w, *index, slots, BLOCK_M, slots_of, **limits)
            factors = weights.flatten()
            return lambda: hipforge.grouped_mxfp8_linear(
                *a, *w, *index, slots, BLOCK_M, 1, factors, uncovered="undefined"
            )

        return make

    def combine() -> Callable[[], object]:
        x, ids = torch.zeros(batch * slots_of, shape.hidden, dtype=bf16), choose(logits())[1]
        return lambda: hipforge.moe_combine(x, ids=ids, num_experts=total)

    hidden, (dense, sparse) = shape.hidden, shape.layers
    found = [
        Piece("norm + quantise", every + dense + 1, "mall", norm(False)),
        Piece("qkv", every, "cold", linear(width, hidden)),
        Piece("norm, rope, store k v", every, "mall", rope),
        Piece("attention, quantise", every, "cold", attention, of_context=True),
        Piece("o_proj", every, "cold", linear(hidden, heads * shape.head_dim)),
    ]
    if dense:
        found += [
            Piece("gate_up", dense, "cold", linear(2 * shape.inner, hidden)),
            Piece("swiglu + quantise", dense, "mall", swiglu(batch, shape.inner)),
            Piece("down", dense, "cold", linear(hidden, shape.inner)),
        ]
    if sparse:
        found += [
            Piece("norm + quantise, copy", sparse, "mall", norm(True)),
            Piece("router", sparse, "cold", router),
            Piece("choice of experts", sparse, "mall", gating),
            Piece("sorted slots", sparse, "mall", align),
            Piece("experts' gate_up, swiglu", sparse, "cold", grouped(2 * shape.expert_inner, hidden, False)),
            Piece("experts' down", sparse, "cold", grouped(hidden, shape.expert_inner, True)),
            Piece("weighted sum", sparse, "mall", combine),
        ]
    found.append(Piece("lm_head", 1, "cold", linear(shape.vocabulary, hidden)))
    return found


BLOCK_M = 64  # slots of a tile, as hipforge.nn.MXFP8MoE has
