"""The shape of a model, from its configuration, and of its part on one GPU of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from hipforge.errors import ConfigError
from hipforge.tuning.models import MLA, Projection, config_of, latent_projections

BLOCK = 32


class Sparse(NamedTuple):
    """Sparse attention: how many layers have it, all behind those with full attention, and which blocks they see."""

    layers: int
    topk: int
    block_size: int
    local_blocks: int

    @property
    def most_keys(self) -> int:
        """Keys that a token sees at most."""
        return self.topk * self.block_size


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
        theta: base of the rotation's frequencies.
        biases: whether qkv, o, router and experts have biases, heads have sinks, and gate and up take turns in the rows
            of their weights: gpt-oss.
        expert_bits: bits of an element of an expert's weights: 8 of MX-FP8 or 4 of MXFP4.
        window: keys that a token sees in every other layer, or None.
        sparse: the layers whose tokens see blocks of keys that an index chooses, or None.
        projections: the products around an attention that has no op here, on one GPU; empty where it has one.
        notes: what of the model the shape does not have as it is.
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
    theta: float = 10000.0
    biases: bool = False
    expert_bits: int = 8
    window: int | None = None
    sparse: Sparse | None = None
    projections: tuple[Projection, ...] = ()
    notes: tuple[str, ...] = ()


def read(path: Path) -> Shape:
    """Return the shape of a ``config.json`` as the transformers library writes it, for one GPU.

    Raises:
        ConfigError: it is not JSON, lacks a field, or is of a model that is not known here.
    """
    config = config_of(path)
    name = str(config["model_type"])
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
        theta=float(config.get("rope_theta") or 10000.0),
    )  # fmt: skip
    if name in ("llama", "qwen3"):
        return replace(plain, inner=int(config["intermediate_size"]), head_norms=name == "qwen3")
    if name == "qwen3_moe":
        return replace(
            plain, layers=(0, layers), head_norms=True, experts=int(config["num_experts"]),
            top_k=int(config["num_experts_per_tok"]), expert_inner=int(config["moe_intermediate_size"]),
        )  # fmt: skip
    if name == "gpt_oss":
        return replace(
            plain, layers=(0, layers), experts=int(config["num_local_experts"]), biases=True, expert_bits=4,
            top_k=int(config["num_experts_per_tok"]), expert_inner=int(config["intermediate_size"]),
            limit=float(config["swiglu_limit"]), window=int(config["sliding_window"]),
        )  # fmt: skip
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
            limit=float(config["swiglu_limit"]), sparse=_sparse(config, plain),
        )  # fmt: skip
    if name in MLA:
        dense, inner = int(config.get("first_k_dense_replace") or 0), int(config["moe_intermediate_size"])
        limit = config.get("swiglu_limit")  # its alpha and beta, 1 and 0, take the same instructions
        return replace(
            plain, layers=(dense, layers - dense), heads=(heads, 1),
            inner=int(config["intermediate_size"]) if dense else 0,
            experts=int(config["n_routed_experts"]), top_k=int(config["num_experts_per_tok"]),
            shared=int(config["n_shared_experts"]), expert_inner=inner, scoring="sigmoid",
            limit=None if limit is None else float(limit), projections=latent_projections(config),
        )  # fmt: skip
    known = "llama, qwen3, qwen3_moe, gpt_oss, minimax_m3_vl_text, glm_moe_dsa or deepseek_v41_text"
    raise ConfigError(f"model_type must be {known}; got {name!r}")


def _sparse(config: dict[str, Any], plain: Shape) -> Sparse | None:
    kinds = config.get("layer_types") or []
    count = sum(kind == "minimax_m3_sparse" for kind in kinds)
    if not count:
        return None
    if len(kinds) != sum(plain.layers) or "minimax_m3_sparse" in kinds[: len(kinds) - count]:
        raise ConfigError(f"layers with sparse attention must come last in layer_types, one of each layer; got {kinds}")
    index = int(config.get("index_n_heads", plain.heads[1])), int(config.get("index_head_dim", plain.head_dim))
    if index != (plain.heads[1], plain.head_dim):
        raise ConfigError(f"index queries must be as many and as wide as KV heads, {plain.heads[1]} of "
                          f"{plain.head_dim}; got {index[0]} of {index[1]}")  # fmt: skip
    numbers = (int(config.get(f"index_{name}", usual)) for name, usual in (
        ("topk_blocks", 16), ("block_size", 128), ("local_blocks", 1)
    ))  # fmt: skip
    return Sparse(count, *numbers)


def without_attention(shape: Shape, asked: bool) -> Shape:
    """Return a shape that says what is left out of it.

    Args:
        shape: of a model.
        asked: whether attention that has no op here is to be left out.

    Raises:
        ConfigError: it is to be left out and has an op, or has none and is not to be left out.
    """
    if asked and not shape.projections:
        raise ConfigError(f"--without-attention is for models whose attention has no op here; {shape.name}'s has one")
    if not shape.projections:
        return shape
    if not asked:
        raise ConfigError(
            f"the attention of {shape.name} models, over latents that an index chooses, has no op here; "
            "--without-attention models the rest of a step and says so"
        )
    return replace(shape, notes=(*shape.notes, "without attention"))


def largest_part(shape: Shape, tp: int) -> Shape:
    """Return the shape on that of ``tp`` GPUs which has most of it: experts are divided by whole scale blocks.

    So servers divide experts of MXFP4 (vLLM, SGLang): 2,880 columns are 384 on each of seven GPUs and 192 on the last.

    Raises:
        ConfigError: anything else cannot be divided.
    """
    blocks, left = divmod(shape.expert_inner, BLOCK)
    if left or tp < 1 or blocks % tp == 0:
        return divided(shape, tp)
    own = -(-blocks // tp) * BLOCK
    note = f"experts of {own} columns, not {shape.expert_inner / tp:g}, in whole blocks of {BLOCK}"
    return divided(replace(shape, expert_inner=own * tp, notes=(*shape.notes, note)), tp)


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
    try:
        projections = (*(each.on_one_of(tp) for each in shape.projections),)
    except ValueError as error:
        raise ConfigError(f"{error}, of a {shape.name} model's attention") from None
    return replace(
        shape, heads=(shape.heads[0] // tp, max(1, kv // tp)), inner=shape.inner // tp,
        expert_inner=shape.expert_inner // tp, vocabulary=shape.vocabulary // tp, projections=projections,
    )  # fmt: skip
